"""What the suite needs from an engine (`Harness`), and short words for what the tests do with it (`Rig`)."""

# ruff: noqa: S101

from __future__ import annotations

import abc
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from holdfast.failures import Failure
from holdfast.job import Job, JobId, Key, NewJob, SessionId, State
from holdfast.lifecycle import (
    Applied,
    Failed,
    Lost,
    Move,
    Outcome,
    Released,
    Snoozed,
    Succeeded,
    replay,
    settle,
)
from holdfast.policy import RetryPolicy, Steps
from holdfast.ports import SYSTEM, microseconds
from holdfast.store import Beat, ClaimRequest, Inserted, InsertStatus, JobQuery, Session, Store

BOOM = Failure(at=0, attempt=1, type="Boom", message="it went wrong")
EVERY_BYTE = bytes(range(256))
QUEUE = "default"


class Harness(abc.ABC):
    """One engine, with nothing in it yet. A test gets a harness of its own."""

    step: float = 10.0
    """The unit of time in the tests, in seconds. With a real clock: short, but well above the time of a few calls."""

    @abc.abstractmethod
    def open(self) -> AbstractAsyncContextManager[Store]:
        """The store, opened."""

    @abc.abstractmethod
    def second(self) -> AbstractAsyncContextManager[Store]:
        """Another store object on the same data: a second client. In-process engines give the same object."""

    @abc.abstractmethod
    async def pass_time(self, seconds: float) -> None:
        """Let that much time pass on the store's clock: advance a manual one, or really wait."""

    @abc.abstractmethod
    async def erase_session(self, session_id: SessionId) -> None:
        """Remove what the store knows of a session, behind its back, as a restored backup might have it."""

    async def age_closed_sessions(self, seconds: float) -> None:
        """Let closed sessions be that much older. Engines with a real clock change their rows instead of waiting."""
        await self.pass_time(seconds)


class _Middle:
    """The random source of the suite."""

    def fraction(self) -> float:
        return 0.5


class Rig:
    """An opened store, and the verbs of the suite on it."""

    def __init__(self, harness: Harness, store: Store) -> None:
        self.harness = harness
        self.store = store
        self.policy = RetryPolicy(backoff=Steps((harness.step,)), max_crashes=3, max_snoozes=2)

    def using(self, store: Store) -> Rig:
        """The same verbs on another client."""
        return Rig(self.harness, store)

    # Time.

    def steps(self, count: float) -> int:
        """That many steps of time in microseconds."""
        return microseconds(count * self.harness.step)

    async def wait(self, steps: float) -> None:
        """Let that many steps of time pass."""
        await self.harness.pass_time(steps * self.harness.step)

    # Jobs.

    def new(self, **fields: Any) -> NewJob:
        """A new job that differs from the plainest one by `fields`."""
        return NewJob(**{"id": SYSTEM.ids.job_id(), "task": "work", "payload": b"{}", **fields})

    def key(self, text: str = "k", payload_hash: str = "h", steps: float = 100) -> Key:
        """An idempotency key held for that many steps."""
        return Key(text, payload_hash, self.steps(steps))

    async def add(self, **fields: Any) -> JobId:
        """The id of a job that was just enqueued."""
        new = self.new(**fields)
        assert await self.store.insert([new]) == [Inserted(new.id, InsertStatus.CREATED)]
        return new.id

    async def add_many(self, count: int, **fields: Any) -> list[JobId]:
        """The ids of jobs that were just enqueued in one call, in that order."""
        new = [self.new(**fields) for _ in range(count)]
        answers = await self.store.insert(new)
        assert answers == [Inserted(job.id, InsertStatus.CREATED) for job in new]
        return [job.id for job in new]

    async def get(self, job_id: JobId) -> Job:
        """The job, which must be there."""
        job = await self.store.get(job_id)
        assert job is not None, f"{job_id} is not in the store"
        return job

    async def state(self, job_id: JobId) -> State:
        """The job's state."""
        return (await self.get(job_id)).state

    async def dump(self) -> list[Job]:
        """Every job."""
        jobs: list[Job] = []
        query = JobQuery(limit=1000)
        while True:
            page = await self.store.find(query)
            jobs += page.jobs
            if page.next is None:
                return jobs
            query = JobQuery(limit=1000, cursor=page.next)

    # Sessions and claims.

    async def session(self) -> SessionId:
        """A new open session."""
        session_id = SYSTEM.ids.session_id()
        await self.store.open_session(Session(id=session_id))
        return session_id

    async def claim(
        self, session_id: SessionId, limit: int = 1, *, queues: Sequence[str] = (QUEUE,), turn: int = 0
    ) -> list[Job]:
        """The jobs claimed."""
        request = ClaimRequest(session_id=session_id, queues=tuple(queues), limit=limit, turn=turn)
        return list((await self.store.claim(request)).jobs)

    async def claim_ids(
        self, session_id: SessionId, limit: int = 1000, *, queues: Sequence[str] = (QUEUE,), turn: int = 0
    ) -> list[JobId]:
        """The ids of the jobs claimed."""
        return [job.id for job in await self.claim(session_id, limit, queues=queues, turn=turn)]

    async def take(self, session_id: SessionId | None = None, *, queue: str = QUEUE) -> Job:
        """One claimed job, which must be there; by a new session if none is given."""
        jobs = await self.claim(session_id or await self.session(), queues=(queue,))
        assert len(jobs) == 1, f"no job to claim in {queue}"
        return jobs[0]

    async def next_due(self, session_id: SessionId, *, queues: Sequence[str] = (QUEUE,), limit: int = 1) -> int | None:
        """The time of the next job after a claim."""
        request = ClaimRequest(session_id=session_id, queues=tuple(queues), limit=limit)
        claimed = await self.store.claim(request)
        return None if claimed.due_in is None else claimed.now + claimed.due_in

    async def beat(self, session_id: SessionId) -> Beat:
        """One heartbeat."""
        return await self.store.beat(session_id)

    # Outcomes.

    def move(self, job: Job, outcome: Outcome, *, cancel_asked: bool = False) -> Move:
        """What follows from the outcome."""
        return settle(job, outcome, self.policy, _Middle(), cancel_asked=cancel_asked)

    async def apply(self, move: Move) -> Applied:
        """One move."""
        [applied] = await self.store.apply([move])
        return applied

    async def settle(self, job: Job, outcome: Outcome, *, cancel_asked: bool = False) -> Applied:
        """Report the outcome of a claim."""
        return await self.apply(self.move(job, outcome, cancel_asked=cancel_asked))

    async def ack(self, job: Job, result: bytes | None = None) -> Applied:
        """Report success."""
        return await self.settle(job, Succeeded(result))

    async def nack(self, job: Job, *, permanent: bool = False, retry_after: float | None = None) -> Applied:
        """Report a failure. The retry comes one step later."""
        return await self.settle(job, Failed(BOOM, permanent=permanent, retry_after=retry_after))

    async def release(self, job: Job) -> Applied:
        """Give the job back."""
        return await self.settle(job, Released())

    async def snooze(self, job: Job, steps: float = 1) -> Applied:
        """Give the job back for later."""
        return await self.settle(job, Snoozed(steps * self.harness.step, BOOM))

    async def rescue(self, *, started: bool | None = None, session_id: SessionId | None = None) -> list[JobId]:
        """What a keeper does: bring back every lost job. Their ids."""
        jobs = await self.store.lost(1000, session_id=session_id)
        answers = await self.store.apply([self.move(job, Lost(BOOM, started)) for job in jobs])
        assert answers == [Applied.APPLIED] * len(jobs)
        return [job.id for job in jobs]

    async def replay(self, job_id: JobId) -> Applied:
        """What an operator does to an ended job."""
        return await self.apply(replay(await self.get(job_id)))

    async def end(self, job_id: JobId, state: State, *, queue: str = QUEUE) -> Job:
        """Bring the only due job of the queue to an end state. The job as it then is."""
        if state is State.CANCELLED:
            await self.store.request_cancel([job_id])
        else:
            job = await self.take(queue=queue)
            assert job.id == job_id
            await (self.ack(job) if state is State.SUCCEEDED else self.nack(job, permanent=True))
        ended = await self.get(job_id)
        assert ended.state is state
        return ended


OUTCOMES: tuple[Outcome, ...] = (
    Succeeded(b"result"),
    Failed(BOOM),
    Failed(BOOM, permanent=True),
    Released(),
    Snoozed(1.0, BOOM),
)
"""Every way in which the holder of a lease can end its claim."""


def outcome_name(outcome: object) -> str:
    """A short name for test ids."""
    permanent = isinstance(outcome, Failed) and outcome.permanent
    return type(outcome).__name__.lower() + ("-permanent" if permanent else "")


@contextlib.asynccontextmanager
async def rig_on(harness: Harness) -> AsyncIterator[Rig]:
    """A rig on the harness's store, opened."""
    async with harness.open() as store:
        yield Rig(harness, store)
