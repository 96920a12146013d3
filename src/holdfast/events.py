"""What happened, as values. One callable receives them all; metrics, logs and tracing are built on it.

A listener is called on the thread where it happened. What it raises is dropped: an observer must never harm a job.

Most of what happens is routine: a job starts, and succeeds. A listener that does not care has an attribute `routine`
that is False. Then such events need not be made for it, though it may still hear them for the sake of another.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from holdfast.job import JobId, Reason, SessionId, State


class JobEnqueued(msgspec.Struct, frozen=True, gc=False):
    """A job was accepted (`created`), or it was there already. In a caller's own transaction: before its commit."""

    job_id: JobId
    queue: str
    task: str
    created: bool


class QueueDeep(msgspec.Struct, frozen=True, gc=False):
    """A queue holds at least `warn_depth` waiting jobs."""

    queue: str
    warn_depth: int


class CancelRequested(msgspec.Struct, frozen=True, gc=False):
    """Somebody asked to cancel a job; `answer` is what became of it."""

    job_id: JobId
    answer: str


class JobReplayed(msgspec.Struct, frozen=True, gc=False):
    """An operator brought an ended job back."""

    job_id: JobId
    queue: str


class QueuePaused(msgspec.Struct, frozen=True, gc=False):
    """Claims from a queue were stopped, or resumed."""

    queue: str
    paused: bool


class SessionRescued(msgspec.Struct, frozen=True, gc=False):
    """A keeper found a worker dead and closed its session."""

    session_id: SessionId


class JobsRescued(msgspec.Struct, frozen=True, gc=False):
    """Jobs of closed sessions went back to their queues, or to the dead letters at the crash limit."""

    returned: int
    failed: int


class KeeperFailed(msgspec.Struct, frozen=True, gc=False):
    """A pass of a keeper failed; it goes on with the next."""

    keeper: str
    error: str


class WorkerStarted(msgspec.Struct, frozen=True, gc=False):
    """A worker opened a session and begins to claim."""

    worker_id: SessionId
    queues: tuple[str, ...]
    concurrency: int


class WorkerStopped(msgspec.Struct, frozen=True, gc=False):
    """A worker settled or released all that it held and closed its session. `clean`: within its grace period."""

    worker_id: SessionId
    clean: bool
    succeeded: int
    failed: int
    released: int


class SessionLost(msgspec.Struct, frozen=True, gc=False):
    """A worker learned that its session was closed: others have its jobs. It goes on with a new one."""

    worker_id: SessionId
    held: int


class JobStarted(msgspec.Struct, frozen=True, gc=False):
    """A handler is about to run. `waited`: seconds since the job became due, by the store's clock."""

    worker_id: SessionId
    job_id: JobId
    queue: str
    task: str
    attempt: int
    waited: float
    correlation_id: str | None


class JobSettled(msgspec.Struct, frozen=True, gc=False):
    """The store accepted what became of a claim. `seconds` the handler took; `error` is the last failure, if any."""

    worker_id: SessionId
    job_id: JobId
    queue: str
    task: str
    state: State
    reason: Reason
    attempt: int
    seconds: float
    error: str
    retry_in: float | None
    correlation_id: str | None


class SettleRefused(msgspec.Struct, frozen=True, gc=False):
    """The store refused a settlement: the lease was lost meanwhile, and somebody else decided about the job."""

    worker_id: SessionId
    job_id: JobId
    queue: str
    task: str
    answer: str


class TaskUnknown(msgspec.Struct, frozen=True, gc=False):
    """A job of a task that this worker does not have (a rolling deploy): it is put off."""

    worker_id: SessionId
    job_id: JobId
    queue: str
    task: str


class LoopBlocked(msgspec.Struct, frozen=True, gc=False):
    """The worker's event loop has not run for `seconds`: a handler blocks it. `released` unstarted jobs went back."""

    worker_id: SessionId
    seconds: float
    released: int
    suspects: tuple[str, ...]
    """The tasks of the handlers that are running on the loop."""


class HandlerStuck(msgspec.Struct, frozen=True, gc=False):
    """A handler ran past its hard limit and cannot be stopped from within: its job failed, its slot is gone."""

    worker_id: SessionId
    job_id: JobId
    queue: str
    task: str
    hard_timeout: float


class PartFailed(msgspec.Struct, frozen=True, gc=False):
    """A background loop of a worker (claimer, settler, heartbeat, …) failed; it goes on after `retry_in` seconds."""

    worker_id: SessionId
    part: str
    error: str
    retry_in: float


class ProcessDied(msgspec.Struct, frozen=True, gc=False):
    """A process that ran jobs ended by itself. `how`: "exit code 3", "killed by SIGSEGV". `job_id`: the one isolated
    job that it ran; empty for a worker process, whose `started` jobs are suspects now and whose `unstarted` go back.
    """

    worker_id: SessionId
    pid: int
    how: str
    job_id: JobId = ""
    started: int = 0
    unstarted: int = 0


class ProcessKilled(msgspec.Struct, frozen=True, gc=False):
    """The supervisor, or a worker for an isolated job, killed a process. `why` says what it had done."""

    worker_id: SessionId
    pid: int
    why: str
    job_id: JobId = ""


class ProcessRecycled(msgspec.Struct, frozen=True, gc=False):
    """The supervisor replaces a worker process that has run many jobs, or grew large. It finishes what it runs."""

    worker_id: SessionId
    pid: int
    why: str


class JobsPruned(msgspec.Struct, frozen=True, gc=False):
    """The retention keeper removed rows whose time was over: ended jobs, keys, closed sessions."""

    rows: int


Event = (
    JobEnqueued
    | QueueDeep
    | CancelRequested
    | JobReplayed
    | QueuePaused
    | SessionRescued
    | JobsRescued
    | KeeperFailed
    | WorkerStarted
    | WorkerStopped
    | SessionLost
    | JobStarted
    | JobSettled
    | SettleRefused
    | TaskUnknown
    | LoopBlocked
    | HandlerStuck
    | PartFailed
    | ProcessDied
    | ProcessKilled
    | ProcessRecycled
    | JobsPruned
)
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener that listens to nothing."""


def tell(listener: Listener, event: Event) -> None:
    """Hand the event over; drop what the listener raises."""
    if listener is not ignore:
        with contextlib.suppress(Exception):
            listener(event)


def hears_routine(listener: Listener) -> bool:
    """Whether the listener wants to hear of each job that starts and of each that succeeds."""
    return listener is not ignore and getattr(listener, "routine", True)


class _Both:
    def __init__(self, first: Listener, second: Listener) -> None:
        self._first = first
        self._second = second
        self.routine = hears_routine(first) or hears_routine(second)

    def __call__(self, event: Event) -> None:
        tell(self._first, event)
        tell(self._second, event)


def both(first: Listener, second: Listener) -> Listener:
    """A listener that tells two others. What one raises does not keep the event from the other."""
    if first is ignore:
        return second
    return first if second is ignore else _Both(first, second)
