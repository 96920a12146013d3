"""Jobs and moves as the scripts in `lua/` read and write them: see `lua/common.lua` for the format.

A record is text that an operator can read: a line of tab-separated fields, a line of JSON, the payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

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
        outbox = b"" if new.queue == move.queue else for_outbox(new)
        arguments += [new.id, when(new), key_of(new), body_of(new), outbox]
    return arguments


def job_from(queue: str, job_id: bytes, record: bytes, row: bytes | None, progress: bytes | None = None) -> Job:
    """The job. Without a row it is as it was enqueued."""
    fields, description, payload = record.split(b"\n", 2)
    run_at, created_at, retention, priority, share, key = fields.decode().split("\t", 5)
    about = _decode_json(description)
    state, reason, version = State.READY, Reason.ENQUEUED, 0
    session = claimed_at = ended_at = ""
    cancel_asked = False
    written = _NOTHING_WRITTEN
    if row is not None:
        head, _, wrote = row.partition(b"\n")
        (its_state, its_reason, its_version, its_session, cancel, its_run_at, its_claimed_at, its_ended_at) = (
            head.split(b"\t", 8)[:8]
        )
        state, reason, version = _STATES[its_state], _REASONS[its_reason], int(its_version)
        session, run_at = its_session.decode(), its_run_at.decode()
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
        run_at=int(run_at),
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


def jobs_from(queue: str, flat: Sequence[Any]) -> list[Job]:
    """The jobs of a reply that lists id, record, row and progress of each."""
    return [
        job_from(queue, *flat[at : at + 4])
        for at in range(0, len(flat), 4)
    ]  # fmt: skip
