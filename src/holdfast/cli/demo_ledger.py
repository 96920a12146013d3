"""The accounts of `holdfast demo`: every accepted job, and what the store says became of it.

Nothing here is a difference of counters: a job counts as succeeded, failed or cancelled when it was read from the store
in that state, by its id. One that the store does not know any more, or that has not ended when everything is over, is
lost.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from holdfast.job import ENDED, Job, JobId, Reason, State
from holdfast.ports import MICROSECONDS
from holdfast.store import Store

_AT_ONCE = 100
_MOST_LATENCIES = 200_000


class Tally(msgspec.Struct):
    """How many jobs were accepted, and how they ended. `crashed` ones are among the failed. `retried`: tried more than
    once; `attempts`: of all jobs together.
    """

    accepted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    crashed: int = 0
    retried: int = 0
    attempts: int = 0
    lost: int = 0

    @property
    def ended(self) -> int:
        """How many have ended."""
        return self.succeeded + self.failed + self.cancelled

    def add(self, job: Job) -> None:
        """Count a job that has ended."""
        match job.state:
            case State.SUCCEEDED:
                self.succeeded += 1
            case State.FAILED:
                self.failed += 1
            case _:
                self.cancelled += 1
        self.crashed += job.state is State.FAILED and job.reason is Reason.CRASHED
        self.retried += job.attempt > 1
        self.attempts += job.attempt

    def __add__(self, other: Tally) -> Tally:
        """Both together."""
        return Tally(*(mine + theirs for mine, theirs in zip(_numbers(self), _numbers(other), strict=True)))


def _numbers(tally: Tally) -> tuple[int, ...]:
    return msgspec.structs.astuple(tally)


class Latency(msgspec.Struct, frozen=True):
    """Seconds from when jobs were due until a worker took them. None: nothing was measured."""

    p50: float | None = None
    p99: float | None = None


def latency(seconds: Iterable[float]) -> Latency:
    """The percentiles of these."""
    ordered = sorted(seconds)
    if not ordered:
        return Latency()
    return Latency(ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)])


class Ledger:
    """The accounts by label. `keep_ids`: keep those of ended jobs, so that `audit` can read every job once more."""

    def __init__(self, store: Store, labels: Iterable[str], *, keep_ids: bool) -> None:
        self._store = store
        self._keep_ids = keep_ids
        self._ended: dict[JobId, str] = {}
        self.tallies = {label: Tally() for label in labels}
        self.open: dict[JobId, str] = {}
        """The jobs that have not been seen at their end, with their labels."""
        self.latencies: deque[float] = deque(maxlen=_MOST_LATENCIES)

    @property
    def total(self) -> Tally:
        """All labels together."""
        return sum(self.tallies.values(), Tally())

    def accept(self, job_id: JobId, label: str) -> None:
        """The store has accepted this job."""
        self.open[job_id] = label
        self.tallies[label].accepted += 1

    async def look(self, job_ids: Iterable[JobId]) -> list[float]:
        """Read these jobs from the store, and book those that have ended. How long they had waited to start."""
        wanted = [job_id for job_id in dict.fromkeys(job_ids) if job_id in self.open]
        waits: list[float] = []
        for first in range(0, len(wanted), _AT_ONCE):
            ids = wanted[first : first + _AT_ONCE]
            jobs = await asyncio.gather(*(self._store.get(job_id) for job_id in ids))
            waits += self._book(ids, jobs)
        self.latencies.extend(waits)
        return waits

    def _book(self, ids: Sequence[JobId], jobs: Sequence[Job | None]) -> list[float]:
        waits = []
        for job_id, job in zip(ids, jobs, strict=True):
            if job is not None and job.state not in ENDED:
                continue
            label = self.open.pop(job_id)
            if self._keep_ids:
                self._ended[job_id] = label
            if job is None:
                self.tallies[label].lost += 1
                continue
            self.tallies[label].add(job)
            if job.claimed_at is not None:
                waits.append(max(0, job.claimed_at - job.run_at) / MICROSECONDS)
        return waits

    async def audit(self) -> None:
        """The last reading: all ids that are known, from the store as it is now. What has not ended by now is lost."""
        if self._keep_ids:
            self.open |= self._ended
            self._ended.clear()
            self.latencies.clear()
            self.tallies = {label: Tally(accepted=tally.accepted) for label, tally in self.tallies.items()}
        await self.look(list(self.open))
        for label in self.open.values():
            self.tallies[label].lost += 1
