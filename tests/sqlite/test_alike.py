"""The paths of nearly all jobs (one step for many of them): they must answer, and write, as the general ones do."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.errors import StoreError
from holdfast.failures import Failure
from holdfast.job import Job, Key, State
from holdfast.lifecycle import Applied, Failed, Move, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import InsertStatus
from holdfast.stores.sqlite import SqliteStore, claims
from holdfast.stores.sqlite.settlements import Settlements
from tests.sqlite.helpers import claim, finish, new_job, new_jobs, open_session, run_sql

LONG = b'{"text":"' + b"x" * 5000 + b'"}'


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(tmp_path / "jobs.db", durability="relaxed") as opened:
        yield opened


def ended_well(job: Job, result: bytes | None = None) -> Move:
    return settle(job, Succeeded(result), RetryPolicy(), SYSTEM.random)


def failure(number: int) -> Failure:
    return Failure(1, number, "ValueError", f"attempt {number}")


def rows(store: SqliteStore, table: str) -> list[str]:
    return [row[0] for row in run_sql(store.path, f"SELECT id FROM holdfast_{table} ORDER BY id")]


# Claims.


async def test_what_is_claimed_is_what_is_stored(store: SqliteStore) -> None:
    """Jobs of one lane that differ in everything in which they can: each field of each arrives."""
    different: list[dict[str, Any]] = [
        {},
        {"delay": 1},
        {"task": "other", "task_version": "2", "max_retries": 9, "retention": 60_000_000},
        {"correlation_id": "a \u00fc 'quoted\""},
    ]
    payloads = (b"{}", b'{"a":"\xc3\xa9\\u0001"}', LONG)
    variants = [new_job(payload=payload, **changes) for payload in payloads for changes in different]
    variants += [new_job(key=Key(f"k{number}", "f" * 64, 1_000_000_000)) for number in range(2)]
    await store.insert(variants)
    session = await open_session(store)
    tried = await claim(store, session, 5)
    retried = [settle(job, Failed(failure(1), retry_after=0), RetryPolicy(), SYSTEM.random) for job in tried]
    assert await store.apply(retried) == [Applied.APPLIED] * 5
    while len(held := await store.held(session)) < len(variants):
        await claim(store, session, 100)
    assert {job.id for job in held} == {job.id for job in variants}
    again = [settle(job, Failed(failure(2), retry_after=0), RetryPolicy(), SYSTEM.random) for job in held]
    await store.apply(again)
    claimed: dict[str, Job] = {}
    while len(claimed) < len(variants):
        claimed |= {job.id: job for job in await claim(store, session, 100)}
    for new in variants:
        job = claimed[new.id]
        assert job == await store.get(new.id)
        assert (job.payload, job.task, job.key) == (new.payload, new.task, new.key)
        assert job.failure_history


async def test_who_differs_in_one_thing_from_the_last_one_claimed_keeps_it(store: SqliteStore) -> None:
    """What a job has in common with the last one is only compared: in everything that is not the job's own."""
    columns = claims._COMMON.split(", ")
    await store.insert([new_job(correlation_id="c") for _ in range(len(columns) + 3)])
    run_sql(store.path, "UPDATE holdfast_live SET key = 'k', key_hash = 'h', key_window = 5")
    first, *others = rows(store, "live")
    for column, job_id in zip(columns, others, strict=False):
        value = 1 if column in ("suspect", "cancel_asked") else 9
        run_sql(store.path, f"UPDATE holdfast_live SET {column} = {value} WHERE id = '{job_id}'")
    session = await open_session(store)
    assert [job.id for job in await claim(store, session, 1)] == [first]
    claimed = await claim(store, session, 100)
    assert [job.id for job in claimed] == others
    for job in claimed:
        assert job == await store.get(job.id)


# Settlements.


async def test_a_batch_of_several_sessions_queues_attempts_and_results(store: SqliteStore) -> None:
    jobs: list[Job] = []
    for queue in ("default", "mail"):
        await store.insert(new_jobs(6, queue=queue))
        for _ in range(2):
            jobs += await claim(store, await open_session(store), 3, queue)
    moves = [
        replace(ended_well(job, b"%d" % number), attempt=1 + number % 3, failure_history=b"[%d]" % (number % 2))
        for number, job in enumerate(jobs)
    ]
    assert await store.apply(moves) == [Applied.APPLIED] * 12
    for number, (job, move) in enumerate(zip(jobs, moves, strict=True)):
        found = await store.get(job.id)
        assert found == replace(
            job,
            state=State.SUCCEEDED,
            reason=move.reason,
            attempt=move.attempt,
            failure_history=move.failure_history,
            result=b"%d" % number,
            ended_at=found and found.ended_at,
        )
    assert [(each.queue, each.succeeded, each.in_flight) for each in await store.counts()] == [
        ("default", 6, 0),
        ("mail", 6, 0),
    ]
    assert await store.apply(moves) == [Applied.ALREADY] * 12


GUARDS = {
    "another session": {"session_id": "somebody"},
    "another version": {"version": 7},
}


@pytest.mark.parametrize("changes", GUARDS.values(), ids=GUARDS)
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_one_that_is_not_held_stops_no_other(store: SqliteStore, changes: dict[str, object], place: int) -> None:
    """Whether it comes first or last: what was copied before it was missed is taken back, then each is judged."""
    await store.insert(new_jobs(4))
    session = await open_session(store)
    before, *jobs = await claim(store, session)
    assert await finish(store, [before]) == [Applied.APPLIED]
    moves = [ended_well(job) for job in jobs]
    moves[place] = replace(moves[place], **changes)
    expected = [Applied.APPLIED] * 3
    expected[place] = Applied.STALE
    assert await store.apply([*moves, ended_well(before)]) == [*expected, Applied.ALREADY]
    assert rows(store, "live") == [jobs[place].id]
    assert rows(store, "ended") == sorted(job.id for job in [before, *jobs] if job is not jobs[place])
    [counts] = await store.counts()
    assert (counts.succeeded, counts.in_flight) == (3, 1)


async def test_without_taking_back_it_would_fail(store: SqliteStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A control for the test above."""
    await store.insert(new_jobs(2))
    jobs = await claim(store, await open_session(store))
    moves = [ended_well(jobs[0]), replace(ended_well(jobs[1]), version=7)]
    monkeypatch.setattr(Settlements, "_take_back", lambda self, db, ids: None)
    with pytest.raises(StoreError, match="UNIQUE"):
        await store.apply(moves)


async def test_a_job_twice_in_a_batch_is_settled_once(store: SqliteStore) -> None:
    await store.insert(new_jobs(2))
    one, two = await claim(store, await open_session(store))
    moves = [ended_well(one), ended_well(two), ended_well(one)]
    assert await store.apply(moves) == [Applied.APPLIED, Applied.APPLIED, Applied.ALREADY]


async def test_a_follow_up_may_be_named_later_in_the_batch(store: SqliteStore) -> None:
    """What follows from a move is there for the next one: such a batch is no single run."""
    await store.insert(new_jobs(2))
    one, two = await claim(store, await open_session(store))
    following = new_job()
    moves = [replace(ended_well(one), then=(following,)), ended_well(two)]
    settled_later = replace(ended_well(two), job_id=following.id)
    assert await store.apply([*moves, settled_later]) == [Applied.APPLIED, Applied.APPLIED, Applied.STALE]
    assert rows(store, "live") == [following.id]


# Fresh ids.


@pytest.mark.parametrize("size", [2, 5_000])
@pytest.mark.parametrize("fresh", [True, False])
def test_an_id_that_waits_already_is_existing(tmp_path: Path, fresh: bool, size: int) -> None:
    store = SqliteStore(tmp_path / "jobs.db")
    job = new_job(payload=b'{"a":"%s"}' % (b"x" * size))
    statuses = [store.insert_blocking([job], fresh=fresh and call == 0)[0].status for call in range(2)]
    store.close()
    assert statuses == [InsertStatus.CREATED, InsertStatus.EXISTING]


async def test_an_id_that_is_wrongly_called_fresh_is_one_job_all_the_same(store: SqliteStore) -> None:
    """A caller that breaks its word may get a wrong answer, but no second run."""
    short, long = new_job(), new_job(payload=b'{"a":"%s"}' % (b"x" * 5_000))
    for job in (short, long, short, long):
        store.insert_blocking([job], fresh=True)
    assert [job.id for job in await claim(store, await open_session(store))] == [short.id, long.id]


async def test_only_a_fresh_id_is_not_looked_for(store: SqliteStore) -> None:
    verbs = store._verbs
    job = new_job()
    await store.insert([job])
    await finish(store, await claim(store, await open_session(store)))
    assert store.insert_blocking([job])[0].status is InsertStatus.EXISTING  # a repeated call is answered right

    def tables(fresh: bool) -> str:
        def explain(db: sqlite3.Connection) -> str:
            sql, row = verbs.insert_plain(new_job(), 0, fresh=fresh)
            return str(db.execute(f"EXPLAIN QUERY PLAN {sql}", row).fetchall())

        return store._open().writer.run(explain)

    assert "holdfast_ended" in tables(fresh=False)
    assert tables(fresh=True) == "[]"  # nowhere
