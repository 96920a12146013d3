"""Many kills on end, with everything under load: what the report's large numbers come from.

A campaign is cut into slices. Each is a cell like any other, on a rig of its own, so that its history stays small
enough to be judged at once.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from tests.chaos.cell import ENGINES, SERVERS, Cell
from tests.chaos.producer import mixed
from tests.chaos.rig import Rig
from tests.worker.programs import Program, eventually

KILLS_PER_SLICE = 100
SERVER_KILLS_PER_SLICE = 25
BETWEEN_JOBS = 0.04
"""Seconds. Those who are left must be able to do what comes: else it is the backlog that is measured."""
BETWEEN_KILLS = (0.2, 0.5)
"""Seconds. Each is followed by a process that starts: more often, and starting is all that two processors do."""
WORKERS_KILLED = "campaign: workers killed"
SERVER_KILLED = "campaign: server killed"


def worker_kills(kills: int) -> Iterator[Cell]:
    """The slices of a campaign with so many kills of workers."""
    for first in range(0, kills, KILLS_PER_SLICE):
        yield _kill_workers(min(KILLS_PER_SLICE, kills - first))


def server_kills(kills: int) -> Iterator[Cell]:
    """The same for kills of the server."""
    for first in range(0, kills, SERVER_KILLS_PER_SLICE):
        yield _kill_server(min(SERVER_KILLS_PER_SLICE, kills - first))


def _calls() -> Iterator[tuple[str, dict[str, Any]]]:
    """All kinds of jobs: one in fifty lasts for longer than a lease, one in fifty has a process of its own."""
    for number, call in enumerate(mixed()):
        match number % 50:
            case 17:
                yield "lasting", {"number": number, "seconds": 1.2}
            case 37:
                yield "apart", {"number": number}
            case _:
                yield call


# Workers.


def _kill_workers(kills: int) -> Cell:
    def run(rig: Rig) -> None:
        rig.keeper()
        herd = _Herd(rig)
        with rig.producer(_calls, every=BETWEEN_JOBS):
            for _ in range(kills):
                time.sleep(random.uniform(*BETWEEN_KILLS))
                herd.kill_one()

    return Cell(
        name=WORKERS_KILLED,
        faults="F1",
        about="SIGKILL of a random worker, alone or a supervisor's, or of a supervisor with all its workers",
        engines=ENGINES,
        run=run,
    )


class _Herd:
    """Two supervisors with two workers each, and two workers that nobody supervises. Who is killed is replaced."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._alone = [rig.worker(wait=False) for _ in range(2)]
        self._supervisors = [rig.supervisor(processes=2, wait=False) for _ in range(2)]

    def kill_one(self) -> None:
        """Kill somebody who is at work."""
        eventually(self._at_work, "somebody is at work")
        found = self._at_work()
        supervisor, pid = random.choice(found)
        rig = self._rig
        if supervisor is None:
            program = next(program for program in self._alone if program.pid == pid)
            rig.kill(program)
            self._alone.remove(program)
            self._alone.append(rig.worker(wait=False))
        elif random.random() < 0.1:
            rig.kill(supervisor)
            self._supervisors.remove(supervisor)
            self._supervisors.append(rig.supervisor(processes=2, wait=False))
        else:
            rig.kill_process(pid)

    def _at_work(self) -> list[tuple[Program | None, int]]:
        """The workers that have claimed something, each with its supervisor."""
        pids: list[tuple[Program | None, int]] = [(None, program.pid) for program in self._alone]
        pids += [(one, pid) for one in self._supervisors for pid in self._rig.processes(one)]
        return [(one, pid) for one, pid in pids if (self._rig.folder / f"history-{pid}.jsonl").exists()]


# Servers.


def _kill_server(kills: int) -> Cell:
    def run(rig: Rig) -> None:
        rig.keeper()
        rig.worker()
        rig.supervisor(processes=2)
        with rig.producer(_calls, every=BETWEEN_JOBS):
            for _ in range(kills):
                time.sleep(random.uniform(0.1, 0.5))
                with rig.server_away():
                    time.sleep(random.uniform(0.1, 1.0))
                rig.wait_for_more(5)

    return Cell(
        name=SERVER_KILLED,
        faults="F5",
        about="SIGKILL of the server under load, started again after 0.1 to 1 s",
        engines=SERVERS,
        run=run,
    )
