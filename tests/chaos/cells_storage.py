"""Harm to what a store writes to: a disk that loses its power or is full, a store that can only be read.

What a store stands on must be there until the rig has ended. So the server that the rig is given ends its disk when it
is closed; a SQLite file has no server, and its disk takes that place.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.config import WorkerSettings
from holdfast.ports import SYSTEM
from holdfast.store import Finding, Store, Verdict
from holdfast.stores import open_store
from tests.chaos.cell import ENGINES, Cell
from tests.chaos.disks import Disk, disk
from tests.chaos.producer import Calls, Producer, mixed
from tests.chaos.rig import PATIENCE, TTL, Rig, descendants_of, encoded, send
from tests.faults.engines import SqlDatabase
from tests.servers import (
    MariaDbServer,
    PostgresServer,
    RedisServer,
    Server,
    ServerFailedError,
    free_port,
    redis_command,
)
from tests.worker.programs import ROOT, eventually

_MEBIBYTES = {"sqlite": 64, "postgres": 256, "mariadb": 256, "redis": 64}
_STARTUP = 120.0
"""Seconds. A server that was cut off has to recover first."""
_SMALL = {"innodb-log-file-size": "8M", "innodb-buffer-pool-size": "16M"}
SAFE: Mapping[str, Mapping[str, str]] = {
    "sqlite": {},
    "postgres": {},
    "mariadb": _SMALL,
    "redis": {"appendonly": "yes", "appendfsync": "always"},
}
"""Settings with which a store says of itself that it survives a power cut."""
UNSAFE: Mapping[str, Mapping[str, str]] = {
    "sqlite": {"durability": "relaxed"},
    "postgres": {"synchronous_commit": "off", "wal_writer_delay": "10s"},
    "mariadb": {**_SMALL, "innodb-flush-log-at-trx-commit": "2"},
    "redis": {"appendonly": "yes", "appendfsync": "everysec"},
}
"""Settings with which it says that it does not."""


class _PostgresOnDisk(PostgresServer):
    ground: Disk
    under: contextlib.ExitStack

    def close(self) -> None:
        with self.under:
            super().close()


class _MariaDbOnDisk(MariaDbServer):
    ground: Disk
    under: contextlib.ExitStack

    def close(self) -> None:
        with self.under:
            super().close()


class _RedisOnDisk(RedisServer):
    ground: Disk
    under: contextlib.ExitStack

    def close(self) -> None:
        with self.under:
            super().close()


class _NoServer(Server):
    """The disk of a SQLite file, where others have a server: there is nothing to start."""

    name = "disk"
    stop_signals = ()
    orphan_signal = signal.SIGKILL
    under: contextlib.ExitStack

    @property
    def url(self) -> str:
        raise NotImplementedError

    def close(self) -> None:
        self.under.close()

    def _prepare(self, folder: Path, deadline: float) -> None:
        raise NotImplementedError

    def _command(self, folder: Path) -> list[str]:
        raise NotImplementedError

    def _answers(self, folder: Path, pid: int) -> bool:
        raise NotImplementedError

    def _worth_retrying(self, log: str) -> bool:
        raise NotImplementedError


_ON_DISK: Mapping[str, type[_PostgresOnDisk] | type[_MariaDbOnDisk] | type[_RedisOnDisk]] = {
    "postgres": _PostgresOnDisk,
    "mariadb": _MariaDbOnDisk,
    "redis": _RedisOnDisk,
}


def stand_on_disk(rig: Rig, settings: Mapping[str, str]) -> Disk:
    """From now on the rig's store is on a disk of its own, which ends with the rig."""
    under = contextlib.ExitStack()
    ground = under.enter_context(disk(_MEBIBYTES[rig.engine]))
    try:
        if rig.engine == "sqlite":
            rig.sqlite_file.symlink_to(ground.path / "jobs.db")
            nothing = _NoServer()
            nothing.under = under
            rig.use_server(nothing)
        else:
            server = _ON_DISK[rig.engine](settings=settings, startup_seconds=_STARTUP)
            server.home, server.under = ground.path, under
            rig.use_server(server)  # the rig closes it, also if it does not start
            server.start()
    except BaseException:
        under.close()
        raise
    return ground


def survival(rig: Rig, store: Store | None = None) -> Finding:
    """What the store says an accepted job survives in it."""
    findings: Sequence[Finding] = rig.ask(lambda own: (store or own).examine())  # type: ignore[attr-defined]
    return findings[0]


def lose_power(rig: Rig, settings: Mapping[str, str]) -> Finding:
    """Jobs are enqueued, claimed and settled; then the power of the store's machine is gone, and comes back.

    What the store, with these settings, says about accepted jobs.
    """
    ground = stand_on_disk(rig, settings)
    if rig.engine == "sqlite":
        _lose_power_of_everybody(rig, ground, settings)
        rig.worker()
        return survival(rig, open_store(_sqlite_url(rig, settings), SYSTEM))
    if isinstance(rig.database, SqlDatabase):
        _apply_to_database(rig.database, settings)
    rig.worker()
    said = survival(rig)
    _lose_power_of_the_server(rig, ground)
    return said


def _apply_to_database(database: SqlDatabase, settings: Mapping[str, str]) -> None:
    """A database of the rig waits for the disk, whatever its server is set to. Here the server's setting holds."""
    if database.engine == "postgres":
        commit = settings.get("synchronous_commit", "on")
        database.sql(f"ALTER DATABASE {database.name} SET synchronous_commit = {commit}")
    else:
        flush = settings.get("innodb-flush-log-at-trx-commit", "1")
        database.sql(f"SET GLOBAL innodb_flush_log_at_trx_commit = {flush}")


def _sqlite_url(rig: Rig, settings: Mapping[str, str]) -> str:
    options = "".join(f"&{name}={value}" for name, value in settings.items())
    return f"sqlite:///{rig.sqlite_file}?timeout=3{options}"


def _lose_power_of_the_server(rig: Rig, ground: Disk) -> None:
    # The server was set up without waiting for the disk; that is not what this is about. PostgreSQL may have the tables
    # in its memory only, if commits do not wait.
    if rig.engine == "postgres":
        assert isinstance(rig.database, SqlDatabase)
        rig.database.sql("CHECKPOINT")
    ground.flush()
    with rig.producer(every=0.005):
        rig.wait_for_more(30)
        rig.fault("power cut", rig.engine)
        with rig.database.paused():  # the whole machine stops at one moment
            ground.cut_power()
            everything = descendants_of(rig.server.pid)
            rig.server.kill()
            for pid in everything:  # left alone, one that waits for another would never find out
                send(pid, signal.SIGKILL)
        ground.restore_power()
        rig.server.start()
        rig.wait_for_more(10)


def _lose_power_of_everybody(rig: Rig, ground: Disk, settings: Mapping[str, str]) -> None:
    """The file is on the machine of those who use it, so all of them end. The rig itself must not have opened it."""
    url = _sqlite_url(rig, settings)
    worker = WorkerSettings(concurrency=4, lease_ttl=TTL, poll=1.0)
    with (
        _started(rig, url, "tests.chaos.program_produce", url) as producer,
        _started(rig, url, "tests.worker.program_alone", rig.application, encoded(worker)) as working,
    ):
        rig.wait_for_starts(1)
        ground.flush()
        rig.wait_for_more(30)
        for program in (producer, working):
            rig.fault("kill", program.pid)
            os.kill(program.pid, signal.SIGSTOP)
        rig.fault("power cut", rig.engine)
        ground.cut_power()
    ground.restore_power()


@contextlib.contextmanager
def _started(rig: Rig, url: str, module: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A program of the rig that ends with the block, by SIGKILL."""
    environment = {"HOLDFAST_TEST_FOLDER": str(rig.folder), "HOLDFAST_TEST_STORE": url}
    with (rig.folder / f"log-{module}").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield program
    finally:
        program.kill()
        program.wait(PATIENCE)


def _power_cut(rig: Rig) -> None:
    said = lose_power(rig, SAFE[rig.engine])
    assert said.verdict is Verdict.OK, said


def _large() -> Iterator[tuple[str, dict[str, object]]]:
    """Jobs that fill up what a server has set aside. Chance cannot be compressed."""
    for number in itertools.count():
        yield "quick", {"number": number, "text": os.urandom(100_000).hex()}


def _disk_full(rig: Rig) -> None:
    ground = stand_on_disk(rig, SAFE[rig.engine])
    rig.worker()
    with _closed_producer(rig, mixed):
        rig.wait_for_more(20)
        rig.fault("disk full", rig.engine)
        ground.fill()
        with _closed_producer(rig, _large):
            eventually(lambda: _not_accepted(rig), "an enqueue fails", PATIENCE)
        ground.free()
        if rig.engine != "sqlite":
            _bring_back(rig.server)
        rig.wait_for_more(20)


@contextlib.contextmanager
def _closed_producer(rig: Rig, calls: Calls) -> Iterator[None]:
    """One that leaves no file open behind it: the disk has to be unmounted."""
    store = open_store(rig.url(), SYSTEM)
    try:
        with Producer(store, rig.note, calls=calls):
            yield
    finally:
        rig.ask(lambda _: store.__aexit__(None, None, None))


def _not_accepted(rig: Rig) -> bool:
    lines = (rig.folder / "history-rig.jsonl").read_text().split("\n")
    return any('"event":"enqueue"' in line and '"answer":"ok"' not in line for line in lines)


def _bring_back(server: Server) -> None:
    """What an operator does about a server that has given up: there is space again, so it is started again."""

    def answers() -> bool:
        if server.running:
            return True
        with contextlib.suppress(ServerFailedError):
            server.start()
        return server.running

    eventually(answers, "the server runs", PATIENCE)


def _read_only(rig: Rig) -> None:
    with _READ_ONLY[rig.engine](rig) as (url, harm):
        rig.worker(url=url)
        with rig.producer(url=url):
            rig.wait_for_more(20)
            rig.fault("read-only", rig.engine)
            with harm:
                eventually(lambda: _not_accepted(rig), "an enqueue fails", PATIENCE)
                time.sleep(TTL)
            rig.wait_for_more(20)
        rig.finish()


Harm = tuple[str, contextlib.AbstractContextManager[None]]
"""The URL by which programs are to come, and what can only be read as long as the block lasts."""


@contextlib.contextmanager
def _read_only_sqlite(rig: Rig) -> Iterator[Harm]:
    """The file system refuses every write to the files, also by whoever has them open.

    Not to the one that is shared memory: there a refused write ends the process (SIGBUS), and no disk does that.
    """

    @contextlib.contextmanager
    def harm() -> Iterator[None]:
        files = [str(path) for path in rig.folder.glob("jobs.db*") if not path.name.endswith("-shm")]
        subprocess.run(["chattr", "+i", *files], check=True)
        try:
            yield
        finally:
            subprocess.run(["chattr", "-i", *files], check=True)

    yield rig.url(), harm()


@contextlib.contextmanager
def _read_only_postgres(rig: Rig) -> Iterator[Harm]:
    database = rig.database
    assert isinstance(database, SqlDatabase)

    @contextlib.contextmanager
    def harm() -> Iterator[None]:
        database.sql(f"ALTER DATABASE {database.name} SET default_transaction_read_only = on")
        database.end_connections()  # it holds for new ones
        try:
            yield
        finally:
            with database.connect() as sql:
                sql.run("SET default_transaction_read_only = off")
                sql.run(f"ALTER DATABASE {database.name} RESET default_transaction_read_only")
            database.end_connections()

    yield rig.url(), harm()


@contextlib.contextmanager
def _read_only_mariadb(rig: Rig) -> Iterator[Harm]:
    """By a user of the cell's own: the rig's may write even then."""
    database = rig.database
    assert isinstance(database, SqlDatabase)
    accounts = "plain@localhost, plain@127.0.0.1"
    database.sql(f"CREATE USER {accounts}")
    database.sql(f"GRANT ALL PRIVILEGES ON {database.name}.* TO {accounts}")

    @contextlib.contextmanager
    def harm() -> Iterator[None]:
        database.sql("SET GLOBAL read_only = 1")
        try:
            yield
        finally:
            database.sql("SET GLOBAL read_only = 0")

    try:
        yield rig.url().replace("holdfast@", "plain@"), harm()
    finally:
        database.sql(f"DROP USER {accounts}")


@contextlib.contextmanager
def _read_only_redis(rig: Rig) -> Iterator[Harm]:
    """A replica of a server that is not there: it keeps what it has, and refuses writes."""

    @contextlib.contextmanager
    def harm() -> Iterator[None]:
        redis_command(rig.server.port, "REPLICAOF", "127.0.0.1", free_port())
        try:
            yield
        finally:
            redis_command(rig.server.port, "REPLICAOF", "NO", "ONE")

    yield rig.url(), harm()


_READ_ONLY: Mapping[str, Callable[[Rig], contextlib.AbstractContextManager[Harm]]] = {
    "sqlite": _read_only_sqlite,
    "postgres": _read_only_postgres,
    "mariadb": _read_only_mariadb,
    "redis": _read_only_redis,
}


CELLS: tuple[Cell, ...] = (
    Cell(
        name="power cut",
        faults="F7",
        about="the store's machine loses its power; the store had said that accepted jobs survive that",
        engines=ENGINES,
        run=_power_cut,
        needs_root=True,
        programs=("mkfs.ext4", "mount", "umount"),
    ),
    Cell(
        name="disk full",
        faults="F17",
        about="the store's disk is full while jobs come in and are settled; then there is space again",
        engines=ENGINES,
        run=_disk_full,
        needs_root=True,
        programs=("mkfs.ext4", "mount", "umount"),
    ),
    Cell(
        name="read-only",
        faults="F18",
        about="the store can be read and not written to, for longer than a lease lasts",
        engines=ENGINES,
        run=_read_only,
        needs_root=True,
        programs=("chattr",),
    ),
)
