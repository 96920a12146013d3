"""Lanes on Redis: a list of what came in order, a sorted set of what did not, and traces of what was cancelled."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.job import JobId, State
from holdfast.lifecycle import Released
from holdfast.store import CancelAnswer
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis import scripts as redis_scripts
from holdfast.testing.suite import Rig
from tests.redis.conftest import NAMESPACE
from tests.redis.helpers import outside, with_clock
from tests.servers import RedisServer

NOON = 1_800_000_000_000_000


@pytest.fixture
def client(redis_server: RedisServer) -> Any:
    return outside(redis_server.url)


def at(rig: Rig, moment: int) -> None:
    """Let it be that time on the server."""
    assert isinstance(rig.store, RedisStore)
    with_clock(rig.store, f"local now = {moment}\n")


def in_lane(client: Any, lane: str = "5\t") -> int:
    return int(client.hget(f"{NAMESPACE}:{{default}}:lanes", lane) or 0)


async def test_a_job_that_is_cancelled_while_it_waits_leaves_a_trace_that_is_never_claimed(
    rig: Rig, client: Any
) -> None:
    first, second, third = await rig.add_many(3)
    assert await rig.store.request_cancel([second]) == [CancelAnswer.CANCELLED]
    assert client.llen(f"{NAMESPACE}:{{default}}:ready:5") == 3
    assert in_lane(client) == 2
    assert await rig.claim_ids(await rig.session()) == [first, third]
    assert client.exists(f"{NAMESPACE}:{{default}}:ready:5", f"{NAMESPACE}:{{default}}:lanes") == 0


async def test_a_job_that_is_cancelled_and_replayed_is_served_once_at_its_new_place(rig: Rig) -> None:
    first, second = await rig.add_many(2)
    await rig.store.request_cancel([first])
    third = await rig.add()
    await rig.replay(first)
    fourth = await rig.add()
    session = await rig.session()
    assert await rig.claim_ids(session) == [second, third, first, fourth]
    assert await rig.claim_ids(session) == []
    assert [counts.in_flight for counts in await rig.store.counts()] == [4]


async def test_without_the_check_for_traces_it_would_be_served_at_its_old_place(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = redis_scripts._piece
    blind = whole("claim").replace("if not time or string.sub(row, 1, 6) ~= 'ready\\t' then return false end", "")
    assert blind != whole("claim")
    monkeypatch.setattr(redis_scripts, "_piece", lambda name: blind if name == "claim" else whole(name))
    first, second = await rig.add_many(2)
    await rig.store.request_cancel([first])
    await rig.replay(first)
    await rig.wait(1)
    assert (await rig.claim_ids(await rig.session()))[0] == first
    assert second


async def test_a_job_that_was_forgotten_and_is_sent_again_with_a_delay_is_not_early(rig: Rig) -> None:
    [job_id] = await rig.add_many(1)
    await rig.store.request_cancel([job_id])
    assert await rig.store.forget([job_id]) == 1
    await rig.store.insert([rig.new(id=job_id, delay=rig.steps(1))])
    session = await rig.session()
    assert await rig.claim_ids(session) == []
    await rig.wait(1.1)
    assert await rig.claim_ids(session) == [job_id]
    assert await rig.claim_ids(session) == []


async def test_what_is_given_back_keeps_its_place_in_whatever_order_it_comes(rig: Rig) -> None:
    ids = await rig.add_many(4)
    sessions = [await rig.session() for _ in range(3)]
    jobs = [(await rig.claim(session))[0] for session in sessions]
    for job in (jobs[1], jobs[0], jobs[2]):
        await rig.settle(job, Released())
    assert await rig.claim_ids(sessions[0]) == ids


async def test_jobs_of_one_microsecond_are_served_by_their_ids(rig: Rig) -> None:
    at(rig, NOON)
    low, middle, high = (f"0000000{digit}-0000-7000-8000-000000000000" for digit in "123")
    for job_id in (middle, high, low):
        await rig.add(id=job_id)
    assert await rig.claim_ids(await rig.session()) == [low, middle, high]


async def test_a_clock_that_was_set_back_keeps_jobs_in_the_order_of_their_times(rig: Rig) -> None:
    at(rig, NOON)
    noon = await rig.add()
    at(rig, NOON - 2)
    before = await rig.add()
    at(rig, NOON - 1)
    between = await rig.add()
    at(rig, NOON + 1)
    after = await rig.add()
    assert await rig.claim_ids(await rig.session()) == [before, between, noon, after]


async def test_a_crowd_that_becomes_due_at_once_is_not_overtaken(rig: Rig) -> None:
    """More than one script promotes: a claim hands out nothing before all of it is lined up."""
    later = await rig.add_many(700, delay=rig.steps(1))
    urgent = await rig.add(delay=rig.steps(1), priority=0)
    await rig.wait(2)
    newer = await rig.add()
    session = await rig.session()
    assert await rig.claim_ids(session, 1) == [urgent]
    assert await rig.claim_ids(session) == [*later, newer]


async def test_a_claim_meets_many_traces_and_goes_on(rig: Rig) -> None:
    ids = await rig.add_many(900)
    for first in range(0, 900, 300):
        assert set(await rig.store.request_cancel(ids[first : first + 300])) == {CancelAnswer.CANCELLED}
    last = await rig.add()
    assert await rig.claim_ids(await rig.session(), 1) == [last]


async def test_lanes_that_this_process_has_never_seen_are_served(rig: Rig) -> None:
    ids: dict[tuple[int, str], JobId] = {}
    async with rig.harness.second() as other:
        producer = rig.using(other)
        for priority, share in ((5, ""), (-100, "x y"), (100, "{brace}"), (0, "ü:\u2603"), (0, "")):
            ids[priority, share] = await producer.add(priority=priority, share=share)
    claimed = await rig.claim(await rig.session(), 10)
    assert [(job.priority, job.share) for job in claimed] == [
        (-100, "x y"),
        (0, ""),
        (0, "ü:\u2603"),
        (5, ""),
        (100, "{brace}"),
    ]
    assert {(job.priority, job.share): job.id for job in claimed} == ids


async def test_the_counts_are_those_of_the_jobs_after_everything(rig: Rig, client: Any) -> None:
    await rig.add_many(5)
    delayed = await rig.add(delay=rig.steps(50))
    session = await rig.session()
    done, failed, back, *_ = await rig.claim(session, 4)
    await rig.ack(done)
    await rig.nack(failed, permanent=True)
    await rig.release(back)
    await rig.store.request_cancel([delayed])
    jobs = await rig.dump()
    [counts] = await rig.store.counts()
    assert counts.ready == sum(job.state is State.READY for job in jobs) == 2
    assert (counts.in_flight, counts.succeeded, counts.failed, counts.cancelled) == (1, 1, 1, 1)
    assert client.hget(f"{NAMESPACE}:{{default}}:meta", "waiting") == b"2"
