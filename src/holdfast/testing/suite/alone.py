"""A job that is enqueued alone, by the blocking call, with an id made for it: what `task.enqueue(...)` asks of a store.

An engine may have a way of its own for it. Whatever is asked next, the job is where every other job is.
"""

# ruff: noqa: S101

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.job import Job, JobId, NewJob, State, enqueued
from holdfast.lifecycle import Applied, Succeeded
from holdfast.store import CancelAnswer, ClaimRequest, DepthLimit, Inserted, InsertStatus, JobQuery
from holdfast.testing.suite.harness import EVERY_BYTE, QUEUE, Rig

CREATED = InsertStatus.CREATED
EXISTING = InsertStatus.EXISTING
FULL = InsertStatus.FULL
_LONG = b"x" * 20_000


async def _alone(rig: Rig, new: NewJob | None = None, **fields: Any) -> JobId:
    """The id of a job that was enqueued so."""
    new = new or rig.new(**fields)
    answers = await asyncio.to_thread(rig.store.insert_blocking, [new], fresh=True)
    assert answers == [Inserted(new.id, CREATED)]
    return new.id


async def _taken(rig: Rig) -> Job:
    """A job in flight."""
    await rig.add()
    return await rig.take()


async def _found(rig: Rig, **query: Any) -> list[JobId]:
    page = await rig.store.find(JobQuery(**query))
    assert page.next is None
    return [job.id for job in page.jobs]


@pytest.mark.parametrize("payload", [EVERY_BYTE, _LONG], ids=["short", "long"])
async def test_a_job_enqueued_alone_is_read_as_it_was_given(rig: Rig, payload: bytes) -> None:
    """Every field of it, by its id and in a list, from the first moment on and after it was claimed."""
    now = await rig.store.now()
    new = rig.new(
        payload=payload,
        task_version="7",
        queue="mail",
        share="acme",
        priority=-3,
        max_retries=0,
        retention=rig.steps(5),
        correlation_id="order-1",
        run_at=now + rig.steps(1),
    )
    plain = rig.new()
    for one in (new, plain):
        await _alone(rig, one)
        job = await rig.get(one.id)
        assert job == enqueued(one, job.created_at)
        assert [*(await rig.store.find(JobQuery(queue=one.queue))).jobs] == [job]
    await rig.wait(1)
    waiting = await rig.get(new.id)
    claimed = await rig.take(queue="mail")
    kept = {"state": State.IN_FLIGHT, "reason": claimed.reason, "version": 1, "session_id": claimed.session_id}
    assert claimed == replace(waiting, claimed_at=claimed.claimed_at, **kept)


async def test_jobs_enqueued_alone_are_found_in_pages_among_others(rig: Rig) -> None:
    """Newest id first, none twice, none left out, whatever the filter."""
    ids = sorted(rig.new().id for _ in range(9))
    for place, job_id in enumerate(ids[::-1]):
        new = rig.new(id=job_id, task=f"t{place % 2}", correlation_id=f"c{place % 2}")
        await (_alone(rig, new) if place % 3 else rig.store.insert([new]))
    for limit in (1, 2, 4):
        listed: list[JobId] = []
        cursor: JobId | None = None
        while True:
            page = await rig.store.find(JobQuery(limit=limit, cursor=cursor, states=(State.READY,)))
            listed += [job.id for job in page.jobs]
            cursor = page.next
            if cursor is None:
                break
        assert listed == ids[::-1]
    even = [job_id for place, job_id in enumerate(ids[::-1]) if place % 2 == 0]
    assert await _found(rig, task="t0") == await _found(rig, correlation_id="c0") == even
    assert await _found(rig, states=(State.IN_FLIGHT,)) == await _found(rig, queue="elsewhere") == []


async def test_jobs_enqueued_alone_are_counted(rig: Rig) -> None:
    """Ready or scheduled, beside others of the queue and in a queue of their own."""
    await rig.add()
    await _alone(rig)
    await _alone(rig, delay=rig.steps(1))
    await _alone(rig, queue="mail")
    found = {counts.queue: (counts.ready, counts.scheduled, counts.in_flight) for counts in await rig.store.counts()}
    assert found == {QUEUE: (2, 1, 0), "mail": (1, 0, 0)}
    await rig.wait(1)
    await rig.claim(await rig.session(), 2)
    found = {counts.queue: (counts.ready, counts.scheduled, counts.in_flight) for counts in await rig.store.counts()}
    assert found == {QUEUE: (1, 0, 2), "mail": (1, 0, 0)}


async def test_every_job_enqueued_alone_is_seen_at_once_and_claimed_once(rig: Rig) -> None:
    """However many there are: an engine may gather them."""
    ids = []
    for number in range(300):
        ids.append(await _alone(rig))
        if number % 20 == 19:
            assert len(await rig.dump()) == len(ids)
            assert [counts.ready for counts in await rig.store.counts()] == [len(ids)]
    assert await rig.claim_ids(await rig.session(), 400) == ids
    assert await rig.claim_ids(await rig.session(), 400) == []


async def test_jobs_enqueued_alone_are_served_in_their_lanes_order(rig: Rig) -> None:
    """By priority, then by due time, then by id, among jobs that came in another way; shares in turn."""
    later = await _alone(rig, delay=rig.steps(2))
    soon = await rig.add(delay=rig.steps(1))
    ids = sorted(rig.new().id for _ in range(6))
    for place in (3, 0, 5, 2, 4, 1):  # one after the other
        new = rig.new(id=ids[place], priority=place % 3)
        await (_alone(rig, new) if place > 2 else rig.store.insert([new]))
    await _alone(rig, priority=9, share="a")
    await rig.add(priority=9, share="b")
    await rig.wait(3)
    jobs = await rig.claim(await rig.session(), 100)
    assert [job.priority for job in jobs] == [0, 0, 1, 1, 2, 2, 5, 5, 9, 9]
    assert [job.id for job in jobs if job.priority == 5] == [soon, later]
    for earlier, after in pairwise(jobs):
        same = (earlier.priority, earlier.share) == (after.priority, after.share)
        assert not same or (earlier.run_at, earlier.id) < (after.run_at, after.id)
    assert {job.share for job in jobs if job.priority == 9} == {"a", "b"}


async def test_a_job_enqueued_alone_for_later_is_not_served_early(rig: Rig) -> None:
    """And a claim that finds nothing says when it is due."""
    job_id = await _alone(rig, delay=rig.steps(2))
    session = await rig.session()
    request = ClaimRequest(session_id=session, queues=(QUEUE,), limit=1)
    claimed = await rig.store.claim(request)
    assert claimed.jobs == ()
    assert claimed.due_in is not None
    assert 0 < claimed.due_in <= rig.steps(2)
    await rig.wait(2)
    assert await rig.claim_ids(session) == [job_id]


async def test_a_job_enqueued_alone_waits_while_its_queue_is_paused(rig: Rig) -> None:
    """It is claimed when the queue goes on."""
    await rig.store.set_paused(QUEUE, True)
    job_id = await _alone(rig)
    session = await rig.session()
    assert await rig.claim_ids(session) == []
    await rig.store.set_paused(QUEUE, False)
    assert await rig.claim_ids(session) == [job_id]


async def test_a_job_enqueued_alone_is_cancelled_and_replayed(rig: Rig) -> None:
    """An operator may be quicker than every worker."""
    job_id = await _alone(rig)
    assert await rig.store.request_cancel([job_id, "nothing"]) == [CancelAnswer.CANCELLED, CancelAnswer.GONE]
    assert await rig.state(job_id) is State.CANCELLED
    assert await rig.replay(job_id) is Applied.APPLIED
    assert await rig.claim_ids(await rig.session()) == [job_id]


async def test_nobody_settles_notes_or_forgets_a_job_that_was_only_enqueued_alone(rig: Rig) -> None:
    """It is there, and nobody's."""
    other = await _taken(rig)
    job_id = await _alone(rig)
    move = replace(rig.move(other, Succeeded()), job_id=job_id)
    assert await rig.apply(move) is Applied.STALE
    assert await rig.store.note(replace(other.lease, job_id=job_id), b"1") is Applied.STALE
    assert await rig.store.forget([job_id]) == 0
    assert await rig.store.prune(100) == 0
    assert (await rig.get(job_id)).state is State.READY


@pytest.mark.parametrize("payload", [b"{}", _LONG], ids=["short", "long"])
async def test_repeating_a_job_enqueued_alone_is_safe(rig: Rig, payload: bytes) -> None:
    """A caller that heard no answer sends the same id again, in whatever way, and whatever became of the job."""
    new = rig.new(payload=payload)
    await _alone(rig, new)

    async def repeat() -> None:
        beside = [rig.new(queue="beside"), rig.new(queue="beside")]
        assert await asyncio.to_thread(rig.store.insert_blocking, [new]) == [Inserted(new.id, EXISTING)]
        answers = await rig.store.insert([beside[0], new, beside[1]], limits={QUEUE: DepthLimit(max_depth=0)})
        assert [answer.status for answer in answers] == [CREATED, EXISTING, CREATED]
        assert await asyncio.to_thread(rig.store.insert_blocking, [new]) == [Inserted(new.id, EXISTING)]

    await repeat()
    job = await rig.take()
    await repeat()
    assert await rig.ack(job) is Applied.APPLIED
    await repeat()
    assert [found.id for found in await rig.dump() if found.queue == QUEUE] == [new.id]


async def test_a_repeated_batch_names_a_job_enqueued_alone(rig: Rig) -> None:
    """The first call that asks for it after it came is that batch."""
    new = rig.new()
    await _alone(rig, new)
    assert await rig.store.insert([new, new]) == [Inserted(new.id, EXISTING)] * 2
    assert await rig.claim_ids(await rig.session()) == [new.id]


async def test_what_follows_from_a_move_may_name_a_job_enqueued_alone(rig: Rig) -> None:
    """It is there already: it is left out."""
    first = await _taken(rig)
    new = rig.new()
    await _alone(rig, new)
    assert await rig.apply(replace(rig.move(first, Succeeded()), then=(new,))) is Applied.APPLIED
    assert await rig.claim_ids(await rig.session()) == [new.id]


async def test_a_job_enqueued_alone_counts_for_the_depth_of_its_queue(rig: Rig) -> None:
    """Whoever comes after it with a limit finds the queue full."""
    await _alone(rig)
    await _alone(rig, delay=rig.steps(1))
    new = rig.new()
    # A store may go by a depth that is up to a second old, so nobody asked before.
    limits = {QUEUE: DepthLimit(max_depth=2)}
    assert await asyncio.to_thread(rig.store.insert_blocking, [new], limits=limits, fresh=True) == [
        Inserted(new.id, FULL)
    ]


async def test_another_client_sees_and_serves_a_job_enqueued_alone(rig: Rig) -> None:
    """Reading first, then claiming; and the first client sees what became of it."""
    job_id = await _alone(rig)
    async with rig.harness.second() as store:
        other = rig.using(store)
        assert (await other.get(job_id)).state is State.READY
        assert [job.id for job in await other.dump()] == [job_id]
        job: Job = await other.take()
        assert (await rig.get(job_id)).session_id == job.session_id
        assert await other.ack(job) is Applied.APPLIED
    assert await rig.state(job_id) is State.SUCCEEDED
