"""Jobs in the caller's own transaction: with it they come, and with it they go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import urlsplit

import asyncmy
import pymysql
import pytest
from pymysql.cursors import DictCursor
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session as OrmSession
from sqlalchemy.pool import NullPool

from holdfast.errors import ForeignConnection, StoreUnavailable
from holdfast.job import Key
from holdfast.store import DepthLimit
from holdfast.stores.mysql import MysqlStore
from tests.mysql.conftest import NAMESPACE
from tests.mysql.helpers import claim, connect, done, new_job, new_jobs, open_session, sql


async def ready(store: MysqlStore) -> int:
    return sum(count.ready for count in await store.counts())


@pytest.fixture
def connection(url: str) -> Iterator[pymysql.Connection[Any]]:
    with connect(url, autocommit=False) as opened:
        yield opened


async def connect_async(url: str, **options: Any) -> Any:
    parts = urlsplit(url)
    login = {"host": parts.hostname, "port": parts.port, "user": parts.username, "password": parts.password or ""}
    return await asyncmy.connect(**{**login, "db": parts.path.strip("/"), "autocommit": False, **options})


@pytest.fixture
async def async_connection(url: str) -> AsyncIterator[Any]:
    opened = await connect_async(url)
    yield opened
    await opened.ensure_closed()


# The job shares the fate of the transaction.


async def test_commit_and_rollback(store: MysqlStore, connection: pymysql.Connection[Any]) -> None:
    [gone] = store.insert_on(connection, [new_job()])
    assert gone.status == "created"
    assert await ready(store) == 0
    connection.rollback()
    assert await ready(store) == 0
    store.insert_on(connection, new_jobs(3))
    connection.commit()
    assert await ready(store) == 3


async def test_settling_in_the_handlers_transaction(
    store: MysqlStore, connection: pymysql.Connection[Any], url: str
) -> None:
    await store.insert([new_job()])
    await open_session(store)
    [job] = await claim(store)
    sql(url, f"CREATE TABLE IF NOT EXISTS {NAMESPACE}_effects (job CHAR(36)) ENGINE = InnoDB")
    sql(url, f"DELETE FROM {NAMESPACE}_effects")
    with connection.cursor() as cursor:
        for end in (connection.rollback, connection.commit):
            cursor.execute(f"INSERT INTO {NAMESPACE}_effects VALUES (%s)", (job.id,))
            assert store.apply_on(connection, done([job])) == ["applied"]
            end()
    found = await store.get(job.id)
    assert found is not None
    assert found.state == "succeeded"
    assert sql(url, f"SELECT COUNT(*) FROM {NAMESPACE}_effects") == [(1,)]
    assert store.apply_on(connection, done([job])) == ["already"]
    connection.rollback()


async def test_the_heart_goes_on_beating_meanwhile(store: MysqlStore, connection: pymysql.Connection[Any]) -> None:
    """The open transaction keeps its session from being closed, not from beating."""
    await store.insert(new_jobs(2))
    await open_session(store)
    first, second = await claim(store)
    assert store.apply_on(connection, done([first])) == ["applied"]
    assert (await store.beat("s")).open
    assert await store.apply(done([second])) == ["applied"]
    connection.commit()
    assert await store.close_session("s")


async def test_asyncmy(store: MysqlStore, async_connection: Any) -> None:
    await store.ainsert_on(async_connection, [new_job()])
    await async_connection.rollback()
    assert await ready(store) == 0
    await store.ainsert_on(async_connection, [new_job()])
    await async_connection.commit()
    assert await ready(store) == 1
    await open_session(store)
    jobs = await claim(store)
    assert await store.aapply_on(async_connection, done(jobs)) == ["applied"]
    await async_connection.commit()
    assert [count.succeeded for count in await store.counts()] == [1]


async def test_a_blocking_verb_refuses_an_awaited_connection(store: MysqlStore, async_connection: Any) -> None:
    with pytest.raises(ForeignConnection, match="ainsert_on"):
        store.insert_on(async_connection, [new_job()])


async def test_sqlalchemy(store: MysqlStore, url: str) -> None:
    engine = create_engine(url.replace("mysql://", "mysql+pymysql://"), poolclass=NullPool)
    with engine.connect() as bound:
        store.insert_on(bound, [new_job()])
        bound.rollback()
        assert await ready(store) == 0
        store.insert_on(bound, [new_job()])
        bound.commit()
    with OrmSession(engine) as session:
        session.execute(text("SELECT 1"))
        store.insert_on(session, [new_job()])
        session.rollback()
        store.insert_on(session, [new_job()])
        session.commit()
    with OrmSession(engine) as session, session.begin():
        store.insert_on(session, [new_job()])
    assert await ready(store) == 3
    engine.dispose()


@pytest.fixture
async def async_engine(url: str) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(url.replace("mysql://", "mysql+asyncmy://"), poolclass=NullPool)
    yield engine
    await engine.dispose()


async def test_sqlalchemy_async(store: MysqlStore, async_engine: AsyncEngine) -> None:
    async with AsyncSession(async_engine) as session:
        await store.ainsert_on(session, [new_job()])
        await session.rollback()
        assert await ready(store) == 0
        await store.ainsert_on(session, [new_job()])
        await session.commit()
    async with async_engine.begin() as bound:
        await store.ainsert_on(bound, [new_job()])
    assert await ready(store) == 2
    await open_session(store)
    jobs = await claim(store)
    async with AsyncSession(async_engine) as session:
        assert await store.aapply_on(session, done(jobs)) == ["applied", "applied"]
        await session.commit()
    assert [count.succeeded for count in await store.counts()] == [2]


# Only our part is undone.


async def test_what_fails_leaves_the_callers_work_alone(
    store: MysqlStore, connection: pymysql.Connection[Any], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql(url, f"CREATE TABLE IF NOT EXISTS {NAMESPACE}_effects (job CHAR(36)) ENGINE = InnoDB")
    sql(url, f"DELETE FROM {NAMESPACE}_effects")
    job = new_job()
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {NAMESPACE}_effects VALUES ('mine')")
        with monkeypatch.context() as patch:
            # The second of its statements is nonsense: the job was inserted before it.
            patch.setattr(type(store._verbs.tables), "anywhere", lambda *args: "SELECT nonsense FROM nowhere")
            with pytest.raises(StoreUnavailable, match=r"Nothing was written|makes the tables"):
                store.insert_on(connection, [job])
        cursor.execute(f"INSERT INTO {NAMESPACE}_effects VALUES ('and mine')")
        connection.commit()
    assert sql(url, f"SELECT COUNT(*) FROM {NAMESPACE}_effects") == [(2,)]
    assert await store.get(job.id) is None


async def test_a_known_id_and_a_held_key_are_told(store: MysqlStore, connection: pymysql.Connection[Any]) -> None:
    key = Key("k", "h", 60_000_000)
    there = new_job(key=key)
    await store.insert([there])
    again, same_key, other = store.insert_on(
        connection, [there, new_job(key=key), new_job(key=Key("k", "another", 60_000_000))]
    )
    assert [again.status, same_key.status, other.status] == ["existing", "existing", "key_conflict"]
    [plain] = store.insert_on(connection, [new_job(id=there.id)])
    assert plain.status == "existing"
    [full] = store.insert_on(connection, [new_job()], limits={"default": DepthLimit(max_depth=1)})
    assert full.status == "full"
    connection.rollback()


async def test_an_old_snapshot_does_not_mislead(
    store: MysqlStore, connection: pymysql.Connection[Any], url: str
) -> None:
    """The caller's transaction sees the database as it was. The guards must not."""
    await store.insert([new_job()])
    await open_session(store)
    [job] = await claim(store)
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute(f"SELECT COUNT(*) FROM {NAMESPACE}_in_flight")
        assert cursor.fetchall() == ((1,),)
        await store.insert([new_job(key=Key("k", "h", 60_000_000))])
        await store.close_session("s")
        assert store.apply_on(connection, done([job])) == ["stale"]
        [held] = store.insert_on(connection, [new_job(key=Key("k", "h", 60_000_000))])
        assert held.status == "existing"
        connection.rollback()


async def test_rows_as_dictionaries_and_another_sql_mode(store: MysqlStore, url: str) -> None:
    """Whatever the caller's session is like: quoting must not depend on it."""
    payload = b'{"a": "it\'s \\\\ \\"quoted\\""}'
    with connect(url, autocommit=False, cursorclass=DictCursor, charset="latin1") as connection:
        with connection.cursor() as cursor:
            cursor.execute("SET SESSION sql_mode = 'ANSI,NO_BACKSLASH_ESCAPES', time_zone = '-09:00'")
        job = new_job(payload=payload, share="größe 'n", key=Key("ключ \\", "h", 60_000_000))
        store.insert_on(connection, [job])
        connection.commit()
    found = await store.get(job.id)
    assert found is not None
    assert (found.payload, found.share, found.key) == (payload, job.share, job.key)
    await open_session(store)
    assert [claimed.id for claimed in await claim(store)] == [job.id]


# What cannot be shared.


async def test_autocommit_without_a_transaction_is_refused(store: MysqlStore, url: str) -> None:
    with connect(url) as connection:
        with pytest.raises(ForeignConnection, match="autocommit"):
            store.insert_on(connection, [new_job()])
        connection.begin()
        store.insert_on(connection, [new_job()])
        connection.commit()
    assert await ready(store) == 1
    awaited = await connect_async(url, autocommit=True)
    with pytest.raises(ForeignConnection, match="autocommit"):
        await store.ainsert_on(awaited, [new_job()])
    await awaited.ensure_closed()


async def test_another_database_is_refused(store: MysqlStore, url: str) -> None:
    sql(url, "CREATE DATABASE IF NOT EXISTS elsewhere")
    with (
        connect(url, database="elsewhere", autocommit=False) as connection,
        pytest.raises(ForeignConnection, match="elsewhere"),
    ):
        store.insert_on(connection, [new_job()])
    awaited = await connect_async(url, db="elsewhere")
    with pytest.raises(ForeignConnection, match="elsewhere"):
        await store.aapply_on(awaited, [])
    await awaited.ensure_closed()


async def test_after_a_failover_the_store_looks_again(store: MysqlStore, url: str) -> None:
    """The store still thinks of the server that was there before; the caller is on the new one."""
    for identity in (("old", 3306, "/data", "test"), ("older", 3306, "/data", "test")):
        store._identity = identity
        with connect(url, autocommit=False) as connection:
            store.insert_on(connection, [new_job()])
            connection.commit()
        store._identity = identity
        awaited = await connect_async(url)
        await store.ainsert_on(awaited, [new_job()])
        await awaited.commit()
        await awaited.ensure_closed()
    assert await ready(store) == 4


async def test_a_deadlock_of_the_whole_transaction_is_told(store: MysqlStore, url: str) -> None:
    """The server undoes all that the caller did: going on would commit half of it."""
    await store.insert(new_jobs(2))
    await open_session(store)
    one, two = sorted(await claim(store), key=lambda job: job.id)
    lock = f"SELECT id FROM {NAMESPACE}_in_flight WHERE id = %s FOR UPDATE"
    with connect(url, autocommit=False) as mine, connect(url, autocommit=False) as other:
        with other.cursor() as cursor:
            cursor.execute(f"CREATE TABLE IF NOT EXISTS {NAMESPACE}_heavy (n INT) ENGINE = InnoDB")
            cursor.execute(f"INSERT INTO {NAMESPACE}_heavy SELECT 1 FROM information_schema.columns LIMIT 500")
            cursor.execute(lock, (two.id,))
            settling = asyncio.create_task(asyncio.to_thread(store.apply_on, mine, done([one, two])))
            await asyncio.sleep(0.3)  # it has the first and waits for the second
            await asyncio.to_thread(cursor.execute, lock, (one.id,))
            with pytest.raises(StoreUnavailable, match="rolled back your whole transaction"):
                await settling
        other.rollback()
        mine.rollback()


@pytest.mark.parametrize("thing", [object(), "connection", None])
async def test_something_else_is_refused(store: MysqlStore, thing: object) -> None:
    with pytest.raises(ForeignConnection):
        store.insert_on(thing, [new_job()])
    with pytest.raises(ForeignConnection):
        await store.ainsert_on(thing, [new_job()])


async def test_a_connection_of_another_engine_is_refused(store: MysqlStore) -> None:
    engine = create_engine("sqlite://")
    with engine.connect() as bound, pytest.raises(ForeignConnection, match="no kind of connection"):
        store.insert_on(bound, [new_job()])
    engine.dispose()


async def test_a_closed_connection_is_refused(store: MysqlStore, url: str) -> None:
    closed = connect(url, autocommit=False)
    closed.close()
    with pytest.raises((ForeignConnection, StoreUnavailable)):
        store.insert_on(closed, [new_job()])
