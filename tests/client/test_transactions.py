"""Jobs inside the caller's own transaction on SQLite: they exist, or have succeeded, if and only if it commits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import Holdfast, QueueSettings, Settings, State, Task
from holdfast.errors import ForeignConnection, KeyConflict, PartlyRefused, QueueFull, StoreReplaced, StoreUnavailable
from holdfast.lifecycle import Applied, Succeeded
from holdfast.stores.sqlite import SqliteStore
from tests.client.helpers import SESSION, finish, move_for, take

WRITE_ORDER = "INSERT INTO orders (name) VALUES ('tea')"
COUNT_ORDERS = "SELECT count(*) FROM orders"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A database with a business table, which the store shares."""
    path = tmp_path / "business.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE orders (name TEXT)")
        db.commit()
    return path


@pytest.fixture
def app(path: Path) -> Iterator[Holdfast]:
    app = Holdfast(SqliteStore(path, durability="relaxed", timeout=0.3))
    app.open()  # before anybody holds a transaction: the schema is made now
    yield app
    app.close()


@pytest.fixture
def ship(app: Holdfast) -> Task[[str], str]:
    @app.task
    def ship(what: str) -> str:
        return what

    return ship


class Seen:
    """What another connection sees of the business and of the jobs."""

    def __init__(self, app: Holdfast, path: Path) -> None:
        self._app = app
        self._path = path

    def orders(self) -> int:
        with contextlib.closing(sqlite3.connect(self._path)) as db:
            return int(db.execute(COUNT_ORDERS).fetchone()[0])

    def jobs(self) -> int:
        return sum(counts.ready + counts.scheduled for counts in self._app.counts())

    def keys(self) -> int:
        with contextlib.closing(sqlite3.connect(self._path)) as db:
            return int(db.execute("SELECT count(*) FROM holdfast_keys").fetchone()[0])

    def everything(self) -> tuple[int, int, int]:
        return self.orders(), self.jobs(), self.keys()


@pytest.fixture
def seen(app: Holdfast, path: Path) -> Seen:
    return Seen(app, path)


# The caller's own sqlite3 connection.

Connect = Callable[..., sqlite3.Connection]


@pytest.fixture
def connect(path: Path) -> Iterator[Connect]:
    with contextlib.ExitStack() as open_connections:

        def connect(**options: Any) -> sqlite3.Connection:
            connection: sqlite3.Connection = sqlite3.connect(path, **{"timeout": 0.1, **options})
            open_connections.callback(connection.close)
            return connection

        yield connect


@pytest.fixture(params=["default", "immediate", "explicit", "rows"])
def connection(request: pytest.FixtureRequest, connect: Connect) -> sqlite3.Connection:
    """A connection of every habit."""
    if request.param == "default":
        return connect()
    if request.param == "immediate":
        return connect(isolation_level="IMMEDIATE")
    if request.param == "rows":
        with_rows = connect()
        with_rows.row_factory = lambda cursor, row: {
            name[0]: value for name, value in zip(cursor.description, row, strict=True)
        }
        return with_rows
    explicit = connect(isolation_level=None)
    explicit.execute("BEGIN")
    return explicit


@pytest.mark.parametrize("order_first", [True, False])
def test_commit(connection: sqlite3.Connection, ship: Any, seen: Seen, order_first: bool) -> None:
    if order_first:
        connection.execute(WRITE_ORDER)
    job = ship.options(connection=connection, key="k").enqueue("tea")
    if not order_first:
        connection.execute(WRITE_ORDER)
    assert job.created
    assert seen.everything() == (0, 0, 0)
    connection.commit()
    assert seen.everything() == (1, 1, 1)
    assert job.refresh().state is State.READY


@pytest.mark.parametrize("order_first", [True, False])
def test_rollback(connection: sqlite3.Connection, ship: Any, seen: Seen, order_first: bool) -> None:
    if order_first:
        connection.execute(WRITE_ORDER)
    ship.options(connection=connection, key="k").enqueue("tea")
    if not order_first:
        connection.execute(WRITE_ORDER)
    connection.rollback()
    assert seen.everything() == (0, 0, 0)
    assert ship.options(key="k").enqueue("coffee").created


def test_many_on_a_connection(app: Holdfast, connection: sqlite3.Connection, ship: Any, seen: Seen) -> None:
    handles = app.enqueue_many((ship.job(str(n)) for n in range(1_500)), connection=connection)
    assert len(handles) == 1_500
    assert seen.jobs() == 0
    connection.commit()
    assert seen.jobs() == 1_500


async def test_in_an_event_loop(app: Holdfast, connect: Connect, ship: Any) -> None:
    connection = connect()
    connection.execute(WRITE_ORDER)
    await ship.options(connection=connection).aenqueue("tea")
    await app.aenqueue_many([ship.job("cake")], connection=connection)
    assert await app.acounts() == []
    connection.commit()
    [counts] = await app.acounts()
    assert counts.ready == 2


def test_the_callers_row_factory_stays(connect: Connect, ship: Any, seen: Seen) -> None:
    connection = connect()
    connection.row_factory = sqlite3.Row
    ship.options(connection=connection).enqueue("tea")
    assert isinstance(connection.execute(COUNT_ORDERS).fetchone(), sqlite3.Row)
    connection.commit()
    assert seen.jobs() == 1


def test_several_jobs_and_keys_in_one_transaction(connect: Connect, ship: Any, seen: Seen) -> None:
    connection = connect()
    keyed = ship.options(connection=connection, key="k")
    first = keyed.enqueue("tea")
    again = keyed.enqueue("tea")
    assert (again.id, again.created) == (first.id, False)
    with pytest.raises(KeyConflict):
        keyed.enqueue("coffee")
    connection.execute(WRITE_ORDER)
    connection.commit()
    assert seen.everything() == (1, 1, 1)


def test_partly_refused_on_a_connection(app: Holdfast, connect: Connect, ship: Any, seen: Seen) -> None:
    connection = connect()
    keyed = ship.options(key="k")
    with pytest.raises(PartlyRefused) as caught:
        app.enqueue_many([keyed.job("tea"), keyed.job("coffee"), ship.job("cake")], connection=connection)
    assert list(caught.value.refused) == [1]
    connection.commit()
    assert (seen.jobs(), seen.keys()) == (2, 1)


def test_a_full_queue_leaves_the_callers_transaction_alone(path: Path, connect: Connect) -> None:
    app = Holdfast(SqliteStore(path), settings=Settings(queues=QueueSettings(max_depth=1)))
    app.open()

    @app.task
    def ship(what: str) -> None: ...

    connection = connect()
    connection.execute(WRITE_ORDER)
    ship.options(connection=connection).enqueue("tea")
    with pytest.raises(QueueFull):
        ship.options(connection=connection, key="k").enqueue("coffee")
    connection.commit()
    assert Seen(app, path).everything() == (1, 1, 0)
    app.close()


def test_a_store_that_opens_inside_the_callers_transaction(path: Path, connect: Connect, seen: Seen) -> None:
    late = Holdfast(SqliteStore(path, timeout=0.3))  # the schema is there already, so nothing has to be written first

    @late.task(name="ship")
    def ship_late(what: str) -> None: ...

    connection = connect()
    connection.execute(WRITE_ORDER)
    ship_late.options(connection=connection).enqueue("tea")
    connection.commit()
    assert seen.everything() == (1, 1, 0)
    late.close()


def test_an_insert_that_fails_leaves_nothing_in_the_callers_transaction(
    connect: Connect, ship: Any, seen: Seen
) -> None:
    connection = connect()
    connection.execute("CREATE TRIGGER broken BEFORE INSERT ON holdfast_live BEGIN SELECT RAISE(ABORT, 'no'); END")
    connection.execute(WRITE_ORDER)
    with pytest.raises(StoreUnavailable):
        ship.options(connection=connection, key="k").enqueue("tea")
    connection.commit()
    assert seen.everything() == (1, 0, 0)  # not even the key: it would stand for a job that does not exist


# Connections that cannot share.


def test_autocommit_without_begin(connect: Connect, ship: Any, seen: Seen) -> None:
    connection = connect(isolation_level=None)
    with pytest.raises(ForeignConnection, match="execute BEGIN first"):
        ship.options(connection=connection, key="k").enqueue("tea")
    assert not connection.in_transaction
    assert seen.everything() == (0, 0, 0)
    connection.execute("BEGIN")
    assert ship.options(connection=connection, key="k").enqueue("tea").created
    connection.execute("COMMIT")
    assert seen.jobs() == 1


@pytest.mark.parametrize("where", ["other.db", ":memory:", ""])
def test_a_connection_to_another_database(tmp_path: Path, ship: Any, seen: Seen, where: str) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / where if where == "other.db" else where)) as connection:
        with pytest.raises(
            ForeignConnection, match="can only be part of a transaction on the store's own file"
        ) as caught:
            ship.options(connection=connection, key="k").enqueue("tea")
        assert ("other.db" if where == "other.db" else "in memory") in str(caught.value)
        assert not connection.in_transaction
        assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    assert seen.everything() == (0, 0, 0)


@pytest.mark.parametrize("thing", [object(), "sqlite:///business.db", 5, True, sqlite3])
def test_what_is_no_connection(app: Holdfast, ship: Any, seen: Seen, thing: Any) -> None:
    for call in (
        lambda: ship.options(connection=thing, key="k").enqueue("tea"),
        lambda: asyncio.run(ship.options(connection=thing, key="k").aenqueue("tea")),
        lambda: app.enqueue_many([ship.options(key="k").job("tea")], connection=thing),
    ):
        with pytest.raises(ForeignConnection, match=r"pass a sqlite3\.Connection, or a SQLAlchemy Session"):
            call()
    assert seen.everything() == (0, 0, 0)


def test_a_closed_connection(connect: Connect, ship: Any, seen: Seen) -> None:
    connection = connect()
    connection.close()
    with pytest.raises((ForeignConnection, StoreUnavailable)):
        ship.options(connection=connection, key="k").enqueue("tea")
    assert seen.everything() == (0, 0, 0)


async def test_another_driver(ship: Any, path: Path) -> None:
    import aiosqlite

    async with aiosqlite.connect(path) as connection:
        with pytest.raises(ForeignConnection, match="aiosqlite"):
            await ship.options(connection=connection).aenqueue("tea")


# SQLAlchemy.


@pytest.fixture
def engine(path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{path}")
    yield engine
    engine.dispose()


@pytest.fixture
async def async_engine(path: Path) -> AsyncIterator[AsyncEngine]:
    engine = create_async_engine(f"sqlite+aiosqlite:///{path}")
    yield engine
    await engine.dispose()


Begin = Callable[[Engine], Any]
SHAPES: list[Begin] = [Session, Engine.connect]


@pytest.mark.parametrize("begin", SHAPES, ids=["Session", "Connection"])
@pytest.mark.parametrize("order_first", [True, False])
def test_sqlalchemy(engine: Engine, ship: Any, seen: Seen, begin: Begin, order_first: bool) -> None:
    for commit in (False, True):
        with begin(engine) as shared:
            if order_first:
                shared.execute(text(WRITE_ORDER))
            job = ship.options(connection=shared, key="k").enqueue("tea")
            if not order_first:
                shared.execute(text(WRITE_ORDER))
            assert job.created
            assert seen.everything() == (0, 0, 0)
            if commit:
                shared.commit()
            else:
                shared.rollback()
        assert seen.everything() == ((1, 1, 1) if commit else (0, 0, 0))


def test_sqlalchemy_many(app: Holdfast, engine: Engine, ship: Any, seen: Seen) -> None:
    with Session(engine) as session, session.begin():
        app.enqueue_many((ship.job(str(n)) for n in range(1_200)), connection=session)
        assert seen.jobs() == 0
    assert seen.jobs() == 1_200


def test_sqlalchemy_business_error_undoes_the_job(engine: Engine, ship: Any, seen: Seen) -> None:
    def order() -> None:
        with Session(engine) as session, session.begin():
            session.execute(text(WRITE_ORDER))
            ship.options(connection=session, key="k").enqueue("tea")
            raise RuntimeError("changed my mind")

    with pytest.raises(RuntimeError, match="changed my mind"):
        order()
    assert seen.everything() == (0, 0, 0)


def test_sqlalchemy_in_autocommit(engine: Engine, ship: Any, seen: Seen) -> None:
    with (
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(ForeignConnection, match="execute BEGIN first"),
    ):
        ship.options(connection=connection).enqueue("tea")
    assert seen.jobs() == 0


def test_sqlalchemy_on_another_file(tmp_path: Path, ship: Any, seen: Seen) -> None:
    other = create_engine(f"sqlite:///{tmp_path}/other.db")
    with Session(other) as session, pytest.raises(ForeignConnection, match=r"other\.db"):
        ship.options(connection=session, key="k").enqueue("tea")
    other.dispose()
    assert seen.everything() == (0, 0, 0)


AsyncBegin = Callable[[AsyncEngine], Any]
ASYNC_SHAPES: list[AsyncBegin] = [AsyncSession, AsyncEngine.connect]


@pytest.mark.parametrize("begin", ASYNC_SHAPES, ids=["AsyncSession", "AsyncConnection"])
@pytest.mark.parametrize("order_first", [True, False])
async def test_sqlalchemy_asyncio(
    app: Holdfast, async_engine: AsyncEngine, ship: Any, begin: AsyncBegin, order_first: bool, path: Path
) -> None:
    seen = Seen(app, path)
    for commit in (False, True):
        async with begin(async_engine) as shared:
            if order_first:
                await shared.execute(text(WRITE_ORDER))
            job = await ship.options(connection=shared, key="k").aenqueue("tea")
            if not order_first:
                await shared.execute(text(WRITE_ORDER))
            assert job.created
            assert await asyncio.to_thread(seen.everything) == (0, 0, 0)
            await (shared.commit() if commit else shared.rollback())
        assert await asyncio.to_thread(seen.everything) == ((1, 1, 1) if commit else (0, 0, 0))


async def test_sqlalchemy_asyncio_many(app: Holdfast, async_engine: AsyncEngine, ship: Any) -> None:
    async with AsyncSession(async_engine) as session, session.begin():
        handles = await app.aenqueue_many((ship.job(str(n)) for n in range(1_200)), connection=session)
        assert len(handles) == 1_200
        assert await app.acounts() == []
    [counts] = await app.acounts()
    assert counts.ready == 1_200


async def test_sqlalchemy_asyncio_on_another_file(app: Holdfast, tmp_path: Path, ship: Any) -> None:
    other = create_async_engine(f"sqlite+aiosqlite:///{tmp_path}/other.db")
    async with AsyncSession(other) as session:
        with pytest.raises(ForeignConnection, match=r"other\.db"):
            await ship.options(connection=session).aenqueue("tea")
    await other.dispose()
    assert await app.acounts() == []


async def test_an_async_session_belongs_to_its_loop(async_engine: AsyncEngine, ship: Any) -> None:
    async with AsyncSession(async_engine) as session:
        with pytest.raises(ForeignConnection, match=r"\.AsyncSession belongs to an event loop: use `await aenqueue"):
            await asyncio.to_thread(ship.options(connection=session).enqueue, "tea")
    gc.collect()  # and no coroutine was left behind that nobody awaits


async def test_an_async_session_has_nothing_to_share_with_memory(async_engine: AsyncEngine) -> None:
    app = Holdfast("memory://")

    @app.task
    def ship(what: str) -> None: ...

    async with AsyncSession(async_engine) as session:
        with pytest.raises(ForeignConnection, match="memory store has no transactions"):
            await ship.options(connection=session).aenqueue("tea")
    assert await app.acounts() == []


def test_a_session_has_nothing_to_share_with_memory(engine: Engine) -> None:
    app = Holdfast("memory://")

    @app.task
    def ship(what: str) -> None: ...

    with Session(engine) as session, pytest.raises(ForeignConnection, match="memory store has no transactions"):
        ship.options(connection=session).enqueue("tea")
    assert app.counts() == []
    app.close()


# Settling in the handler's own transaction.


def test_settle_and_commit(app: Holdfast, connection: sqlite3.Connection, ship: Any, seen: Seen) -> None:
    job = ship.enqueue("tea")
    connection.rollback()  # the explicit one has begun too early to see the claim
    claimed = asyncio.run(take(app.store))
    if connection.isolation_level is None:
        connection.execute("BEGIN")
    connection.execute(WRITE_ORDER)
    assert app.store.apply_on(connection, [move_for(claimed, Succeeded(b'"done"'))]) == [Applied.APPLIED]
    assert job.refresh().state is State.IN_FLIGHT
    assert seen.orders() == 0
    connection.commit()
    assert (job.result(timeout=0), seen.orders()) == ("done", 1)


def test_settle_and_roll_back(app: Holdfast, connect: Connect, ship: Any, seen: Seen) -> None:
    job = ship.enqueue("tea")
    claimed = asyncio.run(take(app.store))
    connection = connect()
    connection.execute(WRITE_ORDER)
    assert app.store.apply_on(connection, [move_for(claimed, Succeeded(b'"done"'))]) == [Applied.APPLIED]
    connection.rollback()
    assert (job.refresh().state, seen.orders()) == (State.IN_FLIGHT, 0)
    assert asyncio.run(app.store.apply([move_for(claimed, Succeeded(b'"again"'))])) == [Applied.APPLIED]
    assert job.result(timeout=0) == "again"


@pytest.mark.parametrize("begin", SHAPES, ids=["Session", "Connection"])
def test_settle_with_sqlalchemy(app: Holdfast, engine: Engine, ship: Any, seen: Seen, begin: Begin) -> None:
    job = ship.enqueue("tea")
    claimed = asyncio.run(take(app.store))
    with begin(engine) as shared:
        shared.execute(text(WRITE_ORDER))
        assert app.store.apply_on(shared, [move_for(claimed, Succeeded(b'"done"'))]) == [Applied.APPLIED]
        shared.commit()
    assert (job.result(timeout=0), seen.orders()) == ("done", 1)


async def test_settle_with_an_async_session(app: Holdfast, async_engine: AsyncEngine, ship: Any, path: Path) -> None:
    job = await ship.aenqueue("tea")
    claimed = await take(app.store)
    move = move_for(claimed, Succeeded(b'"done"'))
    async with AsyncSession(async_engine) as session:
        await session.execute(text(WRITE_ORDER))
        assert await app.store.aapply_on(session, [move]) == [Applied.APPLIED]
        await session.commit()
    assert await job.aresult(timeout=0) == "done"
    assert Seen(app, path).orders() == 1


def test_a_stale_lease_says_so_and_the_caller_can_roll_back(
    app: Holdfast, connect: Connect, ship: Any, seen: Seen
) -> None:
    job = ship.enqueue("tea")
    claimed = asyncio.run(take(app.store))
    assert asyncio.run(app.store.close_session(SESSION))
    connection = connect()
    connection.execute(WRITE_ORDER)
    assert app.store.apply_on(connection, [move_for(claimed, Succeeded(b'"late"'))]) == [Applied.STALE]
    connection.rollback()
    assert (job.refresh().state, seen.orders()) == (State.IN_FLIGHT, 0)


def test_a_settled_job_is_not_settled_again(app: Holdfast, connect: Connect, ship: Any, seen: Seen) -> None:
    job = ship.enqueue("tea")
    claimed = asyncio.run(finish(app.store, Succeeded(b'"first"')))
    connection = connect()
    assert app.store.apply_on(connection, [move_for(claimed, Succeeded(b'"second"'))]) == [Applied.ALREADY]
    connection.commit()
    assert job.result(timeout=0) == "first"


def test_settle_on_a_foreign_connection(app: Holdfast, ship: Any, seen: Seen) -> None:
    job = ship.enqueue("tea")
    claimed = asyncio.run(take(app.store))
    with contextlib.closing(sqlite3.connect(":memory:")) as connection, pytest.raises(ForeignConnection):
        app.store.apply_on(connection, [move_for(claimed, Succeeded(b"1"))])
    assert job.refresh().state is State.IN_FLIGHT


# Waking up, and waiting for others.


async def test_a_worker_is_woken_by_the_callers_commit(app: Holdfast, connect: Connect, ship: Any) -> None:
    connection = connect()
    woken = asyncio.Event()

    async def listen() -> None:
        async for _ in app.store.wakeups(["default"]):
            woken.set()

    listening = asyncio.create_task(listen())
    while not woken.is_set():  # until the store watches the file
        connection.execute(WRITE_ORDER)
        connection.commit()
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.05)
    woken.clear()
    await ship.options(connection=connection).aenqueue("tea")
    await asyncio.sleep(0.05)
    assert not woken.is_set()
    connection.commit()
    await asyncio.wait_for(woken.wait(), 5)
    assert (await take(app.store)).payload == b'{"what":"tea"}'
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)


def test_while_another_writer_holds_the_file(app: Holdfast, connect: Connect, ship: Any, seen: Seen) -> None:
    other = connect(isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    other.execute(WRITE_ORDER)
    connection = connect()
    for call in (
        lambda: ship.options(key="k").enqueue("tea"),
        lambda: asyncio.run(ship.options(key="k").aenqueue("tea")),
        lambda: app.enqueue_many([ship.options(key="k").job("tea")]),
        lambda: ship.options(connection=connection, key="k").enqueue("tea"),
    ):
        with pytest.raises(StoreUnavailable, match="try again"):
            call()
    assert app.counts() == []  # reading goes on
    assert not connection.in_transaction
    other.execute("COMMIT")
    assert seen.everything() == (1, 0, 0)
    assert ship.options(connection=connection, key="k").enqueue("tea").created
    connection.commit()
    assert seen.everything() == (1, 1, 1)


def test_a_caller_that_holds_the_file_makes_others_wait_not_fail(
    path: Path, connect: Connect, ship: Any, seen: Seen
) -> None:
    connection = connect(check_same_thread=False)
    ship.options(connection=connection).enqueue("tea")
    timer = threading.Timer(0.05, connection.commit)
    timer.start()
    assert ship.enqueue("coffee").created
    timer.join()
    assert seen.jobs() == 2


def test_a_snapshot_that_has_become_old(connect: Connect, ship: Any, seen: Seen) -> None:
    connection = connect(isolation_level=None)
    connection.execute("BEGIN")
    connection.execute(COUNT_ORDERS).fetchone()
    ship.enqueue("first")
    with pytest.raises(StoreUnavailable):
        ship.options(connection=connection, key="k").enqueue("second")
    connection.execute("ROLLBACK")
    assert (seen.jobs(), seen.keys()) == (1, 0)


async def test_an_async_connection_is_typed_as_it_is(async_engine: AsyncEngine, ship: Any, app: Holdfast) -> None:
    async with async_engine.begin() as connection:
        assert isinstance(connection, AsyncConnection)
        await ship.options(connection=connection).aenqueue("tea")
    [counts] = await app.acounts()
    assert counts.ready == 1


# What a first statement of ours must not do.


def test_a_core_connection_whose_first_statement_is_ours(engine: Engine, ship: Any, seen: Seen) -> None:
    with engine.connect() as connection:
        ship.options(connection=connection).enqueue("tea")
        connection.commit()
    assert seen.jobs() == 1
    with engine.connect() as connection:
        ship.options(connection=connection).enqueue("tea")
        connection.rollback()
    assert seen.jobs() == 1


async def test_an_async_core_connection_whose_first_statement_is_ours(
    async_engine: AsyncEngine, ship: Any, app: Holdfast
) -> None:
    async with async_engine.connect() as connection:
        await ship.options(connection=connection).aenqueue("tea")
        await connection.commit()
    [counts] = await app.acounts()
    assert counts.ready == 1


def test_a_refusal_does_not_leave_the_file_locked(connect: Connect, ship: Any, seen: Seen) -> None:
    ship.options(key="k").enqueue("tea")
    connection = connect()
    with pytest.raises(KeyConflict):
        ship.options(connection=connection, key="k").enqueue("coffee")
    assert not connection.in_transaction
    ship.enqueue("milk")  # nobody waits for a transaction that nobody knows of
    assert seen.jobs() == 2


def test_a_refusal_leaves_the_callers_own_transaction_open(connect: Connect, ship: Any, seen: Seen) -> None:
    ship.options(key="k").enqueue("tea")
    connection = connect()
    connection.execute(WRITE_ORDER)
    with pytest.raises(KeyConflict):
        ship.options(connection=connection, key="k").enqueue("coffee")
    connection.commit()
    assert seen.everything() == (1, 1, 1)


def test_a_replaced_file_is_noticed_on_a_callers_connection(connect: Connect, ship: Any, path: Path) -> None:
    connection = connect()
    copy = path.with_name("copy.db")
    with contextlib.closing(sqlite3.connect(copy)) as backup:
        connection.backup(backup)
    copy.rename(path)
    with pytest.raises(StoreReplaced):
        ship.options(connection=connection).enqueue("tea")


def test_text_in_another_form_is_refused(connect: Connect, ship: Any, seen: Seen) -> None:
    connection = connect()
    connection.text_factory = bytes
    with pytest.raises(ForeignConnection, match="text_factory"):
        ship.options(connection=connection).enqueue("tea")
    with pytest.raises(ForeignConnection, match="no kind of connection"):
        ship.options(connection=connect().cursor()).enqueue("tea")
    assert seen.jobs() == 0


def test_a_closed_sqlalchemy_connection_is_refused_clearly(engine: Engine, ship: Any, seen: Seen) -> None:
    with engine.connect() as connection:
        pass
    with pytest.raises(ForeignConnection, match="cannot be used here"):
        ship.options(connection=connection).enqueue("tea")
    assert seen.jobs() == 0
