"""SAQ, on Redis or PostgreSQL."""

from protocol import ENGINE, PLAIN, Info, Peer, address, become, empty_postgres, empty_redis, main, mark, versions
from saq import Queue

AT_ONCE = 10

if ENGINE == "postgres":
    queue = Queue.from_url(address("BENCH_POSTGRES_URL"), min_size=4, max_size=20)
else:
    queue = Queue.from_url(address("BENCH_REDIS_URL"))


def noop_plain(ctx, *, i, s):
    mark()


async def noop_async(ctx, *, i, s):
    mark()


settings = {"queue": queue, "functions": [("noop", noop_plain if PLAIN else noop_async)], "concurrency": AT_ONCE}


class SaqPeer(Peer):
    info = Info(
        lib="saq",
        version=versions("saq"),
        backend=ENGINE,
        settings=f"concurrency={AT_ONCE} (as in its documentation), ttl=-1: nothing is kept of a job that is done",
        durability="acked after the run; stuck jobs are swept, and retried or aborted",
        threads=True,
        pending={"sql": "SELECT count(*) FROM saq_jobs WHERE status IN ('new', 'queued', 'active')"}
        if ENGINE == "postgres"
        else {"redis": [["LLEN", "saq:default:queued"], ["LLEN", "saq:default:active"]]},
    )

    async def setup(self):
        if ENGINE == "postgres":
            empty_postgres()
            await queue.connect()
            await queue.disconnect()
        else:
            empty_redis()

    async def connect_async(self):
        await queue.connect()

    async def disconnect_async(self):
        await queue.disconnect()

    async def enqueue_async(self, i, s):
        await queue.enqueue("noop", i=i, s=s, ttl=-1)

    def worker(self):
        become("saq", "saq_adapter.settings")


PEER = SaqPeer()

if __name__ == "__main__":
    main()
