"""The paths of nearly all jobs (`migrations/0002_alike.sql`, `0005_more_alike.sql`): as the general ones do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.failures import Failure
from holdfast.job import Job, Key, NewJob
from holdfast.lifecycle import Failed, Move, Released, Snoozed, Succeeded, settle
from holdfast.policy import RetryPolicy, Steps
from holdfast.ports import SYSTEM
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.query import Query
from tests.postgres.helpers import (
    DAY,
    HOUR,
    MINUTE,
    Database,
    claim,
    eventually,
    finish,
    new_job,
    new_jobs,
    open_session,
    raw,
)

AT_ONCE = RetryPolicy(backoff=Steps((0.0,)))


@pytest.fixture
def asked(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that the store has called since."""
    asked: list[str] = []
    execute = store._connections._execute

    async def noted(query: Query) -> Any:
        asked.append(query.text.partition("(")[0].rpartition(" ")[2].partition("_alike_")[2])
        return await execute(query)

    monkeypatch.setattr(store._connections, "_execute", noted)
    return asked


def statuses(answers: list[Any]) -> list[str]:
    return [answer.status.value for answer in answers]


async def test_nearly_all_jobs_take_these_paths(store: PostgresStore, asked: list[str]) -> None:
    session = await open_session(store)
    await store.insert(new_jobs(3))
    await claim(store, session)  # it learns that there is this lane
    await store.insert(new_jobs(3))
    asked.clear()
    await store.insert(new_jobs(4))
    await finish(store, await claim(store, session, 7))
    assert asked == ["insert_alike", "claim_alike", "succeed_alike"]


@pytest.mark.parametrize("where", ["waiting", "in flight", "ended", "ended, kept for half an hour", "a dead letter"])
async def test_some_were_there_before(store: PostgresStore, where: str) -> None:
    old = new_jobs(2, retention=HOUR // 2 if "half an hour" in where else DAY)
    await store.insert(old)
    if where != "waiting":
        jobs = await claim(store, await open_session(store))
        if where == "a dead letter":
            failure = Failure(0, 1, "Error", "")
            await finish(store, jobs, Failed(failure, permanent=True))
        elif where != "in flight":
            await finish(store, jobs)
    fresh = new_jobs(3, retention=old[0].retention)
    batch = [fresh[0], old[0], fresh[1], old[1], fresh[2]]
    assert statuses(await store.insert(batch)) == ["created", "existing", "created", "existing", "created"]
    assert statuses(await store.insert(batch)) == ["existing"] * 5
    [counts] = await store.counts()
    assert counts.ready == 3 + 2 * (where == "waiting")


async def test_named_twice(store: PostgresStore) -> None:
    one, two, three = new_jobs(3)
    assert statuses(await store.insert([one, two, one, three])) == ["created", "created", "existing", "created"]
    [counts] = await store.counts()
    assert counts.ready == 3


async def test_an_id_that_was_there_does_not_spoil_the_transaction(database: Database, store: PostgresStore) -> None:
    old, *fresh = new_jobs(4)
    await store.insert([old])
    with raw(database.url, autocommit=False) as connection:
        assert statuses(store.insert_on(connection, [*fresh, old])) == ["created"] * 3 + ["existing"]
        assert statuses(store.insert_on(connection, new_jobs(4))) == ["created"] * 4
    [counts] = await store.counts()
    assert counts.ready == 8


@pytest.mark.parametrize("alike", [True, False])
async def test_every_field_arrives(store: PostgresStore, alike: bool) -> None:
    def job(number: int) -> NewJob:
        other = 0 if alike else number
        return new_job(
            payload=b'{"n":%d}' % 10**number,
            task=f"task{other}",
            task_version=f"v{other}",
            max_retries=other,
            retention=DAY + other,
            correlation_id=f"c\u20ac{other}",
            delay=other,
        )

    jobs = [job(number) for number in range(5)]
    assert statuses(await store.insert(jobs)) == ["created"] * 5
    await asyncio.sleep(0.01)
    session = await open_session(store)
    await claim(store, session, 1, "other")
    claimed = await claim(store, session)
    names = ("id", "payload", "task", "task_version", "max_retries", "retention", "correlation_id", "queue", "share")
    for found, new in zip(claimed, jobs, strict=True):
        assert [getattr(found, name) for name in names] == [getattr(new, name) for name in names]
        assert await store.get(found.id) == found


async def claimed_one(store: PostgresStore, session: str, **fields: Any) -> None:
    """One job has been claimed from the lane alone, so that the next claim says what it was like."""
    await store.insert([new_job(**fields)])
    await finish(store, await claim(store, session))
    await store.insert([new_job(**fields)])
    await finish(store, await claim(store, session))


async def test_a_claim_that_says_what_it_expects_tells_what_is_different(
    store: PostgresStore, asked: list[str]
) -> None:
    """Whatever a job may have of its own, and in the order of the lane, not in that of the table."""
    session = await open_session(store)
    await claimed_one(store, session, correlation_id="c")
    now = SYSTEM.clock.now()
    own: list[dict[str, Any]] = [
        {"task": "other"},
        {"task_version": "2"},
        {"max_retries": 7},
        {"retention": HOUR},
        {"correlation_id": None},
        {"correlation_id": "d"},
        {"key": Key("k\u20ac", "h", HOUR)},
        {},
    ]
    jobs = [
        new_job(**{"correlation_id": "c", "payload": b"%d" % number, "run_at": now - number * MINUTE, **fields})
        for number, fields in enumerate(own)
    ]
    for job in jobs:
        await store.insert([job])
    await asyncio.sleep(0.01)
    asked.clear()
    claimed = await claim(store, session)
    assert asked == ["claim_alike"]
    assert [job.id for job in claimed] == [job.id for job in jobs]  # a time that has passed is now: as they came
    names = ("payload", "task", "task_version", "max_retries", "retention", "correlation_id", "key")
    for found, new in zip(claimed, jobs, strict=True):
        assert [getattr(found, name) for name in names] == [getattr(new, name) for name in names]
        assert await store.get(found.id) == found


async def test_a_claim_that_says_what_it_expects_serves_by_the_due_time(
    database: Database, store: PostgresStore
) -> None:
    session = await open_session(store)
    await claimed_one(store, session)
    jobs = [new_job(delay=delay) for delay in (30_000, 20_000, 10_000, 0)]
    await store.insert(jobs)
    await eventually(lambda: database.value("SELECT count(*) FROM {ns}_waiting WHERE run_at <= {ns}_now()") == 4)
    assert [job.id for job in await claim(store, session)] == [job.id for job in reversed(jobs)]


async def test_jobs_of_several_kinds_say_so_in_columns(store: PostgresStore, asked: list[str]) -> None:
    """Also from a lane whose jobs were alike before: once they are told in JSON, then no more."""
    session = await open_session(store)
    await claimed_one(store, session)
    for expected in ("claim_alike", "claim_lane", "claim_lane"):
        await store.insert([new_job(task=f"task{number % 2}") for number in range(4)])
        asked.clear()
        assert len(await claim(store, session, 4)) == 4
        assert asked[0] == expected
    await store.insert(new_jobs(4))
    await claim(store, session, 4)
    asked.clear()
    await claim(store, session, 4)
    assert asked[0] == "claim_alike"


async def test_jobs_with_keys_say_so_in_columns(store: PostgresStore, asked: list[str]) -> None:
    """Each has something of its own to tell, though their options are the same: no claim expects that."""
    session = await open_session(store)
    await claimed_one(store, session)
    for turn, expected in enumerate(("claim_alike", "claim_lane", "claim_lane")):
        await store.insert([new_job(key=Key(f"{turn} {number}", "h", HOUR)) for number in range(4)])
        asked.clear()
        assert len(await claim(store, session, 4)) == 4
        assert asked[0] == expected


async def test_what_a_claim_expects_is_of_one_lane(store: PostgresStore, asked: list[str]) -> None:
    """Two workers' queues, or another lane beside it: the general function, and every job as it is."""
    session = await open_session(store)
    await claimed_one(store, session, task="a")
    await store.insert([new_job(task="a"), new_job(task="b", priority=3)])
    assert [job.task for job in await claim(store, session)] == ["b", "a"]
    await store.insert([new_job(task="a")])
    asked.clear()
    assert [job.task for job in await claim(store, session)] == ["a"]
    assert "claim_alike" not in asked


async def test_what_only_few_jobs_have(store: PostgresStore) -> None:
    """A key, a version, failures (longer than a line of base64): the claim tells what the job is."""
    session = await open_session(store)
    await store.insert([new_job(key=Key("k\u20ac", "h", HOUR)), *new_jobs(2)])
    first = await claim(store, session)
    failed = settle(first[1], Failed(Failure(1, 1, "Error", "x" * 200)), AT_ONCE, SYSTEM.random)
    later = settle(first[2], Snoozed(0.0, Failure(1, 1, "Snooze", "")), AT_ONCE, SYSTEM.random)
    released = settle(first[0], Snoozed(0.0, Failure(1, 1, "Snooze", "")), AT_ONCE, SYSTEM.random)
    assert await store.apply([failed, later, released]) == ["applied"] * 3
    again = await claim(store, session)
    assert {job.version for job in again} == {2}
    for job in again:
        assert await store.get(job.id) == job
    assert sorted((job.attempt, job.failures, job.snoozes) for job in again) == [(0, 0, 1), (0, 0, 1), (1, 1, 0)]
    assert await finish(store, again) == ["applied"] * 3
    for job in again:
        ended = await store.get(job.id)
        assert ended is not None
        assert (ended.attempt, ended.failures, ended.failure_history) == (
            job.attempt + 1,
            job.failures,
            job.failure_history,
        )


@pytest.mark.parametrize("retention", [DAY, 9 * DAY], ids=["in the ring", "kept"])
async def test_each_has_its_own_result(store: PostgresStore, retention: int) -> None:
    results = [None, b"", b"1", b'"\xe2\x82\xac"', None, b"x" * 10_000]
    await store.insert(new_jobs(len(results), retention=retention))
    jobs = await claim(store, await open_session(store))
    moves = [
        settle(job, Succeeded(result), RetryPolicy(), SYSTEM.random) for job, result in zip(jobs, results, strict=True)
    ]
    assert await store.apply(moves) == ["applied"] * len(results)
    assert await store.apply(moves) == ["already"] * len(results)
    found = [await store.get(job.id) for job in jobs]
    assert [job and job.result for job in found] == results
    [counts] = await store.counts()
    assert (counts.succeeded, counts.in_flight) == (len(results), 0)


@pytest.mark.parametrize("retention", [DAY, 9 * DAY], ids=["in the ring", "kept"])
async def test_all_have_the_same_result(store: PostgresStore, asked: list[str], retention: int) -> None:
    await store.insert(new_jobs(5, retention=retention))
    jobs = await claim(store, await open_session(store))
    moves = [settle(job, Succeeded(b"7"), RetryPolicy(), SYSTEM.random) for job in jobs]
    assert await store.apply(moves[1:3]) == ["applied"] * 2
    asked.clear()
    assert await store.apply(moves) == ["applied", "already", "already", "applied", "applied"]
    assert asked == ["succeed_alike"]
    found = [await store.get(job.id) for job in jobs]
    assert [job and (job.result, job.attempt, job.reason) for job in found] == [(b"7", 1, "succeeded")] * 5
    [counts] = await store.counts()
    assert (counts.succeeded, counts.in_flight) == (5, 0)


async def test_some_were_claimed_before(store: PostgresStore, asked: list[str]) -> None:
    """The version is compared for each job, whichever function they take."""
    session = await open_session(store)
    await store.insert(new_jobs(3))
    first = await claim(store, session)
    assert await finish(store, first[:1], Released()) == ["applied"]
    again = await claim(store, session, 1)
    assert [job.version for job in again] == [2]
    asked.clear()
    assert await finish(store, [*again, first[1]]) == ["applied"] * 2
    assert asked == ["succeed"]
    assert await finish(store, [first[0], first[2]]) == ["stale", "applied"]


async def test_one_job_twice_in_a_batch(store: PostgresStore) -> None:
    jobs = await in_flight(store, 2)
    assert await finish(store, [*jobs, jobs[0]]) == ["applied", "applied", "already"]


async def in_flight(store: PostgresStore, count: int) -> tuple[Job, ...]:
    await store.insert(new_jobs(count))
    return await claim(store, await open_session(store), count)


def successes(jobs: Iterable[Job], alike: bool) -> list[Move]:
    """With one result for all, or one for each: the two functions."""
    return [
        settle(job, Succeeded(b"7" if alike else b"%d" % number), RetryPolicy(), SYSTEM.random)
        for number, job in enumerate(jobs)
    ]


@pytest.mark.parametrize("alike", [True, False])
async def test_a_job_that_changes_while_its_settlement_waits(
    database: Database, store: PostgresStore, alike: bool
) -> None:
    """A row that was changed in place has moved: it is looked for again, and what was written is kept."""
    jobs = await in_flight(store, 3)
    with raw(database.url, autocommit=False) as connection:
        connection.execute(database.text("UPDATE {ns}_in_flight SET progress = '7' WHERE id = %s"), (jobs[1].id,))
        settling = asyncio.ensure_future(store.apply(successes(jobs, alike)))
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{ns}_succeed%'"
        await eventually(lambda: database.value(waiting) == 1)
        connection.commit()
    assert await settling == ["applied"] * 3
    ended = await store.get(jobs[1].id)
    assert ended is not None
    assert (ended.state, ended.progress) == ("succeeded", b"7")
    assert [database.number_of(table) for table in ("in_flight", "history", "waiting")] == [0, 3, 0]


@pytest.mark.parametrize("alike", [True, False])
async def test_a_settlement_and_a_cancel_of_the_same_jobs_do_not_deadlock(
    database: Database, store: PostgresStore, alike: bool
) -> None:
    """Both lock in the order of ids, in whatever order the rows lie in the table."""
    jobs = sorted(await in_flight(store, 2), key=lambda job: job.id)
    ids = [job.id for job in jobs]
    database.sql("UPDATE {ns}_in_flight SET progress = '1' WHERE id = %s", ids[0])  # its row is the last now
    deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    before = database.value(deadlocks)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{ns}_%'"
    with raw(database.url, autocommit=False) as connection:
        connection.execute(database.text("SELECT FROM {ns}_in_flight WHERE id = %s FOR UPDATE"), (ids[0],))
        cancelling = asyncio.ensure_future(store.request_cancel(ids))
        await eventually(lambda: database.value(waiting) == 1)
        settling = asyncio.ensure_future(store.apply(successes(jobs, alike)))
        await eventually(lambda: database.value(waiting) == 2)
        connection.commit()
    assert await settling == ["applied"] * 2
    assert set(await cancelling) <= {"asked", "ended"}
    assert database.value(deadlocks) == before


async def test_several_sessions_in_one_batch(store: PostgresStore) -> None:
    """One of them closed: its jobs are not settled, the others are."""
    await store.insert(new_jobs(4))
    one, two = await open_session(store), await open_session(store)
    jobs = [*await claim(store, one, 2), *await claim(store, two, 2)]
    await store.close_session(one)
    assert await finish(store, jobs) == ["stale", "stale", "applied", "applied"]
