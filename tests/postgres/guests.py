"""Callers with a connection of their own, in a transaction, on every driver that a PostgreSQL store can share."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import asyncpg
import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast.job import NewJob
from holdfast.lifecycle import Applied, Move
from holdfast.store import DepthLimit, Inserted
from holdfast.stores.postgres import PostgresStore


class Guest:
    """A caller with a connection of his own, in a transaction."""

    def __init__(self, connection: Any, run: Callable[[str], Any], commit: Any, rollback: Any) -> None:
        self.connection = connection
        self.run, self.commit, self.rollback = run, commit, rollback
        """Coroutine functions."""

    async def insert(
        self, store: PostgresStore, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        return await store.ainsert_on(self.connection, jobs, limits=limits)

    async def apply(self, store: PostgresStore, moves: Sequence[Move]) -> list[Applied]:
        return await store.aapply_on(self.connection, moves)


class BlockingGuest(Guest):
    """The same with a blocking connection, and the blocking calls."""

    def __init__(self, connection: Any, run: Callable[[str], Any]) -> None:
        async def running(statement: str) -> None:
            run(statement)

        async def committing() -> None:
            connection.commit()

        async def rolling_back() -> None:
            connection.rollback()

        super().__init__(connection, running, committing, rolling_back)

    async def insert(
        self, store: PostgresStore, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        return store.insert_on(self.connection, jobs, limits=limits)

    async def apply(self, store: PostgresStore, moves: Sequence[Move]) -> list[Applied]:
        return store.apply_on(self.connection, moves)


@asynccontextmanager
async def psycopg_blocking(url: str) -> AsyncIterator[Guest]:
    with psycopg.connect(url) as connection:
        yield BlockingGuest(connection, lambda statement: connection.execute(statement.encode()))


@asynccontextmanager
async def psycopg_after_begin(url: str) -> AsyncIterator[Guest]:
    """In autocommit mode, with a transaction of its own."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("BEGIN")
        yield BlockingGuest(connection, lambda statement: connection.execute(statement.encode()))


@asynccontextmanager
async def psycopg_blocking_in_a_coroutine(url: str) -> AsyncIterator[Guest]:
    with psycopg.connect(url) as connection:
        blocking = BlockingGuest(connection, lambda statement: connection.execute(statement.encode()))
        yield Guest(connection, blocking.run, blocking.commit, blocking.rollback)


@asynccontextmanager
async def psycopg_async(url: str) -> AsyncIterator[Guest]:
    async with await psycopg.AsyncConnection.connect(url) as connection:
        yield Guest(
            connection,
            lambda statement: connection.execute(statement.encode()),
            connection.commit,
            connection.rollback,
        )


@asynccontextmanager
async def asyncpg_plain(url: str) -> AsyncIterator[Guest]:
    connection = await asyncpg.connect(url)
    transaction = connection.transaction()
    await transaction.start()
    yield Guest(connection, connection.execute, transaction.commit, transaction.rollback)
    await connection.close()


@asynccontextmanager
async def asyncpg_pool(url: str) -> AsyncIterator[Guest]:
    async with asyncpg.create_pool(url, min_size=1, max_size=1) as pool, pool.acquire() as connection:
        transaction = connection.transaction()
        await transaction.start()
        yield Guest(connection, connection.execute, transaction.commit, transaction.rollback)


def sqlalchemy_blocking(kind: str) -> Callable[[str], AbstractAsyncContextManager[Guest]]:
    @asynccontextmanager
    async def opening(url: str) -> AsyncIterator[Guest]:
        engine = create_engine(url.replace("postgresql", "postgresql+psycopg"))
        with Session(engine) if kind == "Session" else engine.connect() as connection:
            yield BlockingGuest(connection, lambda statement: connection.execute(text(statement)))
        engine.dispose()

    opening.__name__ = f"SQLAlchemy {kind}"
    return opening


def sqlalchemy_async(
    dialect: str, kind: type[AsyncSession] | type[AsyncConnection]
) -> Callable[[str], AbstractAsyncContextManager[Guest]]:
    @asynccontextmanager
    async def opening(url: str) -> AsyncIterator[Guest]:
        engine = create_async_engine(url.replace("postgresql", dialect))
        async with kind(engine) as connection:
            yield Guest(
                connection,
                lambda statement: connection.execute(text(statement)),
                connection.commit,
                connection.rollback,
            )
        await engine.dispose()

    opening.__name__ = f"{dialect} {kind.__name__}"
    return opening


Opening = Callable[[str], AbstractAsyncContextManager[Guest]]
DRIVERS: list[Opening] = [
    psycopg_blocking,
    psycopg_after_begin,
    psycopg_blocking_in_a_coroutine,
    psycopg_async,
    asyncpg_plain,
    asyncpg_pool,
    sqlalchemy_blocking("Session"),
    sqlalchemy_blocking("Connection"),
    sqlalchemy_async("postgresql+psycopg", AsyncSession),
    sqlalchemy_async("postgresql+psycopg", AsyncConnection),
    sqlalchemy_async("postgresql+asyncpg", AsyncSession),
    sqlalchemy_async("postgresql+asyncpg", AsyncConnection),
]
