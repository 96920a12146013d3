"""A claim that takes effect after its caller has given up, or whose answer is lost: the worker finds out by its
heartbeat, and gives it back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.job import JobId, Reason, State
from tests.faults.engines import ON_REDIS, Database, MariaDbDatabase, PostgresDatabase, RedisDatabase
from tests.faults.proxy import Proxy
from tests.faults.stage import ServerStage
from tests.worker.programs import TTL, Program, eventually, throughout

SLOTS = 2
JOBS = 8
IMPATIENT = 1.0
WHERE_A_CLAIM_IS_ONE_STATEMENT = pytest.mark.parametrize(
    "engine", [PostgresDatabase.engine, RedisDatabase.engine], scope="module"
)
ON_POSTGRES = pytest.mark.parametrize("engine", [PostgresDatabase.engine], scope="module")
ON_MARIADB = pytest.mark.parametrize("engine", [MariaDbDatabase.engine], scope="module")


@pytest.fixture
def proxy(database: Database) -> Iterator[Proxy]:
    with Proxy(database.server.port) as proxy:
        yield proxy


@pytest.fixture
def stage(tmp_path: Path, database: Database, proxy: Proxy) -> Iterator[ServerStage]:
    with ServerStage(tmp_path, database, port=proxy.port, timeout=IMPATIENT) as stage:
        yield stage


def claim_late(stage: ServerStage, proxy: Proxy, **environment: object) -> tuple[Program, list[JobId]]:
    """A worker's claim is on its way for longer than the worker waits for it. It claims again, is busy with what it
    got, and then the first claim arrives. The worker, and the jobs that it did not start.
    """
    worker = stage.alone(concurrency=SLOTS, **environment)
    stage.enqueue_all([*[("hold", {"gate": "first"})] * SLOTS, *[("hold", {"gate": "end"})] * JOBS])
    eventually(lambda: len(stage.entries()) == SLOTS, "all slots are busy")
    proxy.hold(stage.database.claim_mark)
    stage.open_gate("first")
    assert proxy.held.wait(20)
    worker.wait_for("claimer failed")
    eventually(lambda: len(stage.entries()) == 2 * SLOTS, "another claim is answered")
    runs = stage.runs()
    waiting = [job_id for job_id in stage.jobs() if job_id not in runs]
    assert len(waiting) == JOBS - SLOTS
    proxy.release()
    return worker, waiting


@WHERE_A_CLAIM_IS_ONE_STATEMENT
def test_what_a_claim_took_after_its_caller_gave_up_is_given_back(stage: ServerStage, proxy: Proxy) -> None:
    worker, waiting = claim_late(stage, proxy)
    sessions = stage.open_sessions()
    eventually(lambda: given_back(stage, waiting), "it is given back", instead=stage.counts)
    late = given_back(stage, waiting)
    stage.wait_for_count("in_flight", SLOTS)
    stage.open_gate("end")
    jobs = stage.wait_for_end(waiting)
    assert {(job.state, job.attempt) for job in jobs.values()} == {(State.SUCCEEDED, 1)}
    assert {jobs[job_id].version > 1 for job_id in late} == {True}
    assert set(stage.runs().values()) == {1}
    assert stage.open_sessions() == sessions
    assert not worker.lines("taken for dead")


@ON_MARIADB
def test_where_a_claim_is_a_transaction_it_takes_nothing_after_its_caller_gave_up(
    stage: ServerStage, proxy: Proxy
) -> None:
    """The server has ended the transaction by then: nobody leaves one open for longer than a call may take."""
    _, waiting = claim_late(stage, proxy)
    stage.open_gate("end")
    jobs = stage.wait_for_end(waiting)
    assert {(job.state, job.attempt, job.version) for job in jobs.values()} == {(State.SUCCEEDED, 1, 1)}
    assert set(stage.runs().values()) == {1}


def given_back(stage: ServerStage, job_ids: list[JobId]) -> list[JobId]:
    jobs = stage.jobs()
    return [job_id for job_id in job_ids if jobs[job_id].reason is Reason.RELEASED]


@ON_REDIS
@pytest.mark.parametrize("cut", [False, True], ids=["black hole", "cut"])
def test_what_a_claim_took_whose_answer_was_lost_is_given_back(stage: ServerStage, proxy: Proxy, cut: bool) -> None:
    worker = stage.alone(concurrency=SLOTS)
    sessions = stage.open_sessions()
    first = stage.enqueue("note")
    stage.wait_for_entry(first)
    proxy.lose_reply(stage.database.claim_mark, cut=cut)
    job_ids = stage.enqueue_all([("note", {})] * JOBS)
    assert proxy.held.wait(20)
    lost = time.monotonic()
    jobs = stage.wait_for_end(job_ids)
    print(f"{stage.database.engine}: everything has ended {time.monotonic() - lost:.2f} s after the answer was lost")
    assert {(job.state, job.attempt) for job in jobs.values()} == {(State.SUCCEEDED, 1)}
    assert set(stage.runs().values()) == {1}
    assert stage.open_sessions() == sessions
    if cut:  # else the heartbeat may notice before the deadline does, and ends a claim that waits
        assert worker.lines("claimer failed")
    assert [job_id for job_id in job_ids if jobs[job_id].version > 1] != []  # what the lost answer was about


@ON_POSTGRES  # one is enough: what is switched off knows of no engine
def test_if_the_worker_never_asked_what_it_holds_the_jobs_would_be_stuck(stage: ServerStage, proxy: Proxy) -> None:
    claim_late(stage, proxy, guard_off="reconcile")
    eventually(lambda: stage.counts()["in_flight"] > SLOTS, "the late claim has taken effect")
    throughout(1.5 * TTL, lambda: stage.counts()["in_flight"] > SLOTS, "the worker holds what it does not know of")
