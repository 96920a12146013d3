"""Wake-ups across processes: they come soon, they come only from others, and waiting costs next to nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import cast

import pytest

from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.watcher import Commits, Watcher
from tests.sqlite.helpers import (
    CHILDREN,
    claim,
    eventually,
    finish,
    new_job,
    new_jobs,
    open_session,
    raw,
    run_sql,
    start_child,
)

SOON = 0.5
EVER = 30.0
"""Seconds after which something does not happen any more, on however busy a machine."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, timeout=5)
    yield store
    store.close()


class Waiter:
    """Counts the wake-ups of one store, and when they came."""

    def __init__(self, store: SqliteStore, queue: str = "default") -> None:
        self._store = store
        self._queue = queue
        self.times: list[float] = []

    async def _wait(self) -> None:
        async for _ in self._store.wakeups([self._queue]):
            self.times.append(time.monotonic())

    async def next(self, after: int) -> float:
        """When the first wake-up after so many came."""
        await eventually(lambda: len(self.times) > after)
        return self.times[after]

    async def __aenter__(self) -> Waiter:
        self._task = asyncio.ensure_future(self._wait())
        await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


def watchers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "holdfast-sqlite-watcher"]


def insert_when_told(path: Path, told: Connection) -> None:
    store = SqliteStore(path)
    store._open()
    told.send("ready")
    while told.recv():
        store.insert_blocking([new_job()])
        told.send(time.monotonic())  # one clock for all processes of a machine


@contextlib.asynccontextmanager
async def another_process(path: Path) -> AsyncIterator[Connection]:
    here, there = CHILDREN.Pipe()
    child = start_child(insert_when_told, path, there)
    assert await asyncio.to_thread(here.recv) == "ready"
    yield here
    here.send(False)
    child.join(10)
    here.close()
    there.close()


async def test_an_insert_of_another_process_wakes_soon(store: SqliteStore, path: Path) -> None:
    latencies = []
    async with another_process(path) as other, Waiter(store) as waiter:
        for _ in range(10):
            await asyncio.sleep(0.12)
            seen = len(waiter.times)
            other.send(True)
            written = await asyncio.to_thread(other.recv)
            latencies.append(await waiter.next(seen) - cast(float, written))
    milliseconds = sorted(round(latency * 1000, 1) for latency in latencies)
    print(f"from the commit of another process to the wake-up: {milliseconds} ms")
    assert milliseconds[-1] < SOON * 1000
    assert len(waiter.times) <= 12


async def test_after_a_long_quiet_time_it_still_wakes_soon(store: SqliteStore, path: Path) -> None:
    async with another_process(path) as other, Waiter(store) as waiter:
        await asyncio.sleep(1)
        assert waiter.times == []
        other.send(True)
        written = await asyncio.to_thread(other.recv)
        assert await waiter.next(0) - cast(float, written) < SOON


async def test_a_transaction_of_any_program_wakes_at_its_commit(store: SqliteStore, path: Path) -> None:
    async with Waiter(store) as waiter:
        connection = raw(path)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
        await asyncio.sleep(0.15)
        assert waiter.times == []
        committed = time.monotonic()
        connection.execute("COMMIT")
        assert await waiter.next(0) - committed < SOON
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
        connection.execute("ROLLBACK")
        connection.close()
        await asyncio.sleep(0.15)
        assert len(waiter.times) == 1


async def test_a_commit_between_asking_and_looking_is_not_missed(store: SqliteStore, path: Path) -> None:
    await store.__aenter__()
    for _ in range(20):
        waiting = store.wakeups(["default"])
        first = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0)  # it waits from here on; the watcher has only just begun
        run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
        await asyncio.wait_for(first, EVER)
        await waiting.aclose()  # type: ignore[attr-defined]


async def test_the_first_thing_a_store_does_may_be_to_wait(path: Path) -> None:
    other = SqliteStore(path)
    other._open()
    store = SqliteStore(path)
    async with Waiter(store) as waiter:
        began = time.monotonic()
        other.insert_blocking([new_job()])
        assert await waiter.next(0) - began < SOON
    store.close()
    other.close()


async def test_inserts_of_this_process_wake_at_once(store: SqliteStore) -> None:
    async with Waiter(store) as waiter, Waiter(store, "elsewhere") as bystander:
        await store.insert([new_job()])
        await waiter.next(0)
        await asyncio.to_thread(store.insert_blocking, [new_job()])
        await waiter.next(1)
        await asyncio.sleep(0.1)
        assert (len(waiter.times), bystander.times) == (2, [])


async def test_own_claims_and_settlements_wake_nobody_here(store: SqliteStore) -> None:
    session = await open_session(store)
    await store.insert(new_jobs(30))
    async with Waiter(store) as waiter:
        while jobs := await claim(store, session, limit=3):
            await finish(store, jobs)
            await store.beat(session)
            await store.counts()
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert waiter.times == []


async def test_two_idle_workers_do_not_wake_each_other_for_ever(path: Path) -> None:
    """A claim that finds nothing writes nothing, so it is no news to others."""
    claims = {"one": 0, "two": 0}

    async def work(name: str, store: SqliteStore) -> None:
        session = await open_session(store)
        async for _ in store.wakeups(["default"]):
            claims[name] += 1
            if jobs := await claim(store, session):
                await finish(store, jobs)

    async with SqliteStore(path) as one, SqliteStore(path) as two:
        workers = [asyncio.ensure_future(work("one", one)), asyncio.ensure_future(work("two", two))]
        await asyncio.sleep(0.2)
        await one.insert([new_job()])
        await asyncio.sleep(0.5)
        settled = dict(claims)
        await asyncio.sleep(0.5)
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        assert [count.succeeded for count in await one.counts()] == [1]
    print(f"wake-ups for one job: {settled}")
    assert claims == settled
    assert sum(settled.values()) <= 12


async def test_the_watcher_ends_when_nobody_waits_and_begins_again(store: SqliteStore, path: Path) -> None:
    await eventually(lambda: not watchers())  # of an earlier test
    for _ in range(3):
        async with Waiter(store), Waiter(store) as waiter:
            assert len(watchers()) == 1
            run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
            await waiter.next(0)
        await eventually(lambda: not watchers())


async def test_waiters_that_come_and_go_quickly_are_never_without_a_watcher(store: SqliteStore, path: Path) -> None:
    await store.now()  # the table is there
    for number in range(20):
        async with Waiter(store):
            pass
        await asyncio.sleep((number % 10) * 0.02)  # around the moment at which the watcher gives up
        waiting = store.wakeups(["default"])
        first = asyncio.ensure_future(anext(waiting))
        await asyncio.sleep(0)
        run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
        await asyncio.wait_for(first, EVER)
        await waiting.aclose()  # type: ignore[attr-defined]


async def test_a_waiter_outlives_a_closed_store(store: SqliteStore, path: Path) -> None:
    async with Waiter(store) as waiter:
        await asyncio.to_thread(store.close)
        await asyncio.sleep(0.1)
        assert await store.counts() == []  # opens again
        await asyncio.sleep(0.1)
        seen = len(waiter.times)
        run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
        await waiter.next(seen)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
async def test_a_forked_child_has_a_watcher_of_its_own(store: SqliteStore, path: Path) -> None:
    async def wait_in_child() -> None:
        async with Waiter(store) as waiter:
            run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('t', '{}')")
            await waiter.next(0)

    async with Waiter(store) as waiter:
        pid = os.fork()
        if pid == 0:
            try:
                thread = threading.Thread(target=lambda: asyncio.run(wait_in_child()))
                thread.start()
                thread.join(10)
                os._exit(1 if thread.is_alive() else 0)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1]) == 0
        await waiter.next(0)


async def test_waiting_costs_next_to_nothing(store: SqliteStore) -> None:
    await store.insert(new_jobs(10))
    gc.collect()
    async with Waiter(store) as waiter:
        await asyncio.sleep(0.4)
        used, began = time.process_time(), time.monotonic()
        await asyncio.sleep(3)
        share = (time.process_time() - used) / (time.monotonic() - began)
        print(f"one waiter, nothing to do: {share:.2%} of one core")
        assert waiter.times == []
    assert share < 0.03


async def test_the_watcher_goes_on_after_an_error(
    store: SqliteStore, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store._open()
    look = Watcher._others_committed
    errors = iter([MemoryError(), ValueError("nobody expected it")])

    def fail_at_first(self: Watcher, commits: Callable[[], Commits | None]) -> bool:
        for error in errors:
            raise error
        return look(self, commits)

    monkeypatch.setattr(Watcher, "_others_committed", fail_at_first)
    async with another_process(path) as other, Waiter(store) as waiter:
        await asyncio.sleep(0.1)
        assert next(errors, None) is None
        other.send(True)
        await asyncio.to_thread(other.recv)
        await waiter.next(0)


def test_a_commit_between_a_fork_and_the_next_look_is_seen(store: SqliteStore, path: Path) -> None:
    """The connection is opened again after a fork, and counts the commits of others anew."""
    writer = store._open().writer
    seen = writer.foreign_commits()
    assert seen is not None
    assert writer.foreign_commits() == seen
    writer.before_fork()
    run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('a', '{}')")
    writer.after_fork()
    assert writer.foreign_commits() not in (None, seen)
