"""What is removed when its time is over, what is not, and at which pace."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.events import Event, JobsPruned, KeeperFailed
from holdfast.failures import Failure
from holdfast.job import Key, NewJob, State
from holdfast.keepers import retention
from holdfast.keepers.retention import Retention
from holdfast.lifecycle import Applied, Failed, Outcome, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import MICROSECONDS, SYSTEM, Ports
from holdfast.store import CLOSED_SESSION_KEPT, ClaimRequest, InsertStatus, JobQuery, Session, Store, all_sessions
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import SqliteStore
from holdfast.testing import ManualClock

HOUR = 3600
BROKEN = Failed(Failure(at=0, attempt=1, type="E", message="broken"), permanent=True)


class Scene:
    """A store and a keeper on one clock that the test moves; counts the calls of `prune`."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.clock = ManualClock()
        self.ports = Ports(clock=self.clock)
        self.events: list[Event] = []
        self.batches: list[int] = []
        self.store: Store = (
            MemoryStore(ports=self.ports)
            if kind == "memory"
            else SqliteStore(folder / "jobs.db", durability="relaxed", ports=self.ports)
        )
        self.keeper = Retention(self.store, ports=self.ports, listener=self.events.append)

    def count_batches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        prune = self.store.prune

        async def counted(limit: int) -> int:
            self.batches.append(await prune(limit))
            return self.batches[-1]

        monkeypatch.setattr(self.store, "prune", counted)

    async def add(self, count: int = 1) -> list[str]:
        """The ids of new jobs that are kept for an hour after their end."""
        ids = [SYSTEM.ids.job_id() for _ in range(count)]
        await self.store.insert([NewJob(id=id, task="t", payload=b"{}", retention=HOUR * MICROSECONDS) for id in ids])
        return ids

    async def end(self, outcome: Outcome) -> str:
        """The id of a new job with that outcome."""
        await self.store.open_session(Session(id="worker"))
        [job_id] = await self.add()
        [job] = (await self.store.claim(ClaimRequest(session_id="worker", queues=("default",), limit=1))).jobs
        move = settle(job, outcome, RetryPolicy(), SYSTEM.random)
        assert await self.store.apply([move]) == [Applied.APPLIED]
        return job_id

    async def add_cancelled(self, count: int) -> None:
        await self.store.request_cancel(await self.add(count))

    async def kept(self) -> set[str]:
        return {job.id for job in (await self.store.find(JobQuery(limit=1000))).jobs}


@contextlib.asynccontextmanager
async def opened(kind: str, folder: Path) -> AsyncIterator[Scene]:
    scene = Scene(kind, folder)
    async with scene.store:
        yield scene


@pytest.fixture(params=["memory", "sqlite"])
async def scene(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Scene]:
    async with opened(request.param, tmp_path) as scene:
        yield scene


# What goes.


async def test_an_ended_job_goes_when_its_retention_is_over_and_not_before(scene: Scene) -> None:
    succeeded = await scene.end(Succeeded())
    scene.clock.advance(HOUR - 1)
    assert await scene.keeper.one_pass() == 0
    assert await scene.kept() == {succeeded}
    assert scene.events == []
    scene.clock.advance(1)
    assert await scene.keeper.one_pass() == 1
    assert await scene.kept() == set()
    assert scene.events == [JobsPruned(1)]


async def test_dead_letters_and_live_jobs_stay(scene: Scene) -> None:
    failed = await scene.end(BROKEN)
    [waiting] = await scene.add()
    scene.clock.advance(100 * HOUR)
    assert await scene.keeper.one_pass() == 0
    assert await scene.kept() == {failed, waiting}
    job = await scene.store.get(failed)
    assert job is not None
    assert job.state is State.FAILED


async def test_a_key_goes_when_its_window_is_over(scene: Scene) -> None:
    def keyed() -> NewJob:
        key = Key("k", "hash", 2 * HOUR * MICROSECONDS)
        return NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", key=key)

    await scene.store.insert([keyed()])
    scene.clock.advance(HOUR)
    assert await scene.keeper.one_pass() == 0
    [again] = await scene.store.insert([keyed()])
    assert again.status is InsertStatus.EXISTING
    scene.clock.advance(HOUR)
    assert await scene.keeper.one_pass() == 1
    [anew] = await scene.store.insert([keyed()])
    assert anew.status is InsertStatus.CREATED


async def test_a_closed_session_goes_after_a_while(scene: Scene) -> None:
    for session_id in ("closed", "open"):
        await scene.store.open_session(Session(id=session_id))
    await scene.store.close_session("closed")
    assert await scene.keeper.one_pass() == 0
    scene.clock.advance(CLOSED_SESSION_KEPT / MICROSECONDS)
    assert await scene.keeper.one_pass() == 1
    assert [view.id for view in await all_sessions(scene.store)] == ["open"]


# The pace.


async def test_many_rows_go_in_batches(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.count_batches(monkeypatch)
    for _ in range(2):
        await scene.add_cancelled(600)
    scene.clock.advance(HOUR)
    assert await scene.keeper.one_pass() == 1200
    assert scene.batches == [500, 500, 200]
    assert scene.events == [JobsPruned(1200)]
    assert await scene.kept() == set()


async def test_others_come_in_between_two_batches(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_PRUNED_AT_ONCE", 2)
    scene.count_batches(monkeypatch)
    seen_by_others: list[int] = []

    async def other() -> None:
        while len(scene.batches) < 4:
            seen_by_others.append(len(scene.batches))
            await asyncio.sleep(0)

    await scene.add_cancelled(6)
    scene.clock.advance(HOUR)
    await asyncio.gather(scene.keeper.one_pass(), other())
    assert scene.batches == [2, 2, 2, 0]
    assert {1, 2, 3} <= set(seen_by_others)


async def test_the_pause_is_as_long_as_the_batch_took(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [500, 500, 1]
    pauses: list[float] = []

    async def slow(limit: int) -> int:
        scene.clock.advance(0.25 * len(answers))
        return answers.pop(0)

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(scene.store, "prune", slow)
    monkeypatch.setattr(scene.clock, "sleep", sleep)
    assert await scene.keeper.one_pass() == 1001
    assert pauses == [0.75, 0.5]


async def test_a_pass_is_bounded(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_PRUNED_AT_ONCE", 2)
    monkeypatch.setattr(retention, "_MOST_BATCHES", 3)
    await scene.add_cancelled(10)
    scene.clock.advance(HOUR)
    assert await scene.keeper.one_pass() == 6
    assert await scene.keeper.one_pass() == 4


# The loop.


@contextlib.asynccontextmanager
async def running(keeper: Retention) -> AsyncIterator[None]:
    loop = asyncio.create_task(keeper.run())
    try:
        yield
    finally:
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop


class Pauses:
    """A clock's `sleep` that ends at once, remembers for how long it was asked, and stops the loop after `most`."""

    def __init__(self, most: int) -> None:
        self.asked: list[float] = []
        self.enough = asyncio.Event()
        self._most = most

    async def sleep(self, seconds: float) -> None:
        self.asked.append(seconds)
        if len(self.asked) >= self._most:
            self.enough.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


async def test_the_loop_goes_on_after_any_error_and_says_so(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [StoreUnavailable("locked"), RuntimeError("a surprise")]
    prune = scene.store.prune

    async def broken(limit: int) -> int:
        if errors:
            raise errors.pop(0)
        return await prune(limit)

    await scene.add_cancelled(1)
    scene.clock.advance(HOUR)
    pauses = Pauses(3)
    monkeypatch.setattr(scene.store, "prune", broken)
    monkeypatch.setattr(scene.clock, "sleep", pauses.sleep)
    async with running(scene.keeper), asyncio.timeout(10):
        await pauses.enough.wait()
    assert scene.events == [
        KeeperFailed("retention", "StoreUnavailable('locked')"),
        KeeperFailed("retention", "RuntimeError('a surprise')"),
        JobsPruned(1),
    ]


async def test_what_was_removed_before_an_error_is_told(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [500]

    async def failing_later(limit: int) -> int:
        if answers:
            return answers.pop()
        raise StoreUnavailable("locked")

    monkeypatch.setattr(scene.store, "prune", failing_later)
    with pytest.raises(StoreUnavailable):
        await scene.keeper.one_pass()
    assert scene.events == [JobsPruned(500)]


async def test_passes_are_a_minute_apart_with_jitter(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = Pauses(20)
    monkeypatch.setattr(scene.clock, "sleep", pauses.sleep)
    async with running(scene.keeper), asyncio.timeout(10):
        await pauses.enough.wait()
    assert all(45 <= pause <= 75 for pause in pauses.asked)
    assert len(set(pauses.asked)) > 1


async def test_a_pass_that_was_cut_short_is_followed_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_PRUNED_AT_ONCE", 2)
    monkeypatch.setattr(retention, "_MOST_BATCHES", 2)
    await scene.add_cancelled(5)
    scene.clock.advance(HOUR)
    pauses = Pauses(3)
    monkeypatch.setattr(scene.clock, "sleep", pauses.sleep)
    async with running(scene.keeper), asyncio.timeout(10):
        await pauses.enough.wait()
    assert scene.events == [JobsPruned(4), JobsPruned(1)]
    assert pauses.asked[:2] == [0, 0]
    assert pauses.asked[2] >= 45
