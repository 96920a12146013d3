"""`current()`: the running job, as its own handler sees it. It works the same in event loops, threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any

import msgspec

from holdfast.codec import encode_result
from holdfast.errors import NotInJob, StaleLease
from holdfast.job import Job, Lease
from holdfast.lifecycle import Applied, Move, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import Ports
from holdfast.store import Store

LARGEST_PROGRESS = 16 * 1024


class Stop(Enum):
    """Why a handler was asked to stop."""

    TIMEOUT = "timeout"
    CANCEL = "cancel"
    SHUTDOWN = "shutdown"
    LOST = "lost"
    """The session was closed: whatever the handler returns is refused."""


class Surroundings(msgspec.Struct, frozen=True):
    """What is the same for every job that runs in a process."""

    store: Store
    ports: Ports
    noted: Callable[[CurrentJob], None]
    """Called with a job that has told new progress."""


class CurrentJob:
    """The job that is running here. Made by the worker, one per claim; handed to middleware and by `current()`."""

    __slots__ = ("_job", "_surroundings", "is_async", "latest_progress", "state", "stop")

    def __init__(self, job: Job, surroundings: Surroundings, is_async: bool) -> None:
        self._job = job
        self._surroundings = surroundings
        self.is_async = is_async
        """Whether the handler is a coroutine function, so that middleware may open asynchronous resources."""
        self.state: dict[str, Any] = {}
        """Room for what middleware opens and the handler uses, such as a database session."""
        self.stop: Stop | None = None
        self.latest_progress: bytes | None = None

    @property
    def id(self) -> str:
        """The job's id: the same for every attempt, so it serves as an idempotency key towards others."""
        return self._job.id

    @property
    def lease(self) -> Lease:
        """The right to settle this claim."""
        return self._job.lease

    @property
    def task(self) -> str:
        """The name of the task."""
        return self._job.task

    @property
    def queue(self) -> str:
        """The queue that the job came from."""
        return self._job.queue

    @property
    def key(self) -> str | None:
        """The idempotency key that it was enqueued with."""
        return self._job.key.text if self._job.key else None

    @property
    def attempt(self) -> int:
        """Which attempt this is, counted from 1. Claims that never started, releases and snoozes do not count."""
        return self._job.attempt + 1

    @property
    def correlation_id(self) -> str | None:
        """What it was enqueued with, to follow a request through queues."""
        return self._job.correlation_id

    @property
    def cancelled(self) -> bool:
        """Whether the handler should stop: it was cancelled, timed out, lost its lease, or the worker shuts down.

        A coroutine is cancelled as well. A plain function has to look here from time to time.
        """
        return self.stop is not None

    def progress(self, value: Any) -> None:
        """Tell how far the job is: any JSON value of at most 16 KiB. It is kept soon; the newest wins. Never blocks."""
        self.keep_progress(encode_result(value, LARGEST_PROGRESS))

    def keep_progress(self, encoded: bytes) -> None:
        """The same for progress that is JSON already."""
        self.latest_progress = encoded
        self._surroundings.noted(self)

    def succeed_on(self, connection: Any, result: Any = None) -> None:
        """Settle the job inside the handler's own transaction: it has succeeded if and only if that commits.

        `StaleLease` if somebody else has the job by now: roll back. Return soon after the commit.
        """
        [answer] = self._surroundings.store.apply_on(connection, [self._success(result)])
        self._require_held(answer)

    async def asucceed_on(self, connection: Any, result: Any = None) -> None:
        """The same with a connection that belongs to an event loop, or with a plain one in a coroutine."""
        [answer] = await self._surroundings.store.aapply_on(connection, [self._success(result)])
        self._require_held(answer)

    def _success(self, result: Any) -> Move:
        encoded = None if result is None else encode_result(result)
        return settle(self._job, Succeeded(encoded), RetryPolicy(), self._surroundings.ports.random)

    def _require_held(self, answer: Applied) -> None:
        if answer not in (Applied.APPLIED, Applied.ALREADY):
            raise StaleLease(f"job {self.id} is no longer this worker's ({answer}): roll the transaction back")

    def __repr__(self) -> str:
        return f"<CurrentJob {self.id} {self.task} attempt {self.attempt}>"


_current: ContextVar[CurrentJob] = ContextVar("holdfast_current_job")


def current() -> CurrentJob:
    """The job that runs here, or `NotInJob`. A thread that a handler starts itself must be handed it."""
    try:
        return _current.get()
    except LookupError:
        raise NotInJob("current() only works inside a handler that a worker runs") from None


enter: Callable[[CurrentJob], object] = _current.set
"""Makes it the current job of this context. The caller runs each job in a context of its own."""
