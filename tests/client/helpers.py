"""What a worker does with jobs, by hand, through the store port."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast import Holdfast
from holdfast.failures import Failure
from holdfast.job import Job
from holdfast.lifecycle import Applied, Failed, Move, Outcome, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session, Store

SESSION = "hands"
BROKEN = Failure(at=1, attempt=1, type="ValueError", message="broken", traceback="Traceback: ValueError: broken")
BROKEN_FOR_GOOD = Failed(BROKEN, permanent=True)


async def take(store: Store, queue: str = "default") -> Job:
    """Claim one job of the queue."""
    await store.open_session(Session(id=SESSION))
    claimed = await store.claim(ClaimRequest(session_id=SESSION, queues=(queue,), limit=1))
    [job] = claimed.jobs
    return job


def move_for(job: Job, outcome: Outcome) -> Move:
    """The move that follows from the outcome of a claim."""
    return settle(job, outcome, RetryPolicy(), SYSTEM.random)


async def finish(store: Store, outcome: Outcome, queue: str = "default") -> Job:
    """Claim one job of the queue and settle it. The job as it was claimed."""
    job = await take(store, queue)
    assert await store.apply([move_for(job, outcome)]) == [Applied.APPLIED]
    return job


async def succeed(store: Store, result: bytes | None = None, queue: str = "default") -> Job:
    """Claim one job of the queue and let it succeed."""
    return await finish(store, Succeeded(result), queue)


def totals(app: Holdfast) -> Mapping[str, Any]:
    """How many jobs there are, by queue and state."""
    return {
        counts.queue: (counts.ready + counts.scheduled, counts.in_flight, counts.succeeded + counts.failed)
        for counts in app.counts()
    }
