"""The engine in this process's memory: the reference implementation, the oracle of the random tests, and the store
for small programs that can afford to lose their jobs with the process.

Lines and heaps hold the ready jobs (`waiting.py`): what is due, and what is scheduled. Claiming first promotes what
has become due. Every method takes one lock; nothing here awaits while holding it.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from heapq import nsmallest
from typing import Any, Self, TypedDict

import msgspec
from msgspec.structs import replace

from holdfast.errors import (
    ForeignConnection,
    QueueClosed,
    SessionClosed,
)
from holdfast.job import ENDED, Job, JobId, Lease, NewJob, Reason, SessionId, State, check_whole, enqueued
from holdfast.lanes import draw, serving_order
from holdfast.lifecycle import Applied, KeyChange, Move, Standing, cancel, judge
from holdfast.ports import SYSTEM, Ports
from holdfast.store import (
    CLOSED_SESSION_KEPT,
    Beat,
    CancelAnswer,
    Checkpoint,
    Claimed,
    ClaimRequest,
    DepthLimit,
    Finding,
    Inserted,
    InsertStatus,
    JobQuery,
    Page,
    QueueCounts,
    Session,
    SessionPage,
    SessionView,
    Verdict,
    held_by,
    oldest_ready,
)
from holdfast.stores.waiting import WaitingJobs
from holdfast.stores.wakeups import WakeupHub, queues_fed

_READY, _IN_FLIGHT, _CLAIMED, _APPLIED = State.READY, State.IN_FLIGHT, Reason.CLAIMED, Applied.APPLIED
"""For what is done with every job: looking up a member of an enumeration costs as much as a comparison."""


class Snapshot(TypedDict):
    """The waiting jobs at one moment."""

    depth: int
    ready: int
    scheduled: int
    shutdown: bool


class _HeldKey(msgspec.Struct, frozen=True):
    payload_hash: str
    job_id: JobId
    expires_at: int


class MemoryStore:
    """A `Store` in memory. `capacity` bounds the waiting jobs of all queues together (None: only queue limits)."""

    def __init__(self, *, ports: Ports = SYSTEM, capacity: int | None = None) -> None:
        self._clock = ports.clock
        self._capacity = None if capacity is None else check_whole("capacity", capacity, 1, 10**12)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._hub = WakeupHub()
        self._shutdown = False
        self._clear()

    def _clear(self) -> None:
        self._jobs: dict[JobId, Job] = {}
        self._waiting = WaitingJobs()
        self._held: defaultdict[SessionId, dict[JobId, None]] = defaultdict(dict)
        self._sessions: dict[SessionId, SessionView] = {}
        self._keys: dict[tuple[str, str], _HeldKey] = {}
        self._paused: set[str] = set()
        self._checkpoints: dict[tuple[str, str], str] = {}

    # What only this engine offers.

    def snapshot(self) -> Snapshot:
        """Depth, ready, scheduled and shutdown, at one moment."""
        with self._lock:
            now = self._clock.now()
            waiting = [job for job in self._jobs.values() if job.state is State.READY]
            scheduled = sum(job.run_at > now for job in waiting)
            return Snapshot(
                depth=len(waiting),
                ready=len(waiting) - scheduled,
                scheduled=scheduled,
                shutdown=self._shutdown,
            )

    def purge(self) -> None:
        """Drop everything and open again. For tests."""
        with self._lock:
            self._shutdown = False
            self._clear()

    def shutdown(self) -> None:
        """Take no new jobs from now on. What is there can still be claimed and settled."""
        with self._lock:
            self._shutdown = True
            self._changed.notify_all()
        self._hub.notify()

    def wait_until_due(self, queues: Collection[str], timeout: float) -> bool:
        """Block until a job of these queues can be claimed (True), the timeout, or a shutdown with none left."""
        deadline = self._clock.monotonic() + timeout
        with self._changed:
            while True:
                now = self._clock.now()
                next_due = self._waiting.next_due([queue for queue in queues if queue not in self._paused])
                if next_due is not None and next_due <= now:
                    return True
                left = deadline - self._clock.monotonic()
                if left <= 0 or (self._shutdown and next_due is None):
                    return False
                self._changed.wait(left if next_due is None else min(left, (next_due - now) / 1_000_000))

    # New jobs.

    async def insert(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
        fresh: bool = False,
    ) -> list[Inserted]:
        """See `Store.insert`."""
        if checkpoint is not None:
            return self._insert_with_checkpoint(jobs, limits or {}, checkpoint)
        return self.insert_blocking(jobs, limits=limits)

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """See `Store.insert_blocking`."""
        with self._lock:
            self._refuse_if_shut_down()
            now = self._clock.now()
            inserted = [self._insert_one(job, now, limits or {}) for job in jobs]
            self._changed.notify_all()
        self._hub.notify({job.queue for job in jobs})
        return inserted

    def _insert_with_checkpoint(
        self, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit], checkpoint: Checkpoint
    ) -> list[Inserted]:
        with self._lock:
            self._refuse_if_shut_down()
            place = (checkpoint.queue, checkpoint.name)
            checkpoint.require(jobs, self._checkpoints.get(place))
            room = self._room(checkpoint.queue, limits.get(checkpoint.queue, DepthLimit()))
            if self._fresh(jobs) > max(room, 0):
                return [Inserted(job.id, InsertStatus.FULL) for job in jobs]
            self._checkpoints[place] = checkpoint.now
            return self.insert_blocking(jobs, limits=limits)

    def _fresh(self, jobs: Sequence[NewJob]) -> int:
        """How many of these jobs, all of one queue, are there neither by their id nor by their key."""
        now = self._clock.now()
        ids: set[JobId] = set()
        keys: set[str] = set()
        for job in jobs:
            key = job.key.text if job.key else None
            if job.id in self._jobs or job.id in ids:
                continue
            if key and (key in keys or self._key_holder(job.queue, key, now)):
                continue
            ids.add(job.id)
            if key:
                keys.add(key)
        return len(ids)

    def _refuse_if_shut_down(self) -> None:
        if self._shutdown:
            raise QueueClosed("this store was shut down and takes no new jobs; open a new one")

    def _insert_one(self, new: NewJob, now: int, limits: Mapping[str, DepthLimit] | None) -> Inserted:
        """Insert one job, if there is room for it. `limits` None: without asking for room."""
        if new.id in self._jobs:
            return Inserted(new.id, InsertStatus.EXISTING)
        if new.key and (holder := self._key_holder(new.queue, new.key.text, now)):
            return held_by(holder.job_id, holder.payload_hash, new.key)
        limit = (limits or {}).get(new.queue, DepthLimit())
        if limits is not None and self._room(new.queue, limit) < 1:
            return Inserted(new.id, InsertStatus.FULL)
        job = enqueued(new, now)
        if new.key:
            self._keys[new.queue, new.key.text] = _HeldKey(new.key.payload_hash, new.id, now + new.key.window)
        self._jobs[job.id] = job
        self._waiting.add(job, now)
        return Inserted(
            new.id,
            InsertStatus.CREATED,
            deep=limit.warn_depth is not None and self._waiting.depth[new.queue] >= limit.warn_depth,
        )

    def _room(self, queue: str, limit: DepthLimit) -> float:
        """How many more jobs the queue may take."""
        in_queue = math.inf if limit.max_depth is None else limit.max_depth - self._waiting.depth[queue]
        in_all = math.inf if self._capacity is None else self._capacity - sum(self._waiting.depth.values())
        return min(in_queue, in_all)

    def _key_holder(self, queue: str, key: str, now: int) -> _HeldKey | None:
        holder = self._keys.get((queue, key))
        return holder if holder and holder.expires_at > now else None

    def insert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """Always refused: memory has no transactions to share."""
        raise ForeignConnection("the memory store has no transactions; use SQLite, PostgreSQL or MySQL for connection=")

    async def ainsert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """Always refused, as `insert_on`."""
        return self.insert_on(connection, jobs, limits=limits)

    # Sessions.

    async def open_session(self, session: Session) -> None:
        """See `Store.open_session`."""
        with self._lock:
            now = self._clock.now()
            self._sessions.setdefault(
                session.id,
                SessionView(
                    id=session.id,
                    beat=0,
                    open=True,
                    opened_at=now,
                    beat_at=now,
                    host=session.host,
                    pid=session.pid,
                    queues=session.queues,
                ),
            )

    def _is_open(self, session_id: SessionId | None) -> bool:
        session = self._sessions.get(session_id or "")
        return session is not None and session.open

    async def beat(self, session_id: SessionId) -> Beat:
        """See `Store.beat`."""
        with self._lock:
            if not self._is_open(session_id):
                return Beat(open=False, held=0, cancel=())
            session = self._sessions[session_id]
            self._sessions[session_id] = replace(session, beat=session.beat + 1, beat_at=self._clock.now())
            held = self._held.get(session_id, {})
            return Beat(
                open=True,
                held=len(held),
                cancel=tuple(job_id for job_id in held if self._jobs[job_id].cancel_asked),
            )

    async def held(self, session_id: SessionId) -> list[Job]:
        """See `Store.held`."""
        with self._lock:
            return [self._jobs[job_id] for job_id in self._held.get(session_id, ())]

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        """See `Store.sessions`. A cursor is the last id of the page before."""
        with self._lock:
            ids = nsmallest(limit + 1, (each for each in self._sessions if each > (cursor or "")))
            views = tuple(self._sessions[each] for each in ids[:limit])
        return SessionPage(views, views[-1].id if len(ids) > limit else None)

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        """See `Store.close_session`."""
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or not session.open or (if_beat is not None and session.beat != if_beat):
                return False
            self._sessions[session_id] = replace(session, open=False, beat_at=self._clock.now())
            return True

    # The life of a claim.

    async def claim(self, request: ClaimRequest) -> Claimed:
        """See `Store.claim`."""
        with self._lock:
            if not self._is_open(request.session_id):
                raise SessionClosed(f"session {request.session_id} is not open; it may not claim jobs")
            now = self._clock.now()
            jobs: list[Job] = []
            queues = [queue for queue in request.queues if queue not in self._paused]
            for queue in queues:
                self._waiting.promote(queue, now)
                groups = serving_order(self._waiting.lanes(queue), request.turn)
                jobs += draw(groups, request.limit - len(jobs), self._waiting.pull)
            claimed = tuple(self._hand_over(jobs, request.session_id, now))
            next_due = now if len(claimed) == request.limit else self._waiting.next_due(queues)
            return Claimed(claimed, now, None if next_due is None else next_due - now)

    def _hand_over(self, jobs: Sequence[Job], session_id: SessionId, now: int) -> list[Job]:
        held, handed = self._held, []
        for job in jobs:
            claimed = replace(
                job,
                state=_IN_FLIGHT,
                reason=_CLAIMED,
                session_id=session_id,
                version=job.version + 1,
                claimed_at=now,
                progress=None,
            )
            held[session_id][job.id] = None
            self._jobs[job.id] = claimed
            handed.append(claimed)
        return handed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply`."""
        with self._lock:
            now = self._clock.now()
            answers = [self._apply_one(move, now) for move in moves]
            self._changed.notify_all()
        self._hub.notify(queues_fed(moves))
        return answers

    def _standing(self, job: Job) -> Standing:
        is_open = (session := self._sessions.get(job.session_id or "")) is not None and session.open
        return Standing(job.state, job.reason, job.version, job.session_id, is_open, job.cancel_asked)

    def _apply_one(self, move: Move, now: int) -> Applied:
        job = self._jobs.get(move.job_id)
        verdict = judge(move, self._standing(job) if job else None)
        if job is None or verdict is not _APPLIED:
            return verdict
        if job.key and move.key_change is KeyChange.TAKE:
            holder = self._key_holder(job.queue, job.key.text, now)
            if holder and holder.job_id != job.id:
                return Applied.KEY_TAKEN
            self._keys[job.queue, job.key.text] = _HeldKey(job.key.payload_hash, job.id, now + job.key.window)
        elif job.key and move.key_change is KeyChange.FREE:
            holder = self._keys.get((job.queue, job.key.text))
            if holder and holder.job_id == job.id:
                del self._keys[job.queue, job.key.text]

        goes_back = move.to is _READY
        moved = replace(
            job,
            state=move.to,
            reason=move.reason,
            version=job.version + move.raise_version,
            attempt=move.attempt,
            failures=move.failures,
            crashes=move.crashes,
            snoozes=move.snoozes,
            suspect=move.suspect,
            failure_history=move.failure_history,
            result=move.result,
            cancel_asked=job.cancel_asked and not goes_back,
            run_at=job.run_at if move.delay is None else now + move.delay,
            ended_at=None if goes_back else now,
        )
        if job.state is _READY:
            self._waiting.remove(job, now)
        elif job.state is _IN_FLIGHT:
            self._let_go(job)
        if goes_back:
            self._waiting.add(moved, now)
        self._jobs[job.id] = moved
        for following in move.then:
            self._insert_one(following, now, None)
        return _APPLIED

    def _let_go(self, job: Job) -> None:
        held = self._held[holder := job.session_id or ""]
        del held[job.id]
        if not held:
            del self._held[holder]

    def apply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """Always refused: memory has no transactions to share."""
        raise ForeignConnection("the memory store has no transactions; use SQLite, PostgreSQL or MySQL for connection=")

    async def aapply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """Always refused, as `apply_on`."""
        return self.apply_on(connection, moves)

    async def note(self, lease: Lease, progress: bytes) -> Applied:
        """See `Store.note`."""
        with self._lock:
            job = self._jobs.get(lease.job_id)
            if job is None:
                return Applied.GONE
            if job.state is not State.IN_FLIGHT or job.lease != lease or not self._is_open(lease.session_id):
                return Applied.STALE
            self._jobs[job.id] = replace(job, progress=progress)
            return Applied.APPLIED

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        """See `Store.lost`."""
        with self._lock:
            return [
                self._jobs[job_id]
                for holder, held in self._held.items()
                if not self._is_open(holder) and session_id in (None, holder)
                for job_id in held
            ][:limit]

    # Operators and keepers.

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        with self._lock:
            now = self._clock.now()
            return [self._request_cancel_one(job_id, now) for job_id in job_ids]

    def _request_cancel_one(self, job_id: JobId, now: int) -> CancelAnswer:
        job = self._jobs.get(job_id)
        if job is None:
            return CancelAnswer.GONE
        if job.state is State.READY:
            self._apply_one(cancel(job), now)
            return CancelAnswer.CANCELLED
        if job.state is State.IN_FLIGHT:
            self._jobs[job_id] = replace(job, cancel_asked=True)
            return CancelAnswer.ASKED
        return CancelAnswer.ENDED

    async def set_paused(self, queue: str, paused: bool) -> None:
        """See `Store.set_paused`."""
        with self._lock:
            if paused:
                self._paused.add(queue)
            else:
                self._paused.discard(queue)
            self._changed.notify_all()
        self._hub.notify({queue})

    async def prune(self, limit: int) -> int:
        """See `Store.prune`."""
        with self._lock:
            now = self._clock.now()
            jobs = [
                job.id
                for job in self._jobs.values()
                if job.ended_at is not None and job.state is not State.FAILED and job.ended_at + job.retention <= now
            ]
            keys = [place for place, held in self._keys.items() if held.expires_at <= now]
            sessions = [
                session.id
                for session in self._sessions.values()
                if not session.open and session.beat_at + CLOSED_SESSION_KEPT <= now and session.id not in self._held
            ]
            over: list[tuple[dict[Any, Any], object]] = [(self._jobs, job_id) for job_id in jobs]
            over += [(self._keys, place) for place in keys]
            over += [(self._sessions, session_id) for session_id in sessions]
            for table, key in over[:limit]:
                del table[key]
            return len(over[:limit])

    async def forget(self, job_ids: Sequence[JobId]) -> int:
        """See `Store.forget`."""
        with self._lock:
            ended = {job_id for job_id in job_ids if (job := self._jobs.get(job_id)) and job.state in ENDED}
            for job_id in ended:
                del self._jobs[job_id]
            return len(ended)

    # Reading.

    async def get(self, job_id: JobId) -> Job | None:
        """See `Store.get`."""
        with self._lock:
            return self._jobs.get(job_id)

    async def find(self, query: JobQuery) -> Page:
        """See `Store.find`."""
        with self._lock:
            matching = sorted(
                (
                    job
                    for job in self._jobs.values()
                    if (not query.states or job.state in query.states)
                    and query.queue in (None, job.queue)
                    and query.task in (None, job.task)
                    and query.correlation_id in (None, job.correlation_id)
                    and (query.cursor is None or job.id < query.cursor)
                ),
                key=lambda job: job.id,
                reverse=True,
            )
        page = tuple(matching[: query.limit])
        return Page(page, page[-1].id if len(matching) > query.limit else None)

    async def counts(self) -> list[QueueCounts]:
        """See `Store.counts`."""
        with self._lock:
            now = self._clock.now()
            tally: defaultdict[str, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
            for queue in self._paused:
                tally[queue]["ready"] += 0
            for job in self._jobs.values():
                waits = job.state is State.READY and job.run_at > now
                tally[job.queue]["scheduled" if waits else job.state.value] += 1
            return [QueueCounts(queue=queue, paused=queue in self._paused, **tally[queue]) for queue in sorted(tally)]

    async def checkpoint(self, queue: str, name: str) -> str | None:
        """See `Store.checkpoint`."""
        with self._lock:
            return self._checkpoints.get((queue, name))

    async def now(self) -> int:
        """See `Store.now`."""
        return self._clock.now()

    def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """See `Store.wakeups`."""
        return self._hub.waiting(queues)

    async def examine(self, *, deep: bool = False) -> list[Finding]:
        """See `Examinable.examine`."""
        advice = "keep jobs that matter in a file: sqlite:///jobs.db"
        with self._lock:
            due = [job.run_at for job in self._jobs.values() if job.state is State.READY]
            waiting = oldest_ready(min(due, default=None), self._clock.now())
        return [Finding("survives", "nothing beyond this process", Verdict.WEAK, advice), waiting]

    def beside(self) -> MemoryStore:
        """See `Store.beside`. There are no connections: nobody waits here for longer than a lock."""
        return self

    async def __aenter__(self) -> Self:
        """Nothing to open."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing to close: the jobs live as long as this object."""
