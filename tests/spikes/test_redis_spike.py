"""Does the store port fit Redis with one script per queue? On one server, and where every queue has its own slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.crc import key_slot
from redis.exceptions import ResponseError

from holdfast.errors import SessionClosed
from holdfast.failures import Failure
from holdfast.job import LATEST_TIME, Job, NewJob, Reason, State
from holdfast.lanes import INVERTED_EVERY
from holdfast.lifecycle import Applied, Failed, Lost, Move, Outcome, Released, Succeeded, settle
from holdfast.policy import RetryPolicy, Steps
from holdfast.ports import SYSTEM
from holdfast.store import Claimed, ClaimRequest, Session
from tests.servers import RedisServer, free_port, missing_server_policy
from tests.spikes.redis_spike import RedisSpike

POLICY = RetryPolicy(backoff=Steps((0.3,)))
FAILURE = Failure(at=0, attempt=1, type="E", message="broken")
OK = Succeeded(b"1")


@pytest.fixture(scope="module")
def redis_cluster() -> Iterator[RedisServer]:
    """One node that owns all slots: it refuses every script that touches two of them."""
    with missing_server_policy():
        server = RedisServer(settings={"cluster-enabled": "yes", "cluster-port": str(free_port())})
    with server:
        yield server


@pytest.fixture(params=["redis_server", "redis_cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[RedisSpike]:
    server: RedisServer = request.getfixturevalue(request.param)
    async with Redis.from_url(server.url) as client:
        if request.param == "redis_cluster":
            await own_all_slots(client)
        yield RedisSpike(client, f"spike-{SYSTEM.ids.session_id()}")


async def own_all_slots(client: Any) -> None:
    deadline = time.monotonic() + 10
    while (info := await client.execute_command("CLUSTER INFO"))["cluster_state"] != "ok":
        if info["cluster_slots_assigned"] == "0":
            await client.execute_command("CLUSTER ADDSLOTS", *range(16384))
        assert time.monotonic() < deadline, info
        await asyncio.sleep(0.02)


def new(queue: str = "a", *, priority: int = 5, share: str = "", delay: int = 0) -> NewJob:
    job_id = SYSTEM.ids.job_id()
    return NewJob(id=job_id, task="t", payload=b"\xff", queue=queue, priority=priority, share=share, delay=delay)


async def inserted(store: RedisSpike, *jobs: NewJob) -> list[str]:
    await store.insert(jobs)
    return [job.id for job in jobs]


async def started(store: RedisSpike, *queues: str) -> str:
    session = Session(id=SYSTEM.ids.session_id(), queues=queues or ("a",))
    await store.open_session(session)
    return session.id


async def claimed(store: RedisSpike, session: str, *queues: str, limit: int = 10, turn: int = 0) -> tuple[Job, ...]:
    return (await answer(store, session, *queues, limit=limit, turn=turn)).jobs


async def answer(store: RedisSpike, session: str, *queues: str, limit: int = 10, turn: int = 0) -> Claimed:
    return await store.claim(ClaimRequest(session_id=session, queues=queues or ("a",), limit=limit, turn=turn))


def move(job: Job, outcome: Outcome, *, cancel_asked: bool = False) -> Move:
    return settle(job, outcome, POLICY, SYSTEM.random, cancel_asked=cancel_asked)


def ids(jobs: tuple[Job, ...] | list[Job]) -> list[str]:
    return [job.id for job in jobs]


async def test_the_cluster_refuses_what_the_spike_must_not_do(redis_cluster: RedisServer) -> None:
    async with Redis.from_url(redis_cluster.url) as client:
        await own_all_slots(client)
        with pytest.raises(ResponseError, match="same slot"):
            await client.eval("return 1", 2, "x:{a}:rows", "x:{b}:rows")


async def test_lua_is_exact_up_to_the_latest_time_and_not_beyond(redis_server: RedisServer) -> None:
    async with Redis.from_url(redis_server.url) as client:
        exact: Any = await client.eval("return string.format('%.0f', ARGV[1])", 0, str(LATEST_TIME))
        rounded: Any = await client.eval("return string.format('%.0f', ARGV[1])", 0, str(LATEST_TIME + 2))
    assert int(exact) == LATEST_TIME
    assert int(rounded) != LATEST_TIME + 2


async def test_claim_then_ack_and_ack_again(store: RedisSpike) -> None:
    session = await started(store)
    [job_id] = await inserted(store, new())
    [job] = await claimed(store, session)
    assert (job.id, job.state, job.version, job.session_id) == (job_id, State.IN_FLIGHT, 1, session)
    assert job.payload == b"\xff"
    assert (await store.beat(session)).held == 1
    assert await store.held(session) == [job]
    assert await store.apply([move(job, OK)]) == [Applied.APPLIED]
    assert await store.apply([move(job, OK)]) == [Applied.ALREADY]
    assert await store.apply([move(job, Released())]) == [Applied.STALE]
    assert (await store.beat(session)).held == 0
    assert await claimed(store, session) == ()


async def test_inserting_twice_is_one_job(store: RedisSpike) -> None:
    session = await started(store)
    job = new()
    await inserted(store, job, job)
    await inserted(store, job)
    assert ids(await claimed(store, session)) == [job.id]


async def test_stale_ack_after_close_and_rescue(store: RedisSpike) -> None:
    dead, alive = await started(store), await started(store)
    await inserted(store, new())
    [job] = await claimed(store, dead)
    assert await store.lost(10) == []
    assert await store.apply([move(job, Lost(FAILURE))]) == [Applied.STALE]  # its session is open
    assert (await store.beat(dead)).open
    assert not await store.close_session(dead, if_beat=0)
    assert await store.close_session(dead, if_beat=1)
    assert not await store.close_session(dead)
    assert not (await store.beat(dead)).open

    assert await store.apply([move(job, OK)]) == [Applied.STALE]
    lost = await store.lost(10)
    assert ids(lost) == [job.id]
    rescue = [move(each, Lost(FAILURE)) for each in lost]
    assert await store.apply(rescue) == [Applied.APPLIED]
    assert await store.apply(rescue) == [Applied.ALREADY]  # another keeper, a moment later
    assert await store.lost(10) == []
    [again] = await claimed(store, alive)
    assert (again.version, again.attempt, again.suspect) == (2, 1, True)
    assert await store.apply([move(job, OK)]) == [Applied.STALE]
    assert await store.apply([move(again, OK)]) == [Applied.APPLIED]


async def test_a_closed_session_may_not_claim_nor_open_again(store: RedisSpike) -> None:
    session = Session(id=SYSTEM.ids.session_id(), queues=("a",))
    await store.open_session(session)
    await inserted(store, new())
    await store.close_session(session.id)
    await store.open_session(session)
    with pytest.raises(SessionClosed):
        await claimed(store, session.id)
    assert len(await claimed(store, await started(store))) == 1


async def test_one_stale_row_does_not_abort_a_batch_over_two_queues(store: RedisSpike) -> None:
    session = await started(store, "a", "b")
    await inserted(store, new("a"), new("b"), new("a"))
    first, second, third = await claimed(store, session, "a", "b")
    await store.apply([move(third, Released())])
    gone = replace(first, id=SYSTEM.ids.job_id())
    batch = [move(first, OK), move(third, OK), move(gone, OK), move(second, OK)]
    assert await store.apply(batch) == [Applied.APPLIED, Applied.STALE, Applied.GONE, Applied.APPLIED]


async def test_a_cancel_that_was_asked_is_answered(store: RedisSpike) -> None:
    session = await started(store)
    await inserted(store, new(), new())
    first, second = await claimed(store, session)
    await store.request_cancel("a", [first.id, second.id])
    assert set((await store.beat(session)).cancel) == {first.id, second.id}
    fails = Failed(FAILURE)
    assert await store.apply([move(first, fails), move(second, OK)]) == [Applied.CANCEL_ASKED, Applied.APPLIED]
    cancels = move(first, fails, cancel_asked=True)
    assert cancels.reason is Reason.CANCELLED
    assert await store.apply([cancels]) == [Applied.APPLIED]
    assert (await store.beat(session)).held == 0


async def test_a_retry_is_not_claimed_before_its_time_on_the_servers_clock(store: RedisSpike) -> None:
    session = await started(store)
    await inserted(store, new())
    [job] = await claimed(store, session)
    assert await store.apply([move(job, Failed(FAILURE))]) == [Applied.APPLIED]
    early = await answer(store, session)
    assert early.jobs == ()
    assert early.due_in is not None
    assert 0 < early.due_in <= 300_000
    due_at = early.now + early.due_in
    deadline = time.monotonic() + 10
    while not (late := await answer(store, session)).jobs:
        assert late.now < due_at
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    assert late.now >= due_at
    assert (late.jobs[0].failures, late.jobs[0].run_at) == (1, due_at)
    assert late.due_in is None


async def test_lanes_are_served_by_priority_and_shares_take_turns(store: RedisSpike) -> None:
    session = await started(store)
    low, high, x1, x2, y1, y2 = await inserted(
        store,
        new(priority=10),
        new(priority=-1),
        new(share="x"),
        new(share="x"),
        new(share="ÿ:"),
        new(share="ÿ:"),
    )
    assert ids(await claimed(store, session, limit=1, turn=INVERTED_EVERY - 1)) == [low]
    assert ids(await claimed(store, session, limit=3, turn=1)) == [high, y1, x1]
    assert ids(await claimed(store, session)) == [x2, y2]


async def test_a_released_job_keeps_its_place(store: RedisSpike) -> None:
    session = await started(store)
    first, second, third = await inserted(store, new(), new(), new())
    one, two = await claimed(store, session, limit=2)
    await store.apply([move(two, Released()), move(one, Released())])
    assert ids(await claimed(store, session)) == [first, second, third]


async def test_an_old_lease_of_the_same_session_does_not_fit_the_next_claim(store: RedisSpike) -> None:
    session = await started(store)
    await inserted(store, new())
    [old] = await claimed(store, session)
    await store.apply([move(old, Released())])
    [again] = await claimed(store, session)
    assert await store.apply([move(old, OK), move(old, Released())]) == [Applied.STALE, Applied.STALE]
    assert await store.apply([move(again, OK)]) == [Applied.APPLIED]


async def test_a_claim_costs_one_call_per_queue_once_its_lanes_are_known(store: RedisSpike) -> None:
    session = await started(store, "a", "b")
    await inserted(store, new("a"), new("b"))
    assert len(await claimed(store, session, "a", "b")) == 2
    await inserted(store, new("a"), new("b"))
    store.calls.clear()
    assert len(await claimed(store, session, "a", "b")) == 2
    assert store.calls == [("claim", "a"), ("claim", "b")]
    await inserted(store, new("a", priority=0))
    store.calls.clear()
    assert len(await claimed(store, session, "a", "b")) == 1
    assert store.calls == [("claim", "a"), ("claim", "a"), ("claim", "b")]


async def test_two_queues_in_one_session_are_closed_and_rescued_together(store: RedisSpike) -> None:
    assert key_slot(b"{a}") != key_slot(b"{b}")
    session, other = await started(store, "a", "b"), await started(store, "a", "b")
    await inserted(store, new("a"), new("b"))
    jobs = await claimed(store, session, "a", "b")
    assert [job.queue for job in jobs] == ["a", "b"]
    beat = await store.beat(session)
    assert (beat.open, beat.held) == (True, 2)
    assert await store.held(session) == list(jobs)
    assert await store.close_session(session, if_beat=1)
    assert ids(await store.lost(1)) == [jobs[0].id]
    lost = await store.lost(10)
    assert ids(lost) == ids(jobs)
    assert await store.apply([move(job, Lost(FAILURE)) for job in lost]) == [Applied.APPLIED] * 2
    assert ids(await claimed(store, other, "a", "b")) == ids(jobs)


async def test_a_close_that_died_half_way_is_completed_by_rescue(store: RedisSpike) -> None:
    class Dies(RedisSpike):
        async def close_part(self, queue: str, session_id: str) -> None:
            if queue == "b":
                raise ConnectionError
            await super().close_part(queue, session_id)

    session = await started(store, "a", "b")
    await inserted(store, new("a"), new("b"), new("b"))
    jobs = await claimed(store, session, "a", "b", limit=2)
    with pytest.raises(ConnectionError):
        await Dies(store.client, store.namespace).close_session(session)
    with pytest.raises(SessionClosed):
        await claimed(store, session, "a")
    # The window of an engine that shards: in queue b the session goes on until its next beat, or until rescue.
    late = await claimed(store, session, "b")
    assert not (await store.beat(session)).open
    assert set(ids(await store.lost(10))) == {*ids(jobs), *ids(late)}
    assert await store.apply([move(late[0], OK)]) == [Applied.STALE]
    with pytest.raises(SessionClosed):
        await claimed(store, session, "b")


async def test_what_follows_in_another_queue_survives_a_death_before_its_delivery(store: RedisSpike) -> None:
    class Dies(RedisSpike):
        async def deliver(self, queue: str) -> None:
            raise ConnectionError

    session = await started(store, "a", "b")
    await inserted(store, new("a"))
    [job] = await claimed(store, session)
    following = new("b")
    acks = replace(move(job, OK), then=(following,))
    with pytest.raises(ConnectionError):
        await Dies(store.client, store.namespace).apply([acks])
    assert await claimed(store, session, "b") == ()
    assert await store.apply([acks]) == [Applied.ALREADY]  # a repeated apply, or any keeper, delivers
    assert ids(await claimed(store, session, "b")) == [following.id]
    await store.deliver("a")
    assert await claimed(store, session, "b") == ()
