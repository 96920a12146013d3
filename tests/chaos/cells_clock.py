"""Clocks of worker processes that are wrong, each by another amount, and that jump.

A SQLite file has no clock but that of the processes that use it, and those are on one machine, which has one. So this
is about the engines with a server.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from holdfast.job import State
from tests.chaos.cell import SERVERS, Cell
from tests.chaos.clocks import WrongClock, library
from tests.chaos.rig import PATIENCE, Rig

_HOUR = 3600.0


def _without_sleep() -> Iterator[tuple[str, dict[str, Any]]]:
    """Tasks whose handlers do not call `time.sleep`, which fails under a wrong clock: see `clocks`."""
    for number in itertools.count():
        if number % 10 == 3:
            yield "unreliable", {"number": number}
        elif number % 10 == 7:
            yield "later", {"number": number}
        else:
            yield "quick", {"number": number, "text": f"job {number}"}


def _wrong_clocks(rig: Rig) -> None:
    with WrongClock(rig.folder) as fast, WrongClock(rig.folder) as slow:
        fast.set(_HOUR)
        slow.set(-_HOUR)
        workers = [rig.worker(prefix=clock.prefix, wait=False) for clock in (fast, slow)]
        for worker in workers:
            worker.wait_for("worker started", seconds=PATIENCE)
        with rig.producer(calls=_without_sleep):
            rig.wait_for_more(20)
            for clock, worker, seconds in (
                (fast, workers[0], -_HOUR),
                (slow, workers[1], _HOUR),
                (fast, workers[0], 0),
            ):
                rig.fault("clock set", worker.pid)
                clock.set(seconds)
                rig.wait_for_more(10)
        dead = [job for job in rig.finish().ending.jobs if job.state is State.FAILED]
        assert not dead, f"the clock has made {len(dead)} handlers fail: {dead[0].failure_history!r:.500}"


def _lacks() -> str:
    return "" if library() else "libfaketime is not installed"


CELLS: tuple[Cell, ...] = (
    Cell(
        name="wrong clocks",
        faults="F15",
        about="the clocks of two workers are an hour fast and an hour slow, and then jump forth and back",
        engines=SERVERS,
        run=_wrong_clocks,
        lacks=_lacks,
    ),
)
