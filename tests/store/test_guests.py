"""Callers' connections: those of an event loop are recognised, and SQLAlchemy's lead to the driver's own."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import pymysql
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from holdfast import Holdfast
from holdfast.errors import ForeignConnection
from holdfast.stores.guests import behind_sqlalchemy, is_asynchronous, on_guest, require_blocking
from holdfast.stores.sqlite import SqliteStore
from tests.servers import MariaDbServer, PostgresServer

# Of an event loop, or not.


class Servers:
    """Where the drivers connect to."""

    def __init__(self, postgres: PostgresServer, mariadb: MariaDbServer) -> None:
        self.postgres = postgres
        self.mysql = {"host": "127.0.0.1", "port": mariadb.port, "user": "holdfast", "database": "test"}

    def sqlalchemy(self, dialect: str) -> str:
        if dialect.startswith("postgresql"):
            return self.postgres.url.replace("postgresql", dialect)
        return f"{dialect}://holdfast@127.0.0.1:{self.mysql['port']}/test"


@pytest.fixture
def servers(postgres_server: PostgresServer, mariadb_server: MariaDbServer) -> Servers:
    return Servers(postgres_server, mariadb_server)


@asynccontextmanager
async def of_psycopg(servers: Servers) -> AsyncIterator[object]:
    async with await psycopg.AsyncConnection.connect(servers.postgres.url) as connection:
        yield connection


@asynccontextmanager
async def of_asyncpg(servers: Servers) -> AsyncIterator[object]:
    connection = await asyncpg.connect(servers.postgres.url)
    yield connection
    await connection.close()


@asynccontextmanager
async def of_a_pool_of_asyncpg(servers: Servers) -> AsyncIterator[object]:
    async with asyncpg.create_pool(servers.postgres.url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        yield connection


@asynccontextmanager
async def of_asyncmy(servers: Servers) -> AsyncIterator[object]:
    connection = await asyncmy.connect(**servers.mysql)
    yield connection
    await connection.ensure_closed()


@asynccontextmanager
async def of_aiosqlite(servers: Servers) -> AsyncIterator[object]:
    async with aiosqlite.connect(":memory:") as connection:
        yield connection


@asynccontextmanager
async def a_scoped_session(servers: Servers) -> AsyncIterator[object]:
    engine = create_async_engine("sqlite+aiosqlite://")
    yield async_scoped_session(async_sessionmaker(engine), scopefunc=asyncio.current_task)
    await engine.dispose()


@asynccontextmanager
async def an_async_session(servers: Servers) -> AsyncIterator[object]:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with AsyncSession(engine) as session:
        yield session
    await engine.dispose()


@asynccontextmanager
async def an_async_connection(servers: Servers) -> AsyncIterator[object]:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.connect() as connection:
        yield connection
    await engine.dispose()


Opening = Callable[[Servers], AbstractAsyncContextManager[object]]
NATIVE: list[Opening] = [of_psycopg, of_asyncpg, of_a_pool_of_asyncpg, of_asyncmy, of_aiosqlite, a_scoped_session]
ASYNCHRONOUS: list[Opening] = [*NATIVE, an_async_session, an_async_connection]


class Proxy:
    """As frameworks hand out their sessions: everything is looked up elsewhere."""

    def __init__(self, target: object) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


@pytest.mark.parametrize("opening", ASYNCHRONOUS)
async def test_a_connection_of_an_event_loop_is_recognised(servers: Servers, opening: Opening) -> None:
    async with opening(servers) as connection:
        for seen in (connection, Proxy(connection)):
            assert is_asynchronous(seen)
            with pytest.raises(ForeignConnection, match="belongs to an event loop: use `await aenqueue"):
                require_blocking(seen, "aenqueue")
    gc.collect()  # and no coroutine was left behind that nobody awaits


def test_a_blocking_connection_is_taken_for_what_it_is(servers: Servers) -> None:
    engine = create_engine("sqlite://")
    with (
        closing(sqlite3.connect(":memory:")) as of_sqlite,
        psycopg.connect(servers.postgres.url) as of_psycopg,
        pymysql.connect(**servers.mysql) as of_pymysql,  # type: ignore[call-overload]
        Session(engine) as session,
        engine.connect() as core,
    ):
        for connection in (of_sqlite, of_psycopg, of_pymysql, session, core, scoped_session(sessionmaker(engine))):
            assert not is_asynchronous(connection)
            assert not is_asynchronous(Proxy(connection))
            require_blocking(connection, "aenqueue")
    engine.dispose()


@pytest.mark.parametrize("thing", [object(), None, 5, "sqlite://", sqlite3])
def test_what_is_no_connection_is_not_asynchronous(thing: object) -> None:
    assert not is_asynchronous(thing)
    assert behind_sqlalchemy(thing) is None


# Work in a coroutine.


@pytest.mark.parametrize("opening", NATIVE)
async def test_what_a_store_could_not_await_is_refused(servers: Servers, opening: Opening) -> None:
    async with opening(servers) as connection:
        with pytest.raises(ForeignConnection, match="no kind of asynchronous connection that this store can share"):
            await on_guest(connection, lambda guest: pytest.fail("it was used"))


async def test_a_blocking_connection_is_used_as_it_is() -> None:
    with closing(sqlite3.connect(":memory:")) as connection:
        assert await on_guest(connection, lambda guest: guest) is connection


@pytest.mark.parametrize("dialect", ["postgresql+psycopg", "postgresql+asyncpg", "mysql+asyncmy"])
@pytest.mark.parametrize("begin", [AsyncSession, AsyncConnection])
async def test_sqlalchemy_leads_to_the_drivers_connection_in_its_transaction(
    servers: Servers, dialect: str, begin: type[AsyncSession] | type[AsyncConnection]
) -> None:
    table = f"guests_{dialect.replace('+', '_')}_{begin.__name__}"
    engine = create_async_engine(servers.sqlalchemy(dialect))

    def write(guest: object) -> object:
        driver = behind_sqlalchemy(guest)
        assert driver is not None
        assert is_asynchronous(driver.driver_connection)
        with closing(driver.cursor()) as cursor:
            cursor.execute(f"INSERT INTO {table} VALUES (42)")
            cursor.execute(f"SELECT answer FROM {table}")
            return cursor.fetchone()[0]

    async with engine.begin() as connection:
        await connection.execute(text(f"CREATE TABLE {table} (answer INT)"))
    for end in ("rollback", "commit"):
        async with begin(engine) as shared:
            assert await on_guest(shared, write) == 42
            await getattr(shared, end)()
        async with engine.connect() as connection:
            found = await connection.execute(text(f"SELECT count(*) FROM {table}"))
            assert found.scalar_one() == (end == "commit")
    await engine.dispose()


def test_a_closed_connection_of_sqlalchemy() -> None:
    engine = create_engine("sqlite://")
    connection = engine.connect()
    connection.close()
    with pytest.raises(ForeignConnection, match="cannot be used here"):
        behind_sqlalchemy(connection)
    engine.dispose()


# A store that can await none of them.


@pytest.mark.parametrize("opening", NATIVE)
async def test_sqlite_refuses_them_all(servers: Servers, opening: Opening, tmp_path: Path) -> None:
    app = Holdfast(SqliteStore(tmp_path / "jobs.db", durability="relaxed"))

    @app.task
    def ship(what: str) -> None: ...

    async with app, opening(servers) as connection:
        on_it = ship.options(connection=connection)
        with pytest.raises(ForeignConnection, match="aenqueue"):
            await asyncio.to_thread(on_it.enqueue, "tea")
        with pytest.raises(ForeignConnection, match="asucceed_on"):
            await asyncio.to_thread(app.store.apply_on, connection, [])
        with pytest.raises(ForeignConnection, match="no kind of asynchronous connection"):
            await on_it.aenqueue("tea")
        with pytest.raises(ForeignConnection, match="no kind of asynchronous connection"):
            await app.store.aapply_on(connection, [])
        assert await app.acounts() == []
