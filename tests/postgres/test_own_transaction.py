"""The application's own transactions through the public face: `options(connection=...)` and `succeed_on`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import psycopg
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import Holdfast, JobHandle, StaleLease, State, WorkerSettings, current
from holdfast.errors import JobNotFound, KeyConflict
from holdfast.policy import Steps
from tests.postgres.helpers import Database, wait_until

PATIENCE = 20.0
INSERT = "INSERT INTO test_own_transaction_orders VALUES ('tea')"


@pytest.fixture(autouse=True)
def orders(database: Database) -> None:
    database.sql("CREATE TABLE IF NOT EXISTS {ns}_orders (name text)")
    database.sql("DELETE FROM {ns}_orders")


@pytest.fixture
def app(database: Database) -> Iterator[Holdfast]:
    app = Holdfast(f"{database.url}?namespace={database.namespace}")
    yield app
    app.close()


@contextmanager
def working(app: Holdfast) -> Iterator[None]:
    worker = app.start_worker(WorkerSettings(concurrency=2, poll=0.5))
    try:
        yield
    finally:
        worker.stop(timeout=5)


def is_there(job: JobHandle[Any]) -> bool:
    try:
        job.refresh()
    except JobNotFound:
        return False
    return True


def test_enqueue(app: Holdfast, database: Database) -> None:
    @app.task
    def ship(what: str) -> None: ...

    engine = create_engine(database.url.replace("postgresql", "postgresql+psycopg"))
    for end, expected in (("rollback", False), ("commit", True)):
        with psycopg.connect(database.url) as connection, Session(engine) as session:
            connection.execute(INSERT)
            jobs = [ship.options(connection=connection).enqueue("tea")]
            jobs += app.enqueue_many([ship.job("milk"), ship.job("salt")], connection=connection)
            session.execute(text(INSERT))
            jobs += [ship.options(connection=session, key="k", delay=60).enqueue("coffee")]
            assert not any(map(is_there, jobs))
            getattr(connection, end)()
            getattr(session, end)()
        assert [is_there(job) for job in jobs] == [expected] * 4
    engine.dispose()
    assert database.number_of("orders") == 2


async def test_aenqueue(app: Holdfast, database: Database) -> None:
    @app.task
    def ship(what: str) -> None: ...

    engine = create_async_engine(database.url.replace("postgresql", "postgresql+asyncpg"))
    for end, expected in (("rollback", False), ("commit", True)):
        plain = await asyncpg.connect(database.url)
        transaction = plain.transaction()
        await transaction.start()
        async with (
            await psycopg.AsyncConnection.connect(database.url) as connection,
            AsyncSession(engine) as session,
        ):
            jobs = [await ship.options(connection=it).aenqueue("tea") for it in (connection, plain, session)]
            for ending in (connection, transaction, session):
                await getattr(ending, end)()
        await plain.close()
        for job in jobs:
            assert await asyncio.to_thread(is_there, job) == expected
    await engine.dispose()


def test_refusals_leave_the_transaction_usable(app: Holdfast, database: Database) -> None:
    @app.task
    def ship(what: str) -> None: ...

    with psycopg.connect(database.url) as connection:
        on_it = ship.options(connection=connection, key="k")
        first = on_it.enqueue("tea")
        assert on_it.enqueue("tea").id == first.id
        with pytest.raises(KeyConflict):
            on_it.enqueue("milk")
        connection.execute(INSERT)
    assert is_there(first)
    assert database.number_of("orders") == 1


@asynccontextmanager
async def each(url: str, driver: str) -> AsyncIterator[tuple[Any, Any]]:
    """A connection in a transaction, and what runs a statement on it. Commits at the end, as its manual shows."""
    if driver == "psycopg":
        async with await psycopg.AsyncConnection.connect(url) as connection:
            yield connection, connection.execute
    elif driver == "asyncpg":
        plain = await asyncpg.connect(url)
        try:
            async with plain.transaction():
                yield plain, plain.execute
        finally:
            await plain.close()
    else:
        engine = create_async_engine(url.replace("postgresql", "postgresql+asyncpg"))
        try:
            async with AsyncSession(engine) as session, session.begin():
                yield session, lambda statement: session.execute(text(statement))
        finally:
            await engine.dispose()


def test_a_handler_settles_in_its_own_transaction(app: Holdfast, database: Database) -> None:
    """The first attempt changes its mind after it has settled: then neither the order nor the success is there."""

    @app.task(backoff=Steps((0.0,)))
    def order() -> str:
        with psycopg.connect(database.url) as connection:
            connection.execute(INSERT)
            current().succeed_on(connection, "in the transaction")
            if current().attempt == 1:
                raise ValueError("changed my mind")
        return "by return"

    @app.task(backoff=Steps((0.0,)))
    async def aorder(driver: str) -> str:
        async with each(database.url, driver) as (connection, run):
            await run(INSERT)
            await current().asucceed_on(connection, "in the transaction")
            if current().attempt == 1:
                raise ValueError("changed my mind")
        return "by return"

    with working(app):
        jobs = [order.enqueue(), *(aorder.enqueue(driver) for driver in ("psycopg", "asyncpg", "SQLAlchemy"))]
        assert [job.result(PATIENCE) for job in jobs] == ["in the transaction"] * 4
    for job in jobs:
        details = job.refresh().details
        assert details is not None
        assert (details.state, details.attempt, details.failures) == (State.SUCCEEDED, 2, 1)
    assert database.number_of("orders") == 4


def test_a_handler_that_lost_its_lease_is_told(app: Holdfast, database: Database) -> None:
    said: list[str] = []

    @app.task(max_retries=0)
    def order() -> None:
        database.sql("UPDATE {ns}_sessions SET open = false WHERE id = %s", current().lease.session_id)
        with psycopg.connect(database.url) as connection:
            connection.execute(INSERT)
            try:
                current().succeed_on(connection)
            except StaleLease as error:
                said.append(str(error))
                connection.rollback()

    with working(app):
        job = order.enqueue()
        wait_until(lambda: said)
    assert said == [f"job {job.id} is no longer this worker's (stale): roll the transaction back"]
    assert database.number_of("orders") == 0
