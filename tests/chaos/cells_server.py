"""Servers that are killed, restarted, paused and out of connections, under load."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import sys
import time
from collections.abc import Iterator

import psycopg
import pymysql

from tests.chaos.cell import ENGINES, SERVERS, Cell
from tests.chaos.rig import PATIENCE, Rig, persistently
from tests.faults.engines import Database, MariaDbDatabase, RedisDatabase, SqlDatabase


def _server_killed(rig: Rig) -> None:
    workers = rig.worker(), rig.supervisor()
    with rig.producer():
        rig.wait_for_more(20)
        rig.measure(*workers)
        for outage in (0.0, 0.3):
            with rig.server_away():
                time.sleep(outage)
            rig.wait_for_more(20)


def _server_restarted(rig: Rig) -> None:
    workers = rig.worker(), rig.supervisor()
    with rig.producer():
        rig.wait_for_more(20)
        rig.measure(*workers)
        rig.fault("server restarted", rig.engine)
        rig.server.stop()
        rig.start_server()
        rig.wait_for_more(20)


def _connections_ended(rig: Rig) -> None:
    workers = rig.worker(), rig.supervisor()
    with rig.producer():
        rig.wait_for_more(20)
        rig.measure(*workers)
        for _ in range(5):
            rig.fault("server ends all connections", rig.engine)
            persistently(rig.database.end_connections)
            rig.wait_for_more(10)


def _server_paused(rig: Rig) -> None:
    """For longer than a lease: nobody is dead for it, as far as anybody could know."""
    workers = rig.worker(), rig.supervisor()
    with rig.producer():
        rig.wait_for_more(20)
        rig.measure(*workers)
        rig.fault("server paused", rig.engine)
        with rig.database.paused():
            time.sleep(1.3)
        rig.wait_for_more(20)


def _no_connections(rig: Rig) -> None:
    """Somebody else has every connection that the server allows, and the workers lose theirs."""
    workers = rig.worker(), rig.supervisor()
    with rig.producer():
        rig.wait_for_more(20)
        rig.measure(*workers)
        rig.fault("server out of connections", rig.engine)
        with _all_connections_taken(rig.database):
            time.sleep(0.5)
        rig.wait_for_more(20)


@contextlib.contextmanager
def _all_connections_taken(database: Database) -> Iterator[None]:
    """Take what is free, end what the others have, and take that, too."""
    victims = database.connections().values()
    few = len(victims) + 10
    with contextlib.ExitStack() as taken:
        if isinstance(database, RedisDatabase):
            database.ask("CONFIG", "SET", "maxclients", few)
            taken.callback(persistently, lambda: database.ask("CONFIG", "SET", "maxclients", 10_000))
            database.end_connections()
            for _ in range(2 * few):  # those that are too many are closed by the server
                taken.enter_context(socket.create_connection(("127.0.0.1", database.server.port)))
        else:
            assert isinstance(database, SqlDatabase)
            sql = taken.enter_context(database.connect())
            if isinstance(database, MariaDbDatabase):
                sql.run(f"SET GLOBAL max_connections = {few}")
                taken.callback(sql.run, "SET GLOBAL max_connections = DEFAULT")
            _take_free_ones(database, taken)
            for victim in victims:
                database.end_connection(sql, victim)
            _take_free_ones(database, taken)
        yield


def _take_free_ones(database: SqlDatabase, taken: contextlib.ExitStack) -> None:
    with contextlib.suppress(psycopg.OperationalError, pymysql.err.OperationalError):
        while True:
            taken.enter_context(database.connect())


# Schemas.


def _migrated_at_once(rig: Rig) -> None:
    """Six programs make the schema of a new store at the same time, three of them are killed meanwhile; then workers
    come, and one more program.
    """
    rig.timeout = 30.0  # they wait for each other
    migrating = [
        rig.stage.start_command([sys.executable, "-m", "holdfast.cli", "migrate", rig.url()]) for _ in range(6)
    ]
    for program in migrating[:3]:
        time.sleep(random.uniform(0.0, 0.2))
        if program.popen.poll() is None:
            rig.fault("kill (of a migration)", program.pid)
            program.signal(signal.SIGKILL)
    workers = [rig.worker(wait=False), rig.supervisor(wait=False)]
    for program in migrating:
        code = program.exit_code(PATIENCE)
        assert code in (0, -signal.SIGKILL), f"it ended with {code}:\n{program.text()}"
    for worker in workers:
        worker.wait_for("worker started", seconds=PATIENCE)
    with rig.producer():
        rig.wait_for_more(10)
        again = rig.stage.start_command([sys.executable, "-m", "holdfast.cli", "migrate", rig.url()])
        assert again.exit_code(PATIENCE) == 0, again.text()
        rig.wait_for_more(10)


CELLS: tuple[Cell, ...] = (
    Cell(
        name="server killed",
        faults="F5",
        about="SIGKILL under load, twice, and started again",
        engines=SERVERS,
        run=_server_killed,
    ),
    Cell(
        name="server restarted",
        faults="F6",
        about="stopped in order under load, and started again",
        engines=SERVERS,
        run=_server_restarted,
    ),
    Cell(
        name="connections ended",
        faults="F6",
        about="the server ends every connection, five times",
        engines=SERVERS,
        run=_connections_ended,
    ),
    Cell(
        name="server paused",
        faults="F9",
        about="SIGSTOP of the server for longer than a lease, then SIGCONT",
        engines=SERVERS,
        run=_server_paused,
    ),
    Cell(
        name="server out of connections",
        faults="F25",
        about="somebody else takes all connections, and the workers lose theirs",
        engines=SERVERS,
        run=_no_connections,
    ),
    Cell(
        name="migrated by many at once",
        faults="F27",
        about="six programs make the same schema at once, three are killed meanwhile, while workers start",
        engines=ENGINES,
        run=_migrated_at_once,
    ),
)
