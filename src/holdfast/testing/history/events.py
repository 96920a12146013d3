"""What a history is made of: what producers were told, what workers and keepers did, what harmed them, how it ended.

Times are seconds of one monotonic clock (the simulation's, or the machine's, which all its processes share). An event
is noted when it is over; a call of the store also says when it `began`, so it took effect between `began` and `at`.

A history is *exact* if every effect on the store was noted at the moment when it happened, as in the simulation. It is
*observed* if each process noted what it was told: then a claim or a settlement may have happened that nobody heard of.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.job import Job, JobId, Reason, SessionId, State
from holdfast.lifecycle import Applied
from holdfast.policy import FullJitter
from holdfast.store import InsertStatus, QueueCounts


class Answer(StrEnum):
    """How a call ended, as its caller knows."""

    OK = "ok"
    FAILED = "failed"
    """Certainly nothing was written."""
    UNKNOWN = "unknown"


class Event(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="event"):
    """Something that happened on a host."""

    at: float
    host: str = ""


class Call(Event, frozen=True, kw_only=True, gc=False):
    """One that took a while: it took effect between `began` and `at`, if at all."""

    began: float
    answer: Answer = Answer.OK


class Enqueue(Call, frozen=True, kw_only=True, gc=False, tag="enqueue"):
    """A producer asked for a job. `returned` is the job that stands for it: its own, or the one that holds the key."""

    job_id: JobId
    digest: str
    """Of task and payload."""
    queue: str
    max_retries: int
    delay: int = 0
    key: str | None = None
    status: InsertStatus | None = None
    returned: JobId = ""


class Claim(Call, frozen=True, kw_only=True, gc=False, tag="claim"):
    """A session was given a job. The times are the store's, in microseconds."""

    session_id: SessionId
    job_id: JobId
    version: int
    attempt: int
    run_at: int
    claimed_at: int
    digest: str


class Start(Event, frozen=True, kw_only=True, gc=False, tag="start"):
    """A handler was called."""

    job_id: JobId
    version: int
    digest: str = ""


class End(Event, frozen=True, kw_only=True, gc=False, tag="end"):
    """It is over: it returned, raised, or was cancelled. One that was killed has no end."""

    job_id: JobId
    version: int
    wished: float | None = None
    """The handler asked for this delay itself, in seconds: `Retry(after=...)`."""


class Effect(Event, frozen=True, kw_only=True, gc=False, tag="effect"):
    """What the handler did to the world outside of the store under test."""

    job_id: JobId
    version: int


class Settle(Call, frozen=True, kw_only=True, gc=False, tag="settle"):
    """A move was answered. The counters and the delay are those that the move wrote, if it was applied."""

    job_id: JobId
    version: int
    session_id: SessionId | None
    to: State
    reason: Reason
    attempt: int
    failures: int
    crashes: int
    snoozes: int
    delay: int | None
    applied: Applied | None = None
    from_the_dead: bool = False
    """It says what becomes of a claim whose session is closed. A worker's own move needs an open one."""
    then: tuple[JobId, ...] = ()


class Cancel(Call, frozen=True, kw_only=True, gc=False, tag="cancel"):
    """Somebody asked to cancel a job. `ended`: it was ready, and is cancelled."""

    job_id: JobId
    ended: bool = False


class Close(Call, frozen=True, kw_only=True, gc=False, tag="close"):
    """A session was closed by this call, by its own worker or by a keeper. `judged`: because its beat stood still."""

    session_id: SessionId
    judged: bool = False


class Fault(Event, frozen=True, kw_only=True, gc=False, tag="fault"):
    """Harm was done: `kind` is its name in the fault table, `victim` the host, session or server that it befell."""

    kind: str
    victim: str = ""


class KeeperReady(Event, frozen=True, kw_only=True, gc=False, tag="keeper_ready"):
    """A keeper has begun to look: from here on, the dead are found."""


class Healed(Event, frozen=True, kw_only=True, gc=False, tag="healed"):
    """No more harm from here on, and enough workers for everything that is left."""


class Stopped(Event, frozen=True, kw_only=True, gc=False, tag="stopped"):
    """A worker was asked to stop, and has ended within its grace period: its session holds nothing any more."""

    session_id: SessionId


class Measured(Event, frozen=True, kw_only=True, gc=False, tag="measured"):
    """How much there was of something before the run and after it. `slack`: how much more is no leak."""

    what: str
    before: float
    after: float
    slack: float


AnyEvent = (
    Enqueue | Claim | Start | End | Effect | Settle | Cancel | Close | Fault | KeeperReady | Healed | Stopped | Measured
)


class Ending(msgspec.Struct, frozen=True, kw_only=True):
    """What is in the store when everything is over."""

    jobs: tuple[Job, ...]
    counts: tuple[QueueCounts, ...]
    open_sessions: frozenset[SessionId] = frozenset()


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the run was set to: what the checks compare with."""

    backoff: FullJitter | None = None
    """None: other backoffs were in use, and delays are not judged."""
    max_crashes: int = 3
    max_snoozes: int = 100
    drained_within: float = 60.0
    """Seconds from `Healed` until every job has ended."""
    steady_clock: bool = True
    """The store's clock ran as the history's does: delays can be judged."""
    set_back: float = 0.0
    """Seconds by which the store's clock was set back, in all: what was due before that is due, whatever it shows."""
    keys_expire: bool = False
    """Keys were held for so short a time that one may have had several jobs."""
    damaged: frozenset[JobId] = frozenset()
    """Jobs whose record the run itself has spoilt. They are not judged."""


class History(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run, in the order in which it was noted."""

    events: tuple[AnyEvent, ...]
    ending: Ending
    rules: Rules = Rules()
    exact: bool = False
