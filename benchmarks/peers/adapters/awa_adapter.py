"""Awa (awa-pg) on PostgreSQL: a runtime in Rust that calls Python handlers. A plain handler goes to a thread."""

import asyncio
from dataclasses import dataclass

import awa
from protocol import PLAIN, VARIANT, Info, Peer, address, empty_postgres, main, mark, run, versions

AT_ONCE = int(VARIANT or 200)
QUEUE = "bench"
# The view `awa.jobs` says it too, but needs minutes for a hundred thousand jobs that are done.
PENDING = """
    SELECT (SELECT count(*) FROM awa.ready_entries) - (SELECT count(*) FROM awa.done_entries)
        - (SELECT coalesce(sum(completed_count), 0) FROM awa.receipt_completion_batches)
"""


@dataclass
class Noop:
    i: int
    s: str


async def serve():
    client = awa.AsyncClient(address("BENCH_POSTGRES_URL"))

    @client.task(Noop, queue=QUEUE)
    async def noop(job):
        if PLAIN:
            await asyncio.to_thread(mark)
        else:
            mark()

    await client.start([(QUEUE, AT_ONCE)])
    await asyncio.Event().wait()


class AwaPeer(Peer):
    info = Info(
        lib="awa-pg",
        version=versions("awa-pg"),
        backend="postgres",
        settings=f"max_workers={AT_ONCE}, claim batch 512 (default), uvloop",
        durability="heartbeat and lease; jobs of a dead worker are rescued; history in rings of partitions",
        threads=True,
        pending={"sql": PENDING},
    )

    async def setup(self):
        empty_postgres()
        await self.connect_async()
        await self.client.migrate()
        await self.client.install_queue_storage()
        await self.disconnect_async()

    def connect(self):
        self.blocking = awa.Client(address("BENCH_POSTGRES_URL"))

    def disconnect(self):
        self.blocking.close()

    async def connect_async(self):
        self.client = awa.AsyncClient(address("BENCH_POSTGRES_URL"))

    async def disconnect_async(self):
        await self.client.close()

    def enqueue(self, i, s):
        self.blocking.insert(Noop(i, s), queue=QUEUE)

    async def enqueue_async(self, i, s):
        await self.client.insert(Noop(i, s), queue=QUEUE)

    async def enqueue_many(self, items):
        await self.client.enqueue_many_copy([Noop(i, s) for i, s in items], queue=QUEUE)

    def worker(self):
        run(serve())


PEER = AwaPeer()

if __name__ == "__main__":
    main()
