"""The port to an engine. A store owns atomicity, order and time; it compares guards and writes; it decides nothing.

Rules for every method of every store:

* Each job and each move is written as a whole or not at all; a batch as a whole only with a checkpoint. An engine that
  shards by queue does its part for each queue in turn.
* Every call has a deadline.
* It raises only errors of `holdfast.errors`. `StoreUnavailable`: nothing was written, in no queue. `OutcomeUnknown`: it
  may have been; repeating the call is safe, because ids are the caller's and `apply` answers `already` (or `stale`, if
  the job has moved on since). A claim that already has jobs returns them rather than raise.
* Time is the store's: `now` below is the engine's clock at the moment of the call, never a worker's.
* A call that is cancelled while under way may have taken effect.
* One row that fails its guard never aborts a batch: the others go through, and the answer says which is which.
* A store may be used from several threads and event loops at once.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from datetime import timedelta
from enum import StrEnum
from typing import Protocol, Self, runtime_checkable

import msgspec

from holdfast.errors import CheckpointConflict, InvalidOption
from holdfast.job import Job, JobId, Key, Lease, NewJob, SessionId, State, check_name, check_whole
from holdfast.lifecycle import Applied, Move

MOST_PER_CALL = 1_000
"""Jobs, moves or ids in one call. Callers cut longer lists; stores may refuse them."""

CLOSED_SESSION_KEPT = 3600 * 1_000_000
"""How long a closed session is shown to people before it is pruned."""

MOST_BYTES_PER_CALL = 8 * 1024 * 1024
"""Bytes of payload in one insert: what an engine can take in without making others wait."""


class InsertStatus(StrEnum):
    """What became of one new job."""

    CREATED = "created"
    EXISTING = "existing"
    """Its id, or its key with the same payload, was there before: `Inserted.job_id` is that job."""
    KEY_CONFLICT = "key_conflict"
    """Its key belongs to a job with another payload: `Inserted.job_id` is that job. Nothing was written."""
    FULL = "full"
    """Its queue holds `max_depth` jobs. Nothing was written."""


class Inserted(msgspec.Struct, frozen=True, gc=False):
    """The answer for one new job. `deep`: its queue holds at least `warn_depth` jobs."""

    job_id: JobId
    status: InsertStatus
    deep: bool = False


def held_by(job_id: JobId, payload_hash: str, key: Key) -> Inserted:
    """The answer for a new job whose key is held by that job, which stands for that payload."""
    same = payload_hash == key.payload_hash
    return Inserted(job_id, InsertStatus.EXISTING if same else InsertStatus.KEY_CONFLICT)


class DepthLimit(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """How many ready jobs (due or not) a queue may hold, and from how many on to warn."""

    max_depth: int | None = None
    warn_depth: int | None = None


class Checkpoint(msgspec.Struct, frozen=True, gc=False):
    """A source's cursor, advanced in the same step as the insert of what it yielded. `was` None: not set before."""

    queue: str
    name: str
    was: str | None
    now: str

    def require(self, jobs: Sequence[NewJob], found: str | None) -> None:
        """What every store checks before it inserts with a checkpoint whose present value is `found`."""
        if any(job.queue != self.queue for job in jobs):
            raise InvalidOption(f"with a checkpoint, every job must be of its queue {self.queue!r}")
        if found != self.was:
            raise self.conflict()

    def conflict(self) -> CheckpointConflict:
        """The error for a checkpoint that has another value than `was`."""
        return CheckpointConflict(
            f"checkpoint {self.name!r} of queue {self.queue!r} was moved by another process; "
            f"read it again and go on from there"
        )


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A worker process as it introduces itself. The id is random per start. `queues` are those it will claim from: an
    engine that shards by queue keeps a part of the session with each. Host and pid are for people.
    """

    id: SessionId
    host: str = ""
    pid: int = 0
    queues: tuple[str, ...] = ()


class SessionView(msgspec.Struct, frozen=True, kw_only=True):
    """A session as the store knows it. A keeper watches `beat` stand still; the times are only for people."""

    id: SessionId
    beat: int
    open: bool
    opened_at: int
    beat_at: int
    host: str
    pid: int
    queues: tuple[str, ...]


class SessionPage(msgspec.Struct, frozen=True):
    """Some sessions, and where the next page begins (None: this was the last)."""

    sessions: tuple[SessionView, ...]
    next: str | None


class Beat(msgspec.Struct, frozen=True):
    """The answer to a heartbeat: is the session still open, how many jobs it holds, which are to be cancelled."""

    open: bool
    held: int
    cancel: tuple[JobId, ...]


class ClaimRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Up to `limit` jobs for an open session: queue after queue as listed, lanes as `holdfast.lanes` orders `turn`."""

    session_id: SessionId
    queues: tuple[str, ...]
    limit: int
    turn: int = 0

    def __post_init__(self) -> None:
        """Refuse a request that could never be answered."""
        for queue in self.queues:
            check_name("queue", queue)
        check_whole("limit", self.limit, 1, MOST_PER_CALL)


class Claimed(msgspec.Struct, frozen=True, gc=False):
    """The jobs in the order of serving, the store's time, and in how many microseconds the next one becomes due.

    `due_in` is 0 when as many jobs came as were asked for (there may be more), and None when nothing waits. It is
    relative because the parts of a sharded engine have clocks of their own.
    """

    jobs: tuple[Job, ...]
    now: int
    due_in: int | None


class CancelAnswer(StrEnum):
    """What became of a request to cancel."""

    CANCELLED = "cancelled"
    ASKED = "asked"
    """A worker holds the job; it hears of it with its next beat."""
    ENDED = "ended"
    GONE = "gone"


class JobQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs to list, newest id first. Empty means any. `cursor` is the `next` of the page before."""

    states: tuple[State, ...] = ()
    queue: str | None = None
    task: str | None = None
    correlation_id: str | None = None
    cursor: JobId | None = None
    limit: int = 100

    def __post_init__(self) -> None:
        """Refuse a page that nobody could hold."""
        check_whole("limit", self.limit, 1, MOST_PER_CALL)


class Page(msgspec.Struct, frozen=True):
    """Some jobs, and where the next page begins (None: this was the last)."""

    jobs: tuple[Job, ...]
    next: JobId | None


class QueueCounts(msgspec.Struct, frozen=True, kw_only=True):
    """One queue for people. `ready` jobs are due, `scheduled` ones are not yet."""

    queue: str
    ready: int = 0
    scheduled: int = 0
    in_flight: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    paused: bool = False


class Verdict(StrEnum):
    """How good it is what was found."""

    OK = "ok"
    WEAK = "weak"
    """It works, and keeps less than it could, or needs somebody's attention."""
    BAD = "bad"
    """The store cannot keep its promise like this."""


class Finding(msgspec.Struct, frozen=True):
    """One thing that an engine says about itself, read from its live settings. `advice`: one plain line, if not ok."""

    name: str
    value: str
    verdict: Verdict = Verdict.OK
    advice: str = ""


def oldest_ready(run_at: int | None, now: int) -> Finding:
    """The finding about the ready job that was due first (None: no job waits), in the same words on every engine."""
    if run_at is None or run_at > now:
        return Finding("oldest ready job", "none is due")
    return Finding("oldest ready job", f"due for {timedelta(seconds=(now - run_at) // 1_000_000)} (h:mm:ss)")


@runtime_checkable
class Overlapping(Protocol):
    """A store whose server works by itself: what a blocking insert waits for can be used."""

    def insert_while(
        self,
        jobs: Sequence[NewJob],
        meanwhile: Callable[[], object],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
    ) -> list[Inserted]:
        """`Store.insert_blocking`, with `meanwhile` called when the jobs are on their way to the server, before the
        answer is waited for: once, or again if they have to be sent again, or not at all. The deadline of the answer
        begins after it. It must not raise an `Exception`; whatever else it raises leaves the outcome unknown.
        """


@runtime_checkable
class Examinable(Protocol):
    """A store that can say what an accepted job survives in it. Not every store can: the queue works without."""

    async def examine(self, *, deep: bool = False) -> list[Finding]:
        """What it finds, the first about what an accepted job survives. `deep`: read every page of the data as well.

        It changes and creates nothing. An engine that cannot be opened as it is raises the error that says why.
        """


class Store(Protocol):
    """What the queue asks of an engine."""

    # New jobs.

    async def insert(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
        fresh: bool = False,
    ) -> list[Inserted]:
        """Add jobs as `ready`, due at `max(run_at, now)` or at `now + delay` (`job.due_at`). One answer each.

        Within a lane they are served by due time, those of one microsecond by id: ids of one process rise.

        A job whose id is in the store, in any state, is `existing`: an unknown insert is safely repeated (an id is used
        in one queue only; what happens to one used in two is not defined). A key is
        held by its job until `window` after the insert; a failed or cancelled job frees it. `limits` per queue: a
        job that would exceed `max_depth` is `full`. Concurrent callers may overshoot by what they insert at once, and a
        store may go by a depth that is up to a second old.

        With a checkpoint, all jobs are of its queue, and nothing is written unless its value is still `was`:
        `CheckpointConflict` otherwise. If any of them would be `full`, all are, and the checkpoint stays.

        `fresh`: the caller made the ids for this very call, and no call before it named them. A store may look less far
        for them then. Later calls may: a caller that gave this one up and repeats it, without `fresh`, is answered
        right, even if this one takes effect only after that.
        Raises `QueueClosed` after a shutdown.
        """

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """The same as `insert`, on the calling thread, by the shortest way that the engine has."""

    def insert_on(
        self,
        connection: object,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
    ) -> list[Inserted]:
        """The same inside the caller's own transaction: the jobs exist if and only if the caller commits.

        `ForeignConnection` if the connection does not belong to this store's database, or belongs to an event loop.
        """

    async def ainsert_on(
        self,
        connection: object,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
    ) -> list[Inserted]:
        """The same for a connection that belongs to an event loop. A blocking one is taken too, and used on the loop's
        thread. `ForeignConnection` as there. If the call is cancelled, the caller rolls back.
        """

    # Sessions.

    async def open_session(self, session: Session) -> None:
        """Make the session known, open, with beat 0. Repeating it is harmless; a closed one stays closed."""

    async def beat(self, session_id: SessionId) -> Beat:
        """Raise the beat counter of an open session. Never opens one: for a closed or unknown one `open` is False."""

    async def held(self, session_id: SessionId) -> list[Job]:
        """Every job in flight under the session, whether or not the worker knows: what it does not, it releases."""

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        """Some sessions, open or closed, that have not been pruned. `cursor` is the `next` of the page before.

        A session that is there from the first page to the last is on at least one of them, with its counter as it is at
        the time of that page; it may be on two. A page may be short, even empty, while `next` is set: `limit` is about
        how many. A cursor is opaque text.
        """

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        """Close an open session, if its counter is still `if_beat` (None: in any case). True if this call closed it.

        Once this has returned, its claims and moves are refused, those under way included. If it raises, part of an
        engine that shards by queue may still accept them; `lost` completes what was begun.
        """

    # The life of a claim.

    async def claim(self, request: ClaimRequest) -> Claimed:
        """Move due jobs to `in_flight` under the session, each with a version one higher than before.

        `SessionClosed` if the session is not open, checked in the same atomic step. A paused queue yields nothing.
        """

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """Carry out each move whose guard holds (`lifecycle.judge`) with its key change, in one step. One answer each.

        A later move of the same job sees what an earlier one of the batch did, and a key goes to the first that takes
        it, by the order of the batch. Why a move was refused may be judged a moment after the refusal.

        A move to an end state takes the job out of the hot structure, stamps `ended_at` and keeps it for its
        retention (failed: until somebody replays or forgets it). A move to `ready` clears a cancel that was asked.
        The jobs of `then` are accepted in the same step, without regard to depth; one whose id or key is there already
        is left out. In another queue of an engine that shards by queue they may appear a little later.
        """

    def apply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """The same inside the caller's own transaction, as with `insert_on`. It must see what is committed meanwhile
        (READ COMMITTED); while it is open, closing the session may have to wait for it.
        """

    async def aapply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """The same for a connection that belongs to an event loop, as with `ainsert_on`."""

    async def note(self, lease: Lease, progress: bytes) -> Applied:
        """Keep the progress of a running job: applied, or stale if the lease no longer holds."""

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        """Jobs in flight whose session is not open (of that session only, if given), however it came about."""

    # Operators and keepers.

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """Cancel ready jobs at once; mark jobs in flight so that `beat` tells their worker."""

    async def set_paused(self, queue: str, paused: bool) -> None:
        """Stop or resume claims from a queue. What is in flight goes on."""

    async def prune(self, limit: int) -> int:
        """Remove up to `limit` rows whose time is over (ended jobs, keys, closed empty sessions). How many it was.

        A key outlives its pruned job until its window ends: a repeated call still gets that job's id.
        """

    async def forget(self, job_ids: Sequence[JobId]) -> int:
        """Remove ended jobs, dead letters included, for good. How many it was. Live jobs are left alone.

        Nothing is remembered of them: a job that is inserted with the same id later begins anew, at version 0.
        """

    # Reading.

    async def get(self, job_id: JobId) -> Job | None:
        """The job, in whatever state it is."""

    async def find(self, query: JobQuery) -> Page:
        """Jobs that match, newest id first. A page may be short, even empty, while `next` is set."""

    async def counts(self) -> list[QueueCounts]:
        """Every queue that has jobs or is paused, by name."""

    async def checkpoint(self, queue: str, name: str) -> str | None:
        """The cursor's present value."""

    async def now(self) -> int:
        """The store's clock."""

    def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """Yields soon after jobs may have become claimable in these queues. A hint: polling is the truth."""

    def beside(self) -> Store:
        """A store on the same jobs with connections of its own, for a thread that must not wait behind this one's
        calls. The caller closes it. An engine without connections answers with itself.
        """

    async def __aenter__(self) -> Self:
        """Open what is needed. Idempotent."""

    async def __aexit__(self, *exc: object) -> None:
        """Close it, after what is under way."""


async def all_sessions(store: Store) -> list[SessionView]:
    """Every session, open or closed, that has not been pruned, each once. For people: a keeper goes page by page."""
    views: dict[SessionId, SessionView] = {}
    cursor: str | None = None
    while True:
        page = await store.sessions(cursor=cursor, limit=MOST_PER_CALL)
        views.update((view.id, view) for view in page.sessions)
        cursor = page.next
        if cursor is None:
            return list(views.values())
