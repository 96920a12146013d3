"""Workers and keepers that are killed, paused, starved and told to stop."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.chaos.cell import ENGINES, Cell
from tests.chaos.producer import with_long_ones
from tests.chaos.program import POINTS
from tests.chaos.rig import Rig

BETWEEN_KILLS = 0.25


# Killed.


def _killed_at(point: str) -> Callable[[Rig], None]:
    def run(rig: Rig) -> None:
        """Once a worker that nobody supervises, and once one with a supervisor: others find out in other ways."""
        alone = rig.worker()
        with rig.producer():
            rig.wait_for_more(5)
            rig.arm(point)
            rig.wait_for_crash(point)
            alone.popen.wait()
            rig.supervisor()
            rig.wait_for_more(5)
            rig.arm(point)
            rig.wait_for_crash(point)
            rig.wait_for_more(5)

    return run


def _killed_at_each_step(rig: Rig) -> None:
    alone = rig.worker()
    rig.supervisor(processes=2)
    with rig.producer():
        for point in POINTS:
            rig.arm(point)
            rig.wait_for_crash(point)
            if alone.popen.poll() is not None:
                alone = rig.worker(wait=False)
        rig.wait_for_more(5)


def _killed_at_random(rig: Rig) -> None:
    workers = [rig.worker(keepers=False), rig.supervisor(processes=2)]
    with rig.producer(with_long_ones(0.3)):
        for _ in range(4):
            rig.wait_for_more(10)
            time.sleep(BETWEEN_KILLS * random.random())
            number = random.randrange(2)
            if number and (children := rig.processes(workers[1])):
                rig.kill_process(random.choice(children))
            else:
                rig.kill(workers[0])
                workers[0] = rig.worker()


def _everybody_killed(rig: Rig) -> None:
    programs = [rig.worker(), rig.supervisor(processes=2), rig.producing_program()]
    rig.wait_for_more(20)
    rig.kill(*programs)
    rig.worker()
    again = rig.producing_program()
    rig.wait_for_more(20)
    rig.stop(again)


# Paused.


def _paused_past_its_lease(rig: Rig) -> None:
    """It wakes up while another worker has its jobs, and its handlers go on as if nothing had happened."""
    first = rig.worker(keepers=False)
    held = rig.enqueue("held_at_first", 3, gate="end")
    rig.wait_for_starts(3, *held)
    rig.pause(first)
    rig.worker()
    rig.enqueue("quick", 20)
    rig.wait_for_starts(6, *held)
    rig.open_gate("end")
    rig.resume(first)
    rig.wait_for_more(0)


CELLS: tuple[Cell, ...] = (
    *(
        Cell(
            name=f"worker killed {point}",
            faults="F1",
            about=f"SIGKILL {point}, of a worker alone and of one with a supervisor",
            engines=ENGINES,
            run=_killed_at(point),
            smoke=False,
        )
        for point in POINTS
    ),
    Cell(
        name="worker killed at each step",
        faults="F1",
        about="SIGKILL at every one of these steps in turn, of whoever comes there first",
        engines=ENGINES,
        run=_killed_at_each_step,
    ),
    Cell(
        name="worker killed at random",
        faults="F1",
        about="SIGKILL at four random moments, of a worker alone or of a supervisor's",
        engines=ENGINES,
        run=_killed_at_random,
    ),
    Cell(
        name="everybody killed",
        faults="F2",
        about="SIGKILL of all workers, the supervisor and the producer together; then others start",
        engines=ENGINES,
        run=_everybody_killed,
    ),
    Cell(
        name="worker paused past its lease",
        faults="F3",
        about="SIGSTOP until another worker has its jobs and runs them; then SIGCONT, and it settles them, too",
        engines=ENGINES,
        run=_paused_past_its_lease,
    ),
)
