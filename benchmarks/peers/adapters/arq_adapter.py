"""arq on Redis. Its jobs are coroutines: a plain function goes to a pool of threads, as its documentation shows."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from arq import create_pool
from arq.connections import RedisSettings
from protocol import PLAIN, Info, Peer, address, become, empty_redis, main, mark, versions

AT_ONCE = 100
POLL_SECONDS = 0.01

redis_settings = RedisSettings.from_dsn(address("BENCH_REDIS_URL"))


async def noop(ctx, i, s):
    if PLAIN:
        await asyncio.get_running_loop().run_in_executor(ctx["pool"], mark)
    else:
        mark()


async def startup(ctx):
    ctx["pool"] = ThreadPoolExecutor()


class WorkerSettings:
    functions = (noop,)
    on_startup = startup
    redis_settings = redis_settings
    max_jobs = AT_ONCE
    poll_delay = POLL_SECONDS
    keep_result = 0


class ArqPeer(Peer):
    info = Info(
        lib="arq",
        version=versions("arq"),
        backend="redis",
        settings=f"max_jobs={AT_ONCE}, poll_delay={POLL_SECONDS} (default 0.5), keep_result=0",
        durability="stays in the queue until it is done; run again when its in-progress key has expired",
        threads=True,
        pending={"redis": [["ZCARD", "arq:queue"]]},
    )

    def setup(self):
        empty_redis()

    async def connect_async(self):
        self.redis = await create_pool(redis_settings)

    async def disconnect_async(self):
        await self.redis.aclose()

    async def enqueue_async(self, i, s):
        await self.redis.enqueue_job("noop", i, s)

    def worker(self):
        become("arq", "arq_adapter.WorkerSettings")


PEER = ArqPeer()

if __name__ == "__main__":
    main()
