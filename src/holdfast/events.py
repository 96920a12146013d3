"""What happened, as values. One callable receives them all; metrics, logs and tracing are built on it.

A listener is called on the thread where it happened. What it raises is dropped: an observer must never harm a job.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from holdfast.job import JobId, SessionId


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


Event = (
    JobEnqueued | QueueDeep | CancelRequested | JobReplayed | QueuePaused | SessionRescued | JobsRescued | KeeperFailed
)
Listener = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The listener that listens to nothing."""


def tell(listener: Listener, event: Event) -> None:
    """Hand the event over; drop what the listener raises."""
    if listener is not ignore:
        with contextlib.suppress(Exception):
            listener(event)
