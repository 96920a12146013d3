"""Procrastinate on PostgreSQL: many jobs at once, done jobs deleted, LISTEN/NOTIFY."""

from procrastinate import App, PsycopgConnector
from protocol import PLAIN, Info, Peer, address, become, empty_postgres, main, mark, versions

AT_ONCE = 20

app = App(connector=PsycopgConnector(conninfo=address("BENCH_POSTGRES_URL"), min_size=1, max_size=AT_ONCE))


def noop_plain(i, s):
    mark()


async def noop_async(i, s):
    mark()


noop = app.task(name="noop")(noop_plain if PLAIN else noop_async)


class ProcrastinatePeer(Peer):
    info = Info(
        lib="procrastinate",
        version=versions("procrastinate"),
        backend="postgres",
        settings=f"concurrency={AT_ONCE}, pool of {AT_ONCE}, delete_jobs=always, LISTEN/NOTIFY",
        durability="the row is deleted after success; jobs of dead workers need a periodic task that retries them",
        threads=True,
        pending={"sql": "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"},
    )

    async def setup(self):
        empty_postgres()
        async with app.open_async():
            await app.schema_manager.apply_schema_async()

    def connect(self):
        app.open()

    def disconnect(self):
        app.close()

    async def connect_async(self):
        await app.open_async()

    async def disconnect_async(self):
        await app.close_async()

    def enqueue(self, i, s):
        noop.defer(i=i, s=s)

    async def enqueue_async(self, i, s):
        await noop.defer_async(i=i, s=s)

    async def enqueue_many(self, items):
        await noop.batch_defer_async(*[{"i": i, "s": s} for i, s in items])

    def worker(self):
        become(
            "procrastinate",
            "--app=procrastinate_adapter.app",
            "worker",
            f"--concurrency={AT_ONCE}",
            "--delete-jobs=always",
        )


PEER = ProcrastinatePeer()

if __name__ == "__main__":
    main()
