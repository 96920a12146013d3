"""PgQueuer on PostgreSQL by asyncpg, in large batches. It has no plain handlers: they go to threads, as it advises."""

import asyncio
import json

import asyncpg
import psycopg
from pgqueuer import PgQueuer
from pgqueuer.adapters.persistence.queries import SyncQueries
from pgqueuer.db import AsyncpgDriver, SyncPsycopgDriver
from pgqueuer.queries import Queries
from protocol import PLAIN, VARIANT, Info, Peer, address, empty_postgres, main, mark, run, versions

BATCH = int(VARIANT or 1_000)


def payload(i, s):
    return json.dumps({"i": i, "s": s}).encode()


async def serve():
    connection = await asyncpg.connect(address("BENCH_POSTGRES_URL"))
    queue = PgQueuer(AsyncpgDriver(connection))

    @queue.entrypoint("noop")
    async def noop(job):
        json.loads(job.payload)
        if PLAIN:
            await asyncio.to_thread(mark)
        else:
            mark()

    await queue.run(batch_size=BATCH)


class PgQueuerPeer(Peer):
    info = Info(
        lib="pgqueuer",
        version=versions("pgqueuer"),
        backend="postgres",
        settings=f"asyncpg, batch_size={BATCH} (default 10), durable tables (default), JSON payload, uvloop",
        durability="heartbeat while it runs; the row moves to the log, in batches; picked again 30 s after a crash",
        threads=True,
        pending={"sql": "SELECT count(*) FROM pgqueuer"},
    )

    async def setup(self):
        empty_postgres()
        await self.connect_async()
        await self.queries.install()
        await self.disconnect_async()

    def connect(self):
        self.blocking = psycopg.connect(address("BENCH_POSTGRES_URL"), autocommit=True)
        self.blocking_queries = SyncQueries(SyncPsycopgDriver(self.blocking))

    def disconnect(self):
        self.blocking.close()

    async def connect_async(self):
        self.connection = await asyncpg.connect(address("BENCH_POSTGRES_URL"))
        self.queries = Queries(AsyncpgDriver(self.connection))

    async def disconnect_async(self):
        await self.connection.close()

    def enqueue(self, i, s):
        self.blocking_queries.enqueue("noop", payload(i, s), 0)

    async def enqueue_async(self, i, s):
        await self.queries.enqueue("noop", payload(i, s), 0)

    async def enqueue_many(self, items):
        await self.queries.enqueue(["noop"] * len(items), [payload(i, s) for i, s in items], [0] * len(items))

    def worker(self):
        run(serve())


PEER = PgQueuerPeer()

if __name__ == "__main__":
    main()
