"""A plain INSERT of (task, payload) is a valid enqueue, from any program and in any language."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from holdfast.job import DEFAULT_MAX_RETRIES, DEFAULT_PRIORITY, DEFAULT_QUEUE, DEFAULT_RETENTION, State
from holdfast.store import ClaimRequest, InsertStatus, JobQuery
from holdfast.stores.sqlite import SqliteStore
from tests.sqlite.helpers import claim, finish, new_job, open_session, raw, run_sql

HOUR = 3_600_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(path, timeout=5) as store:
        yield store


def enqueue(path: Path, **columns: Any) -> None:
    given = {"task": "mail.welcome", "payload": '{"user_id": 42}', **columns}
    marks = ", ".join("?" * len(given))
    run_sql(path, f"INSERT INTO holdfast_ready ({', '.join(given)}) VALUES ({marks})", list(given.values()))


async def test_task_and_payload_are_enough(store: SqliteStore, path: Path) -> None:
    before = time.time_ns() // 1000
    run_sql(path, """INSERT INTO holdfast_ready (task, payload) VALUES ('mail.welcome', '{"user_id": 42}')""")
    after = time.time_ns() // 1000
    [job] = await claim(store, await open_session(store))
    assert (job.task, job.payload, job.task_version) == ("mail.welcome", b'{"user_id": 42}', "1")
    assert (job.queue, job.share, job.priority) == (DEFAULT_QUEUE, "", DEFAULT_PRIORITY)
    assert (job.max_retries, job.retention) == (DEFAULT_MAX_RETRIES, DEFAULT_RETENTION)
    assert (job.attempt, job.failures, job.crashes, job.snoozes, job.version) == (0, 0, 0, 0, 1)
    assert (job.key, job.correlation_id, job.failure_history, job.progress) == (None, None, b"", None)
    assert (job.suspect, job.cancel_asked) == (False, False)
    for moment in (job.created_at, job.run_at):
        assert before - 2_000 <= moment <= after + 1_000  # its clock has milliseconds, cut and not rounded
    assert await finish(store, [job]) == ["applied"]
    ended = await store.get(job.id)
    assert ended is not None
    assert ended.state is State.SUCCEEDED


async def test_a_row_has_the_defaults_of_a_job_that_was_enqueued(store: SqliteStore, path: Path) -> None:
    """Column by column: what Python writes for a job without options, the trigger writes too."""
    store.insert_blocking([new_job(payload=b'{"user_id": 42}')])
    enqueue(path)
    connection = raw(path)
    connection.row_factory = sqlite3.Row
    ours, theirs = map(dict, connection.execute("SELECT * FROM holdfast_live ORDER BY run_at, id"))
    connection.close()
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing <= {"id", "seq", "created_at", "run_at"}
    assert {name: type(ours[name]) for name in ours} == {name: type(theirs[name]) for name in theirs}


async def test_its_id_is_a_uuid7_and_sorts_by_time(store: SqliteStore, path: Path) -> None:
    connection = raw(path)
    earlier = new_job()
    await asyncio.sleep(0.003)
    for _ in range(300):
        connection.execute("INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
    await asyncio.sleep(0.003)
    later = new_job()
    ids = [row[0] for row in connection.execute("SELECT id FROM holdfast_ready")]
    connection.close()
    assert len(set(ids)) == 300
    for job_id in ids:
        parsed = uuid.UUID(job_id)
        assert str(parsed) == job_id
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert abs((parsed.int >> 80) / 1000 - time.time()) < 10
    assert earlier.id < min(ids)
    assert max(ids) < later.id
    # Every random bit is in use: in 300 ids no digit of the random part is always the same.
    assert all(len({job_id[place] for job_id in ids}) > 1 for place in (15, 16, 17, 19, 20, 21, 22, *range(24, 36)))


async def test_rows_are_served_in_the_order_in_which_they_came(store: SqliteStore, path: Path) -> None:
    connection = raw(path)
    for number in range(200):
        connection.execute("INSERT INTO holdfast_ready (task, payload) VALUES (?, '{}')", (f"t{number}",))
    connection.close()
    jobs = await claim(store, await open_session(store), limit=500)
    assert [job.task for job in jobs] == [f"t{number}" for number in range(200)]


async def test_many_rows_in_one_statement(store: SqliteStore, path: Path) -> None:
    run_sql(
        path,
        """WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 500)
           INSERT INTO holdfast_ready (task, payload) SELECT 'mail.welcome', json_object('user_id', i) FROM n""",
    )
    jobs = await claim(store, await open_session(store), limit=1000)
    assert len({job.id for job in jobs}) == 500
    assert {job.payload for job in jobs} == {b'{"user_id":%d}' % number for number in range(1, 501)}


async def test_every_option_may_be_given(store: SqliteStore, path: Path) -> None:
    mine = new_job().id
    enqueue(
        path,
        id=mine,
        payload=b'{"a": "\xc3\xbc"}',
        task_version="7",
        queue="mail",
        share="acme",
        priority=-3,
        max_retries=0,
        retention=HOUR,
        correlation_id="order-1",
    )
    assert await claim(store, await open_session(store)) == ()
    [job] = await claim(store, await open_session(store), queue="mail")
    assert (job.id, job.payload, job.task_version) == (mine, b'{"a": "\xc3\xbc"}', "7")
    assert (job.queue, job.share, job.priority) == ("mail", "acme", -3)
    assert (job.max_retries, job.retention, job.correlation_id) == (0, HOUR, "order-1")


async def test_priority_is_obeyed(store: SqliteStore, path: Path) -> None:
    for priority in (10, 0, 5):
        enqueue(path, priority=priority)
    store.insert_blocking([new_job(priority=-1)])
    jobs = await claim(store, await open_session(store))
    assert [job.priority for job in jobs] == [-1, 0, 5, 10]


async def test_run_at_is_obeyed(store: SqliteStore, path: Path) -> None:
    now = await store.now()
    enqueue(path, run_at=now + HOUR, task="later")
    enqueue(path, run_at=now - HOUR, task="at.once")
    claimed = await store.claim(ClaimRequest(session_id=await open_session(store), queues=("default",), limit=10))
    assert [job.task for job in claimed.jobs] == ["at.once"]
    assert claimed.jobs[0].run_at >= now - 2000  # as for everybody: due at its insert, not before those that waited
    [waiting] = (await store.find(JobQuery(task="later"))).jobs
    assert waiting.run_at == now + HOUR


async def test_it_belongs_to_the_callers_transaction(store: SqliteStore, path: Path) -> None:
    connection = raw(path)
    connection.execute("CREATE TABLE orders (id INTEGER)")
    session = await open_session(store)
    for end, expected in (("ROLLBACK", 0), ("COMMIT", 1)):
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO orders VALUES (1)")
        connection.execute("INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
        connection.execute(end)
        assert len(await claim(store, session)) == expected
    connection.close()


async def test_the_same_id_twice_is_refused(store: SqliteStore, path: Path) -> None:
    job = new_job()
    enqueue(path, id=job.id)
    with pytest.raises(sqlite3.IntegrityError):
        enqueue(path, id=job.id)
    [inserted] = await store.insert([job])
    assert inserted.status is InsertStatus.EXISTING


async def test_what_has_no_default_must_be_given(store: SqliteStore, path: Path) -> None:
    with pytest.raises(sqlite3.IntegrityError, match=r"NOT NULL constraint failed: holdfast_live\.task"):
        enqueue(path, task=None)
    with pytest.raises(sqlite3.IntegrityError, match=r"payload|NOT NULL"):
        enqueue(path, payload=None)
    assert await store.counts() == []


@pytest.mark.parametrize(
    "payload", ["not JSON", "", b"\xff\xfe", 5, 2.5, "[1, 2]", '{"a": 1', "{} {}", f'{{"a": "{"x" * 262_144}"}}']
)
async def test_a_payload_that_is_no_json_object_is_refused(store: SqliteStore, path: Path, payload: Any) -> None:
    with pytest.raises(sqlite3.IntegrityError, match="payload must be a JSON object of named arguments"):
        enqueue(path, payload=payload)
    assert await store.counts() == []


async def test_an_unknown_task_is_a_matter_for_the_worker(store: SqliteStore, path: Path) -> None:
    for task in ("no such task", "", "ü" * 500):
        with pytest.raises(sqlite3.IntegrityError, match="task and queue must be"):
            enqueue(path, task=task)
    enqueue(path, task="no.such-task")
    [job] = await claim(store, await open_session(store))
    assert job.task == "no.such-task"


async def test_numbers_written_as_text_are_numbers(store: SqliteStore, path: Path) -> None:
    """A shell or a CSV import has nothing but text."""
    now = await store.now()
    enqueue(path, priority="3", run_at=str(now - 5), max_retries="1", retention="1000000")
    [job] = await claim(store, await open_session(store))
    assert (job.priority, job.max_retries, job.retention) == (3, 1, 1_000_000)


@pytest.mark.parametrize(
    "columns",
    [
        pytest.param({"priority": 5000}, id="a priority beyond the limits"),
        pytest.param({"max_retries": -1}, id="fewer than no retries"),
        pytest.param({"priority": "high"}, id="a priority by its label"),
        pytest.param({"priority": 0.5}, id="a fraction of a priority"),
        pytest.param({"run_at": "2030-01-01 12:00:00"}, id="a time as text"),
        pytest.param({"run_at": 1e30}, id="a time beyond all"),
        pytest.param({"max_retries": "many"}, id="retries as text"),
        pytest.param({"retention": "a week"}, id="a retention as text"),
        pytest.param({"queue": "not a name!"}, id="a queue that nobody can claim from"),
        pytest.param({"queue": ""}, id="an empty queue"),
        pytest.param({"queue": b"default"}, id="a blob for a queue"),
        pytest.param({"share": b"x"}, id="a blob for a share"),
        pytest.param({"task": b"mail.welcome"}, id="a blob for a task"),
        pytest.param({"id": b"\x00\x01"}, id="a blob for an id"),
    ],
)
async def test_a_bad_row_is_refused_or_harms_no_other(store: SqliteStore, path: Path, columns: dict[str, Any]) -> None:
    """Refused at the insert, or a job like any other. Never: stuck without a word, or in the way of its neighbours."""
    neighbours = [new_job(), new_job(priority=6), new_job(share="other")]
    await store.insert(neighbours)
    with contextlib.suppress(sqlite3.IntegrityError):
        enqueue(path, **columns)
    expected = len(run_sql(path, "SELECT id FROM holdfast_ready"))
    jobs = await claim(store, await open_session(store))
    assert {job.id for job in neighbours} <= {job.id for job in jobs}
    assert len(jobs) == expected
    for job in jobs:
        assert {type(value) for value in (job.priority, job.run_at, job.max_retries, job.retention)} == {int}
        assert {type(value) for value in (job.id, job.task, job.queue, job.share)} == {str}
    assert await finish(store, jobs) == ["applied"] * expected
    assert [(count.queue, count.succeeded) for count in await store.counts()] == [("default", expected)]
