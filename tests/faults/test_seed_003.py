"""Seed 003, "How We'll Test It", on servers: its three tests, and the lines of its table that are about workers.

Jobs come by plain SQL (where there is none, through the client), handlers write to a table (or a list), processes are
killed. What the seed does with shell and PHP is done here with worker processes and a connection beside the store.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.failures import decode_history
from holdfast.job import Reason, State
from tests.faults.engines import Database, SqlDatabase
from tests.faults.stage import ServerStage
from tests.worker.programs import TTL, eventually, is_alive

JOBS = 1000


@pytest.fixture
def stage(tmp_path: Path, database: Database) -> Iterator[ServerStage]:
    with ServerStage(tmp_path, database) as stage:
        yield stage


def check_each_was_processed_once(database: Database) -> None:
    results = database.results()
    assert sorted(number for _, number in results) == list(range(JOBS))
    assert len({job_id for job_id, _ in results}) == JOBS


# Test 1: concurrent workers, no duplicates.


@pytest.mark.parametrize("workers", [5, 10])
def test_a_thousand_jobs_from_another_program_are_processed_exactly_once(
    stage: ServerStage, database: Database, workers: int
) -> None:
    database.create_results()
    if workers == 5:
        programs = [stage.start_alone(concurrency=2) for _ in range(workers)]
        for program in programs:
            program.wait_for("worker started")
    else:
        programs = [stage.supervisor(processes=workers)]
    payloads = [f'{{"number": {number}}}' for number in range(JOBS)]
    database.enqueue("record", payloads, at_once=1 if workers == 5 else 50)
    stage.wait_for_count("succeeded", JOBS)

    check_each_was_processed_once(database)
    assert stage.counts() == Counter(succeeded=JOBS)
    jobs = stage.jobs().values()
    assert Counter((job.state, job.attempt) for job in jobs) == {(State.SUCCEEDED, 1): JOBS}
    share = Counter(job.session_id for job in jobs)
    print(f"{database.engine}, {workers} workers: shares {sorted(share.values())}")
    assert len(share) > 1
    for program in programs:
        program.signal(signal.SIGTERM)
    assert [program.exit_code() for program in programs] == [0] * len(programs)
    assert stage.open_sessions() == {}


def test_a_job_that_was_processed_twice_or_never_would_be_found(database: Database) -> None:
    database.create_results()
    database.add_results([(f"job {number}", number) for number in range(JOBS)])
    check_each_was_processed_once(database)
    database.remove_result(7)
    with pytest.raises(AssertionError):
        check_each_was_processed_once(database)
    database.add_results([("job 8", 8)])
    with pytest.raises(AssertionError):
        check_each_was_processed_once(database)


# Test 2: worker crash recovery.


def test_a_job_whose_whole_process_tree_was_killed_is_brought_back_after_the_ttl(
    stage: ServerStage, database: Database
) -> None:
    keeper = stage.keeper()
    victim = stage.supervisor()
    database.enqueue("hold_at_first", ['{"gate": "never"}'])
    [job_id] = stage.jobs()
    child = stage.wait_for_entry(job_id).pid
    # The supervisor first: it would bring the job back.
    victim.signal(signal.SIGKILL)
    os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    victim.exit_code()
    eventually(lambda: not is_alive(child), "the worker process is dead")
    assert stage.job(job_id).state is State.IN_FLIGHT
    job = stage.wait_for_state(job_id, "ready")
    took = time.monotonic() - killed
    print(f"{database.engine}: ready again {took:.2f} s after the kill, with a TTL of {TTL:g} s")
    assert job.reason is Reason.LOST
    assert "found dead" in keeper.text()
    assert len(stage.entries(job_id=job_id)) == 1

    stage.supervisor()
    job = stage.wait_for_state(job_id, "succeeded")
    assert (job.attempt, job.version) == (2, 2)
    assert [failure.type for failure in decode_history(job.failure_history)] == ["WorkerLost"]
    assert took >= TTL / 2  # it was the TTL, and nobody's guess
    assert took <= 10 * TTL


def test_a_job_whose_worker_process_alone_was_killed_is_brought_back_at_once_by_the_supervisor(
    stage: ServerStage, database: Database
) -> None:
    supervisor = stage.supervisor(ttl=60)  # nobody waits for that
    database.enqueue("hold_at_first", ['{"gate": "never"}'])
    [job_id] = stage.jobs()
    os.kill(stage.wait_for_entry(job_id).pid, signal.SIGKILL)
    killed = time.monotonic()
    again = stage.wait_for_entry(job_id, times=2).at - killed
    print(f"{database.engine}: started again {again:.2f} s after the kill")
    job = stage.wait_for_state(job_id, "succeeded")
    assert job.attempt == 2
    assert [failure.type for failure in decode_history(job.failure_history)] == ["WorkerDied"]
    assert supervisor.lines("killed by SIGKILL")
    assert not supervisor.lines("found dead")


# Test 3: dead letters after the last attempt.


def test_a_poison_job_is_in_the_dead_letters_with_its_errors_after_three_attempts(
    stage: ServerStage, database: Database
) -> None:
    stage.supervisor(concurrency=2)
    database.enqueue("poison", ["{}"], max_retries=2)
    healthy = stage.enqueue_all(("note", {"number": number}) for number in range(20))
    stage.wait_for_count("failed", 1)
    [dead] = [job for job in stage.jobs().values() if job.task == "poison"]
    assert (dead.state, dead.reason, dead.attempt, dead.failures) == (State.FAILED, Reason.EXHAUSTED, 3, 3)
    errors = [(failure.type, failure.message) for failure in decode_history(dead.failure_history)]
    assert errors == [("ValueError", "on purpose")] * 3
    if isinstance(database, SqlDatabase):  # others see the same
        assert database.sql("SELECT count(*) FROM holdfast_ready WHERE task = 'poison'") == [(0,)]

    # Nobody looks at it again, and nobody else was harmed.
    jobs = stage.wait_for_end(healthy)
    assert jobs[dead.id] == dead
    assert {jobs[job_id].state for job_id in healthy} == {State.SUCCEEDED}
    assert stage.runs()[dead.id] == 3


# Of its table: "kill -TERM → finishes current job, exits clean".


def test_on_sigterm_the_current_job_finishes_and_the_worker_exits_clean(stage: ServerStage) -> None:
    supervisor = stage.supervisor(grace=30)
    job_id = stage.enqueue("hold", gate="end")
    stage.wait_for_entry(job_id)
    later = stage.enqueue("note")
    supervisor.signal(signal.SIGTERM)
    supervisor.wait_for("stopping")
    assert stage.job(job_id).state is State.IN_FLIGHT
    stage.open_gate("end")
    assert supervisor.exit_code() == 0
    job = stage.job(job_id)
    assert (job.state, job.attempt, job.result) == (State.SUCCEEDED, 1, b'"held"')
    assert stage.job(later).state is State.READY  # it takes nothing new
    assert stage.open_sessions() == {}
    assert stage.left_behind() == []
