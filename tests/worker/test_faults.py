"""Real faults: processes that are stopped, that crash, that hang, and a store that is out of reach for a while."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.programs import TTL, Program, World, eventually, is_alive, throughout

LONG = 3 * TTL + 0.5
"""Seconds, well beyond three TTLs."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


# A worker that is stopped, and goes on when others have its jobs.


def test_what_a_stopped_worker_says_when_it_goes_on_is_refused_and_the_result_of_the_other_stands(world: World) -> None:
    sleeper = world.alone(concurrency=2)
    acks, is_told = world.enqueue_all([("hold_at_first", {"gate": "end"}), ("hold", {"gate": "never"})])
    for job in (acks, is_told):
        assert world.wait_for_entry(job).pid == sleeper.pid
    [first_session] = world.open_sessions()
    other = world.alone(concurrency=2)

    world.pause(sleeper)
    [done] = world.wait_for_end(acks)
    assert (done.state, done.attempt, done.result) == ("succeeded", 2, b'"attempt 2"')
    assert other.lines("worker found dead")[0].worker_id == first_session
    world.wait_for_entry(is_told, times=2)

    world.open_gate("end")  # it succeeds as soon as it goes on
    sleeper.signal(signal.SIGCONT)
    [refused] = [line for line in sleeper.wait_for("was refused (stale)", times=1) if line.job_id == acks]
    assert refused.worker_id == first_session
    [lost] = sleeper.wait_for("worker was taken for dead")
    assert lost.worker_id == first_session
    assert world.wait_for_entry(is_told, "told to stop").pid == sleeper.pid
    assert world.job(acks) == done
    assert world.job(is_told).state == "in_flight"

    # It goes on with a new session.
    other.kill()
    note = world.enqueue("note")
    world.wait_for_end(note)
    assert world.wait_for_entry(note).pid == sleeper.pid
    world.open_gate("never")
    [row] = world.wait_for_end(is_told)
    assert (row.state, row.attempt) == ("succeeded", 3)
    assert world.job(acks) == done


def test_a_pause_of_the_whole_machine_makes_nobody_look_dead(world: World) -> None:
    workers = [world.alone(), world.alone()]
    jobs = world.enqueue_all([("hold", {"gate": "end"}), ("hold", {"gate": "end"})])
    for job in jobs:
        world.wait_for_entry(job)
    sessions = world.open_sessions()
    world.pause(*workers)
    throughout(2 * TTL, lambda: all(worker.is_stopped() for worker in workers), "the machine stands still")
    for worker in workers:
        worker.signal(signal.SIGCONT)
    throughout(1.5 * TTL, lambda: world.open_sessions() == sessions, "the same sessions are open")
    world.open_gate("end")
    for row in world.wait_for_end(*jobs):
        assert (row.state, row.attempt, world.runs()[row.id]) == ("succeeded", 1, 1)
    for worker in workers:
        assert not worker.lines("dead")


# Handlers that end their process.


def test_isolated_handlers_that_end_their_process_harm_nobody_and_the_dead_letters_say_why(world: World) -> None:
    supervisor = world.supervisor(concurrency=4)
    sessions = world.open_sessions()
    hold = world.enqueue("hold", gate="end")
    world.wait_for_entry(hold)
    ways = {"exit": "exit code 3", "segfault": "SIGSEGV", "abort": "SIGABRT", "kill": "SIGKILL"}
    jobs = {how: world.enqueue("die_alone", how=how) for how in ways}
    world.wait_for_end(*jobs.values())
    for how, reason in ways.items():
        row = world.job(jobs[how])
        assert (row.state, row.reason, row.crashes, row.failures, row.attempt) == ("failed", "crashed", 3, 0, 3)
        assert [failure.type for failure in row.failure_list] == ["ProcessDied"] * 3
        assert all(reason in failure.message for failure in row.failure_list)
        assert world.runs()[row.id] == 3
    note = world.enqueue("note")
    world.open_gate("end")
    world.wait_for_end(note, hold)
    assert world.open_sessions() == sessions
    assert [world.wait_for_entry(note).pid] == list(sessions.values())
    assert (world.job(hold).attempt, world.runs()[hold]) == (1, 1)
    assert not supervisor.lines("unstarted")  # no worker process died


def test_the_end_of_an_isolated_process_is_noticed_though_a_fork_of_it_lives_on(world: World) -> None:
    world.supervisor()
    job = world.enqueue("die_alone_with_heirs")
    [row] = world.wait_for_end(job, seconds=20)
    assert (row.state, row.reason, row.crashes) == ("failed", "crashed", 3)
    assert all("exit code 3" in failure.message for failure in row.failure_list)
    heirs = [pid for entry in world.entries() for pid in entry.others]
    assert len(heirs) == 3
    eventually(lambda: not any(map(is_alive, heirs)), "the forks have ended", seconds=10)


@pytest.mark.parametrize("task", ["fork_and_return", "fork_and_go_on"])
def test_a_copy_of_the_worker_that_a_handler_forks_does_not_work(world: World, task: str) -> None:
    supervisor = world.supervisor(concurrency=2)
    [job] = world.enqueue_all([(task, {"gate": "end"} if task == "fork_and_go_on" else {})])
    [copy] = world.wait_for_entry(job).others
    eventually(lambda: not is_alive(copy), "the copy has ended", seconds=10)
    world.open_gate("end")
    [row] = world.wait_for_end(job)
    assert (row.result, row.attempt, world.runs()[job]) == (b'"worker"', 1, 1)
    notes = world.enqueue_all(("note", {"number": number}) for number in range(100))
    world.wait_for_end(*notes)
    [worker] = world.open_sessions().values()
    assert {entry.pid for entry in world.entries(task="note")} == {worker}
    assert Counter(world.runs()[note] for note in notes) == {1: 100}
    supervisor.signal(signal.SIGTERM)
    assert supervisor.exit_code() == 0
    assert supervisor.lines("worker stopped: 101 succeeded, 0 failed, 0 released")


def segfault_among_others(world: World, others: int, *, guard_off: str = "") -> tuple[Program, str, list[str]]:
    """A handler without isolation takes down the process that runs all of them."""
    supervisor = world.supervisor(concurrency=others + 1, guard_off=guard_off)
    culprit, *neighbours = world.enqueue_all(
        [("die_among_others", {"gate": "crash", "how": "segfault"}), *[("hold", {"gate": "end"})] * others]
    )
    eventually(lambda: len(world.runs()) == others + 1, "all run at once")
    world.open_gate("crash")
    supervisor.wait_for("killed by SIGSEGV")
    world.open_gate("end")
    return supervisor, culprit, neighbours


def check_only_the_culprit_is_dead(world: World, supervisor: Program, culprit: str, neighbours: list[str]) -> None:
    others = len(neighbours)
    assert f"{others + 1} jobs that it ran will run again alone" in supervisor.lines("killed by SIGSEGV")[0].msg
    world.wait_for_end(culprit, *neighbours)
    jobs = world.jobs()
    dead = jobs[culprit]
    assert (dead.state, dead.reason, dead.crashes, dead.failures) == ("failed", "crashed", 3, 0)
    assert [failure.type for failure in dead.failure_list] == ["WorkerDied", *["ProcessDied"] * 3]
    assert all("SIGSEGV" in failure.message for failure in dead.failure_list)
    assert world.runs()[culprit] == 4
    results = Counter((jobs[job].state, jobs[job].attempt, jobs[job].crashes, jobs[job].failures) for job in neighbours)
    assert results == {("succeeded", 2, 0, 0): others}
    assert len([line for line in supervisor.lines("died: ") if "that it ran" in line.msg]) == 1  # it crashed once


def test_of_a_hundred_jobs_in_a_process_that_one_of_them_crashes_only_that_one_ends_in_the_dead_letters(
    world: World,
) -> None:
    check_only_the_culprit_is_dead(world, *segfault_among_others(world, 99))


def test_a_job_that_runs_alone_since_a_crash_is_not_blamed_for_the_crashes_of_others(world: World) -> None:
    supervisor = world.supervisor(concurrency=4)
    innocent = world.enqueue("hold", gate="end")
    culprits = []
    for number in range(1, 5):  # one more than the crash limit
        world.wait_for_entry(innocent, times=number)
        culprits.append(world.enqueue("die_among_others", gate=f"crash-{number}", how="segfault"))
        world.wait_for_entry(culprits[-1])
        world.open_gate(f"crash-{number}")
        supervisor.wait_for("that it ran will run again alone", times=number)
    assert {row.reason for row in world.wait_for_end(*culprits)} == {"crashed"}
    assert world.job(innocent).state != "failed"
    world.open_gate("end")
    [row] = world.wait_for_end(innocent)
    assert (row.state, row.crashes, row.failures) == ("succeeded", 0, 0)


# Handlers that block.


def block_for_long(world: World, *, guard_off: str = "") -> tuple[Program, str, list[str]]:
    """A handler keeps the event loop for more than three TTLs, and jobs that were claimed with it wait behind it."""
    worker = world.alone(claim_ahead=20, guard_off=guard_off)
    blocking, *behind = world.enqueue_all([("block", {"seconds": LONG}), *[("note", {})] * 20])
    world.wait_for_entry(blocking)
    assert world.count("in_flight") == 21
    world.alone()
    world.wait_for_end(blocking, *behind)
    return worker, blocking, behind


def check_it_kept_its_lease(world: World, worker: Program, blocking: str, behind: list[str]) -> None:
    row = world.job(blocking)
    assert (row.state, row.attempt, world.runs()[blocking]) == ("succeeded", 1, 1)
    assert not worker.lines("worker was taken for dead")
    assert worker.pid in world.open_sessions().values()
    # What waited behind it ran elsewhere, meanwhile.
    elsewhere = [entry for entry in world.entries(task="note") if entry.job in behind]
    assert worker.pid not in {entry.pid for entry in elsewhere}
    assert max(entry.at for entry in elsewhere) < world.entries("end", blocking)[0].at
    jobs = world.jobs()
    assert Counter((jobs[job].attempt, world.runs()[job]) for job in behind) == {(1, 1): 20}


def test_a_handler_that_blocks_the_event_loop_keeps_its_lease_and_what_waits_behind_it_runs_elsewhere(
    world: World,
) -> None:
    worker, blocking, behind = block_for_long(world)
    check_it_kept_its_lease(world, worker, blocking, behind)
    [warning] = worker.lines("the event loop has been blocked")
    assert warning.level == "warning"
    assert "(running: block)" in warning.msg
    assert "20 unstarted jobs went back" in warning.msg


def test_a_wedged_process_is_killed_at_the_hard_limit_and_only_the_job_past_it_fails(world: World) -> None:
    supervisor = world.supervisor(concurrency=3)
    [wedged] = world.open_sessions().values()
    neighbours = world.enqueue_all([("hold", {"gate": "end"}), ("hold_in_thread", {"gate": "end"})])
    for job in neighbours:
        assert world.wait_for_entry(job).pid == wedged
    culprit = world.enqueue("wedge", max_retries=0)
    began = world.wait_for_entry(culprit).at

    [dead] = world.wait_for_end(culprit)
    assert (dead.state, dead.reason, dead.attempt, dead.crashes) == ("failed", "exhausted", 1, 0)
    assert [failure.type for failure in dead.failure_list] == ["HardTimeout"]
    [killed] = supervisor.lines("was killed: 1 of its jobs ran past the hard limit")
    assert f"process {wedged} " in killed.msg
    assert not is_alive(wedged)

    again = [world.wait_for_entry(job, times=2) for job in neighbours]
    print(f"the others run elsewhere {max(entry.at for entry in again) - began - 1:.2f} s after the limit")
    # Elsewhere, in a worker and not alone, and it is still their first attempt: they are not to blame.
    assert {entry.pid for entry in again} <= set(world.open_sessions().values())
    assert {entry.attempt for entry in again} == {1}
    world.open_gate("end")
    for row in world.wait_for_end(*neighbours):
        assert (row.state, row.attempt, row.failure_list) == ("succeeded", 1, [])


def test_a_thread_past_its_hard_limit_fails_its_job_and_its_process_is_replaced_when_the_others_are_done(
    world: World,
) -> None:
    supervisor = world.supervisor(concurrency=2, grace=30)
    [stuck] = world.open_sessions().values()
    neighbour = world.enqueue("hold", gate="end")
    world.wait_for_entry(neighbour)
    [dead] = world.wait_for_end(world.enqueue("wedge_in_thread", max_retries=0))
    assert [failure.type for failure in dead.failure_list] == ["HardTimeout"]
    assert supervisor.lines("wedge_in_thread ran past its hard limit of 1 s and cannot be stopped")
    assert world.job(neighbour).state == "in_flight"
    world.open_gate("end")
    [row] = world.wait_for_end(neighbour)
    assert (row.state, row.attempt, world.runs()[neighbour]) == ("succeeded", 1, 1)
    supervisor.wait_for("worker started", times=2)
    note = world.enqueue("note")
    world.wait_for_end(note)
    assert world.wait_for_entry(note).pid != stuck
    assert not is_alive(stuck)
    assert not supervisor.lines("was killed")
    assert not supervisor.lines("died")


# A store that is out of reach.

WRITE_LOCK = """
import os, sqlite3, sys, time
database, folder = sys.argv[1:]
connection = sqlite3.connect(database, isolation_level=None, timeout=30)
connection.execute("BEGIN IMMEDIATE")
open(folder + "/gate-locked", "w").close()
while not os.path.exists(folder + "/gate-unlock"):
    time.sleep(0.005)
connection.execute("ROLLBACK")
"""
# In WAL mode a transaction keeps nobody from reading. The locks of the shared memory do: no reader, no writer gets in.
EVERY_LOCK = """
import fcntl, os, sys, time
database, folder = sys.argv[1:]
shared = open(database + "-shm", "r+b")
fcntl.lockf(shared, fcntl.LOCK_EX, 8, 120)
open(folder + "/gate-locked", "w").close()
while not os.path.exists(folder + "/gate-unlock"):
    time.sleep(0.005)
"""


def test_a_process_that_is_killed_while_the_store_is_locked_is_recovered_afterwards(tmp_path: Path) -> None:
    with World(tmp_path, timeout=0.5) as world:
        supervisor = world.supervisor(processes=2)
        jobs = world.enqueue_all([("hold", {"gate": "end"})] * 2)
        victim, survivor = (world.wait_for_entry(job).pid for job in jobs)
        locker = world.start_command([sys.executable, "-c", WRITE_LOCK, str(world.database), str(world.folder)])
        eventually((world.folder / "gate-locked").exists, "the store is locked")
        os.kill(victim, signal.SIGKILL)
        supervisor.wait_for("recovery failed, it goes on")
        world.open_gate("unlock")
        assert locker.exit_code() == 0
        assert world.wait_for_entry(jobs[0], times=2).attempt == 2
        world.open_gate("end")
        assert [(row.state, row.attempt) for row in world.wait_for_end(*jobs)] == [("succeeded", 2), ("succeeded", 1)]
        assert survivor in world.open_sessions().values()
        assert not supervisor.lines("taken for dead")


def keep_out_for_long(
    world: World, lock: str, *, guard_off: str = "", until: str = ""
) -> tuple[Program, dict[str, int], list[str]]:
    """Two processes run jobs that last while somebody locks the store: for three TTLs, and until `until` is said."""
    supervisor = world.supervisor(processes=2, concurrency=2, guard_off=guard_off)
    sessions = world.open_sessions()
    jobs = world.enqueue_all([("hold", {"gate": "meanwhile"}), ("hold_in_thread", {"gate": "afterwards"})] * 2)
    for job in jobs:
        world.wait_for_entry(job)
    locker = world.start_command([sys.executable, "-c", lock, str(world.database), str(world.folder)])
    eventually((world.folder / "gate-locked").exists, "the store is locked")
    world.open_gate("meanwhile")  # what ends now cannot be settled yet
    throughout(LONG, lambda: locker.popen.poll() is None, "the store is locked")
    if until:
        supervisor.wait_for(until)
    world.open_gate("unlock")
    assert locker.exit_code() == 0
    world.open_gate("afterwards")
    return supervisor, sessions, jobs


def check_nobody_was_taken_for_dead(
    world: World, supervisor: Program, sessions: dict[str, int], jobs: list[str]
) -> None:
    for row in world.wait_for_end(*jobs):
        assert (row.state, row.attempt, world.runs()[row.id]) == ("succeeded", 1, 1)
    more = world.enqueue_all(("note", {"number": number}) for number in range(50))
    world.wait_for_end(*more)
    assert Counter(world.runs()[job] for job in more) == {1: 50}
    # Give everybody the time to be wrong: a dead worker would be found within a TTL and a half.
    throughout(1.5 * TTL, lambda: world.open_sessions() == sessions, "the same sessions are open")
    for wrong in ("found dead", "taken for dead", "was refused", "died"):
        assert not supervisor.lines(wrong)


def test_a_write_lock_held_for_three_ttls_makes_nobody_look_dead_and_nothing_runs_twice(world: World) -> None:
    check_nobody_was_taken_for_dead(world, *keep_out_for_long(world, WRITE_LOCK))


def test_a_store_out_of_reach_for_three_ttls_makes_nobody_look_dead_and_nothing_runs_twice(tmp_path: Path) -> None:
    with World(tmp_path, timeout=1) as world:
        # Calls do fail meanwhile, reads among them.
        supervisor, sessions, jobs = keep_out_for_long(world, EVERY_LOCK, until="keeper rescue failed, it goes on")
        check_nobody_was_taken_for_dead(world, supervisor, sessions, jobs)
