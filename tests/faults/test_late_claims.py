"""A claim that takes effect after its caller has given up: the worker finds out by its heartbeat, and gives it back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.errors import StoreError
from holdfast.job import JobId, NewJob, Reason, State
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores import open_store
from tests.faults.engines import Database, PostgresDatabase
from tests.faults.proxy import Proxy
from tests.faults.stage import ServerStage
from tests.servers import PostgresServer
from tests.worker.programs import TTL, Program, eventually, throughout

SLOTS = 2
JOBS = 8
IMPATIENT = 1.0
CLAIM = ClaimRequest(session_id="s", queues=("default",), limit=1)


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


def given_back(stage: ServerStage, job_ids: list[JobId]) -> list[JobId]:
    jobs = stage.jobs()
    return [job_id for job_id in job_ids if jobs[job_id].reason is Reason.RELEASED]


def test_if_the_worker_never_asked_what_it_holds_the_jobs_would_be_stuck(stage: ServerStage, proxy: Proxy) -> None:
    claim_late(stage, proxy, guard_off="reconcile")
    eventually(lambda: stage.counts()["in_flight"] > SLOTS, "the late claim has taken effect")
    throughout(1.5 * TTL, lambda: stage.counts()["in_flight"] > SLOTS, "the worker holds what it does not know of")


# A lock that claims wait for, longer than their callers do.


def test_a_lock_that_outlasts_the_patience_of_workers_costs_no_job(stage: ServerStage, database: Database) -> None:
    worker = stage.alone(concurrency=SLOTS)
    sessions = stage.open_sessions()
    waiting = 0
    with database.claims_blocked():
        jobs = stage.enqueue_all([("note", {})] * JOBS)
        failed = len(worker.lines("claimer failed"))
        while len(worker.lines("claimer failed")) < failed + 2:
            waiting = max(waiting, database.waiting_for_locks())
            time.sleep(0.05)
    print(f"{database.engine}: {waiting} statements waited at once")
    ended = stage.wait_for_end(jobs)
    assert {(job.state, job.attempt) for job in ended.values()} == {(State.SUCCEEDED, 1)}
    assert set(stage.runs().values()) == {1}
    assert stage.open_sessions() == sessions
    assert waiting


async def give_up_claims(database: Database) -> int:
    """Claim twice in vain. How many of them still wait on the server a little later."""
    async with open_store(database.url(timeout=IMPATIENT), SYSTEM) as store:
        await store.open_session(Session(id="s"))
        await store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(2)])
        with database.claims_blocked():
            for _ in range(2):  # each on its way to another job, if the one before has not let go of its own yet
                with pytest.raises(StoreError):
                    await store.claim(CLAIM)
            return await asyncio.to_thread(still_waiting, database)


def still_waiting(database: Database) -> int:
    """How many statements wait for a lock, and do not give up."""
    deadline = time.monotonic() + 2 * IMPATIENT
    while (waiting := database.waiting_for_locks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return waiting


async def test_a_claim_that_nobody_waits_for_any_more_does_not_wait_on_the_server_either(database: Database) -> None:
    assert await give_up_claims(database) == 0


def test_a_blocking_insert_that_nobody_waits_for_any_more_does_not_wait_on_the_server_either(
    database: Database,
) -> None:
    with Holdfast(database.url(timeout=IMPATIENT)) as app, database.inserts_blocked():
        with pytest.raises(StoreError):
            app.store.insert_blocking([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}")])
        assert still_waiting(database) == 0


async def test_without_a_word_to_the_server_such_claims_would_pile_up_there(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def not_a_word(self: object, *, timeout: float = 0) -> None:
        """Leave it at that."""

    database = PostgresDatabase(postgres_server, "faults_pile")
    database.create()
    monkeypatch.setattr("psycopg.AsyncConnection.cancel_safe", not_a_word)
    try:
        assert await give_up_claims(database) == 2
    finally:
        database.drop()
