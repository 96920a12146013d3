"""An application under test has another store, other ports, and nothing else that is different."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

from holdfast import ForeignConnection, Holdfast, InvalidOption, StoreError, current
from holdfast.testing.jobs import Jobs, inline, isolated, jobs_of
from tests.testing import shop
from tests.testing.shop import app


def test_the_store_of_the_application_is_not_opened(jobs: Jobs) -> None:
    shop.welcome.enqueue(1)
    jobs.drain()
    app.open()
    app.close()
    assert app.counts()[0].succeeded == 1


def test_afterwards_everything_is_as_it_was() -> None:
    own = app.store, app.handling
    with isolated(app) as jobs:
        assert (app.store, app.handling) != own
        assert jobs_of(app) is jobs
    assert (app.store, app.handling) == own
    with pytest.raises(StoreError):
        shop.welcome.enqueue(1)


def test_afterwards_everything_is_as_it_was_even_after_an_error() -> None:
    own = app.store
    with pytest.raises(ZeroDivisionError), isolated(app):
        1 / 0  # noqa: B018
    assert app.store is own


def test_a_handle_that_was_made_before_follows(tmp_path: Path) -> None:
    """Options and templates are made once per handle; the store is looked up at each call."""
    local = Holdfast(f"sqlite:///{tmp_path / 'jobs.db'}")
    task = local.task(shop.welcome.spec.function)
    low = task.options(priority="low")
    with local:
        low.enqueue(1)
        with isolated(local) as jobs:
            low.enqueue(2)
            jobs.assert_enqueued(task, times=1, arguments={"user_id": 2}, priority="low")
        low.enqueue(3)
        assert sum(counts.ready for counts in local.counts()) == 2


def test_each_block_is_a_world_of_its_own() -> None:
    with isolated(app) as outer:
        shop.welcome.enqueue(1)
        with isolated(app) as inner:
            assert inner.enqueued() == []
            shop.welcome.enqueue(2)
            assert jobs_of(app) is inner
        assert len(outer.enqueued()) == 1
        assert jobs_of(app) is outer


def test_a_real_worker_on_the_real_clock() -> None:
    with isolated(app, frozen=False) as jobs:
        with app.start_worker():
            job = shop.newsletter.enqueue(21)
            assert job.result(timeout=30) == 42
        jobs.assert_enqueued(shop.newsletter)
        with pytest.raises(InvalidOption, match="real clock"):
            _ = jobs.clock


def test_a_worker_does_not_fit_a_clock_that_stands_still(jobs: Jobs) -> None:
    with pytest.raises(InvalidOption, match="frozen=False"):
        app.start_worker()
    with pytest.raises(InvalidOption, match="frozen=False"):
        app.run_worker()


def test_an_application_is_needed() -> None:
    with pytest.raises(InvalidOption, match="takes a Holdfast application"), isolated("shop.jobs:app"):  # type: ignore[arg-type]
        pass
    at = datetime(2030, 1, 1, tzinfo=UTC)
    with pytest.raises(InvalidOption, match="stands still"), isolated(app, frozen=False, at=at):
        pass


def test_what_a_handler_left_running_ends_with_the_block() -> None:
    local = Holdfast("memory://")
    left: list[Any] = []

    async def go_on() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            left.append("ended")

    @local.task
    async def careless() -> None:
        left.append(asyncio.create_task(go_on()))
        await asyncio.sleep(0)

    with inline(local):
        careless.enqueue()
        assert len(left) == 1
    assert left[1:] == ["ended"]


def test_failures_are_dated_by_the_clock_of_the_test() -> None:
    with isolated(app, at=datetime(2031, 1, 1, tzinfo=UTC)) as jobs:
        job = shop.charge.enqueue(1)
        jobs.drain()
        assert job.refresh().failures[0].at == jobs.clock.now()


# Transactions.


def on_sqlite() -> sqlite3.Connection:
    return sqlite3.connect(":memory:")


def on_sqlalchemy() -> Session:
    return Session(sqlalchemy.create_engine("sqlite://"))


@pytest.mark.parametrize("connect", [on_sqlite, on_sqlalchemy])
def test_a_job_on_a_connection_counts_as_enqueued(jobs: Jobs, connect: Callable[[], sqlite3.Connection]) -> None:
    connection = connect()
    shop.welcome.options(connection=connection).enqueue(1)
    app.enqueue_many([shop.welcome.job(2)], connection=connection)
    connection.close()
    assert [job.on_connection for job in jobs.assert_enqueued(shop.welcome, times=2)] == [True, True]
    assert "on a connection" in str(jobs.enqueued()[0])
    assert len(jobs.drain()) == 2


async def test_a_job_on_an_asynchronous_connection(jobs: Jobs) -> None:
    engine = create_async_engine("sqlite+aiosqlite://")
    async with engine.connect() as connection:
        await shop.welcome.options(connection=connection).aenqueue(1)
        with pytest.raises(ForeignConnection, match="aenqueue"):
            await asyncio.to_thread(shop.welcome.options(connection=connection).enqueue, 1)
    await engine.dispose()
    jobs.assert_enqueued(shop.welcome, times=1)


def test_a_handler_that_settles_on_its_own_connection(jobs: Jobs) -> None:
    job = shop.order_placed.enqueue(5)
    [run] = jobs.drain()
    assert (run.state, run.result) == ("succeeded", {"order": 5})
    assert job.state == "ready"
    assert app.get(job.id).result() == {"order": 5}


def test_a_handler_that_raises_has_not_settled(jobs: Jobs) -> None:
    shop.order_placed.enqueue(-1)
    [run] = jobs.drain()
    assert (run.state, run.reason) == ("ready", "retried")
    assert isinstance(run.error, ValueError)


def test_current_works(jobs: Jobs) -> None:
    local = Holdfast("memory://")
    seen = []

    @local.task(queue="q")
    def look() -> None:
        job = current()
        seen.append((job.id, job.task, job.queue, job.key, job.attempt, job.correlation_id, job.cancelled))

    with isolated(local) as own:
        handle = look.options(key="k", correlation_id="c").enqueue()
        own.drain()
    assert seen == [(handle.id, "look", "q", "k", 1, "c", False)]
