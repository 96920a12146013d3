"""A keeper among others: somebody beats, cancels or settles between its look and its write."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import pytest

from holdfast.config import WorkerSettings
from holdfast.events import Event, JobsRescued, SessionRescued
from holdfast.failures import Failure, decode_history
from holdfast.job import Job, NewJob, SessionId, State
from holdfast.keepers.rescue import DEFAULT_TTL, Rescue
from holdfast.lifecycle import Applied, Lost, Move, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM, Ports
from holdfast.store import CancelAnswer, ClaimRequest, Session
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock
from tests.unit.samples import BROKEN

TTL = 9.0


class RacedStore(MemoryStore):
    """Others are faster: what they do happens after the keeper's read, and before its write."""

    def __init__(self) -> None:
        super().__init__()
        self.before_close: Callable[[], Awaitable[object]] | None = None
        self.before_apply: Callable[[], Awaitable[object]] | None = None
        self.answers: Callable[[list[Applied]], list[Applied]] = lambda answers: answers
        self.writes = 0

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        if self.before_close:
            await self.before_close()
        return await super().close_session(session_id, if_beat=if_beat)

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        self.writes += 1
        race, self.before_apply = self.before_apply, None
        if race:
            await race()
        return self.answers(await super().apply(moves))


class Scene:
    """A session that holds jobs, and a keeper on a clock that the test moves."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.store = RacedStore()
        self.events: list[Event] = []
        self.followed: list[State] = []

    def keeper(self, *, policy: RetryPolicy = RetryPolicy(), following: bool = True) -> Rescue:  # noqa: B008
        def follow(job: Job, move: Move) -> Move:
            self.followed.append(move.to)
            return move

        ports = Ports(clock=self.clock, random=SYSTEM.random)
        return Rescue(
            self.store,
            ports=ports,
            ttl=TTL,
            policy=policy,
            listener=self.events.append,
            follow=follow if following else None,
        )

    async def claim(self, count: int, session_id: str = "worker") -> list[Job]:
        await self.store.open_session(Session(id=session_id))
        await self.store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(count)])
        claimed = await self.store.claim(ClaimRequest(session_id=session_id, queues=("default",), limit=1_000))
        return list(claimed.jobs)

    async def now(self, job: Job) -> Job:
        found = await self.store.get(job.id)
        assert found is not None
        return found


@pytest.fixture
def scene() -> Scene:
    return Scene()


async def test_a_beat_between_the_look_and_the_closing_wins(scene: Scene) -> None:
    [job] = await scene.claim(1)
    keeper = scene.keeper()
    scene.store.before_close = lambda: scene.store.beat("worker")
    for _ in range(4):
        await keeper.one_pass()
        scene.clock.advance(TTL / 3)
    assert (await scene.now(job)).state is State.IN_FLIGHT
    assert scene.events == []
    # From that beat on, it has a whole TTL again.
    scene.store.before_close = None
    for _ in range(3):
        await keeper.one_pass()
        assert (await scene.now(job)).state is State.IN_FLIGHT
        scene.clock.advance(TTL / 3)
    await keeper.one_pass()
    assert scene.events == [SessionRescued("worker"), JobsRescued(returned=1, failed=0)]


async def test_lost_jobs_that_others_cancel_or_rescue_meanwhile_are_counted_once(scene: Scene) -> None:
    kept, cancelled, taken = await scene.claim(3)
    await scene.store.close_session("worker")

    async def race() -> None:
        assert await scene.store.request_cancel([cancelled.id]) == [CancelAnswer.ASKED]
        rescued = settle(taken, Lost(BROKEN), RetryPolicy(), SYSTEM.random)
        assert await MemoryStore.apply(scene.store, [rescued]) == [Applied.APPLIED]
        # and a worker has it already
        assert [job.id for job in await scene.claim(0, "other")] == [taken.id]

    scene.store.before_apply = race
    assert await scene.keeper().one_pass() == 2
    assert [(await scene.now(job)).state for job in (kept, cancelled, taken)] == [
        State.READY,
        State.CANCELLED,
        State.IN_FLIGHT,
    ]
    assert scene.events == [JobsRescued(returned=2, failed=0)]


async def test_a_keeper_that_was_too_late_with_every_job_says_nothing(scene: Scene) -> None:
    jobs = await scene.claim(3)
    await scene.store.close_session("worker")
    moves = [settle(job, Lost(BROKEN), RetryPolicy(), SYSTEM.random) for job in jobs]

    async def race() -> None:
        assert await MemoryStore.apply(scene.store, moves) == [Applied.APPLIED] * 3
        await scene.claim(0, "other")

    scene.store.before_apply = race
    assert await scene.keeper().one_pass() == 0
    assert scene.events == []


async def test_what_a_lost_job_remembers(scene: Scene) -> None:
    [job] = await scene.claim(1)
    await scene.store.close_session("worker")
    scene.clock.advance(1)
    await scene.keeper().one_pass()
    assert decode_history((await scene.now(job)).failure_history) == [
        Failure(
            at=scene.clock.now(),
            attempt=1,
            type="WorkerLost",
            message="the worker session worker that held the job ended without settling it",
        )
    ]


@pytest.mark.parametrize("following", [True, False])
async def test_what_fails_at_the_crash_limit_is_counted_apart_and_followed(scene: Scene, following: bool) -> None:
    keeper = scene.keeper(policy=RetryPolicy(max_crashes=1), following=following)
    [suspect] = await scene.claim(1)
    await scene.store.close_session("worker")
    await keeper.one_pass()
    assert scene.events == [JobsRescued(returned=1, failed=0)]
    assert scene.followed == []

    jobs = await scene.claim(2, "next")
    assert suspect.id in {job.id for job in jobs}
    await scene.store.close_session("next")
    assert await keeper.one_pass() == 3
    assert scene.events[1:] == [JobsRescued(returned=2, failed=1)]
    assert scene.followed == ([State.FAILED] if following else [])
    assert (await scene.now(suspect)).state is State.FAILED


@pytest.mark.parametrize("call", ["first", "second"])
async def test_a_store_that_answers_for_fewer_jobs_than_it_was_asked_about_is_not_believed(
    scene: Scene, call: str
) -> None:
    jobs = await scene.claim(2)
    await scene.store.close_session("worker")

    async def race() -> None:
        await scene.store.request_cancel([job.id for job in jobs])

    scene.store.before_apply = race
    asked = {Applied.CANCEL_ASKED}
    scene.store.answers = lambda answers: answers[:1] if (set(answers) == asked) is (call == "first") else answers
    with pytest.raises(ValueError, match="shorter"):
        await scene.keeper().one_pass()
    assert scene.store.writes == (1 if call == "first" else 2)


def test_a_keeper_waits_as_long_as_a_lease_lasts_unless_it_is_told_otherwise() -> None:
    assert WorkerSettings().lease_ttl == DEFAULT_TTL
