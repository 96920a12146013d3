"""Bringing back the jobs of a worker process that is dead, with what its board still says.

The process is gone, so nobody races: what had not started is released before the session is closed, and loses nothing.
What was running becomes lost, and its jobs are suspects; one that was a suspect before, and so ran apart, is not to
blame for the others. If it was we who killed the process for a job past its hard limit, that job alone is to blame.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from holdfast.failures import Failure
from holdfast.job import Job, SessionId, State
from holdfast.lifecycle import Applied, Failed, Lost, Move, Outcome, Released, Snoozed, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import Ports
from holdfast.store import MOST_PER_CALL, Store
from holdfast.worker.board import Started
from holdfast.worker.holding import ClaimKey
from holdfast.worker.settler import Follow


class Death(msgspec.Struct, frozen=True):
    """What is known about a process that has ended. `overdue`: it was killed because of these."""

    session_id: SessionId
    how: str
    started: Sequence[Started]
    killed: bool = False
    overdue: frozenset[ClaimKey] = frozenset()


class Recovered(msgspec.Struct, frozen=True):
    """How many jobs had started, and how many had not."""

    started: int
    unstarted: int


async def recover(
    store: Store, death: Death, *, policy: Callable[[str], RetryPolicy], follow: Follow, ports: Ports
) -> Recovered:
    """Settle everything that the dead process held, and close its session. Repeating it is safe."""
    running = {(started.job_id, started.version) for started in death.started}
    settling = _Settling(store, policy, follow, ports)
    message = f"the worker process that ran the job ended: {death.how}"
    started = unstarted = 0
    held = await store.held(death.session_id)
    others_ran = any((job.id, job.version) in running and not job.suspect for job in held)
    for job in held:
        key = (job.id, job.version)
        if key in death.overdue:
            settling.add(
                job,
                Failed(
                    settling.failure(
                        job, "HardTimeout", "the handler ran past its hard limit, and its process was killed"
                    )
                ),
            )
            started += 1
        elif death.killed or key not in running:
            settling.add(job, Released())
            unstarted += 1
        else:
            started += 1
            if job.suspect and others_ran:
                # It ran in a process of its own, and this one ended: one of the others did that, most likely. If it was
                # this one all the same, the limit of snoozes ends it.
                settling.add(job, Snoozed(0.0, settling.failure(job, "WorkerDied", message)))
    await settling.flush()
    await store.close_session(death.session_id)
    while lost := await store.lost(MOST_PER_CALL, session_id=death.session_id):
        for job in lost:
            settling.add(job, Lost(settling.failure(job, "WorkerDied", message), (job.id, job.version) in running))
        if not await settling.flush():
            break  # a keeper was faster with all of them
    return Recovered(started, unstarted)


class _Settling:
    def __init__(self, store: Store, policy: Callable[[str], RetryPolicy], follow: Follow, ports: Ports) -> None:
        self._store = store
        self._policy = policy
        self._follow = follow
        self._ports = ports
        self._waiting: list[tuple[Job, Outcome]] = []

    def failure(self, job: Job, kind: str, message: str) -> Failure:
        return Failure(self._ports.clock.now(), job.attempt + 1, kind, message)

    def add(self, job: Job, outcome: Outcome) -> None:
        self._waiting.append((job, outcome))

    async def flush(self) -> int:
        """Settle what was added. How many settlements the store accepted."""
        accepted = 0
        waiting, self._waiting = self._waiting, []
        for first in range(0, len(waiting), MOST_PER_CALL):
            part = waiting[first : first + MOST_PER_CALL]
            asked = await self._apply(part, cancel_asked=False)
            accepted += len(part) - len(asked)
            if asked:
                accepted += len(asked) - len(await self._apply(asked, cancel_asked=True))
        return accepted

    async def _apply(self, part: Iterable[tuple[Job, Outcome]], *, cancel_asked: bool) -> list[tuple[Job, Outcome]]:
        """Those that were refused, because somebody has asked to cancel them or has settled them."""
        part = list(part)
        answers = await self._store.apply([self._move(job, outcome, cancel_asked) for job, outcome in part])
        return [
            item for item, answer in zip(part, answers, strict=True) if answer not in (Applied.APPLIED, Applied.ALREADY)
        ]

    def _move(self, job: Job, outcome: Outcome, cancel_asked: bool) -> Move:
        move = settle(job, outcome, self._policy(job.task), self._ports.random, cancel_asked=cancel_asked)
        return self._follow(job, move) if move.to is State.FAILED else move
