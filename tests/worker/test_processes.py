"""Worker processes at work: who runs what, and what becomes of it when they are killed, told to stop, or grow old."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.programs import TTL, LogLine, World, children_of, eventually, is_alive, throughout

DRAIN = 30.0
"""A grace period that is never over in these tests."""


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


def check_each_ran_once(world: World, job_ids: list[str]) -> None:
    runs = world.runs()
    assert Counter(runs[job_id] for job_id in job_ids) == {1: len(job_ids)}
    jobs = world.jobs()
    assert Counter((jobs[job_id].state, jobs[job_id].attempt) for job_id in job_ids) == {("succeeded", 1): len(job_ids)}


# Seed 003, test 1.


@pytest.mark.parametrize("workers", [5, 10])
def test_of_a_thousand_jobs_for_several_workers_each_runs_exactly_once(world: World, workers: int) -> None:
    if workers == 5:
        programs = [world.start_alone(concurrency=5) for _ in range(workers)]
        for program in programs:
            program.wait_for("worker started")
    else:
        programs = [world.supervisor(processes=workers, concurrency=5)]
    for number in range(500):
        world.sql("INSERT INTO holdfast_ready (task, payload) VALUES ('note', ?)", (f'{{"number": {number}}}',))
    for first in range(500, 1000, 100):
        task, more = ("note_in_thread", {}) if first % 200 else ("linger", {"seconds": 0.002})
        world.enqueue_all((task, {"number": number, **more}) for number in range(first, first + 100))
    world.wait_for_count("succeeded", 1000)
    began = world.entries()[0].at
    print(f"{workers} workers: 1000 jobs in {world.entries()[-1].at - began:.2f} s of work")

    check_each_ran_once(world, list(world.jobs()))
    assert sorted(entry.number for entry in world.entries()) == list(range(1000))
    assert world.count("ready") == world.count("in_flight") == world.count("failed") == 0
    share = Counter(entry.pid for entry in world.entries())
    print(f"shares: {sorted(share.values())}")
    assert len(share) > 1
    for program in programs:
        program.signal(signal.SIGTERM)
    assert [program.exit_code() for program in programs] == [0] * len(programs)
    assert world.open_sessions() == {}


# Seed 003, test 2.


def test_the_job_of_a_killed_worker_is_completed_by_another_within_ttl_and_two_seconds(world: World) -> None:
    times: list[float] = []
    while not times or (min(times) > TTL + 2 and len(times) < 3):  # others may need the machine
        victim = world.alone()
        job = world.enqueue("hold_at_first", gate="never")
        started = world.wait_for_entry(job)
        assert started.pid == victim.pid
        other = world.alone()
        killed = time.monotonic()
        victim.kill()
        [row] = world.wait_for_end(job)
        times.append(world.wait_for_entry(job, "end").at - killed)
        assert (row.state, row.attempt, row.result) == ("succeeded", 2, b'"attempt 2"')
        assert [failure.type for failure in row.failure_list] == ["WorkerLost"]
        assert other.lines("worker found dead")
        other.kill()
    print(f"completed after {', '.join(f'{took:.2f} s' for took in times)}")
    assert min(times) <= TTL + 2


def test_with_only_keepers_alive_the_job_of_a_killed_worker_is_ready_again_and_a_new_worker_completes_it(
    world: World,
) -> None:
    world.keeper()
    times: list[float] = []
    job = ""
    while not times or (min(times) > TTL + 2 and len(times) < 3):
        victim = world.alone(keepers=False)
        job = world.enqueue("hold_at_first", gate="never")
        world.wait_for_entry(job)
        killed = time.monotonic()
        victim.kill()
        assert world.job(job).state == "in_flight"
        world.wait_for_state(job, "ready")
        times.append(time.monotonic() - killed)
    print(f"ready again after {', '.join(f'{took:.2f} s' for took in times)}")
    assert min(times) <= TTL + 2
    assert (world.job(job).reason, world.job(job).suspect) == ("lost", 1)
    assert len(world.entries(job_id=job)) == 1
    world.alone()
    [row] = world.wait_for_end(job)
    assert (row.state, row.attempt) == ("succeeded", 2)


# Seed 003, test 3.


def test_a_poison_job_ends_in_the_dead_letters_and_harms_no_other(world: World) -> None:
    world.supervisor(processes=2, concurrency=2)
    before = world.enqueue_all(("note", {"number": number}) for number in range(20))
    world.sql("INSERT INTO holdfast_ready (task, payload, max_retries) VALUES ('poison', '{}', 2)")
    beside = world.enqueue_all(("note", {"number": number}) for number in range(20))
    world.wait_for_count("failed", 1)
    [dead] = [job for job in world.jobs().values() if job.task == "poison"]
    assert (dead.state, dead.reason, dead.attempt, dead.failures) == ("failed", "exhausted", 3, 3)
    assert [(failure.type, failure.message) for failure in dead.failure_list] == [("ValueError", "on purpose")] * 3

    # Workers go on, and look at it never again.
    after = world.enqueue_all(("note", {"number": number}) for number in range(20))
    world.wait_for_end(*before, *beside, *after)
    check_each_ran_once(world, before + beside + after)
    assert world.runs()[dead.id] == 3
    assert world.job(dead.id) == dead
    assert world.sql("SELECT count(*) FROM holdfast_live WHERE task = 'poison'") == [(0,)]


# kill -9 of a process under its supervisor.


def test_the_job_of_a_killed_child_starts_again_at_once_and_its_siblings_jobs_are_untouched(
    world: World,
) -> None:
    supervisor = world.supervisor(processes=2, concurrency=2, ttl=60)  # nobody waits for that
    sessions = world.open_sessions()
    jobs = world.enqueue_all([("hold", {"gate": "end"})] * 3)
    places = {job: world.wait_for_entry(job).pid for job in jobs}
    crowded = max(places.values(), key=list(places.values()).count)
    [victim] = set(sessions.values()) - {crowded} or {crowded}
    lost = [job for job, pid in places.items() if pid == victim]
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    times = [world.wait_for_entry(job, times=2).at - killed for job in lost]
    survivors = {session: pid for session, pid in sessions.items() if pid != victim}
    eventually(lambda: len(world.open_sessions()) == 2, "another process is up")
    assert survivors.items() <= world.open_sessions().items()
    world.open_gate("end")
    for row in world.wait_for_end(*jobs):
        assert row.state == "succeeded"
        assert (row.attempt, world.runs()[row.id]) == ((2, 2) if row.id in lost else (1, 1))
    print(f"started again after {', '.join(f'{took:.2f} s' for took in times)}")
    assert supervisor.lines("killed by SIGKILL")
    assert not supervisor.lines("found dead")  # nobody had to wait for the TTL


def crash_with_others_behind(world: World, *, guard_off: str = "") -> tuple[str, list[str], LogLine]:
    """A job kills its process while 99 that were claimed with it wait for their turn."""
    supervisor = world.supervisor(claim_ahead=99, guard_off=guard_off)
    culprit, *behind = world.enqueue_all([("die_once", {"how": "kill"}), *[("note", {})] * 99])
    [died] = supervisor.wait_for("killed by SIGKILL")
    world.wait_for_end(culprit, *behind)
    return culprit, behind, died


def check_only_the_culprit_lost_an_attempt(world: World, culprit: str, behind: list[str], died: LogLine) -> None:
    assert "1 job that it ran will run again alone, 99 unstarted jobs went back" in died.msg
    check_each_ran_once(world, behind)
    jobs = world.jobs()
    assert {jobs[job].failure_history for job in behind} == {b""}
    assert (jobs[culprit].state, jobs[culprit].attempt) == ("succeeded", 2)
    assert [(failure.type, "SIGKILL" in failure.message) for failure in jobs[culprit].failure_list] == [
        ("WorkerDied", True)
    ]
    # A suspect runs alone, in a process without a session. The others were no suspects.
    workers = {pid for [pid] in world.sql("SELECT pid FROM holdfast_sessions")}
    assert {entry.pid for entry in world.entries(task="note")} <= workers
    first, second = world.entries(job_id=culprit)
    assert first.pid in workers
    assert second.pid not in workers


def test_jobs_that_were_claimed_but_not_started_lose_nothing_when_their_process_is_killed(world: World) -> None:
    culprit, behind, died = crash_with_others_behind(world)
    check_only_the_culprit_lost_an_attempt(world, culprit, behind, died)


# Signals.


def hold_with_others_behind(world: World, count: int, task: str = "hold") -> tuple[str, list[str]]:
    """A job that runs, and others that were claimed with it and wait."""
    hold, *behind = world.enqueue_all([(task, {"gate": "end"}), *[("note", {})] * count])
    world.wait_for_entry(hold)
    assert world.count("in_flight") == count + 1
    return hold, behind


@pytest.mark.parametrize("supervised", [True, False], ids=["supervised", "alone"])
def test_sigterm_lets_the_running_job_finish_and_gives_the_waiting_ones_back_at_once(
    world: World, supervised: bool
) -> None:
    start = world.supervisor if supervised else world.alone
    worker = start(grace=DRAIN, claim_ahead=50)
    hold, behind = hold_with_others_behind(world, 50)
    worker.signal(signal.SIGTERM)
    world.wait_for_count("in_flight", 1)
    assert {world.job(job).attempt for job in behind} == {0}
    assert {world.job(job).reason for job in behind} == {"released"}

    other = world.alone()
    world.wait_for_end(*behind)
    check_each_ran_once(world, behind)
    assert {entry.pid for entry in world.entries(task="note") if entry.job in behind} == {other.pid}
    assert world.job(hold).state == "in_flight"

    world.open_gate("end")
    assert worker.exit_code() == 0
    check_each_ran_once(world, [hold])
    [stopped] = worker.lines("worker stopped")
    assert "50 released" in stopped.msg
    assert list(world.open_sessions().values()) == [other.pid]


@pytest.mark.parametrize("task", ["hold", "hold_in_thread"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_the_worker_at_once_and_gives_the_running_job_back(
    world: World, number: int, code: int, task: str
) -> None:
    worker = world.supervisor(grace=DRAIN, claim_ahead=10)
    hold, behind = hold_with_others_behind(world, 10, task)
    worker.signal(number)
    world.wait_for_count("in_flight", 1)  # it has heard the first: two at once may arrive as one
    assert world.entries("told to stop") == []
    began = time.monotonic()
    worker.signal(number)
    assert worker.exit_code() == code
    took = time.monotonic() - began
    print(f"ended {took:.2f} s after the second signal")
    assert took < 5
    assert world.open_sessions() == {}
    for job in (hold, *behind):
        row = world.job(job)
        assert (row.state, row.reason, row.attempt, row.suspect) == ("ready", "released", 0, 0)
    assert not worker.lines("was killed")
    assert world.left_behind() == []


@pytest.mark.parametrize("task", ["stubborn", "hold_in_thread"])
@pytest.mark.parametrize("supervised", [True, False], ids=["supervised", "alone"])
def test_a_handler_that_ignores_cancellation_does_not_keep_the_worker_past_its_grace_period(
    world: World, supervised: bool, task: str
) -> None:
    worker = world.supervisor(grace=1) if supervised else world.alone(grace=1)
    job = world.enqueue(task, gate="never")
    world.wait_for_entry(job)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    code = worker.exit_code()
    took = time.monotonic() - began
    print(f"ended {took:.2f} s after SIGTERM, with a grace period of 1 s")
    assert code == (0 if supervised else 1)  # the script of the lone worker says so when not all ended well
    assert 1 <= took < 1 + 5
    row = world.job(job)
    assert (row.state, row.reason, row.attempt, row.suspect) == ("ready", "released", 0, 0)
    assert len(worker.lines("worker stopped past its grace period: 0 succeeded, 0 failed, 1 released")) == 1
    assert not worker.lines("was killed")
    assert world.open_sessions() == {}


def test_a_handler_that_is_told_to_stop_at_the_end_of_the_grace_period_loses_no_attempt(world: World) -> None:
    worker = world.supervisor(grace=0.5)
    job = world.enqueue("hold", gate="never")
    world.wait_for_entry(job)
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert len(world.entries("told to stop", job)) == 1
    row = world.job(job)
    assert (row.state, row.reason, row.attempt) == ("ready", "released", 0)


def test_a_second_signal_ends_even_a_worker_whose_event_loop_is_blocked(world: World) -> None:
    worker = world.supervisor(grace=DRAIN)
    job = world.enqueue("block", seconds=DRAIN)
    world.wait_for_entry(job)
    worker.signal(signal.SIGTERM)
    worker.wait_until_heard(signal.SIGTERM)
    began = time.monotonic()
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 143
    print(f"ended {time.monotonic() - began:.2f} s after the second signal")
    assert time.monotonic() - began < 10
    assert worker.lines("was killed: it did not stop in time")
    row = world.job(job)
    assert (row.state, row.reason, row.attempt, row.suspect) == ("ready", "released", 0, 0)
    assert world.open_sessions() == {}
    assert world.left_behind() == []


def test_a_worker_that_is_told_to_stop_while_its_processes_come_up_leaves_nothing_behind(world: World) -> None:
    worker = world.start(["holdfast.cli", "worker", "tests.worker.program:app", "--processes", 2, "--lease-ttl", TTL])
    eventually(lambda: len(children_of(worker.pid)) == 2, "both processes come up")
    worker.signal(signal.SIGTERM)
    assert worker.exit_code() == 0
    assert world.open_sessions() == {}
    assert world.left_behind() == []


# Recycling.


def test_processes_are_replaced_after_some_jobs_not_all_at_once_and_nothing_is_lost(world: World) -> None:
    most = 40
    supervisor = world.supervisor(processes=2, more=["--max-jobs", most], look_every=0.01)
    jobs = world.enqueue_all([("linger", {"seconds": 0.01})] * 500)
    world.wait_for_end(*jobs)
    check_each_ran_once(world, jobs)
    replaced = supervisor.lines("is replaced: it has run ")
    after = [int(match[1]) for line in replaced if (match := re.search(r"it has run (\d+) jobs", line.msg))]
    print(f"replaced after {after} jobs")
    assert len(after) >= 6
    assert len(set(after)) > 1
    assert min(after) >= most * 0.9
    share = Counter(entry.pid for entry in world.entries())
    assert len(share) >= len(after)
    assert not supervisor.lines("died")
    assert not supervisor.lines("was killed")
    for line in supervisor.lines("worker stopped"):
        assert "worker stopped:" in line.msg  # within its grace period


def test_a_process_that_grew_large_is_replaced_after_its_running_jobs_have_finished(world: World) -> None:
    supervisor = world.supervisor(concurrency=2, grace=DRAIN, more=["--max-memory", 250])
    [(first_session, first)] = world.open_sessions().items()
    hold = world.enqueue("hold", gate="end")
    assert world.wait_for_entry(hold).pid == first
    world.wait_for_end(world.enqueue("grow", mebibytes=10))
    assert not supervisor.lines("is replaced")
    [grown] = world.wait_for_end(world.enqueue("grow", mebibytes=300))
    assert world.runs()[grown.id] == 1
    [line] = supervisor.wait_for(f"process {first} is replaced: it uses ")
    assert line.worker_id == first_session

    supervisor.wait_for("worker started", times=2)
    note = world.enqueue("note")
    world.wait_for_end(note)
    assert world.wait_for_entry(note).pid != first
    assert world.job(hold).state == "in_flight"
    world.open_gate("end")
    world.wait_for_end(hold)
    check_each_ran_once(world, [hold, note])
    eventually(lambda: not is_alive(first), "the old process has ended")
    assert not supervisor.lines("was killed")
    assert first_session not in world.open_sessions()


def test_a_job_that_outlasts_the_grace_period_is_not_interrupted_when_its_process_is_replaced(world: World) -> None:
    supervisor = world.supervisor(concurrency=2, grace=0.5, more=["--max-jobs", 10])
    hold = world.enqueue("hold", gate="end")
    first = world.wait_for_entry(hold).pid
    world.wait_for_end(*world.enqueue_all([("note", {})] * 10))
    supervisor.wait_for(f"process {first} is replaced")
    supervisor.wait_for("worker started", times=2)
    # Others go on elsewhere, for much longer than the grace period.
    throughout(3, lambda: world.runs()[hold] == 1 and not world.entries("told to stop"), "it runs undisturbed")
    note = world.enqueue("note")
    world.wait_for_end(note)
    assert world.wait_for_entry(note).pid != first
    world.open_gate("end")
    world.wait_for_end(hold)
    check_each_ran_once(world, [hold])
    eventually(lambda: not is_alive(first), "the old process has ended")
    assert not supervisor.lines("was killed")


def test_a_process_that_is_being_replaced_still_obeys_the_signal_to_stop(world: World) -> None:
    supervisor = world.supervisor(concurrency=2, grace=0.5, more=["--max-jobs", 10])
    hold = world.enqueue("hold", gate="never")
    first = world.wait_for_entry(hold).pid
    world.wait_for_end(*world.enqueue_all([("note", {})] * 10))
    supervisor.wait_for(f"process {first} is replaced")
    supervisor.wait_for("worker started", times=2)
    supervisor.signal(signal.SIGTERM)
    assert supervisor.exit_code() == 0
    assert len(world.entries("told to stop", hold)) == 1
    row = world.job(hold)
    assert (row.state, row.reason, row.attempt) == ("ready", "released", 0)
    assert world.open_sessions() == {}
