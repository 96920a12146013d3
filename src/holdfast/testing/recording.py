"""The store of an application under test: the memory engine, and a memory of everything that was enqueued.

It takes any connection and leaves it alone: a job on a caller's connection counts as enqueued at once, as if the caller
had committed. A job that its handler settles on a connection is settled if the handler returns, and not if it raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from holdfast.job import Job, JobId, NewJob, SessionId, State
from holdfast.lifecycle import Applied, Move, judge
from holdfast.ports import Ports
from holdfast.store import CancelAnswer, DepthLimit, Inserted, InsertStatus
from holdfast.stores.guests import require_blocking
from holdfast.stores.memory import MemoryStore


class Recorded(msgspec.Struct, frozen=True):
    """A job as it was when it was enqueued, and whether that was on a connection of the caller's."""

    job: Job
    on_connection: bool


class RecordingStore(MemoryStore):
    """A `MemoryStore` for one test."""

    def __init__(self, ports: Ports) -> None:
        super().__init__(ports=ports)
        self.recorded: list[Recorded] = []
        """What was enqueued, in that order, whatever has become of it since."""
        self.cancel_running: Callable[[JobId], None] = lambda job_id: None
        """Called when somebody asks to cancel a job that is running."""
        self._awaiting_return: dict[tuple[JobId, int], Move] = {}

    def peek(self, job_id: JobId) -> Job | None:
        """The job as it is now."""
        with self._lock:
            return self._jobs.get(job_id)

    def purge(self) -> None:
        """Drop everything, what was recorded too."""
        with self._lock:
            super().purge()
            self.recorded.clear()
            self._awaiting_return.clear()

    # New jobs.

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """See `Store.insert_blocking`."""
        return self._insert_and_record(jobs, limits, on_connection=False)

    def insert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """Insert at once, as if the connection's transaction had been committed."""
        require_blocking(connection, "aenqueue")
        return self._insert_and_record(jobs, limits, on_connection=True)

    async def ainsert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """The same, with a connection of any kind."""
        return self._insert_and_record(jobs, limits, on_connection=True)

    def _insert_and_record(
        self, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit] | None, *, on_connection: bool
    ) -> list[Inserted]:
        inserted = super().insert_blocking(jobs, limits=limits)
        created = (answer.job_id for answer in inserted if answer.status is InsertStatus.CREATED)
        self._record(created, on_connection=on_connection)
        return inserted

    def _record(self, job_ids: Iterable[JobId], *, on_connection: bool = False) -> None:
        for job_id in job_ids:
            if job := self.peek(job_id):
                self.recorded.append(Recorded(job, on_connection))

    # The life of a claim.

    def waiting_queues(self) -> tuple[str, ...]:
        """The queues that have waiting jobs, the one with the earliest due time first."""
        with self._lock:
            due = {queue: self._waiting.next_due([queue]) for queue, depth in self._waiting.depth.items() if depth}
        return tuple(sorted(due, key=lambda queue: (due[queue] or 0, queue)))

    def claim_one(self, job_id: JobId, session_id: SessionId, *, early: bool = False) -> Job | None:
        """Claim that very job, whoever waits before it. None if it does not wait, or is held back: its queue is
        paused, or it is not due (`early`: that does not matter).
        """
        with self._lock:
            job, now = self._jobs.get(job_id), self._clock.now()
            if job is None or job.state is not State.READY or job.queue in self._paused:
                return None
            if job.run_at > now and not early:
                return None
            self._waiting.remove(job, now)
            [claimed] = self._hand_over([job], session_id, now)
            return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply`."""
        moves = [self._chosen(move) for move in moves]
        answers = await super().apply(moves)
        for move, answer in zip(moves, answers, strict=True):
            if answer is Applied.APPLIED:
                self._record(following.id for following in move.then)
        return answers

    def apply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """Keep the moves until the handler has ended: its transaction is taken to be committed if it returns."""
        require_blocking(connection, "asucceed_on")
        return self._keep(moves)

    async def aapply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """The same, with a connection of any kind."""
        return self._keep(moves)

    def _keep(self, moves: Sequence[Move]) -> list[Applied]:
        with self._lock:
            answers = []
            for move in moves:
                job = self._jobs.get(move.job_id)
                answers.append(judge(move, self._standing(job) if job else None))
                if answers[-1] is Applied.APPLIED:
                    self._awaiting_return[move.job_id, move.version] = move
            return answers

    def _chosen(self, move: Move) -> Move:
        """The move, or the one that the handler itself made if it returned after that."""
        own = self._awaiting_return.pop((move.job_id, move.version), move)
        return own if move.to is State.SUCCEEDED else move

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        answers = await super().request_cancel(job_ids)
        for job_id, answer in zip(job_ids, answers, strict=True):
            if answer is CancelAnswer.ASKED:
                self.cancel_running(job_id)
        return answers
