"""Harm to what a store writes to: a disk that loses its power.

What a store stands on must be there until the rig has ended. So the server that the rig is given ends its disk when it
is closed; a SQLite file has no server, and its disk takes that place.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.config import WorkerSettings
from holdfast.ports import SYSTEM
from holdfast.store import Finding, Store, Verdict
from holdfast.stores import open_store
from tests.chaos.cell import ENGINES, Cell
from tests.chaos.disks import Disk, disk
from tests.chaos.rig import PATIENCE, TTL, Rig, descendants_of, encoded, send
from tests.faults.engines import SqlDatabase
from tests.servers import MariaDbServer, PostgresServer, RedisServer, Server
from tests.worker.programs import ROOT

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
    ground.flush()  # the server was set up without waiting for the disk; that is not what this is about
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
)
