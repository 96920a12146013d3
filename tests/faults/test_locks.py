"""A lock that claims and inserts wait for, longer than their callers do."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from holdfast import Holdfast
from holdfast.errors import StoreError
from holdfast.job import NewJob, State
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores import open_store
from tests.faults.engines import ON_SQL, PostgresDatabase, SqlDatabase
from tests.faults.stage import ServerStage
from tests.servers import PostgresServer

SLOTS = 2
JOBS = 8
IMPATIENT = 1.0
CLAIM = ClaimRequest(session_id="s", queues=("default",), limit=1)


@ON_SQL
def test_a_lock_that_outlasts_the_patience_of_workers_costs_no_job(tmp_path: Path, database: SqlDatabase) -> None:
    with ServerStage(tmp_path, database, timeout=IMPATIENT) as stage:
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


async def give_up_claims(database: SqlDatabase) -> int:
    """Claim twice in vain. How many of them still wait on the server a little later."""
    async with open_store(database.url(timeout=IMPATIENT), SYSTEM) as store:
        await store.open_session(Session(id="s"))
        await store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(2)])
        with database.claims_blocked():
            for _ in range(2):  # each on its way to another job, if the one before has not let go of its own yet
                with pytest.raises(StoreError):
                    await store.claim(CLAIM)
            return await asyncio.to_thread(still_waiting, database)


def still_waiting(database: SqlDatabase) -> int:
    """How many statements wait for a lock, and do not give up."""
    deadline = time.monotonic() + 2 * IMPATIENT
    while (waiting := database.waiting_for_locks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return waiting


@ON_SQL
async def test_a_claim_that_nobody_waits_for_any_more_does_not_wait_on_the_server_either(database: SqlDatabase) -> None:
    assert await give_up_claims(database) == 0


@ON_SQL
def test_a_blocking_insert_that_nobody_waits_for_any_more_does_not_wait_on_the_server_either(
    database: SqlDatabase,
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
