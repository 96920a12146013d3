"""Jobs and sessions as rows: the columns, in one order for every table of every SQL engine, and the way back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from holdfast.job import Job, Key, NewJob, Reason, State, due_at
from holdfast.store import SessionPage, SessionView

IDENTITY = (
    "id, task, payload, task_version, queue, share, priority, max_retries, retention, key, key_hash, key_window, "
    "correlation_id, created_at"
)
"""What never changes after the insert."""

LIVE_COLUMNS = (
    f"{IDENTITY}, state, reason, run_at, version, session_id, attempt, failures, crashes, snoozes, suspect, "
    "cancel_asked, claimed_at, failure_history, progress"
)
ENDED_COLUMNS = f"{LIVE_COLUMNS}, ended_at, result"
LIVE_AS_ENDED = f"{LIVE_COLUMNS}, NULL, NULL"
SESSION_COLUMNS = "id, beat, open, opened_at, beat_at, host, pid, queues"

_STATES = {state.value: state for state in State}
_REASONS = {reason.value: reason for reason in Reason}


def state_of(text: str) -> State:
    """The state; an unknown one, written by a newer version or by hand, is an error with a clear text."""
    try:
        return _STATES[text]
    except KeyError:
        raise ValueError(f"unknown job state {text!r:.40} in the database") from None


def reason_of(text: str) -> Reason:
    """The reason; one that this version does not know reads as the plain `enqueued`."""
    return _REASONS.get(text, Reason.ENQUEUED)


def job_from_row(row: Sequence[Any]) -> Job:
    """A job from `ENDED_COLUMNS` or `LIVE_AS_ENDED`."""
    (
        job_id,
        task,
        payload,
        task_version,
        queue,
        share,
        priority,
        max_retries,
        retention,
        key,
        key_hash,
        key_window,
        correlation_id,
        created_at,
        state,
        reason,
        run_at,
        version,
        session_id,
        attempt,
        failures,
        crashes,
        snoozes,
        suspect,
        cancel_asked,
        claimed_at,
        failure_history,
        progress,
        ended_at,
        result,
    ) = row
    return Job(
        id=job_id,
        task=task,
        payload=payload,
        task_version=task_version,
        queue=queue,
        share=share,
        priority=priority,
        state=state_of(state),
        reason=reason_of(reason),
        run_at=run_at,
        created_at=created_at,
        version=version,
        session_id=session_id,
        attempt=attempt,
        failures=failures,
        crashes=crashes,
        snoozes=snoozes,
        suspect=bool(suspect),
        cancel_asked=bool(cancel_asked),
        max_retries=max_retries,
        retention=retention,
        key=None if key is None else Key(key, key_hash, key_window),
        correlation_id=correlation_id,
        claimed_at=claimed_at,
        ended_at=ended_at,
        failure_history=failure_history,
        result=result,
        progress=progress,
    )


def jobs_from_rows(rows: Iterable[Sequence[Any]]) -> list[Job]:
    """The same of many rows. Most have all in common with the one before but id, payload and times: then the job is a
    copy with fields of its own, which takes a third of the time.
    """
    jobs: list[Job] = []
    before: tuple[Any, ...] = ()
    for row in rows:
        common = (row[1], row[3:13], row[14:16], row[17:])
        if common == before:
            jobs.append(replace(jobs[-1], id=row[0], payload=row[2], created_at=row[13], run_at=row[16]))
        else:
            jobs.append(job_from_row(row))
            before = common
    return jobs


def new_row(new: NewJob, now: int) -> tuple[Any, ...]:
    """What an insert at that time writes: the values of `IDENTITY`, then when the job is due."""
    key = new.key
    return (
        new.id,
        new.task,
        new.payload,
        new.task_version,
        new.queue,
        new.share,
        new.priority,
        new.max_retries,
        new.retention,
        key and key.text,
        key and key.payload_hash,
        key and key.window,
        new.correlation_id,
        now,
        due_at(new, now),
    )


def session_page(rows: Sequence[Sequence[Any]], limit: int) -> SessionPage:
    """A page from rows of `SESSION_COLUMNS`, by id, of which one more than `limit` was asked for."""
    views = tuple(map(_session_from_row, rows[:limit]))
    return SessionPage(views, views[-1].id if len(rows) > limit else None)


def _session_from_row(row: Sequence[Any]) -> SessionView:
    session_id, beat, is_open, opened_at, beat_at, host, pid, queues = row
    return SessionView(
        id=session_id,
        beat=beat,
        open=bool(is_open),
        opened_at=opened_at,
        beat_at=beat_at,
        host=host,
        pid=pid,
        queues=tuple(filter(None, queues.split(","))),
    )
