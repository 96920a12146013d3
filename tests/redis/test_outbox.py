"""Jobs that follow into another queue: accepted with the move, in the outbox until they are delivered."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.config import Settings
from holdfast.errors import InvalidOption
from holdfast.job import Job, NewJob, State
from holdfast.lifecycle import Applied, Move, Succeeded
from holdfast.store import Inserted, InsertStatus
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.dispatch import Batch
from holdfast.stores.redis.records import for_outbox
from holdfast.testing.suite import Rig, rig_on
from tests.redis.conftest import NAMESPACE
from tests.redis.helpers import empty, outside, store_at
from tests.servers import RedisServer, missing_server_policy
from tests.store.harnesses import RedisHarness

ONE_LIST = Settings.parse({"redis": {"queues": {"5": "one-list:normal"}}})
"""A ready list that two queues would share."""


@pytest.fixture
def client(redis_server: RedisServer) -> Any:
    return outside(redis_server.url)


@pytest.fixture(scope="module")
def short_of_memory() -> Iterator[RedisServer]:
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


@pytest.fixture
async def single(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    """A store with one ready list for all queues."""
    empty(redis_server.url, "one-list")
    async with store_at(f"{redis_server.url}?namespace=one-list", settings=ONE_LIST) as store:
        yield store
    empty(redis_server.url, "one-list")


def succeeded(rig: Rig, job: Job, *then: NewJob) -> Move:
    return replace(rig.move(job, Succeeded()), then=then)


def ready_in(client: Any, queue: str) -> int:
    return int(client.hget(f"{NAMESPACE}:{{{queue}}}:meta", "waiting") or 0)


async def test_a_large_outbox_is_delivered_completely(rig: Rig, client: Any) -> None:
    await rig.add_many(3, queue="a")
    jobs = await rig.claim(await rig.session(), 3, queues=["a"])
    moves = [succeeded(rig, job, *(rig.new(queue="b") for _ in range(1000))) for job in jobs]
    assert await rig.store.apply(moves) == [Applied.APPLIED] * 3
    for _ in range(5):
        await rig.store.prune(1000)
    assert client.hlen(f"{NAMESPACE}:{{a}}:outbox") == 0
    assert ready_in(client, "b") == 3000


async def test_what_was_delivered_before_it_was_struck_off_does_not_run_again(rig: Rig, client: Any) -> None:
    """Its process died between the two. Meanwhile the job ended, and its time is over."""
    session = await rig.session()
    await rig.add(queue="z")
    follower = rig.new(queue="a", retention=0)
    await rig.apply(succeeded(rig, await rig.take(session, queue="z"), follower))
    assert await rig.ack(await rig.take(session, queue="a")) is Applied.APPLIED
    client.hset(f"{NAMESPACE}:{{z}}:outbox", follower.id, for_outbox(follower))
    await rig.wait(1)
    assert await rig.store.prune(100) >= 1
    assert await rig.claim_ids(session, queues=["a"]) == []
    assert client.hlen(f"{NAMESPACE}:{{z}}:outbox") == 0


async def test_prune_goes_on_where_there_is_no_memory_for_what_is_to_be_delivered(
    short_of_memory: RedisServer,
) -> None:
    server = short_of_memory
    server.ask("FLUSHALL")
    async with rig_on(RedisHarness(server.url, NAMESPACE, direct=server.url)) as rig:
        store = rig.store
        await rig.add(queue="a")
        await rig.add(queue="b")
        ids = await rig.add_many(50, queue="c", retention=0)
        waiting = rig.new(queue="a")
        outside(server.url).hset(f"{NAMESPACE}:{{b}}:outbox", waiting.id, for_outbox(waiting))
        jobs = await rig.claim(await rig.session(), 50, queues=["c"])
        assert set(await store.apply([rig.move(job, Succeeded()) for job in jobs])) == {Applied.APPLIED}
        await rig.wait(1)
        server.ask("CONFIG", "SET", "maxmemory", "1")
        try:
            assert await store.prune(1000) == len(ids)
        finally:
            server.ask("CONFIG", "SET", "maxmemory", "0")
        await store.prune(1000)
        assert (await rig.get(waiting.id)).state is State.READY


# Where all queues would share a ready list, there can be one queue only.


async def test_of_two_queues_at_the_same_moment_one_is_refused(
    rig: Rig, single: RedisStore, redis_server: RedisServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rig.new(queue="a"), rig.new(queue="b")
    answers: list[list[Inserted] | InvalidOption] = []

    async def insert(store: RedisStore, new: NewJob) -> None:
        try:
            answers.append(await store.insert([new]))
        except InvalidOption as error:
            answers.append(error)

    async with store_at(f"{redis_server.url}?namespace=one-list", settings=ONE_LIST) as other:
        execute = single._connections.execute

        async def then_another(batch: Batch) -> list[Any]:
            replies = await execute(batch)
            if not answers:
                await insert(other, second)
            return replies

        monkeypatch.setattr(single._connections, "execute", then_another)
        await insert(single, first)
    [refused] = [answer for answer in answers if isinstance(answer, InvalidOption)]
    [[accepted]] = [answer for answer in answers if not isinstance(answer, InvalidOption)]
    assert "one-list:normal" in str(refused)
    assert accepted.status is InsertStatus.CREATED
    queue, without = ("a", "b") if accepted.job_id == first.id else ("b", "a")
    assert client.smembers("one-list:queues") == {queue.encode()}
    assert list(client.scan_iter(match=f"one-list:{{{without}}}:*")) == []
    assert [(counts.queue, counts.ready) for counts in await single.counts()] == [(queue, 1)]


async def test_a_job_that_would_follow_into_a_second_queue_is_refused_before_the_move(
    rig: Rig, single: RedisStore, client: Any
) -> None:
    rig = rig.using(single)
    job_id = await rig.add(queue="a", retention=0)
    job = await rig.take(queue="a")
    with pytest.raises(InvalidOption, match="one-list:normal"):
        await rig.apply(succeeded(rig, job, rig.new(queue="b")))
    assert await rig.state(job_id) is State.IN_FLIGHT
    assert client.exists("one-list:{a}:outbox") == 0
    assert client.smembers("one-list:queues") == {b"a"}
    follower = rig.new(queue="a")
    assert await rig.apply(succeeded(rig, job, follower)) is Applied.APPLIED
    assert await rig.state(follower.id) is State.READY
    assert await single.prune(10) >= 0


async def test_prune_goes_on_where_an_outbox_has_a_job_for_a_second_queue(
    rig: Rig, single: RedisStore, client: Any
) -> None:
    rig = rig.using(single)
    job_id = await rig.add(queue="a", retention=0)
    await single.request_cancel([job_id])
    stray = rig.new(queue="b")
    client.hset("one-list:{a}:outbox", stray.id, for_outbox(stray))
    await rig.wait(1)
    for _ in range(2):
        await single.prune(10)
    assert await single.get(job_id) is None
    assert client.smembers("one-list:queues") <= {b"a"}
