"""One event of each class, with the level of its line; and streams that behave badly."""

from __future__ import annotations

import io
import threading

from holdfast.events import (
    CancelRequested,
    Event,
    HandlerStuck,
    JobEnqueued,
    JobReplayed,
    JobSettled,
    JobsPruned,
    JobsRescued,
    JobStarted,
    KeeperFailed,
    LoopBlocked,
    PartFailed,
    ProcessDied,
    ProcessKilled,
    ProcessRecycled,
    QueueDeep,
    QueuePaused,
    SessionLost,
    SessionRescued,
    SettleRefused,
    TaskUnknown,
    WorkerStarted,
    WorkerStopped,
)
from holdfast.job import Reason, State
from holdfast.observe.lines import Level

WORKER = "5f3c9a7e1b2d4c6f8091a2b3c4d5e6f7"
JOB = "0195c1a2-7b3c-7def-8123-456789abcdef"

EVENTS: list[tuple[Event, Level]] = [
    (JobEnqueued(JOB, "mail", "welcome", True), "debug"),
    (QueueDeep("mail", 1000), "warning"),
    (CancelRequested(JOB, "asked"), "info"),
    (JobReplayed(JOB, "mail"), "info"),
    (QueuePaused("mail", True), "info"),
    (SessionRescued(WORKER), "warning"),
    (JobsRescued(3, 0), "warning"),
    (KeeperFailed("rescue", "StoreUnavailable('locked')"), "warning"),
    (WorkerStarted(WORKER, ("mail", "reports"), 10), "info"),
    (WorkerStopped(WORKER, True, 5, 1, 2), "info"),
    (SessionLost(WORKER, 4), "warning"),
    (JobStarted(WORKER, JOB, "mail", "welcome", 1, 0.012, "req-1"), "debug"),
    (
        JobSettled(
            WORKER, JOB, "mail", "welcome", State.SUCCEEDED, Reason.SUCCEEDED, 1, 0.25, "", None, correlation_id="req-1"
        ),
        "debug",
    ),
    (SettleRefused(WORKER, JOB, "mail", "welcome", "stale"), "warning"),
    (TaskUnknown(WORKER, JOB, "mail", "welcome"), "warning"),
    (LoopBlocked(WORKER, 2.5, 3, ("welcome",)), "warning"),
    (HandlerStuck(WORKER, JOB, "mail", "welcome", 30.0), "error"),
    (PartFailed(WORKER, "claimer", "StoreUnavailable('locked')", 0.5), "warning"),
    (ProcessDied(WORKER, 4711, "killed by SIGSEGV", "", 2, 8), "error"),
    (ProcessKilled(WORKER, 4711, "stopped beating"), "warning"),
    (ProcessRecycled(WORKER, 4711, "1000 jobs"), "info"),
    (JobsPruned(250), "info"),
]


def settled(
    reason: Reason, state: State = State.READY, *, error: str = "", retry_in: float | None = None, task: str = "welcome"
) -> JobSettled:
    """A settlement."""
    return JobSettled(
        worker_id=WORKER,
        job_id=JOB,
        queue="mail",
        task=task,
        state=state,
        reason=reason,
        attempt=2,
        seconds=0.25,
        error=error,
        retry_in=retry_in,
        correlation_id="req-1",
    )


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


class Held(io.StringIO):
    """A stream that blocks in each write until it is let go. `reached` says that somebody is blocked."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        self.let_go.wait()
        return super().write(text)


class Failing(io.StringIO):
    """A stream whose first writes fail."""

    def __init__(self, failures: int) -> None:
        super().__init__()
        self.failures = failures

    def write(self, text: str) -> int:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(28, "No space left on device")
        return super().write(text)
