"""One job under a new id (`migrations/0003_fresh.sql`, `0004_single.sql`): found wherever it is, should the call have
been repeated.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.failures import Failure
from holdfast.job import NewJob
from holdfast.lifecycle import Failed
from holdfast.store import InsertStatus
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.direct import Direct
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
    open_session,
    raw,
)

PLACES = ["waiting", "in flight", "ended", "ended, kept for half an hour", "ended, kept for long", "a dead letter"]


async def insert(store: PostgresStore, job: NewJob, *, blocking: bool = False, fresh: bool = True) -> str:
    if blocking:
        [inserted] = await asyncio.to_thread(store.insert_blocking, [job], fresh=fresh)
    else:
        [inserted] = await store.insert([job], fresh=fresh)
    return inserted.status.value


def job_for(where: str) -> NewJob:
    retention = {"ended, kept for half an hour": HOUR // 2, "ended, kept for long": 100 * DAY}.get(where, DAY)
    return new_job(retention=retention)


async def bring(store: PostgresStore, where: str) -> None:
    """Bring the only job that waits to that place."""
    if where != "waiting":
        jobs = await claim(store, await open_session(store))
        assert len(jobs) == 1
        if where == "a dead letter":
            await finish(store, jobs, Failed(Failure(0, 1, "Error", ""), permanent=True))
        elif where != "in flight":
            await finish(store, jobs)


async def know_the_time(store: PostgresStore) -> None:
    await insert(store, new_job(queue="other"))
    assert store._verbs._since > 0


def number_of_jobs(database: Database, job: NewJob) -> int:
    number = database.value("SELECT count(*) FROM {ns}_jobs WHERE id = %s", job.id)
    assert isinstance(number, int)
    return number


@pytest.fixture
def asked(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that the store has called since, without the namespace."""
    asked: list[str] = []
    execute = store._connections._execute

    async def noted(query: Query | Direct) -> Any:
        text = query.statement.text.decode() if isinstance(query, Direct) else query.text
        name = text.partition("(")[0].rpartition(" ")[2]
        asked.append(name.removeprefix(f"{store._verbs.namespace}_"))
        return await execute(query)

    monkeypatch.setattr(store._connections, "_execute", noted)
    return asked


async def test_one_fresh_job_takes_this_path(store: PostgresStore, asked: list[str]) -> None:
    assert await insert(store, new_job()) == "created"
    assert await insert(store, new_job(), fresh=False) == "created"
    assert asked == ["insert_single", "insert"]


async def test_every_field_arrives(store: PostgresStore) -> None:
    now = await store.now()
    fields = {
        "payload": b'{"n":1}',
        "task": "task.of.mine",
        "task_version": "v9",
        "queue": "other",
        "share": "s\u20ac",
        "priority": -7,
        "max_retries": 11,
        "retention": DAY + 1,
        "correlation_id": "c\u20ac",
    }
    for due in ({"delay": HOUR}, {"run_at": now + HOUR}, {"run_at": 5}):
        job, same = new_job(**fields, **due), new_job(**fields, **due)
        assert await insert(store, job) == await insert(store, same, fresh=False) == "created"
        found, expected = await store.get(job.id), await store.get(same.id)
        assert found is not None
        assert expected is not None
        names = {*found.__struct_fields__} - {"id", "created_at", "run_at"}
        assert {name: getattr(found, name) for name in names} == {name: getattr(expected, name) for name in names}
        assert {name: getattr(found, name) for name in fields} == fields
        assert abs(found.run_at - expected.run_at) < MINUTE
        assert (found.run_at > now + HOUR // 2) is (due != {"run_at": 5})


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
@pytest.mark.parametrize("where", PLACES)
async def test_repeated_later(store: PostgresStore, where: str, blocking: bool) -> None:
    job = job_for(where)
    assert await insert(store, job, blocking=blocking) == "created"
    await bring(store, where)
    assert await insert(store, job, blocking=blocking, fresh=False) == "existing"


@pytest.mark.parametrize("time_is_known", [False, True])
@pytest.mark.parametrize("where", PLACES)
async def test_repeated_before_it_takes_effect(
    database: Database, store: PostgresStore, where: str, time_is_known: bool
) -> None:
    """The call was given up, and the server carries it out after the one that repeats it, whatever became of that."""
    if time_is_known:
        await know_the_time(store)
    job = job_for(where)
    other = database.store()
    assert await insert(other, job, fresh=False) == "created"
    await bring(other, where)
    other.close()
    assert await insert(store, job) == "existing"
    assert number_of_jobs(database, job) == 1


@pytest.mark.parametrize("minutes", [3, 11, 85])
@pytest.mark.parametrize("where", PLACES)
async def test_repeated_long_before_it_takes_effect(
    database: Database, store: PostgresStore, where: str, minutes: int
) -> None:
    """Until then, the slots in which the job ended may no longer be the present ones."""
    travel = database.travelling()
    try:
        await know_the_time(store)
        job = job_for(where)
        other = database.store()
        assert await insert(other, job, fresh=False) == "created"
        await bring(other, where)
        other.close()
        travel.by(minutes * MINUTE)
        assert await insert(store, job) == "existing"
        assert number_of_jobs(database, job) == 1
    finally:
        travel.home()


async def test_repeated_while_it_waits(database: Database, store: PostgresStore) -> None:
    """For a transaction that inserted the same id: then it is there, or it never was."""
    await know_the_time(store)
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE %s"
    for commits, expected in ((True, "existing"), (False, "created")):
        job = new_job()
        with raw(database.url, autocommit=False) as connection:
            assert store.insert_on(connection, [job])[0].status is InsertStatus.CREATED
            inserting = asyncio.ensure_future(insert(store, job))
            await eventually(lambda: database.value(waiting, f"%{database.namespace}_insert_single(%"))
            connection.commit() if commits else connection.rollback()
            assert await inserting == expected
        assert number_of_jobs(database, job) == 1


async def test_a_clock_that_was_set_back(database: Database, store: PostgresStore) -> None:
    travel = database.travelling()
    try:
        await know_the_time(store)
        travel.by(-30 * MINUTE)
        job = new_job(retention=HOUR)
        other = database.store()
        assert await insert(other, job, fresh=False) == "created"
        await bring(other, "ended")
        other.close()
        assert await insert(store, job) == "existing"
    finally:
        travel.home()


async def test_a_job_that_ended_just_now_is_found_in_every_slot(database: Database, store: PostgresStore) -> None:
    """Each pair of slots, that of ten minutes and that of days, has a look of its own: 10 days go through all 80."""
    travel = database.travelling()
    other = database.store()
    try:
        now = await other.now()
        travel.by(DAY - now % DAY + 5 * MINUTE)
        seen = set()
        for number in range(80):
            await know_the_time(store)
            since = store._verbs._since
            seen.add((since // (10 * MINUTE) % 8, since // DAY % 10))
            session = await open_session(other)
            for job in (new_job(), new_job(retention=HOUR // 2)):
                assert await insert(other, job, fresh=False) == "created"
                assert await finish(other, await claim(other, session)) == ["applied"]
                assert await insert(store, job) == "existing"
            travel.by(DAY - 70 * MINUTE if number % 8 == 7 else 10 * MINUTE)
        assert len(seen) == 80
    finally:
        other.close()
        travel.home()


async def test_an_id_that_is_there_leaves_nothing_behind(database: Database, store: PostgresStore) -> None:
    """What the server refuses is no error of the store's, and its connection goes on to serve."""
    await know_the_time(store)
    [pid] = {await backend(store) for _ in range(3)}
    for where in ("in flight", "waiting"):
        job = new_job()
        other = database.store()
        assert await insert(other, job, fresh=False) == "created"
        await bring(other, where)
        other.close()
        assert await insert(store, job) == "existing"
    assert await backend(store) == pid


async def backend(store: PostgresStore) -> int:
    """The server's process behind the connection that is used next."""
    [(pid,)] = await store._connections._execute(Query("SELECT pg_backend_pid()"))
    assert isinstance(pid, int)
    return pid


@pytest.mark.parametrize("where", PLACES[1:])
async def test_these_tests_notice_a_look_that_sees_nothing(
    database: Database, store: PostgresStore, where: str
) -> None:
    [(definition,)] = database.sql("SELECT pg_get_functiondef(to_regproc('{ns}_insert_single'))")
    assert definition.count("IF FOUND THEN") == 1
    database.sql(definition.replace("IF FOUND THEN", "IF false THEN"))
    try:
        with pytest.raises(AssertionError):
            await test_repeated_before_it_takes_effect(database, store, where, True)
    finally:
        database.sql(definition)


@pytest.mark.parametrize("where", PLACES[1:])
async def test_a_process_of_the_version_before(database: Database, store: PostgresStore, where: str) -> None:
    """It calls `_insert_fresh`."""
    job = job_for(where)
    call = f"""SELECT {{ns}}_insert_fresh(%s, 't', '{{}}', '1', %s, '', 5::smallint, 3, {job.retention}, NULL, 0, NULL,
               %s, '{{}}')"""
    now = await store.now()
    assert database.value(call, job.id, job.queue, now) > 0
    await bring(store, where)
    assert database.value(call, job.id, job.queue, now) is None
