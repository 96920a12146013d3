"""The caller's own connection: jobs exist, and are settled, if and only if the caller commits. On every driver."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

import asyncpg
import psycopg
import pytest
from msgspec.structs import replace
from psycopg.rows import class_row, dict_row, namedtuple_row, scalar_row
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast.errors import ForeignConnection, StoreUnavailable
from holdfast.job import Job, Key, NewJob, State
from holdfast.lifecycle import Applied, Failed, Move, Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import DepthLimit, Inserted, InsertStatus
from holdfast.stores.postgres import PostgresStore
from holdfast.testing.suite.harness import BOOM
from tests.postgres.guests import DRIVERS, Guest, Opening, asyncpg_plain, asyncpg_pool, psycopg_async
from tests.postgres.helpers import HOUR, Database, claim, eventually, new_job, new_jobs, open_session


@pytest.fixture(scope="module")
def namespace_of_module(namespace_of_module: Database) -> Database:
    namespace_of_module.sql("CREATE TABLE IF NOT EXISTS {ns}_orders (name text)")
    return namespace_of_module


every_driver = pytest.mark.parametrize("opening", DRIVERS, ids=lambda opening: opening.__name__)


def orders(database: Database) -> int:
    return database.number_of("orders")


async def order(guest: Guest, database: Database) -> None:
    await guest.run(f"INSERT INTO {database.namespace}_orders VALUES ('tea')")


@every_driver
async def test_enqueue_shares_the_fate_of_the_transaction(
    store: PostgresStore, database: Database, opening: Opening
) -> None:
    database.sql("DELETE FROM {ns}_orders")
    limits = {"default": DepthLimit(max_depth=3, warn_depth=3)}
    found: list[Job | None] = []
    for end in ("rollback", "commit"):
        jobs = [new_job(), new_job(key=Key("k", "h", HOUR)), new_job(delay=HOUR)]
        async with opening(database.url) as guest:
            await order(guest, database)
            inserted = await guest.insert(store, jobs[:1])
            inserted += await guest.insert(store, jobs[1:], limits)
            assert [answer.status for answer in inserted] == [InsertStatus.CREATED] * 3
            assert [answer.deep for answer in inserted] == [False, False, True]
            # What the transaction has done, the transaction sees.
            [again] = await guest.insert(store, [new_job(key=Key("k", "h", HOUR))])
            assert again == Inserted(jobs[1].id, InsertStatus.EXISTING)
            [other] = await guest.insert(store, [new_job(key=Key("k", "another", HOUR))])
            assert other.status is InsertStatus.KEY_CONFLICT
            [full] = await guest.insert(store, [new_job()], limits)
            assert full.status is InsertStatus.FULL
            [repeated] = await guest.insert(store, jobs[:1])
            assert repeated.status is InsertStatus.EXISTING
            assert await store.get(jobs[0].id) is None
            await getattr(guest, end)()
        found = [await store.get(job.id) for job in jobs]
        if end == "rollback":
            assert found == [None] * 3
            assert database.number_of("keys") == orders(database) == 0
    assert [job.state if job else None for job in found] == [State.READY] * 3
    assert database.number_of("keys") == orders(database) == 1


@every_driver
async def test_a_settlement_shares_the_fate_of_the_transaction(
    store: PostgresStore, database: Database, opening: Opening
) -> None:
    database.sql("DELETE FROM {ns}_orders")
    await store.insert([new_job(key=Key("k", "h", HOUR)), new_job(), new_job()])
    one, two, three = await claim(store, await open_session(store))
    following = new_job(task="follow", key=Key("then", "h", HOUR))
    moves = [
        replace(moved(one, Succeeded(b'"done"')), then=(following,)),
        moved(two, Failed(BOOM, permanent=True)),
        moved(three, Failed(BOOM, retry_after=0.0)),
    ]
    for end in ("rollback", "commit"):
        async with opening(database.url) as guest:
            await order(guest, database)
            assert await guest.apply(store, moves) == [Applied.APPLIED] * 3
            assert await guest.apply(store, moves[:2]) == [Applied.ALREADY] * 2
            assert [await state(store, job) for job in (one, two, three)] == [State.IN_FLIGHT] * 3
            await getattr(guest, end)()
        if end == "rollback":
            assert [await state(store, job) for job in (one, two, three)] == [State.IN_FLIGHT] * 3
            assert await store.get(following.id) is None
            assert orders(database) == 0
    assert [await state(store, job) for job in (one, two, three)] == [State.SUCCEEDED, State.FAILED, State.READY]
    assert await state(store, following) is State.READY
    ended = await store.get(one.id)
    assert ended is not None
    assert ended.result == b'"done"'
    assert orders(database) == 1
    assert database.sql("SELECT key FROM {ns}_keys ORDER BY key") == [("k",), ("then",)]


def moved(job: Job, outcome: Any) -> Move:
    return settle(job, outcome, RetryPolicy(), SYSTEM.random)


async def state(store: PostgresStore, job: Job | NewJob) -> State | None:
    found = await store.get(job.id)
    return found.state if found else None


@every_driver
async def test_every_kind_of_move_can_be_part_of_it(store: PostgresStore, database: Database, opening: Opening) -> None:
    """A stale one is answered, not raised: the transaction can go on."""
    await store.insert(new_jobs(2))
    session = await open_session(store)
    one, two = await claim(store, session)
    await store.apply([moved(one, Failed(BOOM, permanent=True))])
    dead = await store.get(one.id)
    assert dead is not None
    await store.close_session(session)
    async with opening(database.url) as guest:
        assert await guest.apply(store, [replay(dead), moved(two, Succeeded())]) == [Applied.APPLIED, Applied.STALE]
        await order(guest, database)
        await guest.commit()
    assert [await state(store, job) for job in (one, two)] == [State.READY, State.IN_FLIGHT]


@every_driver
async def test_the_commit_wakes_a_waiter(store: PostgresStore, database: Database, opening: Opening) -> None:
    heard = 0

    async def wait() -> None:
        nonlocal heard
        async for _ in store.wakeups(["mail"]):
            heard += 1

    async with database.store() as producer:  # so that nothing is heard but what the server says
        waiting = asyncio.ensure_future(wait())
        await eventually(lambda: heard)  # it listens now, and looks once for what came before
        before = heard
        async with opening(database.url) as guest:
            await guest.insert(producer, [new_job(queue="mail")])
            await asyncio.sleep(0.1)
            assert heard == before
            await guest.commit()
            await eventually(lambda: heard > before, 2)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


# What is refused.


async def refused(store: PostgresStore, connection: Any, saying: str, *, blocking: bool = False) -> None:
    """Nothing can be done with this connection, and the error says so."""
    with pytest.raises(ForeignConnection, match=saying):
        await store.ainsert_on(connection, [new_job()])
    with pytest.raises(ForeignConnection, match=saying):
        await store.aapply_on(connection, [])
    if blocking:
        with pytest.raises(ForeignConnection, match=saying):
            store.insert_on(connection, [new_job()])


@pytest.fixture(scope="module")
def elsewhere(namespace_of_module: Database) -> Iterator[Database]:
    """Another database of the same server that has our tables, too."""
    namespace_of_module.sql("CREATE DATABASE elsewhere")
    url = namespace_of_module.url.replace("/postgres", "/elsewhere")
    elsewhere = Database(url, namespace_of_module.namespace)
    elsewhere.store().open_blocking()
    yield elsewhere
    elsewhere.close()


@pytest.fixture(scope="module")
def without_tables(namespace_of_module: Database) -> str:
    namespace_of_module.sql("CREATE DATABASE without_tables")
    return namespace_of_module.url.replace("/postgres", "/without_tables")


@every_driver
async def test_another_database(
    store: PostgresStore, elsewhere: Database, without_tables: str, opening: Opening
) -> None:
    async with opening(elsewhere.url) as guest:
        with pytest.raises(ForeignConnection, match="another database than the store's"):
            await guest.insert(store, [new_job()])
    async with opening(without_tables) as guest:
        with pytest.raises(ForeignConnection, match="without the store's tables"):
            await guest.insert(store, [new_job()])
    assert elsewhere.number_of("waiting") == 0


async def test_autocommit_without_a_transaction(store: PostgresStore, database: Database) -> None:
    saying = "has no transaction: begin one first"
    with psycopg.connect(database.url, autocommit=True) as blocking:
        await refused(store, blocking, saying, blocking=True)
    async with await psycopg.AsyncConnection.connect(database.url, autocommit=True) as connection:
        await refused(store, connection, saying)
    plain = await asyncpg.connect(database.url)
    await refused(store, plain, saying)
    await plain.close()
    assert database.number_of("waiting") == 0


async def test_autocommit_behind_sqlalchemy(store: PostgresStore, database: Database) -> None:
    """SQLAlchemy speaks of a transaction there, but there is none to roll back."""
    saying = "has no transaction: begin one first"
    url = database.url.replace("postgresql", "postgresql+psycopg")
    engine = create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, Session(engine) as session:
        await refused(store, connection, saying, blocking=True)
        await refused(store, session, saying, blocking=True)
    engine.dispose()
    for dialect in ("postgresql+psycopg", "postgresql+asyncpg"):
        async_engine = create_async_engine(database.url.replace("postgresql", dialect), isolation_level="AUTOCOMMIT")
        async with async_engine.connect() as shared, AsyncSession(async_engine) as async_session:
            await refused(store, shared, saying)
            await refused(store, async_session, saying)
        await async_engine.dispose()
    assert database.number_of("waiting") == 0


async def test_a_closed_connection(store: PostgresStore, database: Database) -> None:
    saying = "cannot be used here"
    blocking = psycopg.connect(database.url)
    blocking.close()
    await refused(store, blocking, saying, blocking=True)
    connection = await psycopg.AsyncConnection.connect(database.url)
    await connection.close()
    await refused(store, connection, saying)
    plain = await asyncpg.connect(database.url)
    await plain.close()
    await refused(store, plain, saying)
    async with asyncpg.create_pool(database.url, min_size=1, max_size=1) as pool:
        async with pool.acquire() as lent:
            pass
        await refused(store, lent, saying)
    engine = create_engine(database.url.replace("postgresql", "postgresql+psycopg"))
    with engine.connect() as core:
        pass
    await refused(store, core, saying, blocking=True)
    engine.dispose()


async def test_a_connection_whose_server_has_gone(store: PostgresStore, database: Database) -> None:
    """Nothing was written: the transaction is gone with it."""
    with psycopg.connect(database.url) as connection:
        store.insert_on(connection, [new_job()])
        database.sql("SELECT pg_terminate_backend(%s)", connection.info.backend_pid)
        for _ in range(2):
            with pytest.raises((ForeignConnection, StoreUnavailable), match=r"terminating connection|cannot be used"):
                store.insert_on(connection, [new_job()])
    plain = await asyncpg.connect(database.url)
    await plain.execute("BEGIN")
    database.sql("SELECT pg_terminate_backend(%s)", plain.get_server_pid())
    for _ in range(2):
        with pytest.raises((ForeignConnection, StoreUnavailable), match=r"terminating connection|cannot be used"):
            await store.ainsert_on(plain, [new_job()])
    plain.terminate()
    assert database.number_of("waiting") == 0


async def test_a_transaction_that_has_failed(store: PostgresStore, database: Database) -> None:
    with psycopg.connect(database.url) as connection:
        with pytest.raises(psycopg.errors.UndefinedTable):
            connection.execute("SELECT * FROM no_such_table")
        with pytest.raises(ForeignConnection, match="current transaction is aborted"):
            store.insert_on(connection, [new_job()])
        connection.rollback()
        assert store.insert_on(connection, [new_job()])[0].status is InsertStatus.CREATED


async def test_what_is_no_connection_of_ours(store: PostgresStore) -> None:
    with sqlite3.connect(":memory:") as lite:
        await refused(store, lite, r"sqlite3\.Connection is no kind of connection", blocking=True)
    lite.close()
    engine = create_engine("sqlite://")
    with Session(engine) as session:
        await refused(store, session, "uses the driver sqlite3, but the store is a PostgreSQL database", blocking=True)
    engine.dispose()
    async_engine = create_async_engine("sqlite+aiosqlite://")
    async with AsyncSession(async_engine) as async_session:
        await refused(store, async_session, "uses the driver aiosqlite")
    await async_engine.dispose()
    for thing in (None, object(), "postgresql://"):
        await refused(store, thing, "is no kind of connection", blocking=True)


@pytest.mark.parametrize("opening", [psycopg_async, asyncpg_plain, asyncpg_pool], ids=lambda opening: opening.__name__)
async def test_a_connection_of_an_event_loop_in_a_blocking_call(
    store: PostgresStore, database: Database, opening: Opening
) -> None:
    async with opening(database.url) as guest:
        with pytest.raises(ForeignConnection, match="belongs to an event loop: use `await aenqueue"):
            store.insert_on(guest.connection, [new_job()])
        with pytest.raises(ForeignConnection, match="belongs to an event loop: use `await asucceed_on"):
            store.apply_on(guest.connection, [])


# What callers do to their connections.


@pytest.mark.parametrize("row_factory", [dict_row, namedtuple_row, scalar_row, class_row(dict)])
@pytest.mark.parametrize("cursor_factory", [psycopg.Cursor, psycopg.ClientCursor, psycopg.RawCursor])
async def test_rows_and_cursors_of_the_callers_own_kind(
    store: PostgresStore, database: Database, row_factory: Any, cursor_factory: Any
) -> None:
    job = new_job(key=Key("k", "h", HOUR))
    with psycopg.connect(database.url, row_factory=row_factory, cursor_factory=cursor_factory) as connection:
        assert store.insert_on(connection, [job]) == [Inserted(job.id, InsertStatus.CREATED)]
        assert store.insert_on(connection, [job, new_job()])[0] == Inserted(job.id, InsertStatus.EXISTING)
        assert connection.row_factory is row_factory
    connect: Any = psycopg.AsyncConnection.connect
    async with await connect(database.url, row_factory=row_factory) as shared:
        [again] = await store.ainsert_on(shared, [new_job(key=Key("k", "h", HOUR))])
        assert again == Inserted(job.id, InsertStatus.EXISTING)
    [first, second] = await claim(store, await open_session(store))
    with psycopg.connect(database.url, row_factory=row_factory, cursor_factory=cursor_factory) as connection:
        moves = [moved(first, Succeeded()), replace(moved(second, Succeeded()), version=9)]
        assert store.apply_on(connection, moves) == [Applied.APPLIED, Applied.STALE]
    assert await state(store, job) is State.SUCCEEDED


async def test_codecs_of_the_callers_own(store: PostgresStore, database: Database) -> None:
    """As the manual of asyncpg shows it: JSON as Python values, records with attributes."""

    class Record(asyncpg.Record):  # type: ignore[misc]
        def __getattr__(self, name: str) -> Any:
            return self[name]

    connection = await asyncpg.connect(database.url, record_class=Record)
    for kind in ("json", "jsonb"):
        await connection.set_type_codec(kind, encoder=json.dumps, decoder=json.loads, schema="pg_catalog")
    await connection.set_type_codec("uuid", encoder=str, decoder=str, schema="pg_catalog")
    job = new_job()
    async with connection.transaction():
        assert await store.ainsert_on(connection, [job]) == [Inserted(job.id, InsertStatus.CREATED)]
        keyed = new_job(key=Key("k", "h", HOUR))
        assert await store.ainsert_on(connection, [keyed, job]) == [
            Inserted(keyed.id, InsertStatus.CREATED),
            Inserted(job.id, InsertStatus.EXISTING),
        ]
    [claimed, _] = await claim(store, await open_session(store))
    async with connection.transaction():
        assert await store.aapply_on(connection, [moved(claimed, Succeeded())]) == [Applied.APPLIED]
    await connection.close()
    assert await state(store, job) is State.SUCCEEDED


async def test_savepoints_are_the_callers_business(store: PostgresStore, database: Database) -> None:
    kept, undone = new_job(), new_job()
    with psycopg.connect(database.url) as connection:
        store.insert_on(connection, [kept])
        with connection.transaction(force_rollback=True):
            store.insert_on(connection, [undone])
    assert [await state(store, job) for job in (kept, undone)] == [State.READY, None]
