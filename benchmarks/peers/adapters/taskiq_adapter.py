"""Taskiq on Redis streams: one process on uvloop, a hundred jobs at once (its default)."""

from protocol import PLAIN, Info, Peer, address, become, empty_redis, main, mark, versions
from taskiq_redis import RedisStreamBroker

AT_ONCE = "100"

broker = RedisStreamBroker(address("BENCH_REDIS_URL"))


def noop_plain(i: int, s: str) -> None:
    mark()


async def noop_async(i: int, s: str) -> None:
    mark()


noop = broker.task(task_name="noop")(noop_plain if PLAIN else noop_async)


class TaskiqPeer(Peer):
    info = Info(
        lib="taskiq",
        version=versions("taskiq", "taskiq-redis"),
        backend="redis",
        settings=f"stream broker, --workers 1 --max-async-tasks {AT_ONCE}, uvloop, no result backend",
        durability="stream, acked after execution; what a dead worker held is claimed by another after 10 minutes",
        threads=True,
        pending={"redis": [["XPENDING", "taskiq", "taskiq"]]},
    )

    async def setup(self):
        empty_redis()
        await broker.startup()  # makes the consumer group, which sees what comes after it only
        await broker.shutdown()

    async def connect_async(self):
        await broker.startup()

    async def disconnect_async(self):
        await broker.shutdown()

    async def enqueue_async(self, i, s):
        await noop.kiq(i, s)

    def worker(self):
        limits = ["--workers", "1", "--max-async-tasks", AT_ONCE]
        become("taskiq", "worker", "taskiq_adapter:broker", *limits, "--log-level", "WARNING")


PEER = TaskiqPeer()

if __name__ == "__main__":
    main()
