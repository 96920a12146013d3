"""Servers that are killed, restarted, paused and out of connections, under load."""

from __future__ import annotations

import time

from tests.chaos.cell import SERVERS, Cell
from tests.chaos.rig import Rig, persistently


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
        rig.server.start()
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
)
