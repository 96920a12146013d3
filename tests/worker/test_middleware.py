"""Middleware: what is opened for one job, in which order, that it is closed whatever happens, and what it may spoil."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import CurrentJob, JobHandle, Retry, State, Task, current
from holdfast.worker.handling import Middleware
from tests.worker.bench import PATIENCE, Bench, ended, failed, wait_until
from tests.worker.shop import AT_ONCE


class Diary:
    """Who was opened and closed, and with what error."""

    def __init__(self) -> None:
        self.entries: list[str] = []

    def plain(self, name: str) -> Middleware:
        @contextmanager
        def middleware(job: CurrentJob) -> Iterator[None]:
            self.entries.append(f"{name} in")
            try:
                yield
            except BaseException as error:
                self.entries.append(f"{name} sees {type(error).__name__}")
                raise
            finally:
                self.entries.append(f"{name} out")

        return middleware

    def asynchronous(self, name: str) -> Middleware:
        @asynccontextmanager
        async def middleware(job: CurrentJob) -> AsyncIterator[None]:
            await asyncio.sleep(0)
            self.entries.append(f"{name} in")
            try:
                yield
            finally:
                await asyncio.sleep(0)
                self.entries.append(f"{name} out")

        return middleware


@pytest.fixture
def diary() -> Diary:
    return Diary()


def test_middleware_is_entered_in_order_and_left_in_reverse(bench: Bench, diary: Diary) -> None:
    app = bench.app(middleware=[diary.plain("first"), diary.asynchronous("second"), diary.plain("third")])

    @app.task
    async def handle() -> str:
        diary.entries.append("handler")
        return "done"

    bench.work(app)
    assert handle.enqueue().result(PATIENCE) == "done"
    assert diary.entries == [
        "first in", "second in", "third in", "handler", "third out", "second out", "first out",
    ]  # fmt: skip


def test_middleware_around_a_plain_function_runs_on_its_thread(bench: Bench) -> None:
    seen: list[str] = []

    @contextmanager
    def middleware(job: CurrentJob) -> Iterator[None]:
        seen.append(threading.current_thread().name)
        yield
        seen.append(threading.current_thread().name)

    app = bench.app(middleware=[middleware])

    @app.task
    def handle() -> str:
        return threading.current_thread().name

    bench.work(app)
    name = handle.enqueue().result(PATIENCE)
    assert seen == [name, name]


@pytest.mark.parametrize("is_async", [True, False])
def test_middleware_sees_the_error_and_is_closed(bench: Bench, diary: Diary, is_async: bool) -> None:
    app = bench.app(middleware=[diary.plain("outer"), diary.plain("inner")])

    @app.task(max_retries=0)
    async def fall() -> None:
        raise ValueError("down")

    @app.task(max_retries=0)
    def fall_on_a_thread() -> None:
        raise ValueError("down")

    bench.work(app)
    task: Task[[], None] = fall if is_async else fall_on_a_thread
    assert failed(task.enqueue()) == ("exhausted", "ValueError", "down")
    assert diary.entries == [
        "outer in", "inner in", "inner sees ValueError", "inner out", "outer sees ValueError", "outer out",
    ]  # fmt: skip


def test_middleware_is_closed_when_the_handler_times_out(bench: Bench, diary: Diary) -> None:
    app = bench.app(middleware=[diary.asynchronous("session")])

    @app.task(timeout=0.05, max_retries=0)
    async def slow() -> None:
        await asyncio.sleep(20)

    bench.work(app)
    assert failed(slow.enqueue())[1] == "TimeoutError"
    assert diary.entries == ["session in", "session out"]


def test_what_a_handler_raises_to_steer_its_job_passes_through(bench: Bench, diary: Diary) -> None:
    app = bench.app(middleware=[diary.plain("outer")])

    @app.task
    async def busy() -> int:
        if current().attempt == 1:
            raise Retry(after=0)
        return current().attempt

    bench.work(app)
    assert busy.enqueue().result(PATIENCE) == 2
    assert diary.entries == ["outer in", "outer sees Retry", "outer out", "outer in", "outer out"]


# Resources.


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Engine]:
    engine = create_engine(f"sqlite:///{tmp_path / 'business.db'}")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE orders (name TEXT)"))
    yield engine
    engine.dispose()


def orders(database: Engine) -> list[str]:
    with database.connect() as connection:
        return sorted(connection.execute(text("SELECT name FROM orders")).scalars())


def test_every_job_gets_a_fresh_database_session_which_is_closed_after_it(bench: Bench, database: Engine) -> None:
    sessions: list[Session] = []

    @contextmanager
    def with_session(job: CurrentJob) -> Iterator[None]:
        with Session(database) as session, session.begin():
            sessions.append(session)
            job.state["db"] = session
            yield

    app = bench.app(middleware=[with_session])

    @app.task(max_retries=0)
    def order(name: str, fail: bool = False) -> None:
        session: Session = current().state["db"]
        session.execute(text("INSERT INTO orders VALUES (:name)"), {"name": name})
        if fail:
            raise ValueError("changed my mind")

    bench.work(app, concurrency=1)
    jobs = [order.enqueue("tea"), order.enqueue("coffee", fail=True), order.enqueue("milk")]
    assert [ended(job).state for job in jobs] == [State.SUCCEEDED, State.FAILED, State.SUCCEEDED]
    assert orders(database) == ["milk", "tea"]
    assert len({id(session) for session in sessions}) == 3
    assert not any(session.in_transaction() for session in sessions)
    assert database.pool.checkedout() == 0  # type: ignore[attr-defined]


def test_a_coroutine_gets_an_asynchronous_database_session(bench: Bench, database: Engine) -> None:
    engine = create_async_engine(str(database.url).replace("sqlite://", "sqlite+aiosqlite://"))

    @asynccontextmanager
    async def with_session(job: CurrentJob) -> AsyncIterator[None]:
        async with AsyncSession(engine) as session, session.begin():
            job.state["db"] = session
            yield

    app = bench.app(middleware=[with_session])

    @app.task
    async def order(name: str) -> None:
        await current().state["db"].execute(text("INSERT INTO orders VALUES (:name)"), {"name": name})

    @app.task
    async def hang_up() -> None:
        await engine.dispose()

    bench.work(app)
    for job in [order.enqueue(name) for name in ("tea", "coffee")]:
        job.result(PATIENCE)
    assert orders(database) == ["coffee", "tea"]
    hang_up.enqueue().result(PATIENCE)


def test_the_room_for_resources_is_a_jobs_own(bench: Bench) -> None:
    @contextmanager
    def leave_something(job: CurrentJob) -> Iterator[None]:
        assert not job.state
        job.state["id"] = job.id
        yield

    app = bench.app(middleware=[leave_something])

    @app.task(max_retries=0)
    async def handle() -> str:
        current().state["more"] = 1
        return str(current().state["id"])

    bench.work(app, concurrency=1)
    for job in [handle.enqueue() for _ in range(3)]:
        assert job.result(PATIENCE) == job.id


# What middleware may spoil.


class Raising:
    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        if self._where == "enter":
            raise LookupError("no session")

    def __exit__(self, *exc: object) -> None:
        if self._where == "exit":
            raise LookupError("no commit")


def raising(where: str) -> Middleware:
    def middleware(job: CurrentJob) -> AbstractContextManager[Any]:
        if where == "call":
            raise LookupError("no database")
        return Raising(where)

    return middleware


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize(
    ("where", "message", "ran"), [("call", "no database", 0), ("enter", "no session", 0), ("exit", "no commit", 1)]
)
def test_middleware_that_raises_fails_the_job_and_closes_what_was_open(
    bench: Bench, diary: Diary, is_async: bool, where: str, message: str, ran: int
) -> None:
    app = bench.app(middleware=[diary.plain("outer"), raising(where)])

    @app.task(max_retries=0)
    async def handle() -> None:
        bench.tally.runs["handler"] += 1

    @app.task(max_retries=0)
    def handle_on_a_thread() -> None:
        bench.tally.runs["handler"] += 1

    bench.work(app)
    task: Task[[], None] = handle if is_async else handle_on_a_thread
    assert failed(task.enqueue()) == ("exhausted", "LookupError", message)
    assert bench.tally.runs["handler"] == ran
    assert diary.entries == ["outer in", "outer sees LookupError", "outer out"]


@pytest.mark.parametrize("is_async", [True, False])
def test_middleware_that_swallows_the_error_does_not_make_a_success_of_it(bench: Bench, is_async: bool) -> None:
    @contextmanager
    def hush(job: CurrentJob) -> Iterator[None]:
        try:
            yield
        except ValueError:
            bench.tally.runs["swallowed"] += 1

    app = bench.app(middleware=[hush])

    @app.task(max_retries=1, backoff=AT_ONCE)
    async def fall() -> None:
        raise ValueError("down")

    @app.task(max_retries=1, backoff=AT_ONCE)
    def fall_on_a_thread() -> None:
        raise ValueError("down")

    bench.work(app)
    task: Task[[], None] = fall if is_async else fall_on_a_thread
    assert failed(task.enqueue()) == (
        "exhausted", "SwallowedError", "a middleware suppressed the error of the handler",
    )  # fmt: skip
    assert bench.tally.runs["swallowed"] == 2


def test_asynchronous_middleware_on_a_plain_function_is_a_clear_error(bench: Bench, diary: Diary) -> None:
    app = bench.app(middleware=[diary.asynchronous("session")])

    @app.task(max_retries=0)
    def plain() -> None: ...

    bench.work(app)
    reason, kind, message = failed(plain.enqueue())
    assert (reason, kind) == ("exhausted", "InvalidOption")
    assert "task plain is a plain function" in message
    assert "let the middleware look at `job.is_async`" in message
    assert diary.entries == []


def test_middleware_can_look_which_kind_of_handler_it_serves(bench: Bench, diary: Diary) -> None:
    plain, asynchronous = diary.plain("plain"), diary.asynchronous("asynchronous")

    def fitting(job: CurrentJob) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any]:
        return asynchronous(job) if job.is_async else plain(job)

    app = bench.app(middleware=[fitting])

    @app.task
    async def handle() -> None: ...

    @app.task
    def handle_on_a_thread() -> None: ...

    bench.work(app)
    handle.enqueue().result(PATIENCE)
    handle_on_a_thread.enqueue().result(PATIENCE)
    assert diary.entries == ["asynchronous in", "asynchronous out", "plain in", "plain out"]


class Both:
    """A resource that can be opened in either way."""

    def __init__(self, entries: list[str]) -> None:
        self._entries = entries

    def __enter__(self) -> None:
        self._entries.append("plainly")

    def __exit__(self, *exc: object) -> None: ...

    async def __aenter__(self) -> None:
        self._entries.append("asynchronously")

    async def __aexit__(self, *exc: object) -> None: ...


def test_a_resource_that_can_be_opened_in_both_ways_is_opened_as_the_handler_needs_it(
    bench: Bench, diary: Diary
) -> None:
    app = bench.app(middleware=[lambda job: Both(diary.entries)])

    @app.task(max_retries=0)
    async def handle() -> None: ...

    @app.task(max_retries=0)
    def handle_on_a_thread() -> None: ...

    bench.work(app)
    handle.enqueue().result(PATIENCE)
    handle_on_a_thread.enqueue().result(PATIENCE)
    assert diary.entries == ["asynchronously", "plainly"]


@pytest.mark.parametrize("is_async", [True, False])
def test_middleware_that_opens_nothing_to_close_is_a_readable_error(bench: Bench, is_async: bool) -> None:
    forgotten: Callable[[CurrentJob], Any] = lambda job: None  # noqa: E731
    app = bench.app(middleware=[forgotten])

    @app.task(max_retries=0)
    async def handle() -> None: ...

    @app.task(max_retries=0)
    def handle_on_a_thread() -> None: ...

    bench.work(app)
    job: JobHandle[None] = (handle if is_async else handle_on_a_thread).enqueue()
    _, kind, message = failed(job)
    assert kind == "TypeError"
    assert "NoneType" in message
    assert "context manager" in message


def test_middleware_that_swallows_the_cancellation_does_not_cost_the_job_an_attempt_at_shutdown(
    bench: Bench,
) -> None:
    begun = threading.Event()

    @contextmanager
    def hush(job: CurrentJob) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError:
            bench.tally.runs["swallowed"] += 1

    app = bench.app(middleware=[hush])

    @app.task(max_retries=0)
    async def slow() -> None:
        begun.set()
        await asyncio.sleep(20)

    worker = bench.work(app, grace=0.05)
    job = slow.enqueue()
    assert begun.wait(PATIENCE)
    worker.stop()
    wait_until(lambda: bench.tally.runs["swallowed"] == 1, "it was cancelled")
    details = job.refresh().details
    assert details is not None
    assert (details.state, details.reason, details.attempt) == (State.READY, "released", 0)
