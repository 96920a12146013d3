"""The heart alone: when it beats, what it hands to the worker, when it gives jobs back, and when it must not beat."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.events import Event, LoopBlocked, PartFailed
from holdfast.job import Job, NewJob, SessionId, State
from holdfast.lifecycle import Applied, Move
from holdfast.ports import SYSTEM, Ports, SystemSpawner
from holdfast.store import MOST_PER_CALL, Beat, CancelAnswer, ClaimRequest, Session
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock
from holdfast.worker.board import Board
from holdfast.worker.heart import Heart
from holdfast.worker.holding import Holding
from tests.unit.samples import FixedRandom, claimed_job

TTL = 12.0
BEAT = TTL / 3
LOOK = 0.25


class HeartStore(MemoryStore):
    """A store that counts beats and settlements, and answers as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.beats: list[SessionId] = []
        self.answer: Beat | Exception = Beat(open=True, held=0, cancel=())
        self.during_beat: Callable[[], object] = lambda: None
        self.applied: list[int] = []
        self.fault: Exception | None = None
        self.exits = 0

    async def beat(self, session_id: SessionId) -> Beat:
        self.beats.append(session_id)
        self.during_beat()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        self.applied.append(len(moves))
        if self.fault:
            raise self.fault
        return await super().apply(moves)

    async def __aexit__(self, *exc: object) -> None:
        self.exits += 1


class Spawner(SystemSpawner):
    """Event loops of others are tasks on this one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def event_loop(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self.names.append(name)
        self.tasks.append(asyncio.get_running_loop().create_task(main()))


class Bench:
    """A heart on a clock that the test moves. The worker's event loop is the test's own, and ticks as the test says."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = HeartStore()
        self.holding = Holding()
        self.board = Board.private(4)
        self.spawner = Spawner()
        self.events: list[Event] = []
        self.lost: list[SessionId] = []
        self.cancelled: list[list[str]] = []
        self.reconciled = 0
        self.heart = Heart(
            self.store,
            ttl=TTL,
            holding=self.holding,
            board=self.board,
            loop=asyncio.get_running_loop(),
            lost=self.lost.append,
            cancel=self._cancel,
            reconcile=self._reconcile,
            on_loop=lambda: ("culprit",),
            ports=Ports(clock=self.clock, random=FixedRandom(0.25), spawner=self.spawner),
            listener=self.events.append,
        )

    def _cancel(self, jobs: Iterable[str]) -> None:
        self.cancelled.append(list(jobs))

    def _reconcile(self) -> None:
        self.reconciled += 1

    @asynccontextmanager
    async def running(self, session_id: SessionId = "s") -> AsyncIterator[None]:
        self.heart.session_id = session_id
        task = asyncio.create_task(self.heart.run())
        await settle_down()
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def pass_time(self, seconds: float, *, ticking: bool = True) -> None:
        """In steps of the loop watch. The worker's event loop runs, or is blocked."""
        until = self.clock.monotonic() + seconds
        while self.clock.monotonic() < until:
            self.clock.advance(min(LOOK, until - self.clock.monotonic()))
            if ticking:
                self.board.tick(self.clock.monotonic())
            await settle_down()

    async def claim(self, count: int) -> list[Job]:
        await self.store.open_session(Session(id="s"))
        await self.store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(count)])
        request = ClaimRequest(session_id="s", queues=("default",), limit=MOST_PER_CALL)
        claimed: list[Job] = []
        while len(claimed) < count:
            claimed += (await self.store.claim(request)).jobs
        return claimed

    async def states(self, jobs: Iterable[Job]) -> list[State]:
        found = [await self.store.get(job.id) for job in jobs]
        return [job.state for job in found if job]


async def settle_down() -> None:
    """Let everybody do what can be done without time passing."""
    for _ in range(25):
        await asyncio.sleep(0)


@pytest.fixture
async def bench() -> Bench:
    return Bench()


# Beating.


async def test_it_beats_at_once_and_three_times_in_a_ttl(bench: Bench) -> None:
    async with bench.running():
        assert bench.store.beats == ["s"]
        await bench.pass_time(BEAT - LOOK)
        assert len(bench.store.beats) == 1
        await bench.pass_time(LOOK)
        assert len(bench.store.beats) == 2
        await bench.pass_time(10 * TTL)
        assert bench.store.beats == ["s"] * 32
    assert (bench.lost, bench.cancelled, bench.reconciled, bench.events) == ([], [], 0, [])


async def test_it_does_not_beat_for_a_session_that_is_not_there_yet(bench: Bench) -> None:
    async with bench.running(bench.heart.session_id):
        await bench.pass_time(TTL)
        assert bench.store.beats == []
        bench.heart.session_id = "new"
        await bench.pass_time(BEAT)
        assert bench.store.beats == ["new"]


async def test_a_beat_that_fails_is_told_and_made_again_soon(bench: Bench) -> None:
    bench.store.answer = StoreUnavailable("gone")
    async with bench.running():
        soon = TTL / 12 * 0.75
        assert bench.events == [PartFailed("s", "heartbeat", "StoreUnavailable: gone", soon)]
        assert len(bench.store.beats) == 1
        await bench.pass_time(soon - 0.05)
        assert len(bench.store.beats) == 1
        bench.store.answer = Beat(open=True, held=0, cancel=())
        await bench.pass_time(0.05)
        assert len(bench.store.beats) == 2
        await bench.pass_time(BEAT)
        assert len(bench.store.beats) == 3
    assert len(bench.events) == 1


@pytest.mark.parametrize(("over", "beats"), [(1.0, 1), (1.25, 0)])
async def test_a_process_that_cannot_stop_a_handler_at_its_hard_limit_beats_no_more(
    bench: Bench, over: float, beats: int
) -> None:
    """It gets a second's grace: the loop may just be about to deal with it."""
    bench.board.start(0, claimed_job().id, 1, hard_deadline=50.0)
    bench.board.start(1, claimed_job().id, 1)
    async with bench.running(""):
        await bench.pass_time(50.0 + over)
    async with bench.running():
        assert len(bench.store.beats) == beats
        # It may have been dealt with after all.
        bench.board.end(0)
        await bench.pass_time(BEAT)
        assert len(bench.store.beats) == beats + 1


# What a beat answers.


async def test_a_session_that_was_closed_is_lost_whatever_else_the_answer_says(bench: Bench) -> None:
    bench.store.answer = Beat(open=False, held=3, cancel=("a",))
    async with bench.running():
        await bench.pass_time(BEAT)
    assert bench.lost == ["s", "s"]
    assert (bench.cancelled, bench.reconciled) == ([], 0)


async def test_the_session_that_is_lost_is_the_one_that_was_asked_about(bench: Bench) -> None:
    bench.store.answer = Beat(open=False, held=0, cancel=())

    def renew() -> None:
        bench.heart.session_id = "next"

    bench.store.during_beat = renew
    async with bench.running():
        assert bench.lost == ["s"]


async def test_jobs_to_cancel_are_handed_over(bench: Bench) -> None:
    bench.store.answer = Beat(open=True, held=0, cancel=("a", "b"))
    async with bench.running():
        assert bench.cancelled == [["a", "b"]]
    assert bench.lost == []


async def test_a_count_that_does_not_fit_twice_in_a_row_is_looked_into(bench: Bench) -> None:
    bench.store.answer = Beat(open=True, held=1, cancel=())
    async with bench.running():
        assert bench.reconciled == 0
        await bench.pass_time(BEAT)
        assert bench.reconciled == 1
        await bench.pass_time(BEAT)
        assert bench.reconciled == 1
        await bench.pass_time(BEAT)
        assert bench.reconciled == 2


async def test_a_count_that_does_not_fit_for_a_moment_is_not(bench: Bench) -> None:
    wrong, right = Beat(open=True, held=1, cancel=()), Beat(open=True, held=0, cancel=())
    bench.store.answer = wrong
    async with bench.running():
        for answer in (right, wrong, right, wrong, right):
            bench.store.answer = answer
            await bench.pass_time(BEAT)
        assert bench.reconciled == 0
        bench.store.answer = wrong
        await bench.pass_time(2 * BEAT)
        assert bench.reconciled == 1


@pytest.mark.parametrize("counted", ["before", "after"])
async def test_what_is_taken_or_settled_during_a_beat_may_count_or_not(bench: Bench, counted: str) -> None:
    job = claimed_job()

    def change() -> None:
        if bench.holding.knows(job):
            bench.holding.settled(job)
        else:
            bench.holding.take([job])
        before = not bench.holding.knows(job)
        held = before if counted == "before" else not before
        bench.store.answer = Beat(open=True, held=int(held), cancel=())

    bench.store.during_beat = change
    async with bench.running():
        await bench.pass_time(4 * BEAT)
    assert len(bench.store.beats) == 5
    assert bench.reconciled == 0


async def test_a_worker_whose_event_loop_has_ended_cannot_be_told_and_that_is_no_failure(bench: Bench) -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    bench.heart._worker_loop = ended
    bench.store.answer = Beat(open=False, held=0, cancel=())
    async with bench.running():
        await bench.pass_time(BEAT)
        assert len(bench.store.beats) == 2
    assert bench.events == []


# An event loop that is blocked.


async def test_a_loop_that_runs_now_and_then_is_not_blocked(bench: Bench) -> None:
    [job] = await bench.claim(1)
    async with bench.running():
        for _ in range(5):
            await bench.pass_time(1.75, ticking=False)
            await bench.pass_time(LOOK)
    assert bench.events == []
    assert await bench.states([job]) == [State.IN_FLIGHT]


async def test_a_loop_that_is_blocked_for_two_seconds_loses_what_has_not_started(bench: Bench) -> None:
    running, fetched, unheard = jobs = await bench.claim(3)
    bench.holding.take([running, fetched])
    assert bench.holding.start([running]) == [running]
    async with bench.running():
        await bench.pass_time(1.75, ticking=False)
        assert bench.events == []
        await bench.pass_time(LOOK, ticking=False)
        assert bench.events == [LoopBlocked("s", 2.0, 2, ("culprit",))]
        assert await bench.states(jobs) == [State.IN_FLIGHT, State.READY, State.READY]
        assert bench.store.applied == [2]
        # once, however long it lasts
        await bench.pass_time(10, ticking=False)
        assert len(bench.events) == 1
        # and again the next time
        await bench.pass_time(LOOK)
        await bench.pass_time(2.0, ticking=False)
        assert len(bench.events) == 2
    assert bench.holding.start([fetched]) == []
    assert bench.holding.take([unheard]) == []
    assert bench.holding.knows(running)


async def test_what_a_waiting_claim_brings_to_a_blocked_loop_is_given_back_too(bench: Bench) -> None:
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
        assert bench.events == [LoopBlocked("s", 2.0, 0, ("culprit",))]
        jobs = await bench.claim(2)  # the server has carried it out, and nobody has heard of it
        await bench.pass_time(1.75, ticking=False)
        assert await bench.states(jobs) == [State.IN_FLIGHT, State.IN_FLIGHT]
        await bench.pass_time(LOOK, ticking=False)
        assert await bench.states(jobs) == [State.READY, State.READY]
        assert bench.events[1:] == [LoopBlocked("s", 4.0, 2, ("culprit",))]
    assert bench.holding.take(jobs) == []


async def test_a_loop_that_was_blocked_before_anybody_looked_is_noticed_at_the_first_look(bench: Bench) -> None:
    bench.clock.advance(5.0)
    async with bench.running():
        await bench.pass_time(LOOK, ticking=False)
    assert bench.events == [LoopBlocked("s", 5.25, 0, ("culprit",))]


async def test_a_blocked_loop_without_a_session_has_nothing_to_lose(bench: Bench) -> None:
    async with bench.running(""):
        await bench.pass_time(5, ticking=False)
    assert bench.events == []


async def test_very_many_jobs_are_given_back_in_several_calls(bench: Bench) -> None:
    jobs = await bench.claim(2 * MOST_PER_CALL + 1)
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
    assert bench.store.applied == [MOST_PER_CALL, MOST_PER_CALL, 1]
    assert bench.events == [LoopBlocked("s", 2.0, len(jobs), ("culprit",))]
    assert set(await bench.states(jobs)) == {State.READY}


async def test_an_unstarted_job_that_was_to_be_cancelled_is_cancelled(bench: Bench) -> None:
    asked, _ = jobs = await bench.claim(2)

    async def ask_between(session_id: SessionId) -> list[Job]:
        assert await bench.store.request_cancel([asked.id]) == [CancelAnswer.ASKED]
        return jobs

    bench.store.held = ask_between  # type: ignore[method-assign]
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
    assert await bench.states(jobs) == [State.CANCELLED, State.READY]
    assert bench.store.applied == [2, 1]


async def test_a_store_that_always_speaks_of_cancelling_is_asked_twice_only(bench: Bench) -> None:
    await bench.claim(1)

    async def stubborn(moves: Sequence[Move]) -> list[Applied]:
        bench.store.applied.append(len(moves))
        return [Applied.CANCEL_ASKED]

    bench.store.apply = stubborn  # type: ignore[method-assign]
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
    assert bench.store.applied == [1, 1]
    assert bench.events == [LoopBlocked("s", 2.0, 1, ("culprit",))]


async def test_jobs_that_a_store_could_not_take_back_are_as_if_nobody_knew_of_them(bench: Bench) -> None:
    """The count of a later beat shows them, and the worker gives them back."""
    [job] = await bench.claim(1)
    bench.store.fault = StoreUnavailable("gone")
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
    assert not bench.holding.knows(job)
    assert bench.events == [LoopBlocked("s", 2.0, 1, ("culprit",))]


async def test_what_was_given_back_is_asked_for_once_more_lest_it_hides_what_a_late_claim_takes(bench: Bench) -> None:
    """It is counted until the reply to its claim arrives, and nobody may be waiting for that any more."""
    [job] = await bench.claim(1)
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
    assert bench.reconciled == 1
    assert bench.holding.reconcile([], bench.holding.known()) == []
    assert not bench.holding.knows(job)


async def test_jobs_that_a_store_may_have_taken_back_never_start_and_are_asked_for(bench: Bench) -> None:
    [job] = await bench.claim(1)
    bench.store.fault = OutcomeUnknown("the reply got lost")
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
    assert bench.holding.knows(job)
    assert bench.holding.start([job]) == []
    assert bench.reconciled == 1
    assert bench.holding.reconcile([job], bench.holding.known()) == [job]
    assert bench.events == [LoopBlocked("s", 2.0, 1, ("culprit",))]


async def test_a_store_that_answers_for_fewer_jobs_is_not_believed_and_the_watch_goes_on(bench: Bench) -> None:
    await bench.claim(2)

    async def too_few(moves: Sequence[Move]) -> list[Applied]:
        return [Applied.APPLIED]

    bench.store.apply = too_few  # type: ignore[method-assign]
    async with bench.running():
        await bench.pass_time(2.0, ticking=False)
        [failed] = bench.events
        assert isinstance(failed, PartFailed)
        assert (failed.worker_id, failed.part) == ("s", "loop watch")
        assert "shorter" in failed.error
        beats = len(bench.store.beats)
        await bench.pass_time(2 * BEAT)
        assert len(bench.store.beats) >= beats + 2
        await bench.pass_time(2.0, ticking=False)
        assert len(bench.events) == 2


# Starting and stopping.


async def test_it_runs_beside_the_worker_until_it_is_stopped_and_closes_its_store(bench: Bench) -> None:
    bench.heart.session_id = "s"
    bench.heart.start()
    await settle_down()
    assert bench.spawner.names == ["holdfast-heart"]
    assert bench.store.beats == ["s"]
    assert bench.store.exits == 0
    bench.heart.stop()
    await asyncio.wait_for(bench.spawner.tasks[0], 60)
    assert bench.store.exits == 1
    await bench.pass_time(TTL)
    assert bench.store.beats == ["s"]


async def test_a_second_stop_does_not_meet_it_while_it_closes_its_store(bench: Bench) -> None:
    closing, closed = asyncio.Event(), asyncio.Event()

    class SlowlyClosed(HeartStore):
        async def __aexit__(self, *exc: object) -> None:
            closing.set()
            await closed.wait()
            self.exits += 1

    bench.heart._store = store = SlowlyClosed()
    bench.heart.start()
    await settle_down()
    bench.heart.stop()
    await asyncio.wait_for(closing.wait(), 60)
    bench.heart.stop()
    await settle_down()
    closed.set()
    await asyncio.wait_for(bench.spawner.tasks[0], 60)
    assert store.exits == 1


async def test_one_that_was_stopped_before_it_began_does_not_begin(bench: Bench) -> None:
    bench.heart.session_id = "s"
    bench.heart.stop()
    bench.heart.start()
    await asyncio.wait_for(bench.spawner.tasks[0], 60)
    assert bench.store.beats == []


async def test_one_that_has_ended_can_be_stopped(bench: Bench) -> None:
    ended = asyncio.new_event_loop()
    ended.close()
    bench.heart._loop = ended
    bench.heart.stop()
