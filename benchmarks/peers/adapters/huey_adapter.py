"""Huey, on Redis or SQLite: threads, no results kept."""

from pathlib import Path

from huey import RedisHuey, SqliteHuey
from protocol import ENGINE, VARIANT, Info, Peer, address, become, empty_redis, main, mark, versions

WORKERS = VARIANT or ("1" if ENGINE == "sqlite" else "4")  # fastest: of 1, 2, 4, 8 on Redis, of 1, 4 on SQLite
POLLING = ["--delay", "0.01", "--max-delay", "0.05"]

if ENGINE == "sqlite":
    file = address("BENCH_SQLITE_PATH")
    huey = SqliteHuey("bench", filename=file, results=False, fsync=True)
else:
    huey = RedisHuey("bench", url=address("BENCH_REDIS_URL"), results=False)


@huey.task()
def noop(i, s):
    mark()


class HueyPeer(Peer):
    info = Info(
        lib="huey",
        version=versions("huey"),
        backend=ENGINE,
        settings=f"--worker-type thread --workers {WORKERS}, results=False, "
        + (f"WAL, synchronous FULL, {' '.join(POLLING)}" if ENGINE == "sqlite" else "blocking pop"),
        durability="removed before the job runs, no ack: a job that runs in a crash is lost",
        threads=True,
        pending={"sqlite": [file, "SELECT count(*) FROM task"]}
        if ENGINE == "sqlite"
        else {"redis": [["LLEN", "huey.redis.bench"]]},
    )

    def setup(self):
        if ENGINE == "sqlite":
            Path(file).parent.mkdir(parents=True, exist_ok=True)
            huey.storage.flush_all()
        else:
            empty_redis()

    def enqueue(self, i, s):
        noop(i, s)

    def worker(self):
        polling = POLLING if ENGINE == "sqlite" else []
        threads = ["--worker-type", "thread", "--workers", WORKERS]
        become("huey_consumer", "huey_adapter.huey", *threads, "--quiet", "--no-periodic", "--flush-locks", *polling)


PEER = HueyPeer()

if __name__ == "__main__":
    main()
