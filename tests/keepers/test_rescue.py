"""Who is judged dead, who is not, and what becomes of their jobs."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.events import Event, JobsRescued, KeeperFailed, SessionRescued
from holdfast.job import NewJob, State
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.watch import SessionWatch
from holdfast.ports import SYSTEM, Ports
from holdfast.store import Beat, CancelAnswer, ClaimRequest, Session, SessionPage, SessionView, Store
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import SqliteStore
from holdfast.testing import ManualClock

TTL = 9.0


def view(beat: int = 0, *, open: bool = True) -> SessionView:
    return SessionView(id="s", beat=beat, open=open, opened_at=0, beat_at=0, host="", pid=0, queues=())


def looks(watch: SessionWatch, *views_at: tuple[float, SessionView]) -> list[bool]:
    """Whether the session is found still, look after look."""
    return [bool(watch.still([seen], at, at)) for at, seen in views_at]


# The watch, without any store.


def test_a_counter_that_stands_still_for_one_ttl_is_still() -> None:
    at = [(moment, view()) for moment in (0.0, 3.0, 6.0, 8.9, 9.0, 12.0)]
    assert looks(SessionWatch(TTL), *at) == [False, False, False, False, True, True]


def test_every_beat_begins_a_new_ttl() -> None:
    at = [(moment, view(beat)) for moment, beat in ((0, 0), (3, 0), (6, 1), (9, 1), (12, 1), (15, 1))]
    assert looks(SessionWatch(TTL), *at) == [False, False, False, False, False, True]


def test_a_closed_session_is_not_closed_again() -> None:
    at = [(moment, view(open=False)) for moment in (0, 3, 6, 9, 12)]
    assert not any(looks(SessionWatch(TTL), *at))


def test_a_slow_look_proves_nothing() -> None:
    watch = SessionWatch(TTL)
    assert looks(watch, (0, view()), (3, view()), (6, view())) == [False] * 3
    assert watch.still([view()], 6.5, 9.6) == []
    assert looks(watch, (10, view()), (13, view()), (16, view()), (19, view())) == [False, False, False, True]


def test_a_failed_look_proves_nothing() -> None:
    watch = SessionWatch(TTL)
    assert looks(watch, (0, view()), (3, view()), (6, view())) == [False] * 3
    watch.forget()
    assert looks(watch, (9, view()), (12, view()), (15, view()), (18, view())) == [False, False, False, True]


def test_a_pause_of_the_watcher_itself_proves_nothing() -> None:
    """The whole machine may have been stopped, workers and all."""
    assert looks(SessionWatch(TTL), (0, view()), (600, view()), (603, view())) == [False, False, False]


def test_the_time_of_a_look_counts_only_once_it_is_answered() -> None:
    watch = SessionWatch(TTL)
    assert watch.still([view()], 0.0, 2.0) == []
    for at in (3.0, 6.0, 10.9):
        assert watch.still([view()], at, at) == []
    assert watch.still([view()], 11.0, 11.0) == [view()]


def test_only_an_open_session_that_was_not_seen_to_beat_is_a_suspect() -> None:
    watch = SessionWatch(TTL)
    assert watch.suspects([view()])  # never seen before
    watch.still([view()], 0.0, 0.0)
    assert watch.suspects([view()])
    assert not watch.suspects([view(1)])
    assert not watch.suspects([view(open=False)])
    assert not watch.suspects([])


# The keeper, on stores.


class Scene:
    """A store with one worker session that holds one job, and a keeper on a clock that the test moves."""

    def __init__(self, store: Store) -> None:
        self.clock = ManualClock()
        self.events: list[Event] = []
        self.store = store
        ports = Ports(clock=self.clock, random=SYSTEM.random)
        self.keeper = Rescue(store, ports=ports, ttl=TTL, listener=self.events.append)

    async def begin(self) -> None:
        await self.store.open_session(Session(id="worker"))
        await self.store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}")])
        claimed = await self.store.claim(ClaimRequest(session_id="worker", queues=("default",), limit=1))
        [self.job] = claimed.jobs

    async def passes(self, count: int, *, beating: bool) -> None:
        for _ in range(count):
            if beating:
                await self.store.beat("worker")
            await self.keeper.one_pass()
            self.clock.advance(TTL / 3)

    async def state(self) -> State:
        job = await self.store.get(self.job.id)
        assert job is not None
        return job.state


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Scene]:
    store: Store = MemoryStore() if kind == "memory" else SqliteStore(folder / "jobs.db", timeout=0.2)
    async with store:
        scene = Scene(store)
        await scene.begin()
        yield scene


@pytest.fixture(params=["memory", "sqlite"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    async with opened(request.param, tmp_path) as scene:
        yield scene


async def test_a_worker_that_beats_keeps_its_job(scene: Scene) -> None:
    await scene.passes(12, beating=True)
    assert await scene.state() is State.IN_FLIGHT
    assert scene.events == []


async def test_a_dead_worker_loses_its_job_after_one_ttl(scene: Scene) -> None:
    await scene.passes(3, beating=False)
    assert await scene.state() is State.IN_FLIGHT
    await scene.passes(1, beating=False)
    assert await scene.state() is State.READY
    assert scene.events == [SessionRescued("worker"), JobsRescued(returned=1, failed=0)]
    job = await scene.store.get(scene.job.id)
    assert job is not None
    assert (job.suspect, job.attempt, job.crashes) == (True, 1, 0)


async def test_a_lost_job_that_was_to_be_cancelled_is_cancelled(scene: Scene) -> None:
    assert await scene.store.request_cancel([scene.job.id]) == [CancelAnswer.ASKED]
    await scene.passes(4, beating=False)
    assert await scene.state() is State.CANCELLED


async def test_jobs_without_a_session_come_back_whoever_lost_it(scene: Scene) -> None:
    await scene.store.close_session("worker")
    await scene.passes(1, beating=False)
    assert await scene.state() is State.READY


async def test_more_lost_jobs_than_fit_into_one_page(scene: Scene) -> None:
    await scene.store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(250)])
    await scene.store.claim(ClaimRequest(session_id="worker", queues=("default",), limit=250))
    await scene.store.close_session("worker")
    assert await scene.keeper.one_pass() == 251


async def test_a_keeper_writes_only_if_somebody_was_not_seen_to_beat(scene: Scene) -> None:
    """Those who beat have shown that writes are possible; who is new or stands still has not."""
    beat, asked = scene.store.beat, list[str]()

    async def noted(session_id: str) -> Beat:
        asked.append(session_id)
        return await beat(session_id)

    scene.store.beat = noted  # type: ignore[method-assign]
    await scene.passes(4, beating=True)
    assert asked == ["worker", "nobody", "worker", "worker", "worker"]
    await scene.passes(2, beating=False)
    assert asked[5:] == ["nobody", "nobody"]


async def test_a_lock_that_stops_every_beat_makes_nobody_look_dead(tmp_path: Path) -> None:
    """Somebody's long transaction: reads go on, so only a write can tell that beats could not be written either."""
    async with opened("sqlite", tmp_path) as scene:
        await scene.passes(2, beating=True)
        with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            for _ in range(5):
                with pytest.raises(StoreUnavailable):
                    await scene.keeper.one_pass()
                scene.clock.advance(TTL / 3)
            other.execute("ROLLBACK")
        await scene.passes(3, beating=False)
        assert await scene.state() is State.IN_FLIGHT
        await scene.passes(3, beating=True)
        assert scene.events == []


async def test_the_loop_goes_on_after_any_error_and_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    failures = 0
    sessions = scene.store.sessions

    async def broken(*, cursor: str | None = None, limit: int = 100) -> SessionPage:
        nonlocal failures
        failures += 1
        if failures <= 2:
            raise RuntimeError("a surprise")
        return await sessions(cursor=cursor, limit=limit)

    monkeypatch.setattr(scene.store, "sessions", broken)
    loop = asyncio.create_task(scene.keeper.run())
    for _ in range(1_000):
        if failures >= 4:
            break
        scene.clock.advance(TTL)
        await asyncio.sleep(0.001)
    loop.cancel()
    assert failures >= 4
    assert [event for event in scene.events if isinstance(event, KeeperFailed)][:2] == [
        KeeperFailed("rescue", "RuntimeError('a surprise')")
    ] * 2
