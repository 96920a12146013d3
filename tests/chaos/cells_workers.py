"""Workers and keepers that are killed, paused, starved and told to stop."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.job import State
from tests.chaos.cell import ENGINES, SERVERS, Cell
from tests.chaos.producer import with_long_ones
from tests.chaos.program import POINTS
from tests.chaos.rig import TTL, Rig, persistently
from tests.worker.programs import eventually

BETWEEN_KILLS = 0.25
MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")


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
    rig.supervisor()
    with rig.producer():
        for point in POINTS:
            rig.arm(point)
            rig.wait_for_crash(point)
            if alone.popen.poll() is not None:
                alone = rig.worker(wait=False)
        rig.wait_for_more(5)


def _killed_at_random(rig: Rig) -> None:
    workers = [rig.worker(keepers=False), rig.supervisor()]
    with rig.producer(with_long_ones(0.3)):
        for _ in range(3):
            rig.wait_for_more(10)
            time.sleep(BETWEEN_KILLS * random.random())
            number = random.randrange(2)
            if number and (children := rig.processes(workers[1])):
                rig.kill_process(random.choice(children))
            else:
                rig.kill(workers[0])
                workers[0] = rig.worker()


def _everybody_killed(rig: Rig) -> None:
    programs = [rig.worker(), rig.supervisor(), rig.producing_program()]
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


def _keepers_paused_and_killed(rig: Rig) -> None:
    """While one keeper stands still, the other brings the jobs back; then it is the other way round."""
    first, second = rig.keeper(), rig.keeper()
    victim = rig.worker(keepers=False)
    for harm, victims in ((rig.pause, first), (rig.kill, second)):
        held = rig.enqueue("held_at_first", 3, gate="end")
        rig.wait_for_starts(3, *held)
        harm(victims)
        rig.kill(victim)
        victim = rig.worker(keepers=False)
        rig.wait_for_starts(6, *held)
        if harm == rig.pause:
            rig.resume(first)


# Starved.


def _no_processor(rig: Rig) -> None:
    """Four programs that do nothing but count, on however many processors there are."""
    rig.worker()
    rig.supervisor()
    with rig.producer(with_long_ones(1.2 * TTL)):
        rig.wait_for_more(10)
        rig.fault("processor taken")
        burners = [rig.stage.start_command([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
        time.sleep(TTL)
        for burner in burners:
            burner.kill()
        rig.wait_for_more(10)


def _event_loop_blocked(rig: Rig) -> None:
    """For longer than a lease. The heart beats in a thread of its own, so nobody is taken for dead."""
    rig.worker(concurrency=2)
    rig.supervisor(concurrency=2)
    rig.fault("event loop blocked")
    rig.enqueue("blocking", 2, seconds=1.5 * TTL)
    with rig.producer():
        rig.wait_for_more(30)


def _no_files(rig: Rig) -> None:
    """A process that can open no file and no connection for a while, and loses those that it has."""
    workers = rig.worker(), rig.supervisor()
    with rig.producer():
        rig.wait_for_more(20)
        rig.measure(*workers)
        rig.fault("out of files")
        hoarding = rig.enqueue("hoarding", 2, seconds=0.7)
        rig.wait_for_starts(2, *hoarding)
        if rig.engine in SERVERS:
            persistently(rig.database.end_connections)
        rig.wait_for_more(20)


def _killed_by_their_jobs(rig: Rig) -> None:
    """Jobs whose process is killed whenever they run, as by the kernel that is out of memory, among others."""
    rig.supervisor()
    doomed = rig.enqueue("doomed", 2)
    with rig.producer():
        rig.wait_for_more(20)
    rig.drain()
    jobs = rig.jobs(*doomed)
    assert [(job.state, job.crashes) for job in jobs] == [(State.FAILED, 3)] * 2
    assert min(job.attempt for job in jobs) >= 3


def _out_of_memory(rig: Rig) -> None:
    """The kernel kills a process that has taken more than its group may have."""
    group = MEMORY_GROUPS / f"holdfast-chaos-{rig.folder.name}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(200 * 2**20))
        join = f'echo $$ > "{group}/cgroup.procs" && exec "$@"'
        supervisor = rig.supervisor(prefix=("/bin/sh", "-c", join, "join"))
        rig.fault("out of memory", supervisor.pid)
        greedy = rig.enqueue("greedy", 1, mebibytes=400)
        with rig.producer():
            rig.wait_for_more(20)
        rig.drain()
        assert [job.state for job in rig.jobs(*greedy)] == [State.FAILED]
        rig.stop(supervisor)
    finally:
        eventually(lambda: not (group / "cgroup.procs").read_text(), "its group is empty")
        group.rmdir()


def _no_memory_groups() -> str:
    return "" if os.access(MEMORY_GROUPS / "cgroup.procs", os.W_OK) else "it needs memory groups that it may change"


# Told to stop.


def _told_to_stop(rig: Rig) -> None:
    """While they work: everything is settled or given back, and no attempt is used for it."""
    by_signal = {signal.SIGTERM: [rig.worker()], signal.SIGINT: [rig.worker(), rig.supervisor()]}
    with rig.producer():
        rig.wait_for_more(20)
        for number, workers in by_signal.items():
            rig.fault(f"told to stop ({number.name})")
            rig.stop(*workers, number=number)
        rig.worker()
        rig.wait_for_more(10)


def _told_to_stop_twice(rig: Rig) -> None:
    """While handlers run that do not end by themselves: they are given back at once."""
    patient = 30.0  # nobody is to be taken for dead here: that would cost an attempt
    workers = rig.worker(ttl=patient, grace=60.0), rig.supervisor(ttl=patient, grace=60.0)
    held = rig.enqueue("held", 8, gate="end")
    rig.wait_for_starts(8, *held)
    rig.fault("told to stop twice (SIGTERM)")
    rig.stop(*workers, times=2, codes=(1, 128 + signal.SIGTERM))
    rig.open_gate("end")
    rig.worker(ttl=patient)
    rig.drain()
    assert {job.attempt for job in rig.jobs(*held)} == {1}, "a release has cost an attempt"


def _hung_up(rig: Rig) -> None:
    """SIGHUP, as when a terminal is closed. Nobody listens to it: it ends a process as it would any other."""
    listening = ("env", "--default-signal=HUP")  # whoever was started by `nohup` would not hear it
    workers = rig.worker(prefix=listening), rig.supervisor(prefix=listening)
    with rig.producer():
        rig.wait_for_more(20)
        for program in workers:
            rig.fault("kill (SIGHUP)", program.pid)
        rig.stop(*workers, number=signal.SIGHUP, codes=(-signal.SIGHUP,))
        rig.worker()
        rig.wait_for_more(20)


def _told_to_stop_without_server(rig: Rig) -> None:
    """What they cannot settle any more is found by a keeper when the server is back."""
    workers = rig.worker(), rig.supervisor()
    with rig.producer():
        rig.wait_for_more(20)
        with rig.server_away():
            for program in workers:
                rig.fault("kill (SIGTERM, twice, without a server)", program.pid)
            for program in workers:
                program.signal(signal.SIGTERM)
                program.wait_until_heard(signal.SIGTERM)
                program.signal(signal.SIGTERM)
            for program in workers:
                code = program.exit_code()
                # Killed by the second signal: it had stopped before that came, and nobody listened any more.
                assert code in (0, 1, 128 + signal.SIGTERM, -signal.SIGTERM), (
                    f"ended with {code}:\n{program.text()[-4000:]}"
                )
        rig.worker()
        rig.wait_for_more(20)


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
        about="SIGKILL at three random moments, of a worker alone or of a supervisor's",
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
    Cell(
        name="keepers paused and killed",
        faults="F4",
        about="a keeper stands still while another brings jobs back; then it goes on, and the other is killed",
        engines=ENGINES,
        run=_keepers_paused_and_killed,
    ),
    Cell(
        name="jobs that kill their process",
        faults="F23",
        about="SIGKILL of the process of a job, every time it runs: it ends as a dead letter, others are not harmed",
        engines=ENGINES,
        run=_killed_by_their_jobs,
    ),
    Cell(
        name="out of memory",
        faults="F23",
        about="the kernel kills a process that takes more memory than its group may have",
        engines=ENGINES,
        run=_out_of_memory,
        needs_root=True,
        lacks=_no_memory_groups,
        smoke=False,
    ),
    Cell(
        name="no processor",
        faults="F24",
        about="four programs that take all of the processors for the length of a lease",
        engines=ENGINES,
        run=_no_processor,
    ),
    Cell(
        name="event loop blocked",
        faults="F24",
        about="a handler keeps the event loop for longer than a lease",
        engines=ENGINES,
        run=_event_loop_blocked,
    ),
    Cell(
        name="out of files",
        faults="F25",
        about="workers can open no file and no connection for a while, and lose the connections that they have",
        engines=ENGINES,
        run=_no_files,
    ),
    Cell(
        name="told to stop",
        faults="F28",
        about="SIGTERM and SIGINT under load (and SIGTERM while idle, as at the end of every cell)",
        engines=ENGINES,
        run=_told_to_stop,
    ),
    Cell(
        name="told to stop twice",
        faults="F28",
        about="SIGTERM twice while handlers run that do not end by themselves",
        engines=ENGINES,
        run=_told_to_stop_twice,
    ),
    Cell(
        name="hung up",
        faults="F28",
        about="SIGHUP under load",
        engines=ENGINES,
        run=_hung_up,
    ),
    Cell(
        name="told to stop without server",
        faults="F28",
        about="SIGTERM twice while the server is away and settlements wait for it",
        engines=SERVERS,
        run=_told_to_stop_without_server,
    ),
)
