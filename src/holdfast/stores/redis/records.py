"""Jobs and moves as the scripts in `lua/` read and write them: see `lua/common.lua` for the format.

A record is text that an operator can read: a line of tab-separated fields, a line of JSON, the payload.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec.structs import astuple, force_setattr

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


def head_of(new: NewJob) -> bytes:
    """The record without the times that the server adds, and without the payload."""
    key = new.key
    description = _Description(
        new.task,
        new.task_version,
        new.max_retries,
        new.correlation_id,
        (key.payload_hash, key.window) if key else None,
    )
    fields = f"{new.retention}\t{new.priority}\t{new.share}\t{key.text if key else ''}\n"
    return b"%b%b\n" % (fields.encode(), _encode_json(description))


def body_of(new: NewJob) -> bytes:
    """The record without the times that the server adds."""
    return head_of(new) + new.payload


def insert_arguments(jobs: Sequence[NewJob], lanes: dict[str, int]) -> list[Any]:
    """The jobs for `insert.lua`, in groups that differ in id and payload only. `lanes` gets the number of each lane."""
    arguments: list[Any] = []
    rest: tuple[Any, ...] = ()
    task, place = "", 0
    for job in jobs:
        job_id, its_task, payload, *_ = fields = astuple(job)
        if fields[3:] != rest or its_task != task:
            if place:
                arguments[place] = (len(arguments) - place) // 2
            task, rest = its_task, fields[3:]
            lane = lane_of(job)
            arguments += (when(job), lanes.setdefault(lane, len(lanes) + 1), lane, key_of(job), head_of(job), 0)
            place = len(arguments) - 1
        arguments += (job_id, payload)
    if place:
        arguments[place] = (len(arguments) - place) // 2
    return arguments


def for_outbox(new: NewJob) -> bytes:
    """A job on its way to another queue."""
    return _encode_new(new)


def from_outbox(packed: bytes) -> NewJob:
    """The job again."""
    return _decode_new(packed)


def move_arguments(moves: Sequence[Move]) -> list[Any]:
    """The moves for `apply.lua`, in groups that differ in their job only. All are of one queue."""
    arguments: list[Any] = []
    rest: tuple[Any, ...] = ()
    place = 0
    for move in moves:
        fields = astuple(move)[1:]
        if fields != rest or move.then:
            if place:
                arguments[place] = len(arguments) - place - 1
                arguments.append(0)
            rest = fields
            arguments += (_header(move), _wrote(move), 1)
            place = len(arguments) - 1
        arguments.append(move.job_id)
        if move.then:
            arguments.append(len(move.then))
            for new in move.then:
                arguments += _following(new, move.queue)
            rest, place = (), 0
    if place:
        arguments[place] = len(arguments) - place - 1
        arguments.append(0)
    return arguments


def _header(move: Move) -> str:
    sources = _SOURCES.get(move.sources)
    if sources is None:
        sources = _SOURCES[move.sources] = ",".join(sorted(move.sources))
    return (
        f"{move.version}\t{move.session_id or ''}\t{'' if move.session_open is None else int(move.session_open)}\t"
        f"{int(move.despite_cancel)}\t{sources}\t{move.to.value}\t{move.reason.value}\t"
        f"{'' if move.delay is None else move.delay}\t{int(move.raise_version)}\t{move.key_change.value}"
    )


def _wrote(move: Move) -> bytes:
    return _encode_written(
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


def _following(new: NewJob, queue: str) -> tuple[Any, ...]:
    if new.queue == queue:
        return new.id, when(new), key_of(new), body_of(new), b""
    return new.id, "", "", b"", for_outbox(new)


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
        (its_state, its_reason, its_version, its_session, cancel, its_ended_at, its_claimed_at, its_run_at) = (
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


def readable(queue: str, flat: Sequence[Any]) -> tuple[list[Job], list[bytes]]:
    """The jobs of a reply that lists id, record, row and progress of each, and the ids of those that cannot be read."""
    jobs, unreadable = [], []
    for at in range(0, len(flat), 4):
        try:
            jobs.append(job_from(queue, *flat[at : at + 4]))
        except _UNREADABLE:
            unreadable.append(flat[at])
    return jobs, unreadable


def claimed(queue: str, flat: Sequence[Any], session_id: str, now: int) -> tuple[list[Job], list[bytes]]:
    """The jobs of a claim, which lists id, record and row of each, and the ids of those that cannot be read.

    A job without a row is claimed for the first time. Such jobs differ in few fields from the one before, as a rule,
    and are made as copies of it.
    """
    jobs: list[Job] = []
    unreadable: list[bytes] = []
    model: Job | None = None
    model_fields = model_description = b""
    items = iter(flat)
    for job_id, record, row in zip(items, items, items, strict=True):
        try:
            if row is not None:
                jobs.append(job_from(queue, job_id, record, row))
                continue
            fields, description, payload = record.split(b"\n", 2)
            due, _, fields = fields.split(b"\t", 2)
            if model is None or fields != model_fields or description != model_description:
                model = _first_claim(job_from(queue, job_id, record, None), session_id, now)
                model_fields, model_description = fields, description
            job: Job = model.__copy__()  # type: ignore[attr-defined]  # copy(), but without its look-ups
            force_setattr(job, "id", job_id.decode())
            force_setattr(job, "payload", payload)
            at = int(due)
            force_setattr(job, "run_at", at)
            force_setattr(job, "created_at", at)
            jobs.append(job)
        except _UNREADABLE:
            unreadable.append(job_id)
    return jobs, unreadable


def _first_claim(job: Job, session_id: str, now: int) -> Job:
    return msgspec.structs.replace(
        job, state=State.IN_FLIGHT, reason=Reason.CLAIMED, version=1, session_id=session_id, claimed_at=now
    )


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
