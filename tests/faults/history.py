"""What callers of a store were told, and what must hold of it.

`Recorded` stands between a caller and a store, and notes every answer. The checks compare these notes with what is in
the store at the end. They are about one history without unknown outcomes: every call was answered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from holdfast.job import ENDED, Job, JobId, NewJob, State
from holdfast.lifecycle import Applied, Move
from holdfast.store import CancelAnswer, Claimed, ClaimRequest, Inserted, InsertStatus, QueueCounts, Store

Claim = tuple[JobId, int]
"""A job, and its version."""


class History(msgspec.Struct):
    """The answers, each kind in the order in which they came."""

    created: list[JobId] = msgspec.field(default_factory=list)
    claimed: list[Claim] = msgspec.field(default_factory=list)
    settled: list[Claim] = msgspec.field(default_factory=list)
    """Moves out of `in_flight` that were applied."""
    ended: list[JobId] = msgspec.field(default_factory=list)
    replayed: list[Claim] = msgspec.field(default_factory=list)
    """With the version that the job has since."""
    errors: list[str] = msgspec.field(default_factory=list)
    seen: Counter[str] = msgspec.field(default_factory=Counter)
    """How often each kind of answer was given."""

    def add(self, other: History) -> None:
        for name in ("created", "claimed", "settled", "ended", "replayed", "errors"):
            getattr(self, name).extend(getattr(other, name))
        self.seen.update(other.seen)


class Recorded:
    """A store whose answers are noted. What it does not note it hands on."""

    def __init__(self, store: Store, history: History) -> None:
        self._store = store
        self.history = history

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def insert(self, jobs: Sequence[NewJob], **options: Any) -> list[Inserted]:
        answers = await self._store.insert(jobs, **options)
        self._note_inserted(answers)
        return answers

    def insert_blocking(self, jobs: Sequence[NewJob], **options: Any) -> list[Inserted]:
        answers = self._store.insert_blocking(jobs, **options)
        self._note_inserted(answers)
        return answers

    def _note_inserted(self, answers: Sequence[Inserted]) -> None:
        for answer in answers:
            self.history.seen[f"insert {answer.status}"] += 1
            if answer.status is InsertStatus.CREATED:
                self.history.created.append(answer.job_id)

    async def claim(self, request: ClaimRequest) -> Claimed:
        claimed = await self._store.claim(request)
        self.history.claimed += [(job.id, job.version) for job in claimed.jobs]
        return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        answers = await self._store.apply(moves)
        for move, answer in zip(moves, answers, strict=True):
            self.history.seen[f"{move.reason} {answer}"] += 1
            if answer is Applied.APPLIED:
                self._note_applied(move)
        return answers

    def _note_applied(self, move: Move) -> None:
        history = self.history
        if State.IN_FLIGHT in move.sources:
            history.settled.append((move.job_id, move.version))
        if move.to in ENDED:
            history.ended.append(move.job_id)
        if move.raise_version:
            history.replayed.append((move.job_id, move.version + 1))
        # A follow-up whose key is held is left out; here they have none.
        history.created += [job.id for job in move.then]

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        answers = await self._store.request_cancel(job_ids)
        for job_id, answer in zip(job_ids, answers, strict=True):
            self.history.seen[f"cancel {answer}"] += 1
            if answer is CancelAnswer.CANCELLED:
                self.history.ended.append(job_id)
        return answers


# What must hold at the end, when everything has ended.


def check_conservation(history: History, jobs: Iterable[Job]) -> None:
    """Every job that was accepted is there, once, and no other; and it has ended once more than it was brought back."""
    stored = Counter(job.id for job in jobs)
    assert Counter(history.created) == stored
    ends, returns = Counter(history.ended), Counter(job_id for job_id, _ in history.replayed)
    assert {job_id: ends[job_id] - returns[job_id] for job_id in stored} == dict.fromkeys(stored, 1)
    assert [job.id for job in jobs if job.state not in ENDED] == []


def check_versions(history: History, jobs: Iterable[Job]) -> None:
    """Versions rise by one with every claim and every replay, each was handed out once, and each claim ended once."""
    rises: dict[JobId, list[int]] = defaultdict(list)
    for job_id, version in (*history.claimed, *history.replayed):
        rises[job_id].append(version)
    for job in jobs:
        handed_out = sorted(rises[job.id])
        assert handed_out == list(range(1, job.version + 1)), f"versions {handed_out} were handed out of {job}"
    assert Counter(history.settled) == Counter(history.claimed)


def check_keys(jobs: Iterable[Job]) -> None:
    """A key belongs to one job that lives or has succeeded, at most."""
    holders = Counter(
        (job.queue, job.key.text) for job in jobs if job.key and job.state not in (State.FAILED, State.CANCELLED)
    )
    assert [key for key, count in holders.items() if count > 1] == []


def check_counts(counts: Iterable[QueueCounts], jobs: Iterable[Job]) -> None:
    """What is counted for people is what is there."""
    counted = {
        (count.queue, state): number
        for count in counts
        for state in State
        if (number := getattr(count, state) + (count.scheduled if state is State.READY else 0))
    }
    assert counted == Counter((job.queue, state) for job in jobs for state in [job.state])
