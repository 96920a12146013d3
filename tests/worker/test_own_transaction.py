"""A handler that settles its job in its own transaction: the effect and the success are one, or neither is."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from holdfast import StaleLease, State, current
from holdfast.events import JobSettled, SettleRefused
from tests.worker import shop as importable
from tests.worker.bench import PATIENCE, Bench, Heard, ended, failed, service_of, stored
from tests.worker.shop import AT_ONCE, STORE, Shop

INSERT = "INSERT INTO orders VALUES (:name)"


@pytest.fixture
def engine() -> str:
    """Memory has no transactions: see the last test."""
    return "sqlite"


@pytest.fixture
def path(bench: Bench) -> Path:
    """The file of the store, with a table of the business in it."""
    with contextlib.closing(sqlite3.connect(bench.path)) as db:
        db.execute("CREATE TABLE orders (name TEXT)")
        db.commit()
    return bench.path


@pytest.fixture
def database(path: Path) -> Iterator[Engine]:
    database = create_engine(f"sqlite:///{path}")
    yield database
    database.dispose()


def orders(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as db:
        return sorted(name for (name,) in db.execute("SELECT name FROM orders"))


def test_the_commit_of_the_handler_is_the_success_of_the_job(bench: Bench, path: Path, heard: Heard) -> None:
    app = bench.app()
    committed, let_go = threading.Event(), threading.Event()

    @app.task
    def order(name: str) -> str:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(INSERT, {"name": name})
            current().succeed_on(db, f"{name} is ordered")
            db.commit()
        committed.set()
        let_go.wait(PATIENCE)
        return "what it returns does not count any more"

    worker = bench.work(app)
    job = order.enqueue("tea")
    assert committed.wait(PATIENCE)
    assert stored(job).state is State.SUCCEEDED  # though the handler has not returned
    let_go.set()
    assert job.result(PATIENCE) == "tea is ordered"
    heard.wait_for(JobSettled)
    assert orders(path) == ["tea"]
    assert stored(job).attempt == 1
    assert stored(job).result == b'"tea is ordered"'
    assert service_of(worker).settler.counts == {"succeeded": 1}


def test_with_a_sqlalchemy_session_it_is_the_same(bench: Bench, path: Path, database: Engine) -> None:
    app = bench.app()

    @app.task
    def order(name: str) -> str:
        with Session(database) as session:
            session.execute(text(INSERT), {"name": name})
            current().succeed_on(session, "in the transaction")
            session.commit()
        return "by return"

    bench.work(app)
    jobs = [order.enqueue(name) for name in ("tea", "coffee", "milk")]
    assert [job.result(PATIENCE) for job in jobs] == ["in the transaction"] * 3
    assert orders(path) == ["coffee", "milk", "tea"]


def test_with_an_asynchronous_session_it_is_the_same(bench: Bench, path: Path) -> None:
    app = bench.app()
    database = create_async_engine(f"sqlite+aiosqlite:///{path}")

    @app.task
    async def order(name: str) -> str:
        async with AsyncSession(database) as session:
            await session.execute(text(INSERT), {"name": name})
            await current().asucceed_on(session, "in the transaction")
            await session.commit()
        await database.dispose()
        return "by return"

    @app.task
    async def order_plainly(name: str) -> str:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(INSERT, {"name": name})
            await current().asucceed_on(db, "plainly")
            db.commit()
        return "by return"

    bench.work(app)
    assert order.enqueue("tea").result(PATIENCE) == "in the transaction"
    assert order_plainly.enqueue("milk").result(PATIENCE) == "plainly"
    assert orders(path) == ["milk", "tea"]


def test_an_isolated_handler_does_it_in_its_own_process(
    bench: Bench, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STORE, f"sqlite:///{path}")
    shop = Shop(bench.store(), on_event=bench.heard)
    monkeypatch.setattr(importable, "app", bench.keep(shop.app))
    bench.work(shop.app)
    assert shop.write_and_succeed.enqueue(str(path), "tea").result(PATIENCE) == "in the transaction"
    assert orders(path) == ["tea"]


def test_after_a_rollback_the_job_is_tried_again_and_the_effect_is_there_once(
    bench: Bench, path: Path, database: Engine
) -> None:
    app = bench.app()

    @app.task(backoff=AT_ONCE)
    def order(name: str, plainly: bool) -> None:
        first = current().attempt == 1
        if plainly:
            with contextlib.closing(sqlite3.connect(path)) as db:
                db.execute(INSERT, {"name": name})
                current().succeed_on(db)
                if first:
                    db.rollback()
                    raise ValueError("changed my mind")
                db.commit()
        else:
            with Session(database) as session, session.begin():
                session.execute(text(INSERT), {"name": name})
                current().succeed_on(session)
                if first:
                    raise ValueError("changed my mind")

    bench.work(app)
    jobs = [order.enqueue("tea", True), order.enqueue("milk", False)]
    for job in jobs:
        assert ended(job).state is State.SUCCEEDED
        assert (stored(job).attempt, stored(job).failures) == (2, 1)
    assert orders(path) == ["milk", "tea"]


def test_a_handler_that_lost_its_lease_is_told_and_its_effect_is_not_there(
    bench: Bench, path: Path, heard: Heard
) -> None:
    app = bench.app()
    said: list[str] = []

    @app.task(max_retries=0)
    def order(name: str) -> None:
        asyncio.run(bench.store().close_session(current().lease.session_id))
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(INSERT, {"name": name})
            try:
                current().succeed_on(db)
            except StaleLease as error:
                said.append(str(error))
                db.rollback()
                raise

    bench.work(app, keepers=False)
    job = order.enqueue("tea")
    refused = heard.wait_for(SettleRefused)
    assert (refused.job_id, refused.answer) == (job.id, "stale")
    assert said == [f"job {job.id} is no longer this worker's (stale): roll the transaction back"]
    assert orders(path) == []
    assert stored(job).state is State.IN_FLIGHT  # a keeper will bring it back


def test_an_error_after_the_commit_does_not_undo_the_success(bench: Bench, path: Path, heard: Heard) -> None:
    app = bench.app()

    @app.task
    def order(name: str) -> None:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute(INSERT, {"name": name})
            current().succeed_on(db)
            db.commit()
        raise ValueError("too late")

    bench.work(app)
    job = order.enqueue("tea")
    assert heard.wait_for(SettleRefused).job_id == job.id
    assert ended(job).state is State.SUCCEEDED
    assert orders(path) == ["tea"]


def test_memory_says_that_it_has_no_transactions(tmp_path: Path) -> None:
    bench = Bench("memory", tmp_path)
    app = bench.app()

    @app.task(max_retries=0)
    def order() -> None:
        with contextlib.closing(sqlite3.connect(tmp_path / "elsewhere.db")) as db:
            current().succeed_on(db)

    try:
        bench.work(app)
        _, kind, message = failed(order.enqueue())
        assert kind == "ForeignConnection"
        assert "the memory store has no transactions" in message
    finally:
        bench.close()
