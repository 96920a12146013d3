"""streaQ on Redis streams: uvloop, nothing kept of a job that is done."""

from protocol import PLAIN, Info, Peer, address, become, empty_redis, main, mark, versions
from streaq import Worker

AT_ONCE = 32

worker = Worker(redis_url=address("BENCH_REDIS_URL"), concurrency=AT_ONCE, anyio_kwargs={"use_uvloop": True})


def noop_plain(i: int, s: str) -> None:
    mark()


async def noop_async(i: int, s: str) -> None:
    mark()


noop = worker.task(ttl=0, name="noop")(noop_plain if PLAIN else noop_async)


class StreaqPeer(Peer):
    info = Info(
        lib="streaq",
        version=versions("streaq"),
        backend="redis",
        settings=f"concurrency={AT_ONCE}, ttl=0 (no result kept), uvloop",
        durability="stream, acked after the run; taken back after an idle time of 60 s",
        threads=True,
        pending={"redis": [["XLEN", "streaq:default:queues:normal"]]},
    )

    def setup(self):
        empty_redis()

    async def connect_async(self):
        await worker.__aenter__()

    async def disconnect_async(self):
        await worker.__aexit__(None, None, None)

    async def enqueue_async(self, i, s):
        await noop.enqueue(i, s)

    async def enqueue_many(self, items):
        await worker.enqueue_many([noop.enqueue(i, s) for i, s in items])

    def worker(self):
        become("streaq", "run", "streaq_adapter:worker")


PEER = StreaqPeer()

if __name__ == "__main__":
    main()
