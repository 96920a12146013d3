"""How a history is noted: a store whose answers are written down, and files that processes share.

`Recorded` stands between a caller and a store. Nearest to a store whose calls are atomic it notes every effect when it
happens (an exact history); in a process of its own it notes what that process was told (an observed one).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Self, cast

import msgspec

from holdfast.errors import HoldfastError, OutcomeUnknown
from holdfast.job import Job, JobId, NewJob, SessionId
from holdfast.lifecycle import Applied, Move
from holdfast.patience import Patient, WaitingClaims
from holdfast.store import (
    CancelAnswer,
    Claimed,
    ClaimRequest,
    Inserted,
    InsertStatus,
    JobQuery,
    Store,
    all_sessions,
)
from holdfast.testing.history.events import (
    Answer,
    AnyEvent,
    Cancel,
    Claim,
    Close,
    Ending,
    Enqueue,
    Event,
    Settle,
)

Note = Callable[[AnyEvent], None]

_MOST_PER_PAGE = 1000


def digest_of(job: NewJob | Job) -> str:
    """What a handler is to be called with, in short."""
    return digest(job.task, job.payload)


def digest(task: str, payload: bytes) -> str:
    """The same for a task and its payload."""
    return hashlib.blake2b(task.encode() + b"\0" + payload, digest_size=8).hexdigest()


def note_of_insert(
    job: NewJob, *, began: float, at: float, host: str, inserted: Inserted | None, error: HoldfastError | None
) -> Enqueue:
    """What a producer was told about one job: an answer, an error, or neither, if he did not live to hear it."""
    taken = inserted and inserted.status in (InsertStatus.CREATED, InsertStatus.EXISTING)
    heard = Answer.OK if taken else Answer.FAILED if inserted else Answer.UNKNOWN
    return Enqueue(
        at=at,
        host=host,
        began=began,
        answer=_answer(error) if error else heard,
        job_id=job.id,
        digest=digest_of(job),
        queue=job.queue,
        max_retries=job.max_retries,
        delay=job.delay,
        key=job.key.text if job.key else None,
        status=inserted.status if inserted else None,
        returned=inserted.job_id if inserted else "",
    )


class Recorded:
    """A store whose answers are noted. Use `recorded` to get it typed as a `Store`.

    `clock` is the monotonic clock of the history, `host` says who is calling. With `effects_only`, inserts are left to
    the producer to note: he alone knows what he was told.
    """

    def __init__(
        self, store: Store, note: Note, clock: Callable[[], float], host: Callable[[], str], *, effects_only: bool
    ) -> None:
        self._store = store
        self._note = note
        self._clock = clock
        self._host = host
        self._effects_only = effects_only

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def beside(self) -> Store:
        """The same on another connection."""
        return recorded(self._store.beside(), self._note, self._clock, self._host, effects_only=self._effects_only)

    async def __aenter__(self) -> Self:
        """Open the store. Python looks these two up on the class, past `__getattr__`."""
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close it."""
        await self._store.__aexit__(*exc)

    # Inserts.

    async def insert(self, jobs: Sequence[NewJob], **options: Any) -> list[Inserted]:
        """See `Store.insert`."""
        began = self._clock()
        try:
            answers = await self._store.insert(jobs, **options)
        except HoldfastError as error:
            self._note_inserts(began, jobs, None, error)
            raise
        self._note_inserts(began, jobs, answers, None)
        return answers

    def insert_blocking(self, jobs: Sequence[NewJob], **options: Any) -> list[Inserted]:
        """See `Store.insert_blocking`."""
        began = self._clock()
        try:
            answers = self._store.insert_blocking(jobs, **options)
        except HoldfastError as error:
            self._note_inserts(began, jobs, None, error)
            raise
        self._note_inserts(began, jobs, answers, None)
        return answers

    def _note_inserts(
        self, began: float, jobs: Sequence[NewJob], answers: list[Inserted] | None, error: HoldfastError | None
    ) -> None:
        if self._effects_only:
            return
        for position, job in enumerate(jobs):
            inserted = answers[position] if answers else None
            at, host = self._clock(), self._host()
            self._note(note_of_insert(job, began=began, at=at, host=host, inserted=inserted, error=error))

    # Claims and what becomes of them.

    async def claim(self, request: ClaimRequest) -> Claimed:
        """See `Store.claim`. A claim that failed is noted by nobody: which jobs it took, if any, is not known."""
        began = self._clock()
        return self._noted(began, request, await self._store.claim(request))

    def waiting_claims(self, queues: Collection[str]) -> WaitingClaims | None:
        """See `Patient.waiting_claims`. None, too, if the store has none."""
        waiting = self._store.waiting_claims(queues) if isinstance(self._store, Patient) else None
        return None if waiting is None else _RecordedWait(waiting, self._noted, self._clock)

    def _noted(self, began: float, request: ClaimRequest, claimed: Claimed) -> Claimed:
        at, host = self._clock(), self._host()
        for job in claimed.jobs:
            self._note(
                Claim(
                    at=at,
                    host=host,
                    began=began,
                    session_id=request.session_id,
                    job_id=job.id,
                    version=job.version,
                    attempt=job.attempt,
                    run_at=job.run_at,
                    claimed_at=job.claimed_at or claimed.now,
                    digest=digest_of(job),
                )
            )
        return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply`."""
        began = self._clock()
        try:
            answers = await self._store.apply(moves)
        except HoldfastError as error:
            for move in moves:
                self._note_move(began, move, _answer(error), None)
            raise
        for move, applied in zip(moves, answers, strict=True):
            self._note_move(began, move, Answer.OK, applied)
        return answers

    def _note_move(self, began: float, move: Move, answer: Answer, applied: Applied | None) -> None:
        self._note(
            Settle(
                at=self._clock(),
                host=self._host(),
                began=began,
                answer=answer,
                job_id=move.job_id,
                version=move.version,
                session_id=move.session_id,
                to=move.to,
                reason=move.reason,
                attempt=move.attempt,
                failures=move.failures,
                crashes=move.crashes,
                snoozes=move.snoozes,
                delay=move.delay,
                applied=applied,
                from_the_dead=move.session_open is False,
                then=tuple(job.id for job in move.then),
            )
        )

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        began = self._clock()
        try:
            answers = await self._store.request_cancel(job_ids)
        except HoldfastError as error:
            for job_id in job_ids:
                self._note(
                    Cancel(at=self._clock(), host=self._host(), began=began, answer=_answer(error), job_id=job_id)
                )
            raise
        for job_id, answer in zip(job_ids, answers, strict=True):
            ended = answer is CancelAnswer.CANCELLED
            self._note(Cancel(at=self._clock(), host=self._host(), began=began, job_id=job_id, ended=ended))
        return answers

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        """See `Store.close_session`."""
        began = self._clock()
        closed = await self._store.close_session(session_id, if_beat=if_beat)
        if closed:
            judged = if_beat is not None
            self._note(Close(at=self._clock(), host=self._host(), began=began, session_id=session_id, judged=judged))
        return closed


class _RecordedWait:
    """Claims that wait, noted like the others. One begins with its wait."""

    def __init__(
        self,
        waiting: WaitingClaims,
        noted: Callable[[float, ClaimRequest, Claimed], Claimed],
        clock: Callable[[], float],
    ) -> None:
        self._waiting = waiting
        self._noted = noted
        self._clock = clock

    async def claim(self, request: ClaimRequest, *, due_in: int | None, seconds: float) -> Claimed:
        """See `WaitingClaims.claim`."""
        began = self._clock()
        return self._noted(began, request, await self._waiting.claim(request, due_in=due_in, seconds=seconds))

    async def close(self) -> None:
        """See `WaitingClaims.close`."""
        await self._waiting.close()


def recorded(
    store: Store, note: Note, clock: Callable[[], float], host: Callable[[], str], *, effects_only: bool = False
) -> Store:
    """The store, noted."""
    return cast(Store, Recorded(store, note, clock, host, effects_only=effects_only))


def _answer(error: HoldfastError) -> Answer:
    return Answer.UNKNOWN if isinstance(error, OutcomeUnknown) else Answer.FAILED


async def read_ending(store: Store) -> Ending:
    """Everything that is in the store now."""
    jobs: list[Job] = []
    cursor: JobId | None = None
    while True:
        page = await store.find(JobQuery(limit=_MOST_PER_PAGE, cursor=cursor))
        jobs += page.jobs
        cursor = page.next
        if cursor is None:
            break
    return Ending(
        jobs=tuple(jobs),
        counts=tuple(await store.counts()),
        open_sessions=frozenset(view.id for view in await all_sessions(store) if view.open),
    )


# Files.


class HistoryFile:
    """A file to which one process writes events, a line each, in single writes: a kill leaves whole lines behind.

    With `durable`, a line is on the disk when `note` returns.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._durable = durable

    def note(self, event: Event) -> None:
        """Add the event."""
        os.write(self._fd, msgspec.json.encode(event) + b"\n")
        if self._durable:
            os.fsync(self._fd)

    def close(self) -> None:
        """No more of them."""
        os.close(self._fd)


def read_events(paths: Iterable[Path]) -> tuple[AnyEvent, ...]:
    """The events of all files in the order of their times. A last line that was cut off is left out."""
    decoder = msgspec.json.Decoder(AnyEvent)
    events = [decoder.decode(line) for path in paths for line in path.read_bytes().split(b"\n")[:-1]]
    return tuple(sorted(events, key=lambda event: event.at))
