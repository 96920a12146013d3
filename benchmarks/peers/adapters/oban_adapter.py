"""Oban on PostgreSQL. It needs Python 3.12; its jobs are coroutines, and a plain function goes to a thread."""

import asyncio

from oban import Oban, job
from oban.schema import install
from protocol import PLAIN, Info, Peer, address, empty_postgres, main, mark, run, versions

AT_ONCE = 100


@job(queue="default")
async def noop(i, s):
    if PLAIN:
        await asyncio.to_thread(mark)
    else:
        mark()


async def serve():
    pool = await Oban.create_pool(address("BENCH_POSTGRES_URL"), max_size=10)
    async with Oban(pool=pool, queues={"default": AT_ONCE}):
        await asyncio.Event().wait()


class ObanPeer(Peer):
    info = Info(
        lib="oban",
        version=versions("oban"),
        backend="postgres",
        settings=f"queue limit {AT_ONCE}, pool of 10, uvloop",
        durability="the row is kept as completed and pruned later; orphans are rescued after 60 s",
        threads=True,
        pending={"sql": "SELECT count(*) FROM oban_jobs WHERE state <> 'completed'"},
    )

    async def setup(self):
        empty_postgres()
        pool = await Oban.create_pool(address("BENCH_POSTGRES_URL"))
        await install(pool)
        await pool.close()

    async def connect_async(self):
        self.pool = await Oban.create_pool(address("BENCH_POSTGRES_URL"))
        self.oban = Oban(pool=self.pool)
        await self.oban.start()

    async def disconnect_async(self):
        await self.oban.stop()
        await self.pool.close()

    async def enqueue_async(self, i, s):
        await self.oban.enqueue(noop.new(i, s))

    async def enqueue_many(self, items):
        await self.oban.enqueue_many([noop.new(i, s) for i, s in items])

    def worker(self):
        run(serve())


PEER = ObanPeer()

if __name__ == "__main__":
    main()
