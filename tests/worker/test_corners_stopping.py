"""Corners of ending: workers whose event loop ends before them, handlers that never end, and what they leave behind.

Also no thread to be had, which is how a worker ends that nobody wanted to end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast import Holdfast, JobHandle, State, WorkerSettings
from holdfast.events import HandlerStuck, JobSettled, PartFailed, WorkerStopped
from holdfast.keepers.rescue import Rescue
from holdfast.ports import SYSTEM, Ports, SystemSpawner
from holdfast.store import SessionView, all_sessions
from holdfast.worker.board import Board
from tests.worker.bench import PATIENCE, Bench, Heard, service_of, stored, wait_until
from tests.worker.programs import throughout
from tests.worker.shop import Shop

T = TypeVar("T")
TTL = 0.5
FOR_EVER = 3600.0


def within(seconds: float, call: Callable[[], T]) -> T:
    """What the call returns; an error if it takes longer. Something that hangs must not hang the whole run."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"not done after {seconds:g} s"
    return results[0]


def fate(job: JobHandle[Any]) -> tuple[str, str, int]:
    details = stored(job)
    return details.state.value, details.reason.value, details.attempt


# The heartbeat ends with its worker.


class Hearts:
    """The heartbeats that have begun since."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._before = set(threading.enumerate())

    def beating(self) -> list[str]:
        return self.threads("holdfast-heart")

    def threads(self, name: str) -> list[str]:
        """Those of that name that have started since."""
        new = [thread.name for thread in threading.enumerate() if thread not in self._before]
        return [thread for thread in new if thread.startswith(name)]

    def session(self) -> SessionView:
        [view] = asyncio.run(all_sessions(self._bench.store()))
        return view

    def check_they_stand_still(self) -> None:
        wait_until(lambda: not self.beating(), "the heartbeat ends")
        beat = self.session().beat
        throughout(0.8 * TTL, lambda: self.session().beat == beat, "the counter stands still")


@pytest.fixture
def hearts(bench: Bench) -> Hearts:
    return Hearts(bench)


class Endless:
    """Handlers that go on for as long as they may."""

    def __init__(self, shop: Shop, folder: Path) -> None:
        self.app = shop.app
        self._begun = folder / "begun"
        self._let_go = threading.Event()
        self.stopped = threading.Event()

        @self.app.task(timeout=None)
        async def on_the_loop(path: str, seconds: float) -> str:
            self._begun.touch()
            try:
                await asyncio.sleep(seconds)
            except asyncio.CancelledError:
                self.stopped.set()
                raise
            return "late"

        @self.app.task(timeout=None)
        def on_a_thread(path: str, seconds: float) -> str:
            self._begun.touch()
            self._let_go.wait(seconds)
            return "late"

        self._tasks = {"loop": on_the_loop, "thread": on_a_thread, "process": shop.endless_alone}

    async def begin(self, kind: str) -> tuple[JobHandle[str], asyncio.Task[bool]]:
        """A job that runs, in a worker that is a background task of this event loop."""
        job = await self._tasks[kind].aenqueue(str(self._begun), FOR_EVER)
        settings = WorkerSettings(lease_ttl=TTL, grace=FOR_EVER, keepers=False)
        working = asyncio.create_task(self.app.arun_worker(settings))
        async with asyncio.timeout(PATIENCE):
            while not self._begun.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return job, working

    def let_go(self) -> None:
        self._let_go.set()


@pytest.fixture
def endless(shop: Shop, tmp_path: Path) -> Iterator[Endless]:
    endless = Endless(shop, tmp_path)
    yield endless
    endless.let_go()


@pytest.mark.parametrize("kind", ["loop", "thread", "process"])
def test_a_worker_task_that_is_cancelled_twice_gives_its_job_back_and_beats_no_more(
    endless: Endless, hearts: Hearts, kind: str
) -> None:
    async def work() -> JobHandle[str]:
        job, working = await endless.begin(kind)
        working.cancel()
        await asyncio.wait([working], timeout=0.2)
        assert not working.done()  # it may finish what it runs
        assert not endless.stopped.is_set()
        assert len(hearts.beating()) == 1
        working.cancel()
        await asyncio.wait([working])
        assert working.cancelled()
        return job

    job = within(PATIENCE, lambda: asyncio.run(work()))
    assert fate(job) == ("ready", "released", 0)
    assert not hearts.session().open
    assert endless.stopped.is_set() == (kind == "loop")
    hearts.check_they_stand_still()


@pytest.mark.parametrize("kind", ["loop", "thread", "process"])
def test_when_the_event_loop_of_a_worker_task_ends_so_do_its_heartbeat_and_its_processes(
    bench: Bench, endless: Endless, hearts: Hearts, kind: str
) -> None:
    """The usual program: `create_task`, and `asyncio.run` returns while it works. The process goes on."""

    async def work() -> JobHandle[str]:
        job, _ = await endless.begin(kind)
        return job

    job = within(PATIENCE, lambda: asyncio.run(work()))
    hearts.check_they_stand_still()
    wait_until(lambda: not hearts.threads("holdfast-wait-"), "the process of the isolated job ends")
    assert fate(job)[0] == "in_flight"
    assert hearts.session().open

    async def rescue() -> None:
        keeping = asyncio.create_task(Rescue(bench.store(), ports=SYSTEM, ttl=TTL).run())
        async with asyncio.timeout(PATIENCE):
            while (await endless.app.aget(job.id)).state is not State.READY:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        keeping.cancel()

    asyncio.run(rescue())
    assert fate(job) == ("ready", "lost", 1)


# What handlers leave in the event loop.


@pytest.mark.usefixtures("short_last_words")
@pytest.mark.parametrize("deaf", [False, True], ids=["slow", "deaf"])
def test_a_worker_ends_in_time_though_a_generator_takes_for_ever_to_close(bench: Bench, deaf: bool) -> None:
    app = bench.app()
    kept: list[AsyncIterator[int]] = []
    closing, over = threading.Event(), threading.Event()
    ignored = [asyncio.CancelledError] if deaf else []

    async def rows() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            closing.set()
            while not over.is_set():  # a server that does not answer when its cursor is closed
                with suppress(*ignored):
                    await asyncio.sleep(0.01)

    @app.task
    async def read() -> int:
        kept.append(rows())
        return await anext(kept[0])

    worker = bench.work(app)
    assert read.enqueue().result(PATIENCE) == 1
    assert not closing.is_set()
    assert within(PATIENCE, lambda: worker.stop(timeout=1.0))
    assert closing.is_set()
    over.set()


# Handlers that never end, and their neighbours.


async def test_two_handlers_past_their_hard_limit_do_not_cost_their_neighbour_its_time(
    bench: Bench, heard: Heard
) -> None:
    app: Holdfast = bench.app()
    over, let_go = threading.Event(), asyncio.Event()
    told: list[str] = []

    @app.task(timeout=None, hard_timeout=0.2, max_retries=0)
    def deaf() -> None:
        over.wait(PATIENCE)

    @app.task(timeout=None)
    async def innocent() -> str:
        try:
            await let_go.wait()
        except asyncio.CancelledError:
            told.append("to stop")
            raise
        return "done"

    grace = 0.3
    board = Board.private(4)
    job = await innocent.aenqueue()
    stuck = await app.aenqueue_many([deaf.job(), deaf.job()])
    service = app.worker_service(WorkerSettings(concurrency=4, grace=grace, lease_ttl=5.0), board=board)
    before = board.is_leaving
    working = asyncio.create_task(service.run())
    async with asyncio.timeout(PATIENCE):
        while len(heard.of(HandlerStuck)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (before, board.is_leaving) == (False, True)  # by this the supervisor knows that it needs another process
        await asyncio.wait([working], timeout=3 * grace)
        assert not working.done()
        assert told == []
        let_go.set()
        assert await working
    over.set()
    assert [(await app.aget(handle.id)).state for handle in (job, *stuck)] == ["succeeded", "failed", "failed"]
    details = (await app.aget(job.id)).details
    assert details is not None
    assert details.attempt == 1
    assert [stopped.released for stopped in heard.of(WorkerStopped)] == [0]


# No thread to be had.


class ShortOfThreads(SystemSpawner):
    """Has as many threads for handlers as a test allows."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.refused = threading.Semaphore(0)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        if name.startswith("holdfast-handler"):
            if not self.allowed:
                self.refused.release()
                raise RuntimeError("can't start new thread")
            self.allowed -= 1
        return super().thread(target, name)


def test_a_job_for_which_there_is_no_thread_goes_back_and_leaves_its_slot_to_others(
    bench: Bench, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.runner._NO_THREAD_PAUSE", 0.05)
    spawner = ShortOfThreads(0)
    app = bench.app(ports=Ports(spawner=spawner))

    @app.task
    def plain() -> str:
        return "from a thread"

    @app.task
    async def coroutine() -> str:
        return "from the loop"

    worker = bench.work(app, concurrency=1)
    job = plain.enqueue()
    released = heard.wait_for(JobSettled, lambda settled: settled.job_id == job.id)
    assert (released.state, released.reason, released.attempt) == (State.READY, "released", 0)
    spawner.allowed = 1
    assert job.result(PATIENCE) == "from a thread"
    assert fate(job)[2] == 1
    assert coroutine.enqueue().result(PATIENCE) == "from the loop"
    wait_until(lambda: service_of(worker)._runner.free == 1, "the slot is free")
    assert not heard.of(PartFailed)


def test_a_job_for_which_there_is_no_other_thread_waits_for_the_one_that_there_is(bench: Bench, heard: Heard) -> None:
    spawner = ShortOfThreads(1)
    app = bench.app(ports=Ports(spawner=spawner))
    begun, let_go = threading.Event(), threading.Event()

    @app.task
    def plain(number: int) -> str:
        if number == 1:
            begun.set()
            let_go.wait(PATIENCE)
        return threading.current_thread().name

    worker = bench.work(app, concurrency=2, poll=0.05)
    first = plain.enqueue(1)
    assert begun.wait(PATIENCE)
    second = plain.enqueue(2)
    assert spawner.refused.acquire(timeout=PATIENCE)
    throughout(0.3, lambda: fate(second)[0] == "in_flight", "it waits")
    let_go.set()
    assert first.result(PATIENCE) == second.result(PATIENCE) == "holdfast-handler-1"
    assert (fate(first)[2], fate(second)[2]) == (1, 1)
    assert not heard.of(JobSettled, lambda settled: settled.reason == "released")
    wait_until(lambda: service_of(worker)._runner.free == 2, "both slots are free")
