"""Jobs and moves as the scripts in `lua/` read and write them: see `lua/common.lua` for the format.

A record is text that an operator can read: a line of tab-separated fields, a line of JSON, the payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from holdfast.failures import Failure, append_failures
from holdfast.job import Job, Key, NewJob, Reason, State
from holdfast.lifecycle import Move


class _Description(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What only the client reads. `key`: hash and window; its text is among the fields."""

    task: str
    version: str = "1"
    max_retries: int = 3
    correlation_id: str | None = None
    key: tuple[str, int] | None = None


class _Written(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a move writes, opaque to the scripts."""

    attempt: int = 0
    failures: int = 0
    crashes: int = 0
    snoozes: int = 0
    suspect: bool = False
    failure_history: bytes = b""
    result: bytes | None = None


_NOTHING_WRITTEN = _Written()
_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder(_Description).decode
_encode_written = msgspec.msgpack.Encoder().encode
_decode_written = msgspec.msgpack.Decoder(_Written).decode
_encode_new = msgspec.msgpack.Encoder().encode
_decode_new = msgspec.msgpack.Decoder(NewJob).decode
_STATES = {state.value.encode(): state for state in State}
_REASONS = {reason.value.encode(): reason for reason in Reason}
_SOURCES: dict[frozenset[State], str] = {}


def lane_of(new: NewJob) -> str:
    """The lane of a job, as the scripts call it."""
    return f"{new.priority}\t{new.share}"


def when(new: NewJob) -> str:
    """When a job is due."""
    return f"+{new.delay}" if new.run_at is None else f"={new.run_at}"


def key_of(new: NewJob) -> str:
    """A job's key with its window and hash, or ''."""
    return f"{new.key.window}\t{new.key.payload_hash}\t{new.key.text}" if new.key else ""


def body_of(new: NewJob) -> bytes:
    """The record without the times that the server adds."""
    key = new.key
    description = _Description(
        new.task,
        new.task_version,
        new.max_retries,
        new.correlation_id,
        (key.payload_hash, key.window) if key else None,
    )
    fields = f"{new.retention}\t{new.priority}\t{new.share}\t{key.text if key else ''}\n"
    return b"%b%b\n%b" % (fields.encode(), _encode_json(description), new.payload)


def for_outbox(new: NewJob) -> bytes:
    """A job on its way to another queue."""
    return _encode_new(new)


def from_outbox(packed: bytes) -> NewJob:
    """The job again."""
    return _decode_new(packed)


def move_arguments(move: Move) -> list[Any]:
    """One move for `apply.lua`."""
    sources = _SOURCES.get(move.sources)
    if sources is None:
        sources = _SOURCES[move.sources] = ",".join(sorted(move.sources))
    header = (
        f"{move.version}\t{move.session_id or ''}\t{'' if move.session_open is None else int(move.session_open)}\t"
        f"{int(move.despite_cancel)}\t{sources}\t{move.to.value}\t{move.reason.value}\t"
        f"{'' if move.delay is None else move.delay}\t{int(move.raise_version)}\t{move.key_change.value}"
    )
    written = _encode_written(
        _Written(
            move.attempt,
            move.failures,
            move.crashes,
            move.snoozes,
            move.suspect,
            move.failure_history,
            move.result,
        )
    )
    arguments: list[Any] = [move.job_id, header, written, len(move.then)]
    for new in move.then:
        if new.queue == move.queue:
            arguments += [new.id, when(new), key_of(new), body_of(new), b""]
        else:
            arguments += [new.id, "", "", b"", for_outbox(new)]
    return arguments


def job_from(queue: str, job_id: bytes, record: bytes, row: bytes | None, progress: bytes | None = None) -> Job:
    """The job. Without a row it is as it was enqueued."""
    fields, description, payload = record.split(b"\n", 2)
    run_at, created_at, retention, priority, share, key = fields.decode().split("\t", 5)
    about = _decode_json(description)
    due = int(run_at)
    state, reason, version = State.READY, Reason.ENQUEUED, 0
    session = claimed_at = ended_at = ""
    cancel_asked = False
    written = _NOTHING_WRITTEN
    if row is not None:
        head, _, wrote = row.partition(b"\n")
        (its_state, its_reason, its_version, its_session, cancel, its_run_at, its_claimed_at, its_ended_at) = (
            head.split(b"\t", 8)[:8]
        )
        state, reason, version = _STATES[its_state], _REASONS.get(its_reason, Reason.ENQUEUED), int(its_version)
        session, due = its_session.decode(), int(its_run_at)
        claimed_at, ended_at = its_claimed_at.decode(), its_ended_at.decode()
        cancel_asked = cancel == b"1"
        if wrote:
            written = _decode_written(wrote)
    return Job(
        id=job_id.decode(),
        task=about.task,
        payload=payload,
        task_version=about.version,
        queue=queue,
        share=share,
        priority=int(priority),
        state=state,
        reason=reason,
        run_at=due,
        created_at=int(created_at),
        version=version,
        session_id=session or None,
        attempt=written.attempt,
        failures=written.failures,
        crashes=written.crashes,
        snoozes=written.snoozes,
        suspect=written.suspect,
        cancel_asked=cancel_asked,
        max_retries=about.max_retries,
        retention=int(retention),
        key=Key(key, *about.key) if about.key else None,
        correlation_id=about.correlation_id,
        claimed_at=int(claimed_at) if claimed_at else None,
        ended_at=int(ended_at) if ended_at else None,
        failure_history=written.failure_history,
        result=written.result,
        progress=progress,
    )


_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, msgspec.MsgspecError)
"""What `job_from` raises for what we did not write."""


def readable(queue: str, flat: Sequence[Any], width: int = 4) -> tuple[list[Job], list[bytes]]:
    """The jobs of a reply that lists id, record, row and perhaps progress of each, and the ids of those that cannot be
    read.
    """
    jobs, unreadable = [], []
    for at in range(0, len(flat), width):
        try:
            jobs.append(job_from(queue, *flat[at : at + width]))
        except _UNREADABLE:
            unreadable.append(flat[at])
    return jobs, unreadable


def jobs_to_show(queue: str, flat: Sequence[Any], jobs_key: bytes) -> list[Job]:
    """The same for people: one that cannot be read looks as the dead letter that it will be, or is."""
    jobs = []
    for at in range(0, len(flat), 4):
        try:
            jobs.append(job_from(queue, *flat[at : at + 4]))
        except _UNREADABLE as error:
            jobs.append(_stand_in(queue, flat[at], flat[at + 1], flat[at + 2], type(error).__name__, jobs_key))
    return jobs


def _stand_in(queue: str, job_id: bytes, record: bytes | None, row: bytes | None, why: str, jobs_key: bytes) -> Job:
    fields = (row or b"").split(b"\t", 3)
    version = int(fields[2]) if len(fields) > 2 and fields[2].isdigit() else 0
    shown = job_id.decode(errors="backslashreplace")
    message = (
        f"what Redis has of this job cannot be read ({why}), so it will not run: somebody else wrote it, or a newer "
        f"version. See HGET {jobs_key.decode()} {shown}, and the same with states for jobs. Repaired, replay it"
    )
    return Job(
        id=shown,
        task="unreadable",
        payload=record or b"",
        task_version="",
        queue=queue,
        share="",
        priority=0,
        state=State.FAILED,
        reason=Reason.PERMANENT,
        run_at=0,
        created_at=0,
        version=version,
        session_id=None,
        attempt=0,
        failures=0,
        crashes=0,
        snoozes=0,
        suspect=False,
        cancel_asked=False,
        max_retries=0,
        retention=0,
        key=None,
        correlation_id=None,
        claimed_at=None,
        ended_at=None,
        failure_history=append_failures(b"", [Failure(at=0, attempt=0, type="UnreadableJob", message=message)]),
        result=None,
        progress=None,
    )
