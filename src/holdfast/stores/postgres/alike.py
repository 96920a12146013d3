"""What nearly all jobs have in common, said once: the values of the functions in `migrations/0002_alike.sql` and
`0005_more_alike.sql`.

Arrays travel as texts, in the server's own notation: every driver takes a text, and joining one costs less than any
driver's array. Payloads and results travel in one piece, with the place of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter, itemgetter
from typing import Any

import msgspec
from msgspec.structs import force_setattr, replace

from holdfast.job import Job, Key, NewJob, Reason, SessionId, State
from holdfast.lifecycle import KeyChange, Move

_SAME = (
    "task",
    "task_version",
    "queue",
    "share",
    "priority",
    "max_retries",
    "retention",
    "correlation_id",
    "delay",
    "run_at",
)
_same_of = attrgetter(*_SAME)
_FEW = 4
"""With fewer jobs, a JSON object for each costs no more than the arrays do."""


class _More(msgspec.Struct, gc=False):
    """What only few jobs have when they are claimed: those that were claimed before, or have a key."""

    version: int
    attempt: int
    failures: int
    crashes: int
    snoozes: int
    suspect: bool
    failure_history: bytes
    key: Key | None


Options = tuple[str, str, int, int, str | None]
_OPTIONS = ("task", "task_version", "max_retries", "retention", "correlation_id")


class _Other(_More, gc=False):
    """The same of a job that is not like those before it."""

    task: str
    task_version: str
    max_retries: int
    retention: int
    correlation_id: str | None


_MOST_OTHERS = 8
"""If more than one in so many has something of its own to tell, all say what they are in columns, not in JSON."""
_order_of = itemgetter(3, 0)


SINGLE = "uuid bytea text text text text smallint int bigint text bigint bigint"
"""The types of the first values of `_insert_single`, those of `single`."""


def single(job: NewJob) -> tuple[bytes | None, ...]:
    """The first values of `_insert_single`, as text in bytes."""
    return (job.id.encode(), job.payload, *_as_bytes(_same_of(job)))


@lru_cache(maxsize=256)
def _as_bytes(values: tuple[str | int | None, ...]) -> tuple[bytes | None, ...]:
    return tuple(None if value is None else str(value).encode() for value in values)


def alike(jobs: Sequence[NewJob]) -> tuple[Any, ...] | None:
    """The values of `_insert_alike`, but for the last: ids, places, payloads, the rest. None if the jobs are few, or
    differ in more than their ids and payloads.
    """
    if len(jobs) < _FEW:
        return None
    same = _same_of(jobs[0])
    if [*map(_same_of, jobs)].count(same) < len(jobs):
        return None
    starts, sizes, payloads = _in_one_piece([job.payload for job in jobs])
    rest = msgspec.json.encode(dict(zip(_SAME, same, strict=True))).decode()
    return _array(job.id for job in jobs), starts, sizes, payloads, rest


_PLAIN = (State.SUCCEEDED, 1, 0, 0, 0, False, b"", (), True, True, KeyChange.KEEP)
_told_by = attrgetter(
    "to",
    "attempt",
    "failures",
    "crashes",
    "snoozes",
    "suspect",
    "failure_history",
    "then",
    "session_open",
    "despite_cancel",
    "key_change",
    "session_id",
)
_job_of = attrgetter("job_id")
_version_and_result = attrgetter("version", "result")


def is_plain_success(move: Move) -> bool:
    """Whether the move is the success of a first attempt: all that is written follows from that, but its result."""
    told: tuple[object, ...] = _told_by(move)
    return told[:-1] == _PLAIN


def session_of_successes(moves: Sequence[Move]) -> SessionId | None:
    """The session of all these moves if each is a plain success, and of another job; None if not. Most batches are."""
    told = [*map(_told_by, moves)]
    if not told or told[0][:-1] != _PLAIN or told.count(told[0]) < len(told):
        return None
    if len({*map(_job_of, moves)}) < len(moves):
        return None
    session_id: SessionId | None = moves[0].session_id
    return session_id


def by_session(moves: Sequence[Move]) -> dict[SessionId, list[Move]]:
    """The moves of each session."""
    groups: dict[SessionId, list[Move]] = {}
    for move in moves:
        groups.setdefault(move.session_id or "", []).append(move)
    return groups


def alike_successes(moves: Sequence[Move]) -> tuple[Any, ...] | None:
    """The values of `_succeed_alike`, but for the session: ids, in order, so that two batches cannot wait for each
    other, and the version and the result of all. None if these differ.
    """
    same = _version_and_result(moves[0])
    if [*map(_version_and_result, moves)].count(same) < len(moves):
        return None
    return _array(sorted(map(_job_of, moves))), *same


def successes(moves: Sequence[Move]) -> tuple[Any, ...]:
    """The values of `_succeed`, but for the session: ids, versions, and the results with the place of each."""
    ids = _array(map(_job_of, moves))
    versions = _array(str(move.version) for move in moves)
    return ids, versions, None, ids, *_in_one_piece([move.result for move in moves])


def claimed_jobs(
    rows: Sequence[tuple[Any, ...]], lane: tuple[str, int, str], session_id: SessionId, now: int
) -> tuple[list[Job], Options | None]:
    """The jobs that `_claim_lane` answered with: queue, priority and share of the lane, claimed by the session now. And
    what they have in common, if that is worth telling the next claim (`alike_jobs`).

    Copies of one job for all that have the same task and options: to set every field of each takes three times as long.
    """
    patterns: dict[Options, Job] = {}
    jobs = []
    others = 0
    for row in rows:
        options: Options = row[5:10]
        pattern = patterns.get(options)
        if pattern is None:
            pattern = patterns[options] = _pattern(options, lane, session_id, now)
        job = replace(pattern, id=row[0], payload=row[1], created_at=row[2], run_at=row[3])
        if row[4] is not None:
            _add(job, msgspec.json.decode(row[4], type=_More))
            others += 1
        jobs.append(job)
    worth_telling = len(patterns) == 1 and others <= len(jobs) // _MOST_OTHERS
    return jobs, next(iter(patterns)) if worth_telling else None


def alike_jobs(
    rows: list[tuple[Any, ...]], same: Options, lane: tuple[str, int, str], session_id: SessionId, now: int
) -> tuple[list[Job], Options | None]:
    """The same for the rows of `_claim_alike`, whose jobs have these options if they do not say otherwise."""
    rows.sort(key=_order_of)
    pattern = _pattern(same, lane, session_id, now)
    jobs = [replace(pattern, id=row[0], payload=row[1], created_at=row[2], run_at=row[3]) for row in rows]
    others = 0
    for job, row in zip(jobs, rows, strict=True):
        if row[4] is not None:
            other = msgspec.json.decode(row[4], type=_Other)
            _add(job, other)
            for name in _OPTIONS:
                force_setattr(job, name, getattr(other, name))
            others += 1
    return jobs, same if others <= len(jobs) // _MOST_OTHERS else None


def _pattern(options: Options, lane: tuple[str, int, str], session_id: SessionId, now: int) -> Job:
    task, task_version, max_retries, retention, correlation_id = options
    queue, priority, share = lane
    return Job(
        id="",
        task=task,
        payload=b"",
        task_version=task_version,
        queue=queue,
        share=share,
        priority=priority,
        state=State.IN_FLIGHT,
        reason=Reason.CLAIMED,
        run_at=0,
        created_at=0,
        version=1,
        session_id=session_id,
        attempt=0,
        failures=0,
        crashes=0,
        snoozes=0,
        suspect=False,
        cancel_asked=False,
        max_retries=max_retries,
        retention=retention,
        key=None,
        correlation_id=correlation_id,
        claimed_at=now,
        ended_at=None,
        failure_history=b"",
        result=None,
        progress=None,
    )


def _add(job: Job, more: _More) -> None:
    force_setattr(job, "version", more.version + 1)
    for name in ("attempt", "failures", "crashes", "snoozes", "suspect", "failure_history", "key"):
        force_setattr(job, name, getattr(more, name))


def _in_one_piece(pieces: Sequence[bytes | None]) -> tuple[str, str, bytes]:
    """Where each begins, counted from 1, how long each is, and all of them. One that is None has no length."""
    sizes = [0 if piece is None else len(piece) for piece in pieces]
    starts = accumulate(sizes[:-1], initial=1)
    shown = ("NULL" if piece is None else str(len(piece)) for piece in pieces)
    return _array(map(str, starts)), _array(shown), b"".join(filter(None, pieces))


def _array(elements: Iterable[str]) -> str:
    """An array of what needs no quotes: ids, numbers."""
    return "{" + ",".join(elements) + "}"
