"""Which jobs of a batch are accepted: decided once, as a value. An engine reads what this asks for, and writes.

The memory store decides on its own, one job at a time: it is what the others are compared with.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from holdfast.job import JobId, NewJob
from holdfast.store import DepthLimit, Inserted, InsertStatus, held_by

Place = tuple[str, str]
"""Where an idempotency key is unique: its queue and its text."""

Holder = tuple[JobId, str]
"""The job that holds a key, and the hash of the payload that it stands for."""


class Intake(msgspec.Struct, frozen=True):
    """One answer per job, and the jobs to write, each with the key that it brings."""

    answers: list[Inserted]
    jobs: list[NewJob]


def keys_of(jobs: Sequence[NewJob]) -> list[Place]:
    """Whose holders the decision needs, sorted: whoever locks them does so in one order."""
    return sorted({(job.queue, job.key.text) for job in jobs if job.key})


def counts_needed(jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit]) -> dict[str, int]:
    """The queues whose depth the decision needs, and how far it is enough to count each."""
    queues = {job.queue for job in jobs} & limits.keys()
    return {queue: max(limits[queue].max_depth or 0, limits[queue].warn_depth or 0) + 1 for queue in sorted(queues)}


def decide(
    jobs: Sequence[NewJob],
    *,
    known: Collection[JobId],
    holders: Mapping[Place, Holder],
    depths: Mapping[str, int],
    limits: Mapping[str, DepthLimit],
    all_or_none: bool = False,
) -> Intake:
    """What becomes of each job, as `Store.insert` says.

    `known` are the ids that are there already, `holders` those of `keys_of` that are held, `depths` what was counted
    for `counts_needed`. `all_or_none`: if one would be full, all are.
    """
    there = set(known)
    held = dict(holders)
    depth = dict(depths)
    answers: list[Inserted] = []
    accepted: list[NewJob] = []
    for job in jobs:
        if job.id in there:
            answers.append(Inserted(job.id, InsertStatus.EXISTING))
            continue
        key = job.key
        if key and (holder := held.get((job.queue, key.text))):
            answers.append(held_by(*holder, key))
            continue
        deep = False
        if job.queue in depth:
            limit = limits[job.queue]
            if limit.max_depth is not None and depth[job.queue] >= limit.max_depth:
                answers.append(Inserted(job.id, InsertStatus.FULL))
                continue
            depth[job.queue] += 1
            deep = limit.warn_depth is not None and depth[job.queue] >= limit.warn_depth
        if key:
            held[job.queue, key.text] = (job.id, key.payload_hash)
        there.add(job.id)
        accepted.append(job)
        answers.append(Inserted(job.id, InsertStatus.CREATED, deep))
    if all_or_none and any(answer.status is InsertStatus.FULL for answer in answers):
        return Intake([Inserted(job.id, InsertStatus.FULL) for job in jobs], [])
    return Intake(answers, accepted)
