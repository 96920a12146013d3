"""Settlements that succeed and single inserts take a short way, and jobs that end together expire together: what must
be the same as on the long way.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import hiredis
import pytest

from holdfast.errors import OutcomeUnknown, SchemaOutdated, StoreError, UnsafeStore
from holdfast.failures import Failure
from holdfast.job import NewJob, State
from holdfast.lifecycle import Applied, Failed, Move, Outcome, Released, Succeeded
from holdfast.store import InsertStatus
from holdfast.stores.redis import RedisStore, opening
from holdfast.stores.redis.scripts import load_scripts
from holdfast.stores.redis.wire import unpacked
from holdfast.testing.suite import Rig
from tests.postgres.helpers import new_job
from tests.redis.conftest import NAMESPACE
from tests.redis.fake import FORWARD, FakeServer, error, text
from tests.redis.helpers import empty, later_by, outside, store_at, with_clock
from tests.servers import RedisServer

WEEK = 7 * 24 * 3600 * 1_000_000


@pytest.fixture
def client(redis_server: RedisServer) -> Any:
    return outside(redis_server.url)


def key(name: str) -> str:
    return f"{NAMESPACE}:{{default}}:{name}"


async def succeeded(rig: Rig, count: int, **fields: Any) -> list[Move]:
    """The moves of so many jobs that were claimed together and have succeeded."""
    await rig.add_many(count, **fields)
    return [rig.move(job, Succeeded(b"1")) for job in await rig.claim(await rig.session(), count)]


async def test_a_move_that_comes_twice_in_a_batch_is_counted_once(rig: Rig, client: Any) -> None:
    first, second = await succeeded(rig, 2)
    assert await rig.store.apply([first, second, first]) == [Applied.APPLIED, Applied.APPLIED, Applied.ALREADY]
    [counts] = await rig.store.counts()
    assert (counts.in_flight, counts.succeeded) == (0, 2)
    assert client.lrange(key("completed"), 0, -1) == [second.job_id.encode(), first.job_id.encode()]


async def test_a_move_sees_what_an_earlier_one_of_another_kind_did(rig: Rig) -> None:
    await rig.add_many(2)
    one, two = await rig.claim(await rig.session(), 2)
    moves = [rig.move(job, outcome) for job in (one, two) for outcome in (Succeeded(b"1"), Released())]
    assert await rig.store.apply(moves) == [Applied.APPLIED, Applied.STALE] * 2
    moves.reverse()
    assert await rig.store.apply(moves) == [Applied.STALE, Applied.ALREADY] * 2


async def test_groups_of_all_kinds_in_one_batch(rig: Rig) -> None:
    await rig.add_many(6)
    jobs = await rig.claim(await rig.session(), 6)
    follower = rig.new()
    outcomes: list[Outcome] = [
        Succeeded(b"1"),
        Failed(Failure(0, 1, "E", "no")),
        Succeeded(b"1"),
        Succeeded(b"2"),
        Released(),
        Succeeded(b"2"),
    ]
    moves = [rig.move(job, outcome) for job, outcome in zip(jobs, outcomes, strict=True)]
    with_follower = Move(**{name: getattr(moves[2], name) for name in Move.__struct_fields__} | {"then": (follower,)})
    moves[2] = with_follower
    assert await rig.store.apply(moves) == [Applied.APPLIED] * 6
    found = [await rig.get(job.id) for job in jobs]
    assert [job.result for job in found] == [b"1", None, b"1", b"2", None, b"2"]
    assert [job.state for job in found] == [
        State.SUCCEEDED, State.READY, State.SUCCEEDED, State.SUCCEEDED, State.READY, State.SUCCEEDED
    ]  # fmt: skip
    assert await rig.state(follower.id) is State.READY


async def test_who_is_to_be_cancelled_and_succeeds_is_no_longer_asked_about(rig: Rig, client: Any) -> None:
    moves = await succeeded(rig, 3)
    await rig.store.request_cancel([moves[1].job_id])
    assert await rig.store.apply(moves) == [Applied.APPLIED] * 3
    assert client.exists(key("cancels")) == 0


async def test_a_row_that_somebody_spoilt_spoils_no_other(rig: Rig, client: Any) -> None:
    moves = await succeeded(rig, 3)
    client.hset(key("states"), moves[1].job_id, "in_flight\tclaimed\t1\t")
    assert await rig.store.apply(moves) == [Applied.APPLIED, Applied.GONE, Applied.APPLIED]


async def test_jobs_that_end_together_share_an_entry_by_retention(rig: Rig, client: Any) -> None:
    moves = await succeeded(rig, 3) + await succeeded(rig, 2, retention=WEEK // 2)
    await rig.store.apply(moves)
    entries = [entry.decode().split() for entry in client.zrange(key("expiry"), 0, -1)]
    assert entries == [[move.job_id for move in moves[3:]], [move.job_id for move in moves[:3]]]


async def test_a_part_of_an_entry_is_pruned_and_the_rest_later(rig: Rig, client: Any) -> None:
    assert isinstance(rig.store, RedisStore)
    await rig.store.apply(await succeeded(rig, 5))
    later_by(rig.store, 2 * WEEK)
    assert await rig.store.prune(2) == 2
    [entry] = client.zrange(key("expiry"), 0, -1)
    assert len(entry.split()) == 3
    assert [await rig.store.prune(2), await rig.store.prune(2), await rig.store.prune(2)] == [2, 1, 0]
    assert client.exists(key("expiry"), key("jobs"), key("states"), key("index")) == 0


async def test_a_job_that_has_moved_on_is_not_pruned_with_those_it_ended_with(rig: Rig) -> None:
    """Replayed; replayed and ended again, later; forgotten and sent again."""
    assert isinstance(rig.store, RedisStore)
    moves = await succeeded(rig, 4)
    await rig.store.apply(moves)
    over, back, again, sent = (move.job_id for move in moves)
    await rig.store.forget([sent])
    later_by(rig.store, WEEK // 2)
    await rig.replay(again)
    await rig.ack(await rig.take())
    await rig.replay(back)
    await rig.store.insert([rig.new(id=sent)])
    later_by(rig.store, WEEK + 1_000_000)
    assert await rig.store.prune(10) == 1
    assert await rig.store.get(over) is None
    assert [await rig.state(job_id) for job_id in (back, again, sent)] == [
        State.READY, State.SUCCEEDED, State.READY
    ]  # fmt: skip
    later_by(rig.store, 2 * WEEK)
    assert await rig.store.prune(10) == 1
    assert await rig.store.get(again) is None


async def test_many_entries_of_jobs_that_are_gone_do_not_stop_the_pruning(rig: Rig) -> None:
    assert isinstance(rig.store, RedisStore)
    for _ in range(3):
        moves = await succeeded(rig, 200)
        await rig.store.apply(moves)
        await rig.store.forget([move.job_id for move in moves])
    await rig.store.apply(await succeeded(rig, 1))
    later_by(rig.store, 2 * WEEK)
    assert await rig.store.prune(100) == 1


# What the server and the store must be like.


async def test_a_store_of_another_layout_is_refused(redis_server: RedisServer, client: Any) -> None:
    for kept in ('{"processing":"","ready":{}}', '{"version":3,"names":{}}'):
        client.set("other-layout:layout", kept)
        store = store_at(f"{redis_server.url}?namespace=other-layout")
        with pytest.raises(SchemaOutdated, match=f"this version of Holdfast writes {opening.LAYOUT}"):
            await store.counts()
        store.close()
    client.delete("other-layout:layout")


async def test_a_server_that_cannot_count_microseconds_is_refused(redis_server: RedisServer) -> None:
    def answer(words: list[bytes]) -> Any:
        return text(b"redis_version:7.0.15\r\narch_bits:32\r\n") if words[0] == b"INFO" else FORWARD

    with FakeServer(answer, behind=redis_server.port) as fake:
        store = store_at(fake.url)
        with pytest.raises(UnsafeStore, match="32 bits"):
            await store.counts()
        store.close()


# The short way of an insert.


async def test_one_job_takes_the_short_way_and_looks_the_same(rig: Rig, client: Any) -> None:
    assert isinstance(rig.store, RedisStore)
    await rig.add()
    several = await rig.add_many(2, correlation_id="c", max_retries=7, retention=WEEK // 2)
    one = rig.new(correlation_id="c", max_retries=7, retention=WEEK // 2)
    put = rig.store._verbs.put([one])
    assert put is not None
    assert await rig.store._connections.call(put) == 1
    alike = [client.hget(key("jobs"), job_id).split(b"\t", 2)[2] for job_id in (several[0], one.id)]
    assert alike[0] == alike[1]
    assert (await rig.claim_ids(await rig.session(), 10))[-1] == one.id
    [counts] = await rig.store.counts()
    assert (counts.ready, counts.in_flight) == (0, 4)


@pytest.mark.parametrize("blocking", [False, True])
async def test_the_same_job_twice_on_the_short_way(rig: Rig, client: Any, blocking: bool) -> None:
    async def insert(job: NewJob) -> InsertStatus:
        if blocking:
            [inserted] = await asyncio.to_thread(rig.store.insert_blocking, [job])
        else:
            [inserted] = await rig.store.insert([job])
        return inserted.status

    await rig.add()
    job = rig.new()
    assert [await insert(job), await insert(job)] == [InsertStatus.CREATED, InsertStatus.EXISTING]
    assert client.llen(key("ready:5")) == 2
    assert client.hget(key("meta"), "waiting") == b"2"


async def test_a_job_of_the_same_microsecond_does_not_take_the_short_way(rig: Rig, client: Any) -> None:
    assert isinstance(rig.store, RedisStore)
    with_clock(rig.store, "local now = 1800000000000000\n")
    first, second, third = sorted(rig.new().id for _ in range(3))
    for job_id in (second, third, first):
        await rig.store.insert([rig.new(id=job_id)])
    assert client.llen(key("ready:5")) == 1
    assert await rig.claim_ids(await rig.session(), 10) == [first, second, third]


async def test_the_short_way_says_what_any_client_would_send(rig: Rig, client: Any) -> None:
    assert isinstance(rig.store, RedisStore)
    await rig.add()
    for fields in ({}, {"payload": b'{"text":"\xc3\xbc\\r\\n$1"}', "share": "\u2603 x", "correlation_id": "\u2603"}):
        new = rig.new(**fields)
        put = rig.store._verbs.put([new])
        assert put is not None
        command = unpacked(put.data)
        assert put.data == hiredis.pack_command(command)
        keys, arguments = command[3 : 3 + int(command[2])], command[3 + int(command[2]) :]
        assert keys[-1] == rig.store._verbs.layout.ready(new.queue, f"5\t{new.share}")
        assert arguments[:2] == (f"5\t{new.share}".encode(), new.id.encode())
        assert arguments[2].split(b"\n", 2)[2] == new.payload


@pytest.mark.parametrize("blocking", [False, True])
async def test_the_short_way_finds_a_server_that_has_lost_its_scripts_and_one_that_is_not_known(
    rig: Rig, client: Any, blocking: bool
) -> None:
    assert isinstance(rig.store, RedisStore)
    await rig.add()
    for disturb in (client.script_flush, rig.store.topology.doubt):
        disturb()
        new = rig.new()
        assert rig.store._verbs.put([new]) is not None
        if blocking:
            [inserted] = await asyncio.to_thread(rig.store.insert_blocking, [new])
        else:
            [inserted] = await rig.store.insert([new])
        assert inserted.status is InsertStatus.CREATED
        assert await rig.store.get(new.id) is not None


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("what", ["lost before", "lost after", "busy", "refused"])
async def test_what_may_get_in_the_way_of_the_short_way(redis_server: RedisServer, blocking: bool, what: str) -> None:
    """It ends as any other call does: tried again if nothing was written, in doubt if that is not known."""
    script = load_scripts()["put"].sha.encode()
    seen = 0

    def answer(words: list[bytes]) -> Any:
        nonlocal seen
        if script not in words:
            return FORWARD
        seen += 1
        match what:
            case "lost after":
                raise ConnectionError("the reply is lost")
            case "busy" if seen == 1:
                return error("LOADING Redis is loading the dataset in memory")
            case "refused":
                return error("OOM command not allowed when used memory > 'maxmemory'")
            case _:
                pass
        return FORWARD

    async def insert(job: NewJob) -> InsertStatus:
        if blocking:
            [inserted] = await asyncio.to_thread(store.insert_blocking, [job])
        else:
            [inserted] = await store.insert([job])
        return inserted.status

    empty(redis_server.url, NAMESPACE)
    with FakeServer(answer, behind=redis_server.port) as fake:
        store = store_at(f"{fake.url}?namespace={NAMESPACE}")
        await insert(new_job())
        job = new_job()
        if what == "lost before":
            for connection in fake._open:
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.sleep(0.05)
            assert await insert(job) is InsertStatus.CREATED
        elif what == "lost after":
            with pytest.raises(OutcomeUnknown) as caught:
                await insert(job)
            assert list(caught.value.ids) == [job.id]
            assert seen == 1, "a call that may have written must not be repeated"
        elif what == "busy":
            assert await insert(job) is InsertStatus.CREATED
            assert seen == 2
        else:
            with pytest.raises(StoreError, match="OOM"):
                await insert(job)
        store.close()


async def test_a_counter_that_somebody_spoilt_leaves_no_half_of_a_job(rig: Rig, client: Any) -> None:
    await rig.add()
    client.hset(key("meta"), "waiting", "many")
    job = rig.new()
    with pytest.raises(StoreError):
        await rig.store.insert([job])
    assert client.hget(key("jobs"), job.id) is None
    assert client.zscore(key("index"), job.id) is None
