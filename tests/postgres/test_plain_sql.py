"""A plain INSERT of (task, payload) is a valid enqueue, from any program and in any language."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Sequence
from typing import Any

import asyncpg
import psycopg
import pytest
from psycopg.types.json import Json, Jsonb

from holdfast import Holdfast, WorkerSettings
from holdfast.job import DEFAULT_MAX_RETRIES, DEFAULT_PRIORITY, DEFAULT_QUEUE, DEFAULT_RETENTION, State
from holdfast.store import ClaimRequest, InsertStatus, JobQuery
from holdfast.stores.postgres import PostgresStore
from tests.postgres.helpers import HOUR, Database, claim, finish, new_job, open_session, raw


def enqueue(database: Database, **columns: Any) -> None:
    given = {"task": "mail.welcome", "payload": '{"user_id": 42}', **columns}
    marks = ", ".join(["%s"] * len(given))
    database.sql(f"INSERT INTO {{ns}}_ready ({', '.join(given)}) VALUES ({marks})", *given.values())


async def test_task_and_payload_are_enough(store: PostgresStore, database: Database) -> None:
    before = await store.now()
    database.sql("""INSERT INTO {ns}_ready (task, payload) VALUES ('mail.welcome', '{"user_id": 42}')""")
    after = await store.now()
    [job] = await claim(store, await open_session(store))
    assert (job.task, job.payload, job.task_version) == ("mail.welcome", b'{"user_id": 42}', "1")
    assert (job.queue, job.share, job.priority) == (DEFAULT_QUEUE, "", DEFAULT_PRIORITY)
    assert (job.max_retries, job.retention) == (DEFAULT_MAX_RETRIES, DEFAULT_RETENTION)
    assert (job.attempt, job.failures, job.crashes, job.snoozes, job.version) == (0, 0, 0, 0, 1)
    assert (job.key, job.correlation_id, job.failure_history, job.progress) == (None, None, b"", None)
    assert (job.suspect, job.cancel_asked) == (False, False)
    for moment in (job.created_at, job.run_at):
        assert before <= moment <= after
    assert await finish(store, [job]) == ["applied"]
    ended = await store.get(job.id)
    assert ended is not None
    assert ended.state is State.SUCCEEDED


async def test_a_row_has_the_defaults_of_a_job_that_was_enqueued(store: PostgresStore, database: Database) -> None:
    """Column by column: what Python writes for a job without options, the trigger writes too."""
    store.insert_blocking([new_job(payload=b'{"user_id": 42}')])
    enqueue(database)
    [ours, theirs] = [row for (row,) in database.sql("SELECT row_to_json(w) FROM {ns}_waiting w ORDER BY run_at, id")]
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing <= {"id", "created_at", "run_at"}


async def test_every_column_may_be_given(store: PostgresStore, database: Database) -> None:
    mine, later = new_job().id, await store.now() + HOUR
    enqueue(
        database,
        id=mine,
        payload='{"a": "ü"}',
        task_version="7",
        queue="mail",
        share="acme",
        priority=-3,
        run_at=later,
        max_retries=0,
        retention=HOUR,
        correlation_id="order-1",
        created_at=1,
        attempt=5,
        failures=5,
        reason="mine",
    )
    [job] = (await store.find(JobQuery())).jobs
    assert (job.id, job.payload, job.task_version) == (mine, '{"a": "ü"}'.encode(), "7")
    assert (job.queue, job.share, job.priority, job.run_at) == ("mail", "acme", -3, later)
    assert (job.max_retries, job.retention, job.correlation_id) == (0, HOUR, "order-1")
    # The history of a new job is not the caller's to tell.
    assert job.created_at > 1
    assert (job.attempt, job.failures, job.reason) == (0, 0, "enqueued")


@pytest.mark.parametrize("payload", ['{"user_id": 42}', Json({"user_id": 42})], ids=["text", "Json"])
async def test_from_psycopg(store: PostgresStore, database: Database, payload: Any) -> None:
    with psycopg.connect(database.url) as connection:
        text = database.text("INSERT INTO {ns}_ready (task, payload) VALUES (%s, %s) RETURNING id")
        row = connection.execute(text, ("mail.welcome", payload)).fetchone()
        assert row is not None
    [job] = await claim(store, await open_session(store))
    assert json.loads(job.payload) == {"user_id": 42}
    assert row[0] == uuid.UUID(job.id)


async def test_json_by_a_cast_and_from_asyncpg(store: PostgresStore, database: Database) -> None:
    database.sql("INSERT INTO {ns}_ready (task, payload) VALUES ('a', %s::jsonb::text)", Jsonb({"user_id": 42}))
    database.sql("INSERT INTO {ns}_ready (task, payload) SELECT 'b', json_build_object('user_id', 42)::text")
    connection = await asyncpg.connect(database.url)
    insert = database.text("INSERT INTO {ns}_ready (task, payload, priority) VALUES ($1, $2, $3)").decode()
    await connection.execute(insert, "c", '{"user_id": 42}', 5)
    await connection.close()
    jobs = await claim(store, await open_session(store))
    assert [job.task for job in jobs] == ["a", "b", "c"]
    assert all(json.loads(job.payload) == {"user_id": 42} for job in jobs)


async def test_its_id_is_a_uuid7_and_sorts_by_time(store: PostgresStore, database: Database) -> None:
    earlier = new_job()
    await asyncio.sleep(0.003)
    database.sql("INSERT INTO {ns}_ready (task, payload) SELECT 't', '{}' FROM generate_series(1, 300)")
    await asyncio.sleep(0.003)
    later = new_job()
    ids = [str(row[0]) for row in database.sql("SELECT id FROM {ns}_ready")]
    assert len(set(ids)) == 300
    for job_id in ids:
        parsed = uuid.UUID(job_id)
        assert (parsed.version, parsed.variant) == (7, uuid.RFC_4122)
        assert abs((parsed.int >> 80) / 1000 - time.time()) < 10
    assert earlier.id < min(ids)
    assert max(ids) < later.id
    # The random bits are in use: in 300 ids no digit of the random part is always the same.
    assert all(len({job_id[place] for job_id in ids}) > 1 for place in (19, 20, 21, 22, *range(24, 36)))


ONE_BY_ONE = [f"INSERT INTO {{ns}}_ready (task, payload) VALUES ('t{number:03}', '{{}}')" for number in range(200)]
SELECTED = (
    "INSERT INTO {ns}_ready (task, payload) SELECT 't' || to_char(n, 'FM000'), '{}' FROM generate_series(0, 199) n"
)
IN_A_LOOP = """DO $$ BEGIN FOR n IN 0..199 LOOP
                   INSERT INTO {ns}_ready (task, payload) VALUES ('t' || to_char(n, 'FM000'), '{}');
               END LOOP; END $$"""


@pytest.mark.parametrize(
    "statements", [ONE_BY_ONE, [SELECTED], [IN_A_LOOP]], ids=["one by one", "selected", "in a loop"]
)
@pytest.mark.parametrize("autocommit", [True, False])
async def test_rows_are_served_in_the_order_in_which_they_came(
    store: PostgresStore, database: Database, statements: Sequence[str], autocommit: bool
) -> None:
    with raw(database.url, autocommit=autocommit) as connection:
        for statement in statements:
            connection.execute(database.text(statement))
    jobs = await claim(store, await open_session(store), limit=500)
    assert [job.task for job in jobs] == [f"t{number:03}" for number in range(200)]
    assert [job.id for job in jobs] == sorted(job.id for job in jobs)


async def test_priority_and_time_are_obeyed(store: PostgresStore, database: Database) -> None:
    now = await store.now()
    for priority in (10, 0, 5):
        enqueue(database, priority=priority)
    enqueue(database, run_at=now + HOUR, task="later", priority=-100)
    enqueue(database, run_at=now - HOUR, task="at.once")
    store.insert_blocking([new_job(priority=-1)])
    claimed = await store.claim(ClaimRequest(session_id=await open_session(store), queues=("default",), limit=10))
    assert [job.priority for job in claimed.jobs] == [-1, 0, 5, 5, 10]
    # As for everybody: due at its insert, not before those that waited.
    assert [job.task for job in claimed.jobs if job.priority == 5] == ["mail.welcome", "at.once"]
    assert claimed.due_in is not None
    assert 0.9 * HOUR < claimed.due_in <= HOUR


async def test_it_belongs_to_the_callers_transaction(store: PostgresStore, database: Database) -> None:
    session = await open_session(store)
    with psycopg.connect(database.url) as connection:
        for end, expected in (("rollback", 0), ("commit", 1)):
            connection.execute(database.text("INSERT INTO {ns}_ready (task, payload) VALUES ('t', '{}')"))
            assert await claim(store, session) == ()
            getattr(connection, end)()
            assert len(await claim(store, session)) == expected


@pytest.mark.parametrize("state", ["ready", "in_flight", "succeeded"])
async def test_the_same_id_twice_is_refused(store: PostgresStore, database: Database, state: str) -> None:
    job = new_job()
    enqueue(database, id=job.id)
    if state != "ready":
        claimed = await claim(store, await open_session(store))
        if state == "succeeded":
            await finish(store, claimed)
    with pytest.raises(psycopg.errors.UniqueViolation):
        enqueue(database, id=job.id)
    [inserted] = await store.insert([job])
    assert inserted.status is InsertStatus.EXISTING
    assert database.value("SELECT count(*) FROM {ns}_jobs") == 1


NAMES = "holdfast: task, queue and task_version must be"
PAYLOAD = "holdfast: payload must be a JSON object of named arguments"


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"task": None}, NAMES),
        ({"task": ""}, NAMES),
        ({"task": "no such task"}, NAMES),
        ({"task": "ü" * 500}, NAMES),
        ({"queue": "not a name!"}, NAMES),
        ({"queue": ""}, NAMES),
        ({"task_version": "1 2"}, NAMES),
        ({"payload": None}, PAYLOAD),
        ({"payload": ""}, PAYLOAD),
        ({"payload": "not JSON"}, PAYLOAD),
        ({"payload": "[1, 2]"}, PAYLOAD),
        ({"payload": '"text"'}, PAYLOAD),
        ({"payload": "null"}, PAYLOAD),
        ({"payload": '{"a": 1'}, PAYLOAD),
        ({"payload": "{} {}"}, PAYLOAD),
        ({"payload": f'{{"a": "{"x" * 262_144}"}}'}, PAYLOAD),
        ({"priority": 101}, "holdfast: priority must be"),
        ({"priority": -101}, "holdfast: priority must be"),
        ({"max_retries": -1}, "holdfast: max_retries must be"),
        ({"max_retries": 1001}, "holdfast: max_retries must be"),
        ({"run_at": 2**60}, "holdfast: run_at must be"),
        ({"retention": -1}, "holdfast: retention must be"),
        ({"retention": 400_000_000_000_000}, "holdfast: retention must be"),
        ({"share": "x" * 129}, "holdfast: share has at most"),
        ({"share": "a\x01b"}, "holdfast: share has at most"),
        ({"correlation_id": ""}, "holdfast: share has at most 128 bytes, correlation_id 1 to 256"),
        ({"correlation_id": "a\x7fb"}, "holdfast: share has at most 128 bytes, correlation_id 1 to 256"),
        ({"correlation_id": "x" * 257}, "holdfast: share has at most 128 bytes, correlation_id 1 to 256"),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, dict) else "",
)
async def test_a_row_that_no_worker_could_run_is_refused(
    database: Database, columns: dict[str, Any], said: str
) -> None:
    with pytest.raises(psycopg.errors.CheckViolation, match=f"^{said}"):
        enqueue(database, **columns)
    assert database.number_of("waiting") == 0


async def test_what_the_columns_types_refuse(database: Database) -> None:
    for columns in ({"priority": "high"}, {"run_at": "2030-01-01 12:00:00"}, {"id": "mine"}, {"priority": 5000000}):
        with pytest.raises((psycopg.errors.DataError, psycopg.errors.ProgrammingError)):
            enqueue(database, **columns)
    assert database.number_of("waiting") == 0


async def test_a_refused_row_takes_the_others_of_its_statement_along(store: PostgresStore, database: Database) -> None:
    await store.insert([new_job()])
    with pytest.raises(psycopg.errors.CheckViolation):
        database.sql("INSERT INTO {ns}_ready (task, payload) VALUES ('a', '{}'), ('b', '[]')")
    assert [job.task for job in await claim(store, await open_session(store))] == ["mail.welcome"]


async def test_a_row_is_run(database: Database) -> None:
    app = Holdfast(f"{database.url}?namespace={database.namespace}")
    seen: list[int] = []

    @app.task(name="mail.welcome")
    async def welcome(user_id: int) -> None:
        seen.append(user_id)

    worker = app.start_worker(WorkerSettings(poll=0.1))
    enqueue(database)
    database.sql("INSERT INTO {ns}_ready (task, payload) VALUES ('mail.welcome', '{\"user_id\": 43}')")
    async with asyncio.timeout(10):
        while len(seen) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await asyncio.to_thread(worker.stop, timeout=5)
    await app.aclose()
    assert seen == [42, 43]
    assert database.value("SELECT count(*) FROM {ns}_jobs WHERE state = 'succeeded'") == 2
