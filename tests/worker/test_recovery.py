"""What becomes of the jobs of a worker process that is dead, by what its board still says."""

from __future__ import annotations

import math

import pytest

from holdfast.failures import decode_history
from holdfast.job import Job, NewJob, Reason, State
from holdfast.lifecycle import Move
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session, Store, all_sessions
from holdfast.worker.board import Started
from holdfast.worker.recovery import Death, Recovered, recover
from tests.worker.bench import Bench

DEAD = "dead"


class Scene:
    """A session that has ended with some jobs in its hands."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.jobs: list[Job] = []

    async def claim(self, count: int) -> list[Job]:
        new = [NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", max_retries=0) for _ in range(count)]
        await self.store.insert(new)
        await self.store.open_session(Session(id=DEAD))
        claimed = await self.store.claim(ClaimRequest(session_id=DEAD, queues=("default",), limit=count))
        self.jobs = list(claimed.jobs)
        return self.jobs

    async def recover(
        self, *started: Job, killed: bool = False, overdue: tuple[Job, ...] = (), max_crashes: int = 3
    ) -> Recovered:
        death = Death(
            DEAD,
            "killed by SIGSEGV",
            [Started(job.id, job.version, math.inf) for job in started],
            killed,
            frozenset((job.id, job.version) for job in overdue),
        )
        return await recover(
            self.store,
            death,
            policy=lambda task: RetryPolicy(max_crashes=max_crashes),
            follow=self.follow,
            ports=SYSTEM,
        )

    def follow(self, job: Job, move: Move) -> Move:
        return move

    async def now(self, job: Job) -> Job:
        found = await self.store.get(job.id)
        assert found is not None
        return found

    async def fates(self) -> list[tuple[State, Reason, int, bool]]:
        found = [await self.now(job) for job in self.jobs]
        return [(job.state, job.reason, job.attempt, job.suspect) for job in found]


@pytest.fixture
def scene(bench: Bench) -> Scene:
    return Scene(bench.app().store)


async def test_what_had_not_started_loses_nothing_and_what_ran_is_suspected(scene: Scene) -> None:
    running, _ = await scene.claim(2)
    assert await scene.recover(running) == Recovered(1, 1)
    assert await scene.fates() == [(State.READY, "lost", 1, True), (State.READY, "released", 0, False)]
    [failure] = decode_history((await scene.now(running)).failure_history)
    assert (failure.type, failure.message) == (
        "WorkerDied",
        "the worker process that ran the job ended: killed by SIGSEGV",
    )
    assert [session.open for session in await all_sessions(scene.store)] == [False]


async def test_if_we_killed_it_for_a_job_past_its_limit_that_job_alone_is_to_blame(scene: Scene) -> None:
    overdue, innocent, _ = await scene.claim(3)
    assert await scene.recover(overdue, innocent, killed=True, overdue=(overdue,)) == Recovered(1, 2)
    assert await scene.fates() == [
        (State.FAILED, "exhausted", 1, False),
        (State.READY, "released", 0, False),
        (State.READY, "released", 0, False),
    ]
    assert decode_history((await scene.now(overdue)).failure_history)[-1].type == "HardTimeout"


async def test_a_job_that_somebody_wanted_cancelled_is_cancelled(scene: Scene) -> None:
    running, waiting = await scene.claim(2)
    await scene.store.request_cancel([running.id, waiting.id])
    await scene.recover(running)
    assert [fate[:2] for fate in await scene.fates()] == [(State.CANCELLED, "cancelled")] * 2


async def test_repeating_it_changes_nothing(scene: Scene) -> None:
    running, _ = await scene.claim(2)
    await scene.recover(running)
    before = await scene.fates()
    assert await scene.recover(running) == Recovered(0, 0)
    assert await scene.fates() == before


async def test_more_jobs_than_go_into_one_call_all_come_back(scene: Scene) -> None:
    first = await scene.claim(600)
    jobs = first + await scene.claim(600)
    scene.jobs = jobs
    assert await scene.recover(*first) == Recovered(600, 600)
    fates = await scene.fates()
    assert set(fates[:600]) == {(State.READY, "lost", 1, True)}
    assert set(fates[600:]) == {(State.READY, "released", 0, False)}
