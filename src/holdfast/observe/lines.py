"""What a log says about each event: its level, one sentence for people, and the keys to find it by. Pure.

Every event has a line. Details without a key of their own (attempt, seconds, error, delay) are part of the sentence.
Payloads, arguments and results are in no event, so they are in no line; the text of an error is its author's, and is
cut and made printable here.
"""

from __future__ import annotations

from typing import Literal, TypedDict, assert_never

import msgspec

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

Level = Literal["debug", "info", "warning", "error"]

LONGEST_ERROR = 300


class Keys(TypedDict, total=False):
    """The keys that a line may carry besides `level`, `ts` and `msg`, in the order in which they are written.

    There are no others: what is not listed here cannot be logged, so that no payload gets in by accident.
    """

    trace_id: str | None
    span_id: str | None
    job_id: str | None
    queue: str | None
    worker_id: str | None
    request_id: str | None
    namespace: str | None


class Line(msgspec.Struct, frozen=True):
    """One line of a log."""

    level: Level
    msg: str
    keys: Keys


def printable(text: str, longest: int) -> str:
    """The text on one line of at most `longest` characters, with everything visible that a terminal or a reader of
    lines could act upon: control characters (`\\n`, `\\x1b`), line separators, direction marks, lone surrogates.
    """
    # Escaping makes text longer, so it is cut before (it may be huge) and after.
    shown = text[:longest]
    if not shown.isprintable():
        shown = "".join(
            character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
            for character in shown
        )
    return shown if len(text) <= longest and len(shown) <= longest else shown[: longest - 1] + "…"


def line(event: Event) -> Line:
    """The line for an event."""
    match event:  # in the order of their frequency, then in that of `holdfast.events`
        case JobSettled():
            return _settled(event)
        case JobStarted():
            return Line(
                "debug",
                f"{event.task} started, attempt {event.attempt}, after waiting {_seconds(event.waited)}",
                _job(event),
            )
        case JobEnqueued():
            said = "enqueued" if event.created else "was enqueued before: the caller got the job that is there"
            return Line("debug", f"{event.task} {said}", {"job_id": event.job_id, "queue": event.queue})
        case QueueDeep():
            return Line(
                "warning",
                f"at least {event.warn_depth} jobs wait in the queue: add workers, or enqueue more slowly",
                {"queue": event.queue},
            )
        case CancelRequested():
            return Line("info", f"cancel requested: {_cut(event.answer)}", {"job_id": event.job_id})
        case JobReplayed():
            return Line("info", "brought back to its queue", {"job_id": event.job_id, "queue": event.queue})
        case QueuePaused():
            said = "paused: nothing is claimed from the queue" if event.paused else "resumed"
            return Line("info", said, {"queue": event.queue})
        case SessionRescued():
            return Line(
                "warning",
                "worker found dead, its heartbeat stood still: its jobs go back to their queues",
                {"worker_id": event.session_id},
            )
        case JobsRescued():
            said = f"{_count(event.returned, 'job')} of dead workers went back to their queues"
            if event.failed:
                return Line("error", f"{said}, {event.failed} failed for good at the crash limit", {})
            return Line("warning", said, {})
        case KeeperFailed():
            return Line("warning", f"keeper {event.keeper} failed, it goes on{_because(event.error)}", {})
        case WorkerStarted():
            return Line(
                "info",
                f"worker started: {_count(event.concurrency, 'job')} at once, queues {_cut(', '.join(event.queues))}",
                {"worker_id": event.worker_id},
            )
        case WorkerStopped():
            done = f"{event.succeeded} succeeded, {event.failed} failed, {event.released} released"
            if event.clean:
                return Line("info", f"worker stopped: {done}", {"worker_id": event.worker_id})
            return Line("warning", f"worker stopped past its grace period: {done}", {"worker_id": event.worker_id})
        case SessionLost():
            return Line(
                "warning",
                f"worker was taken for dead, {_count(event.held, 'job')} of it belong to others now: it goes on with "
                f"a new session. Was the machine stopped, or the store out of reach?",
                {"worker_id": event.worker_id},
            )
        case SettleRefused():
            return Line(
                "warning",
                f"{event.task}: what became of it was refused ({_cut(event.answer)}), because the lease was lost "
                f"meanwhile: somebody else decides about the job, and it may run twice",
                _job(event),
            )
        case TaskUnknown():
            return Line(
                "warning",
                f"{event.task} is not a task of this worker, the job is put off: deploy the task here, or let other "
                f"workers claim from this queue",
                _job(event),
            )
        case LoopBlocked():
            suspects = f" (running: {_cut(', '.join(event.suspects))})" if event.suspects else ""
            return Line(
                "warning",
                f"the event loop has been blocked for {_seconds(event.seconds)} by a handler{suspects}; "
                f"{_count(event.released, 'unstarted job')} went back. Make a handler that blocks a plain function, "
                f"which runs in a thread, or await what it calls",
                {"worker_id": event.worker_id},
            )
        case HandlerStuck():
            return Line(
                "error",
                f"{event.task} ran past its hard limit of {_seconds(event.hard_timeout)} and cannot be stopped: the "
                f'job failed and its slot is lost until the process is replaced. With isolation="process" it is killed',
                _job(event),
            )
        case PartFailed():
            return Line(
                "warning",
                f"{event.part} failed, it goes on in {_seconds(event.retry_in)}{_because(event.error)}",
                {"worker_id": event.worker_id},
            )
        case ProcessDied():
            said = f"process {event.pid} died: {_cut(event.how)}"
            if not event.job_id:
                said += (
                    f"; {_count(event.started, 'job')} that it ran will run again alone, "
                    f"{_count(event.unstarted, 'unstarted job')} went back"
                )
            return Line("error", said, {"job_id": event.job_id, "worker_id": event.worker_id})
        case ProcessKilled():
            return Line(
                "warning",
                f"process {event.pid} was killed: {_cut(event.why)}",
                {"job_id": event.job_id, "worker_id": event.worker_id},
            )
        case ProcessRecycled():
            return Line("info", f"process {event.pid} is replaced: {_cut(event.why)}", {"worker_id": event.worker_id})
        case JobsPruned():
            return Line("info", f"{_count(event.rows, 'row')} removed whose time was over", {})
        case _:
            assert_never(event)


def _settled(event: JobSettled) -> Line:
    took = f"attempt {event.attempt}, {_seconds(event.seconds)}"
    because = _because(event.error)
    again = "" if event.retry_in is None else f", runs again in {_seconds(event.retry_in)}"
    level: Level
    match event.reason:
        case Reason.SUCCEEDED if event.error:
            level, said = "warning", f"succeeded ({took}), but its result was not kept{because}"
        case Reason.SUCCEEDED:
            level, said = "debug", f"succeeded ({took})"
        case Reason.RETRIED:
            level, said = "info", f"failed ({took}){again}{because}"
        case Reason.EXHAUSTED:
            level, said = "error", f"failed for good ({took}), no retries left{because}"
        case Reason.PERMANENT:
            level, said = "error", f"failed for good ({took}), its error is permanent{because}"
        case Reason.SNOOZED_OUT:
            level, said = "error", f"failed for good ({took}), put off too often{because}"
        case Reason.CRASHED if event.state is State.FAILED:
            level, said = "error", f"failed for good ({took}), its process crashed too often{because}"
        case Reason.CRASHED:
            level, said = "warning", f"crashed its process ({took}){again}{because}"
        case Reason.LOST:
            level, said = "warning", f"was lost with its worker ({took}){again}{because}"
        case Reason.RELEASED:
            level, said = "debug", f"released ({took}), it keeps its place in the queue"
        case Reason.SNOOZED:
            level, said = "info", f"put off ({took}){again}{because}"
        case Reason.CANCELLED:
            level, said = "info", f"cancelled ({took}){because}"
        case Reason.ENQUEUED | Reason.CLAIMED | Reason.REPLAYED:  # no settlement, but a line all the same
            level, said = "info", f"{event.reason} ({took}){because}"
        case _:
            assert_never(event.reason)
    return Line(level, f"{event.task} {said}", _job(event))


def _job(event: JobStarted | JobSettled | SettleRefused | TaskUnknown | HandlerStuck) -> Keys:
    return {
        "job_id": event.job_id,
        "queue": event.queue,
        "worker_id": event.worker_id,
        "request_id": event.correlation_id if isinstance(event, JobStarted | JobSettled) else None,
    }


def _cut(text: str) -> str:
    return printable(text, LONGEST_ERROR)


def _because(error: str) -> str:
    return f": {_cut(error)}" if error else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.3f}".rstrip("0").rstrip(".") + " s"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
