"""What to ask a server for the verbs of the port that only read. A job is looked for in every queue: an id does not say
where it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from holdfast.job import Job, JobId, is_job_id
from holdfast.store import JobQuery, Page, QueueCounts
from holdfast.stores.redis.dispatch import Batch, Call, Verb, run_script
from holdfast.stores.redis.records import jobs_to_show
from holdfast.stores.redis.verbs import Verbs

_LOOKED_AT = 250
_MOST_ROUNDS = 40
"""Looks for one page, after which it stays short: a rare job among a million others is found page by page."""


def get(verbs: Verbs, job_id: JobId) -> Verb[Job | None]:
    """See `Store.get`."""
    if not is_job_id(job_id):
        return None
    queues = yield from verbs.queues()
    replies = yield Batch([verbs.call("read", queue, [job_id]) for queue in queues], writes=False)
    return next(iter(_shown(verbs, queues, replies)), None)


def find(verbs: Verbs, query: JobQuery) -> Verb[Page]:
    """See `Store.find`. Every queue is looked through as far down as the one that was looked through least far."""
    queues = [query.queue] if query.queue else (yield from verbs.queues())
    found: list[Job] = []
    below = query.cursor or ""
    for _ in range(_MOST_ROUNDS):
        jobs, floor = yield from _look(verbs, queues, query, below)
        found += jobs
        if len(found) > query.limit:
            return Page(tuple(found[: query.limit]), found[query.limit - 1].id)
        if not floor:
            return Page(tuple(found), None)
        below = floor
    return Page(tuple(found), below)


def _look(verbs: Verbs, queues: Sequence[str], query: JobQuery, below: str) -> Verb[tuple[list[Job], str]]:
    """One look at each queue: the jobs that match, newest first, and the id above which they are complete ('': all)."""
    states = ",".join(query.states)
    args = [below, min(query.limit + 1, _LOOKED_AT), _LOOKED_AT, states]
    replies = yield Batch([verbs.call("find", queue, args) for queue in queues], writes=False)
    floor = max((reply[0].decode() for reply in replies), default="")
    jobs = _shown(verbs, queues, [reply[1:] for reply in replies])
    matching = [
        job
        for job in jobs
        if job.id >= floor
        and (not query.states or job.state in query.states)
        and query.task in (None, job.task)
        and query.correlation_id in (None, job.correlation_id)
    ]
    return sorted(matching, key=lambda job: job.id, reverse=True), floor


def _shown(verbs: Verbs, queues: Sequence[str], replies: Sequence[Any]) -> list[Job]:
    return [
        job
        for queue, flat in zip(queues, replies, strict=True)
        for job in jobs_to_show(queue, flat, verbs.layout.key(queue, "jobs"))
    ]


def counts(verbs: Verbs) -> Verb[list[QueueCounts]]:
    """See `Store.counts`."""
    queues = yield from verbs.queues()
    replies = yield Batch([verbs.call("counts", queue, []) for queue in queues], writes=False)
    return [
        QueueCounts(
            queue=queue,
            ready=tally[0],
            scheduled=tally[1],
            in_flight=tally[2],
            succeeded=tally[3],
            failed=tally[4],
            cancelled=tally[5],
            paused=bool(tally[6]),
        )
        for queue, tally in zip(queues, replies, strict=True)
        if any(tally)
    ]


def checkpoint(verbs: Verbs, queue: str, name: str) -> Verb[str | None]:
    """See `Store.checkpoint`."""
    key = verbs.layout.key(queue, "checkpoints")
    [value] = yield Batch([Call(("HGET", key, name), key)], writes=False)
    return None if value is None else value.decode()


def now(verbs: Verbs) -> Verb[int]:
    """See `Store.now`."""
    [microseconds] = yield Batch([run_script(verbs.scripts["now"], [], [])], writes=False)
    return int(microseconds)
