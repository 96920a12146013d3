"""The settler: outcomes in, one by one; settlements out, in batches.

Group commit: a flush begins as soon as the one before has been answered, with everything that has arrived meanwhile. No
timer adds latency, and the busier the worker, the larger the batches. A flush that fails is kept and repeated: moves
carry their lease, so a repeated one is answered `already`, and one that comes too late `stale`.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

import msgspec

from holdfast.errors import StoreError
from holdfast.events import JobSettled, Listener, PartFailed, SettleRefused, hears_routine, ignore, tell
from holdfast.failures import capture, decode_history
from holdfast.job import ENDED, Job, SessionId, State
from holdfast.lifecycle import Applied, Failed, Move, Outcome, Released, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import MICROSECONDS, Ports
from holdfast.store import MOST_BYTES_PER_CALL, MOST_PER_CALL, Store
from holdfast.worker.handling import NOTHING_RETURNED
from holdfast.worker.holding import Holding

_FIRST_PAUSE = 0.05
_LONGEST_PAUSE = 2.0

Follow = Callable[[Job, Move], Move]
"""Adds to a move what follows from it: the jobs to enqueue in the same step. Never raises."""


_SUCCEEDED, _FAILED = State.SUCCEEDED, State.FAILED
_APPLIED, _ALREADY, _CANCEL_ASKED = Applied.APPLIED, Applied.ALREADY, Applied.CANCEL_ASKED
"""Looking up a member of an enumeration costs as much as the rest of a line here, and is done for every job."""


class _Ended(msgspec.Struct, frozen=True, gc=False):
    """A claim that has an outcome."""

    job: Job
    outcome: Outcome
    policy: RetryPolicy
    seconds: float
    cancel_asked: bool


_outcome_of = attrgetter("outcome")


class Settler:
    """Used from one event loop. `add` never blocks; what it holds is bounded by what the worker has claimed."""

    def __init__(
        self,
        store: Store,
        holding: Holding,
        *,
        ports: Ports,
        listener: Listener,
        follow: Follow,
        settled: Callable[[], None],
    ) -> None:
        self._store = store
        self._holding = holding
        self._ports = ports
        self._listener = listener
        self._routine = hears_routine(listener)
        self._follow = follow
        self._settled = settled
        self._waiting: deque[_Ended] = deque()
        self._flushing = 0
        self._arrived = asyncio.Event()
        self.counts: Counter[str] = Counter()
        """Settlements that the store accepted: by the state of a job that has ended, by the reason of one that has not.
        The refused ones are `refused`."""

    def __len__(self) -> int:
        """How many outcomes the store has not confirmed yet."""
        return len(self._waiting) + self._flushing

    def add(
        self, job: Job, outcome: Outcome, policy: RetryPolicy, seconds: float = 0.0, cancel_asked: bool = False
    ) -> None:
        """Settle the claim soon."""
        if not self._waiting:
            self._arrived.set()  # it stays set until the last of them has gone out
        self._waiting.append(_Ended(job, outcome, policy, seconds, cancel_asked))

    async def run(self) -> None:
        """Flush after flush, until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            await self._arrived.wait()
            batch = self._next_batch()
            if not batch:
                self._arrived.clear()
                continue
            try:
                await self._flush(batch)
                pause = _FIRST_PAUSE
            except StoreError as error:
                self._keep(batch)
                retry_in = pause * (0.5 + self._ports.random.fraction())
                tell(
                    self._listener,
                    PartFailed(batch[0].job.session_id or "", "settler", f"{type(error).__name__}: {error}", retry_in),
                )
                await self._ports.clock.sleep(retry_in)
                pause = min(pause * 2, _LONGEST_PAUSE)
            except asyncio.CancelledError:
                self._keep(batch)
                raise
            except Exception as error:
                # Something that no store may raise: one job of the batch is at fault, or the code. Alone, each shows.
                await self._one_by_one(batch, error)

    def __bool__(self) -> bool:
        return len(self) > 0

    def _next_batch(self) -> list[_Ended]:
        waiting = self._waiting
        batch: list[_Ended] = []
        if len(waiting) <= MOST_PER_CALL and _returned_nothing(waiting):
            batch += waiting
            waiting.clear()
        size = 0
        while waiting and len(batch) < MOST_PER_CALL and size < MOST_BYTES_PER_CALL // 2:
            ended = waiting.popleft()
            if isinstance(ended.outcome, Succeeded) and ended.outcome.result is not None:
                size += len(ended.outcome.result)
            batch.append(ended)
        self._flushing = len(batch)
        return batch

    def _keep(self, batch: Sequence[_Ended]) -> None:
        self._waiting.extendleft(reversed([ended for ended in batch if self._holding.knows(ended.job)]))
        self._flushing = 0

    async def _flush(self, batch: Sequence[_Ended]) -> None:
        random, follow = self._ports.random, self._follow
        moves: list[Move] = []
        for each in batch:
            move = settle(each.job, each.outcome, each.policy, random, cancel_asked=each.cancel_asked)
            moves.append(move if move.to is not _FAILED else follow(each.job, move))
        answers = await self._store.apply(moves)
        if not self._routine and answers.count(_APPLIED) == len(batch) and _returned_nothing(batch):
            self._settled_quietly([ended.job for ended in batch])  # nearly always
        else:
            self._heard(batch, moves, answers)
        self._flushing = 0
        self._settled()

    def _heard(self, batch: Sequence[_Ended], moves: Sequence[Move], answers: Sequence[Applied]) -> None:
        quiet: list[Job] = []
        told: list[tuple[_Ended, Move, Applied]] = []
        for ended, move, answer in zip(batch, moves, answers, strict=True):
            job = ended.job
            accepted = answer is _APPLIED or answer is _ALREADY
            if accepted and move.to is _SUCCEEDED and not self._routine and move.failure_history == job.failure_history:
                quiet.append(job)
            elif answer is _CANCEL_ASKED:
                self._waiting.append(msgspec.structs.replace(ended, cancel_asked=True))
            else:
                told.append((ended, move, answer))
        self._settled_quietly(quiet)
        for ended, move, answer in told:
            self._answered(ended, move, answer)

    def _settled_quietly(self, jobs: Sequence[Job]) -> None:
        """These have succeeded, and nobody wants to hear of them one by one."""
        if jobs:
            self._holding.all_settled(jobs)
            self.counts[_SUCCEEDED] += len(jobs)

    def _answered(self, ended: _Ended, move: Move, answer: Applied) -> None:
        job = ended.job
        self._holding.settled(job)
        accepted = answer in (Applied.APPLIED, Applied.ALREADY)
        self.counts[("refused" if not accepted else move.to if move.to in ENDED else move.reason)] += 1
        if self._listener is not ignore:
            tell(self._listener, settlement(job, move, answer, ended.seconds))

    async def _one_by_one(self, batch: Sequence[_Ended], cause: Exception) -> None:
        tell(
            self._listener,
            PartFailed(batch[0].job.session_id or "", "settler", f"{type(cause).__name__}: {cause}", 0.0),
        )
        for position, ended in enumerate(batch):
            self._flushing = len(batch) - position
            if not self._holding.knows(ended.job):
                continue  # answered before the batch failed
            try:
                await self._flush([ended])
            except StoreError:
                self._keep([ended])
            except Exception as error:
                await self._fail(ended, error)
        self._flushing = 0

    async def _fail(self, ended: _Ended, error: Exception) -> None:
        """The outcome itself cannot be stored: settle the job as failed with that error, or leave it to the rescue."""
        if isinstance(ended.outcome, Released):
            self._holding.settled(ended.job)
            return
        failure = capture(error, at=self._ports.clock.now(), attempt=ended.job.attempt + 1)
        try:
            await self._flush([msgspec.structs.replace(ended, outcome=Failed(failure, permanent=True))])
        except StoreError:
            self._keep([ended])
        except Exception:
            self._holding.settled(ended.job)


def settlement(job: Job, move: Move, answer: Applied, seconds: float) -> JobSettled | SettleRefused:
    """What to tell about a move that the store has answered."""
    worker_id: SessionId = job.session_id or ""
    if answer not in (Applied.APPLIED, Applied.ALREADY):
        return SettleRefused(worker_id, job.id, job.queue, job.task, answer.value)
    failures = decode_history(move.failure_history) if move.failure_history != job.failure_history else []
    return JobSettled(
        worker_id,
        job.id,
        job.queue,
        job.task,
        move.to,
        move.reason,
        move.attempt,
        seconds,
        f"{failures[-1].type}: {failures[-1].message}" if failures else "",
        None if move.delay is None else move.delay / MICROSECONDS,
        job.correlation_id,
    )


def _returned_nothing(batch: Iterable[_Ended]) -> bool:
    """Whether all are successes of handlers that returned nothing. Most batches are; asking costs hardly anything."""
    outcomes = [*map(_outcome_of, batch)]
    return outcomes.count(NOTHING_RETURNED) == len(outcomes)
