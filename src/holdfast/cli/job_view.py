"""One job as people and programs see it: a line of a list, or everything.

The payload may hold secrets, so a list never has it and `show` only has it when it is asked for.
"""

from __future__ import annotations

import json
from typing import Any

from holdfast.cli.output import Cell, Column, Row, write_block, write_fields, write_styled
from holdfast.cli.wording import ago, first_line, moment, span, visible
from holdfast.failures import Failure, decode_history
from holdfast.job import ENDED, Job, State
from holdfast.ports import MICROSECONDS

STATE_STYLES = {
    State.READY: "cyan",
    State.IN_FLIGHT: "yellow",
    State.SUCCEEDED: "green",
    State.FAILED: "red",
    State.CANCELLED: "dim",
}
JOB_COLUMNS = (
    Column("ID"),
    Column("STATE"),
    Column("QUEUE"),
    Column("TASK"),
    Column("TRIES", right=True),
    Column("AGE", right=True),
    Column("NOTE", fit="cut"),
)
DEAD_COLUMNS = (
    Column("ID"),
    Column("QUEUE"),
    Column("TASK"),
    Column("TRIES", right=True),
    Column("DIED", right=True),
    Column("REASON"),
    Column("ERROR", fit="cut"),
)


def job_row(job: Job, now: int) -> Row:
    """The job as a line of `JOB_COLUMNS`."""
    return (
        job.id,
        Cell(job.state, STATE_STYLES[job.state]),
        job.queue,
        job.task,
        str(job.attempt),
        span(now - job.created_at),
        _note(job, now),
    )


def dead_row(job: Job, now: int) -> Row:
    """The dead letter as a line of `DEAD_COLUMNS`."""
    died = span(now - job.ended_at) if job.ended_at is not None else ""
    return (job.id, job.queue, job.task, str(job.attempt), died, job.reason, _last_error(job) or "")


def _note(job: Job, now: int) -> str:
    error = _last_error(job)
    if job.state is State.READY:
        due = f"due {ago(job.run_at, now)}"
        return f"{job.reason}, {due}: {error}" if error else due
    if job.state is State.IN_FLIGHT:
        running = f"running for {span(now - (job.claimed_at or now))}"
        return f"{running}, asked to stop" if job.cancel_asked else running
    if job.state is State.FAILED and error:
        return f"{job.reason}: {error}"
    return f"ended {ago(job.ended_at or now, now)}"


def _last_error(job: Job) -> str | None:
    history = decode_history(job.failure_history)
    return first_line(f"{history[-1].type}: {history[-1].message}") if history else None


def summary(job: Job) -> dict[str, Any]:
    """The job as a line of `--json`. The keys are a promise: programs read them."""
    return {
        "id": job.id,
        "state": job.state.value,
        "reason": job.reason.value,
        "queue": job.queue,
        "task": job.task,
        "priority": job.priority,
        "attempt": job.attempt,
        "failures": job.failures,
        "crashes": job.crashes,
        "snoozes": job.snoozes,
        "max_retries": job.max_retries,
        "correlation_id": job.correlation_id,
        "created_at": moment(job.created_at),
        "run_at": moment(job.run_at),
        "claimed_at": _moment_or_none(job.claimed_at),
        "ended_at": _moment_or_none(job.ended_at),
        "error": _last_error(job),
    }


def record(job: Job, *, payload: bool) -> dict[str, Any]:
    """Everything about the job, its payload only if asked for."""
    told = summary(job) | {
        "task_version": job.task_version,
        "share": job.share,
        "key": job.key.text if job.key else None,
        "retention": job.retention / MICROSECONDS,
        "session_id": job.session_id,
        "suspect": job.suspect,
        "cancel_asked": job.cancel_asked,
        "progress": _decoded(job.progress),
        "result": _decoded(job.result),
        "failure_history": [
            {
                "at": moment(failure.at),
                "attempt": failure.attempt,
                "type": failure.type,
                "message": failure.message,
                "traceback": failure.traceback,
            }
            for failure in decode_history(job.failure_history)
        ],
    }
    return told | {"payload": _decoded(job.payload)} if payload else told


def write_job(job: Job, now: int, *, payload: bool) -> None:
    """Everything about the job, for people."""
    asked = job.cancel_asked and job.state is State.IN_FLIGHT
    suspect = job.suspect and job.state not in ENDED
    fields: list[tuple[str, Cell | str | None]] = [
        ("id", Cell(job.id, "bold")),
        ("task", f"{job.task} (version {job.task_version})"),
        ("state", Cell(job.state, STATE_STYLES[job.state])),
        ("reason", job.reason),
        ("queue", job.queue),
        ("share", job.share or None),
        ("priority", str(job.priority)),
        ("attempts", _attempts(job)),
        ("key", job.key.text if job.key else None),
        ("correlation id", job.correlation_id),
        ("created", _seen(job.created_at, now)),
        ("due", _seen(job.run_at, now) if job.state is State.READY else None),
        ("claimed", _seen(job.claimed_at, now)),
        ("worker", job.session_id),
        ("ended", _seen(job.ended_at, now)),
        ("cancel", "asked: its worker hears of it with its next heartbeat" if asked else None),
        ("suspect", "it was running in a process that died: it runs alone, isolated" if suspect else None),
        ("progress", _as_json(job.progress)),
        ("result", _as_json(job.result)),
        ("payload", _as_json(job.payload) if payload else f"{len(job.payload)} bytes, shown with --payload"),
    ]
    write_fields([(name, value) for name, value in fields if value is not None])
    for failure in decode_history(job.failure_history):
        _write_failure(failure, now)


def _write_failure(failure: Failure, now: int) -> None:
    write_styled(("", ""))
    write_styled(
        (f"attempt {failure.attempt}: {failure.type}", "bold red"),
        (f"  {_seen(failure.at, now)}", "dim"),
    )
    # The traceback ends with the type and the message, so they are told once.
    write_block(failure.traceback or f"{failure.type}: {failure.message}", indent="  ")


def _attempts(job: Job) -> str:
    told = f"{job.attempt}, failures {job.failures} of at most {job.max_retries + 1}"
    told += f", crashes {job.crashes}" if job.crashes else ""
    return told + (f", snoozes {job.snoozes}" if job.snoozes else "")


def _seen(at: int | None, now: int) -> str | None:
    return None if at is None else f"{moment(at)} ({ago(at, now)})"


def _moment_or_none(at: int | None) -> str | None:
    return None if at is None else moment(at)


def _decoded(data: bytes | None) -> Any:
    """The JSON that the bytes hold, or their text if they hold none (written by hand, torn)."""
    if data is None:
        return None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return data.decode("utf-8", "backslashreplace")


def _as_json(data: bytes | None) -> str | None:
    return None if data is None else visible(json.dumps(_decoded(data), ensure_ascii=False))
