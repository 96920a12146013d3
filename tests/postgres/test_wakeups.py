"""Wake-ups across processes: they come soon, they are few, and where none can be heard, polling goes on."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

import psycopg
import pytest

from holdfast import Holdfast, WorkerSettings
from holdfast.failures import Failure
from holdfast.lifecycle import Applied, Lost, Released, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.stores import open_store
from holdfast.stores.postgres import PostgresStore, listener, lookback
from tests.postgres.helpers import (
    CHILDREN,
    HOUR,
    Database,
    claim,
    eventually,
    finish,
    new_job,
    new_jobs,
    open_session,
    raw,
    start_child,
)
from tests.servers import PgBouncerServer

SOON = 1.0
QUIET = 0.25
"""After that long, whatever looks again after a notification has done so."""


class Waiter:
    """Counts the wake-ups of one store, and when they came."""

    def __init__(self, store: PostgresStore, queue: str = "default") -> None:
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

    async def none_within(self, seconds: float) -> bool:
        """Whether it stays quiet."""
        before = len(self.times)
        await asyncio.sleep(seconds)
        return len(self.times) == before

    async def __aenter__(self) -> Waiter:
        self._task = asyncio.ensure_future(self._wait())
        await eventually(lambda: self.times or self._task.done())  # it listens, and looks for what came before
        await asyncio.sleep(QUIET)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task


class Ear:
    """A connection that keeps every notification of the namespace."""

    def __init__(self, database: Database) -> None:
        self._connection = raw(database.url)
        self._connection.execute(database.text('LISTEN "{ns}"'))

    def heard(self) -> list[str]:
        """What has come since it was asked last."""
        return [notice.payload for notice in self._connection.notifies(timeout=0.2)]

    def close(self) -> None:
        self._connection.close()


@pytest.fixture
def ear(database: Database) -> Iterator[Ear]:
    with contextlib.closing(Ear(database)) as ear:
        yield ear


# They come.


def insert_when_told(database: Database, told: Connection) -> None:
    store = database.store()
    store.open_blocking()
    told.send("ready")
    while told.recv():
        store.insert_blocking([new_job()])
        told.send(time.monotonic())  # one clock for all processes of a machine


async def test_an_insert_of_another_process(store: PostgresStore, database: Database) -> None:
    here, there = CHILDREN.Pipe()
    child = start_child(insert_when_told, database, there)
    assert await asyncio.to_thread(here.recv) == "ready"
    latencies = []
    async with Waiter(store) as waiter:
        for _ in range(5):
            seen = len(waiter.times)
            here.send(True)
            written = await asyncio.to_thread(here.recv)
            latencies.append(await waiter.next(seen) - cast(float, written))
            await asyncio.sleep(QUIET)
    here.send(False)
    child.join(10)
    here.close()
    there.close()
    milliseconds = sorted(round(latency * 1000, 1) for latency in latencies)
    print(f"from the commit of another process to the wake-up: {milliseconds} ms")
    assert milliseconds[-1] < SOON * 1000


async def test_whatever_makes_a_job_claimable(store: PostgresStore, database: Database) -> None:
    """Each by another store, so that nothing is heard but what the server says."""
    async with database.store() as other, Waiter(store) as waiter:

        async def woken(by: Any) -> None:
            seen = len(waiter.times)
            before = time.monotonic()
            await by
            assert await waiter.next(seen) - before < SOON
            await asyncio.sleep(QUIET)

        await woken(other.insert([new_job()]))
        [job] = await claim(other, await open_session(other))
        await woken(finish(other, [job], Released()))
        await other.set_paused("default", True)
        await asyncio.sleep(QUIET)
        await woken(other.set_paused("default", False))
        await woken(asyncio.to_thread(database.sql, "INSERT INTO {ns}_ready (task, payload) VALUES ('t', '{}')"))
        assert await waiter.none_within(0.3)
        await other.insert([new_job(queue="another")])
        assert await waiter.none_within(0.3)


@pytest.mark.parametrize("way", ["notified", "in the same process", "beside"])
async def test_jobs_that_come_back_are_found_by_claimers_that_have_passed_them(
    database: Database, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A look at everything is dear, as on a machine that stands still at times, so a claimer looks back seldom."""
    monkeypatch.setattr(lookback.LookBack, "_is_cheap", lambda look: False)
    monkeypatch.setattr(lookback, "_LEAST_INTERVAL", 20.0)
    notify = way == "notified"
    async with database.store(notify=notify) as store, database.store(notify=notify) as other:
        keeper = {"notified": other, "in the same process": store, "beside": store.beside()}[way]
        async with keeper, Waiter(store) if notify else contextlib.nullcontext() as waiter:
            for _ in range(3):
                await other.insert([new_job()])  # each with a place of its own
            [first] = await claim(other, dead := await open_session(other), 1)
            session = await open_session(store)
            for _ in range(2):  # the first looks at everything
                await claim(store, session, 1)
            await other.close_session(dead)
            assert await claim(store, session, 1) == ()
            seen = len(waiter.times) if waiter else 0
            lost = Lost(Failure(SYSTEM.clock.now(), 1, "WorkerLost", "gone"), started=False)
            [applied] = await keeper.apply([settle(first, lost, RetryPolicy(), SYSTEM.random)])
            assert applied is Applied.APPLIED
            if waiter:
                await waiter.next(seen)
            [again] = await claim(store, session, 1)
            assert again.id == first.id


async def test_a_waiter_that_leaves_takes_its_connection_along(database: Database) -> None:
    name = "wakeups-leaving"
    url = f"{database.url}?application_name={name}"
    async with PostgresStore(url, namespace=database.namespace) as store:
        async with Waiter(store):
            assert database.connections(name) == 1
        await eventually(lambda: database.connections(name) == 0)


async def test_the_listener_comes_back(database: Database) -> None:
    """After its connection was ended, with what came meanwhile."""
    name = "wakeups-ended"
    url = f"{database.url}?application_name={name}"
    async with (
        PostgresStore(url, namespace=database.namespace) as store,
        database.store() as other,
        Waiter(store) as waiter,
    ):
        for _ in range(2):
            ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = %s"
            assert database.value(ended, name) == 1
            seen = len(waiter.times)
            await other.insert([new_job()])
            await waiter.next(seen)
            await eventually(lambda: database.connections(name) == 1)
            await asyncio.sleep(QUIET)
            seen, before = len(waiter.times), time.monotonic()
            await other.insert([new_job()])
            assert await waiter.next(seen) - before < SOON


# They are few.


async def test_a_thousand_jobs_in_one_call_are_one_notification(database: Database, ear: Ear) -> None:
    async with database.store() as store:
        await store.insert(new_jobs(1000))
        assert await asyncio.to_thread(ear.heard) == ["default"]
        store.insert_blocking([new_job(queue=queue) for queue in ("a", "b", "a", "b")])
        assert sorted(await asyncio.to_thread(ear.heard)) == ["a", "b"]


async def test_a_burst_of_a_thousand_calls_is_told_a_few_times(database: Database, ear: Ear) -> None:
    store = database.store()

    def burst() -> float:
        before = time.monotonic()
        for _ in range(1000):
            store.insert_blocking([new_job()])
        return time.monotonic() - before

    took = await asyncio.to_thread(burst)
    store.close()
    heard = len(await asyncio.to_thread(ear.heard))
    print(f"{heard} notifications for 1,000 inserts in {took:.2f} s")
    assert 1 <= heard <= took / listener._QUIET + 1
    assert heard < 500


async def test_plain_sql_tells_once_for_each_queue(database: Database, ear: Ear) -> None:
    many = """INSERT INTO {ns}_ready (task, payload, queue)
              SELECT 't', '{}', CASE WHEN n % 2 = 0 THEN 'a' ELSE 'b' END FROM generate_series(1, 500) n"""
    database.sql(many)
    assert sorted(await asyncio.to_thread(ear.heard)) == ["a", "b"]
    with psycopg.connect(database.url) as connection:
        connection.execute(database.text(many))
        connection.rollback()
    assert await asyncio.to_thread(ear.heard) == []


async def test_what_makes_nothing_claimable_tells_nobody(database: Database, ear: Ear) -> None:
    async with database.store() as store:
        await store.insert([new_job(), new_job(delay=HOUR)])
        await asyncio.to_thread(ear.heard)
        jobs = await claim(store, await open_session(store))
        await finish(store, jobs)
        await store.beat(jobs[0].lease.session_id)
        await store.request_cancel([jobs[0].id])
        await store.prune(10)
        await store.set_paused("default", True)
    assert await asyncio.to_thread(ear.heard) == []


async def test_with_notify_off_nothing_is_said(database: Database, ear: Ear) -> None:
    url = f"{database.url}?namespace={database.namespace}&notify=off&application_name=wakeups-off"
    store = cast(PostgresStore, open_store(url, SYSTEM))
    async with store:
        await store.insert([new_job()])
        store.insert_blocking([new_job()])
        with psycopg.connect(database.url) as connection:
            store.insert_on(connection, [new_job()])
        [job, *_] = await claim(store, await open_session(store))
        await finish(store, [job], Released())
        before = database.connections("wakeups-off")
        waiting = asyncio.ensure_future(anext(store.wakeups(["default"])))
        await asyncio.sleep(0.1)
        assert database.connections("wakeups-off") == before  # nobody listens
        await store.insert([new_job()])
        await asyncio.wait_for(waiting, SOON)  # inside the process it needs no notification
    assert await asyncio.to_thread(ear.heard) == []


# Nothing is heard.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_SOUND_HEARD_WITHIN", 0.3)
    monkeypatch.setattr(listener, "_PULSE", 0.2)


def clients(pgbouncer: PgBouncerServer, name: str) -> int:
    """How many connections of that name the pooler has."""
    with raw(pgbouncer.console_url, prepare_threshold=None) as console:
        console.cursor_factory = psycopg.ClientCursor
        rows = console.execute("SHOW CLIENTS")
        assert rows.description is not None
        place = [column.name for column in rows.description].index("application_name")
        return [row[place] for row in rows.fetchall()].count(name)


async def test_through_a_pooler_the_listener_gives_up_and_a_pulse_takes_its_place(
    database: Database, pgbouncer_server: PgBouncerServer, impatient: None
) -> None:
    url = f"{pgbouncer_server.url}?application_name=wakeups-pooled"
    async with PostgresStore(url, namespace=database.namespace) as store:
        waiter = Waiter(store)
        task = asyncio.ensure_future(waiter._wait())
        await waiter.next(3)
        assert clients(pgbouncer_server, "wakeups-pooled") == 0
        gaps = [later - earlier for earlier, later in zip(waiter.times, waiter.times[1:], strict=False)]
        assert min(gaps) > 0.1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_through_a_pooler_jobs_are_found_by_looking(
    database: Database, pgbouncer_server: PgBouncerServer, caplog: pytest.LogCaptureFixture
) -> None:
    app = Holdfast(f"{pgbouncer_server.url}?namespace={database.namespace}")
    ran: list[int] = []

    @app.task
    async def note(number: int) -> None:
        ran.append(number)

    worker = app.start_worker(WorkerSettings(poll=0.2))
    async with database.store() as producer:
        for number in range(3):
            payload = f'{{"number": {number}}}'.encode()
            await producer.insert([new_job(task="note", payload=payload)])
            await eventually(lambda: len(ran) > number, 5)  # noqa: B023
    await asyncio.to_thread(worker.stop, timeout=5)
    await app.aclose()
    assert ran == [0, 1, 2]
    assert [record for record in caplog.records if record.levelname in ("WARNING", "ERROR")] == []
