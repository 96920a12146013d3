"""Corners of bringing jobs back: a follow-up that cannot be made, a suspect that takes its whole worker down, and an
outcome that never reached the store.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.codec import DEFAULT_PAYLOAD_LIMIT
from holdfast.events import JobsRescued, KeeperFailed, PartFailed, SessionRescued
from holdfast.failures import decode_history
from holdfast.job import Job, NewJob, State
from holdfast.keepers.rescue import Rescue
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session, Store, all_sessions
from holdfast.tasks import FollowUps
from holdfast.worker.board import Board, Started
from holdfast.worker.claimer import _MOST_UNSETTLED
from holdfast.worker.recovery import Death, Recovered, recover
from holdfast.worker.runner import _LARGEST_WINDOW
from tests.worker.bench import PATIENCE, Bench, Heard

TTL = 0.5
AT_THE_FIRST_CRASH = RetryPolicy(max_crashes=1)


async def until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    """Return when it holds; fail with `what` was waited for if it never does."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not await condition():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(f"never happened: {what}") from None


async def claim(store: Store, session_id: str, limit: int = 100) -> list[Job]:
    """Everything that is there, for a session that is opened for it."""
    await store.open_session(Session(id=session_id, queues=("default",)))
    claimed = await store.claim(ClaimRequest(session_id=session_id, queues=("default",), limit=limit))
    return list(claimed.jobs)


async def now(store: Store, job_id: str) -> Job:
    job = await store.get(job_id)
    assert job is not None
    return job


# A follow-up that cannot be made.


class Mourned:
    """A task whose failure is to be followed by another, and a job of it for which that cannot be made."""

    def __init__(self, bench: Bench, why: str) -> None:
        self.app: Holdfast = bench.app()
        self.store = self.app.store

        @self.app.task
        def mourn(arguments: dict[str, Any], error: str) -> None: ...

        @self.app.task(on_failed=mourn)
        def doomed(data: str) -> None: ...

        @self.app.task
        def innocent() -> None: ...

        self.innocent = innocent
        if why == "too large":
            self.new = doomed.job("x" * (DEFAULT_PAYLOAD_LIMIT - len('{"data":""}'))).new
        else:
            self.new = NewJob(id=SYSTEM.ids.job_id(), task="doomed", payload=b'{"data": ')
        self.follow_ups = FollowUps(self.app.tasks, self.app._client, bench.heard)

    async def suspect(self) -> Job:
        """The job, claimed alone by a session that died."""
        await self.store.insert([self.new])
        await claim(self.store, "first")
        await self.store.close_session("first")
        assert await Rescue(self.store, ports=SYSTEM, ttl=TTL).one_pass() == 1
        job = await now(self.store, self.new.id)
        assert job.suspect
        return job

    async def check(self, heard: Heard) -> None:
        """It has failed, nothing follows, and somebody knows."""
        job = await now(self.store, self.new.id)
        assert (job.state, job.reason) == (State.FAILED, "crashed")
        assert not (await self.app.afind(task="mourn")).jobs
        [told] = heard.of(PartFailed)
        assert told.part == "on_failed"
        assert f"the on_failed of job {job.id} (doomed) cannot be enqueued" in told.error


@pytest.fixture(params=["too large", "unreadable"])
def mourned(request: pytest.FixtureRequest, bench: Bench) -> Mourned:
    return Mourned(bench, request.param)


async def test_a_follow_up_that_cannot_be_made_keeps_no_keeper_from_its_work(mourned: Mourned, heard: Heard) -> None:
    store = mourned.store
    await mourned.suspect()
    beside = await mourned.innocent.aenqueue()
    assert len(await claim(store, "second")) == 2
    await store.close_session("second")
    elsewhere = await mourned.innocent.aenqueue()
    assert len(await claim(store, "third")) == 1  # that worker dies without a word: nobody closes its session

    keeper = Rescue(
        store, ports=SYSTEM, ttl=TTL, policy=AT_THE_FIRST_CRASH, listener=heard, follow=mourned.follow_ups.add
    )
    keeping = asyncio.create_task(keeper.run())

    async def all_are_back() -> bool:
        states = {(await now(store, job.id)).state for job in (beside, elsewhere)}
        return states == {State.READY} and len(heard.of(JobsRescued)) == 2  # told a moment after the store has it

    await until(all_are_back, "the innocent jobs come back")
    keeping.cancel()
    await asyncio.wait([keeping])
    await mourned.check(heard)
    assert [event.session_id for event in heard.of(SessionRescued)] == ["third"]
    assert heard.of(JobsRescued) == [JobsRescued(1, 1), JobsRescued(1, 0)]
    assert heard.of(KeeperFailed) == []


async def test_a_keeper_that_cannot_bring_jobs_back_still_closes_the_sessions_of_the_dead(bench: Bench) -> None:
    mourned = Mourned(bench, "unreadable")
    await mourned.suspect()
    await claim(mourned.store, "second")
    await mourned.store.close_session("second")
    await claim(mourned.store, "third")

    def broken(job: Job, move: Any) -> Any:
        raise ZeroDivisionError

    keeper = Rescue(
        mourned.store, ports=SYSTEM, ttl=TTL, policy=AT_THE_FIRST_CRASH, listener=bench.heard, follow=broken
    )
    keeping = asyncio.create_task(keeper.run())

    async def is_closed() -> bool:
        views = [view.open for view in await all_sessions(mourned.store) if view.id == "third"]
        return views == [False] and len(bench.heard.of(KeeperFailed)) > 0

    await until(is_closed, "the session of the dead worker is closed")
    keeping.cancel()
    await asyncio.wait([keeping])
    assert "ZeroDivisionError" in bench.heard.of(KeeperFailed)[0].error


async def test_a_follow_up_that_cannot_be_made_keeps_no_supervisor_from_its_work(
    mourned: Mourned, heard: Heard
) -> None:
    store = mourned.store
    await mourned.suspect()
    waiting = await mourned.innocent.aenqueue()
    [suspect, _] = await claim(store, "second")
    death = Death("second", "killed by SIGSEGV", [Started(suspect.id, suspect.version, math.inf)])
    recovered = await recover(
        store, death, policy=lambda task: AT_THE_FIRST_CRASH, follow=mourned.follow_ups.add, ports=SYSTEM
    )
    assert recovered == Recovered(1, 1)
    assert (await now(store, waiting.id)).reason == "released"
    await mourned.check(heard)


# Who is to blame for a dead worker.


class Grave:
    """Worker processes that die one after the other, with the jobs that they hold."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.deaths = 0

    async def enqueue(self) -> str:
        [inserted] = await self.store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}")])
        return inserted.job_id

    async def die(self, *job_ids: str, max_snoozes: int = 100) -> None:
        """A worker that runs these jobs, and has claimed all there are, ends."""
        self.deaths += 1
        session_id = f"session-{self.deaths}"
        running = [job for job in await claim(self.store, session_id) if job.id in job_ids]
        assert {job.id for job in running} == set(job_ids)
        death = Death(session_id, "killed", [Started(job.id, job.version, math.inf) for job in running])
        policy = RetryPolicy(max_snoozes=max_snoozes)
        await recover(self.store, death, policy=lambda task: policy, follow=lambda job, move: move, ports=SYSTEM)

    async def fate(self, job_id: str) -> tuple[str, str, bool]:
        job = await now(self.store, job_id)
        return job.state.value, job.reason.value, job.suspect


@pytest.fixture
def grave(bench: Bench) -> Grave:
    return Grave(bench.app().store)


async def test_a_suspect_that_takes_its_whole_worker_down_among_ever_new_neighbours_comes_to_an_end(
    grave: Grave,
) -> None:
    most = 4
    poison = await grave.enqueue()
    await grave.die(poison)
    assert await grave.fate(poison) == ("ready", "lost", True)
    for _ in range(most):
        neighbour = await grave.enqueue()
        await grave.die(poison, neighbour, max_snoozes=most)
        assert await grave.fate(poison) == ("ready", "snoozed", True)
        assert await grave.fate(neighbour) == ("ready", "lost", True)
    job = await now(grave.store, poison)
    assert (job.attempt, job.crashes, job.failures, job.snoozes) == (1, 0, 0, most)  # it may have been the neighbours

    await grave.die(poison, await grave.enqueue(), max_snoozes=most)
    assert await grave.fate(poison) == ("failed", "snoozed_out", True)
    last = decode_history((await now(grave.store, poison)).failure_history)[-1]
    assert (last.type, last.message) == ("WorkerDied", "the worker process that ran the job ended: killed")


async def test_a_suspect_that_takes_its_worker_down_with_nobody_else_in_it_is_to_blame(grave: Grave) -> None:
    poison = await grave.enqueue()
    await grave.die(poison)
    await grave.die(poison)
    assert (await now(grave.store, poison)).crashes == 1


# An outcome that never reached the store.


def test_a_job_that_has_an_outcome_stays_on_the_board_without_a_deadline() -> None:
    board, job_id, other = Board.private(2), SYSTEM.ids.job_id(), SYSTEM.ids.job_id()
    place = board.take()
    assert board.started() == []
    board.start(place, job_id, 3, hard_deadline=5.0)
    assert board.started() == board.running() == [Started(job_id, 3, 5.0)]
    board.end(place)
    assert board.running() == []
    assert board.started() == [Started(job_id, 3, math.inf)]
    assert board.done == 1
    board.start(board.take(), other, 1, hard_deadline=7.0)
    assert board.started() == [Started(other, 1, 7.0), Started(job_id, 3, math.inf)]
    board.end(board.take())  # nothing had started there
    assert (board.done, len(board.started())) == (2, 2)


@pytest.mark.parametrize("slots", [1, 3_000])
def test_the_board_forgets_the_oldest_outcomes_only_when_more_have_come_than_a_worker_lets_wait(slots: int) -> None:
    """What is unconfirmed, what the worker has claimed beyond its slots, and all that ran, may end before the store
    confirms the first of them; and then every slot runs another job.
    """
    board, first = Board.private(slots), SYSTEM.ids.job_id()

    def remembered() -> bool:
        return first in {started.job_id for started in board.started()}

    place = board.take()
    board.start(place, first, 1)
    board.end(place)
    for _ in range(_MOST_UNSETTLED + _LARGEST_WINDOW + slots):
        place = board.take()
        board.start(place, SYSTEM.ids.job_id(), 1)
        board.end(place)
    for _ in range(slots):
        board.start(board.take(), SYSTEM.ids.job_id(), 1)
    assert remembered()
    for _ in range(2 * slots + 4096):
        place = board.take()
        board.start(place, SYSTEM.ids.job_id(), 1)
        board.end(place)
    assert not remembered()


async def test_a_job_whose_outcome_had_not_reached_the_store_when_its_process_died_counts_as_started(
    grave: Grave,
) -> None:
    unconfirmed, unstarted = await grave.enqueue(), await grave.enqueue()
    board = Board.private(2)
    by_id = {job.id: job for job in await claim(grave.store, "session")}
    for job_id, version in ((unconfirmed, by_id[unconfirmed].version), (SYSTEM.ids.job_id(), 1)):
        place = board.take()
        board.start(place, job_id, version)
        board.end(place)
    death = Death("session", "killed", board.started())
    recovered = await recover(
        grave.store, death, policy=lambda task: RetryPolicy(), follow=lambda job, move: move, ports=SYSTEM
    )
    assert recovered == Recovered(1, 1)
    assert await grave.fate(unconfirmed) == ("ready", "lost", True)
    assert (await now(grave.store, unconfirmed)).attempt == 1
    assert await grave.fate(unstarted) == ("ready", "released", False)
