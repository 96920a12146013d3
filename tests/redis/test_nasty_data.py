"""What somebody else wrote into our keys: only that job is affected, the others go on, and an operator can see it.

A job that cannot be read becomes a dead letter as soon as anybody meets it (a claim, a look at what a session holds,
a rescue). What Redis has of it stays as it is; once that is repaired by hand, it can be replayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.failures import decode_history
from holdfast.job import Job, NewJob, State
from holdfast.lifecycle import Applied, Failed, Lost, Outcome, Succeeded, replay, settle
from holdfast.policy import RetryPolicy, Steps
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, JobQuery, QueueCounts, Session, all_sessions
from holdfast.stores.redis import RedisStore
from tests.cli.helpers import failure, records, run
from tests.redis.helpers import empty, outside, store_at
from tests.servers import RedisServer

NAMESPACE = "nasty"
JOBS, STATES = f"{NAMESPACE}:{{default}}:jobs", f"{NAMESPACE}:{{default}}:states"
POLICY = RetryPolicy(backoff=Steps((0.0,)))

Damage = Callable[[bytes], bytes]

RECORDS: dict[str, Damage] = {
    "garbage": lambda record: b"\xff\x00\t\n garbage",
    "nothing": lambda record: b"",
    "cut in its first line": lambda record: record[:20],
    "cut in its second line": lambda record: record[: record.index(b"\n") + 5],
    "no JSON": lambda record: record.replace(b"{", b"\xff", 1),
    "JSON of another kind": lambda record: record.replace(b'{"task"', b'{"tusk"', 1),
    "a word where a number was": lambda record: b"soon" + record[record.index(b"\t") :],
    "a number that is none": lambda record: record.replace(b"\t5\t", b"\tfive\t", 1),
}
ROWS: dict[str, Damage] = {
    "garbage": lambda row: b"\xff\x00\t\n garbage",
    "nothing": lambda row: b"",
    "cut in its first line": lambda row: row[:25],
    "cut in what moves wrote": lambda row: row[:-3],
    "a version that is none": lambda row: row.replace(b"\t1\t", b"\tone\t", 1),
}


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    empty(redis_server.url, NAMESPACE)
    async with store_at(f"{redis_server.url}?namespace={NAMESPACE}") as store:
        await store.open_session(Session(id="s", queues=("default",)))
        yield store


@pytest.fixture
def client(redis_server: RedisServer) -> Any:
    return outside(redis_server.url)


async def inserted(store: RedisStore, number: int = 3) -> list[str]:
    new = [NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(number)]
    await store.insert(new)
    return [job.id for job in new]


async def claimed(store: RedisStore, session: str = "s") -> list[Job]:
    return list((await store.claim(ClaimRequest(session_id=session, queues=("default",), limit=10))).jobs)


async def settled(store: RedisStore, jobs: list[Job], outcome: Outcome) -> list[Applied]:
    return await store.apply([settle(job, outcome, POLICY, SYSTEM.random) for job in jobs])


async def counts(store: RedisStore) -> QueueCounts:
    [of_queue] = await store.counts()
    return of_queue


def ids(jobs: list[Job]) -> list[str]:
    return [job.id for job in jobs]


def damage(client: Any, key: str, job_id: str, how: Damage) -> bytes:
    """Spoil one entry. What it was."""
    was: bytes = client.hget(key, job_id)
    assert how(was) != was
    client.hset(key, job_id, how(was))
    return was


async def assert_dead_and_visible(store: RedisStore, url: str, job_id: str) -> None:
    """The job is a dead letter that says why, to programs and to people, and it can be removed."""
    job = await store.get(job_id)
    assert job is not None
    assert (job.id, job.state, job.queue) == (job_id, State.FAILED, "default")
    [told] = decode_history(job.failure_history)
    assert told.type == "UnreadableJob"
    assert JOBS in told.message
    assert ids(list((await store.find(JobQuery(states=(State.FAILED,)))).jobs)) == [job_id]
    assert job_id in ids(list((await store.find(JobQuery())).jobs))
    tally = await counts(store)
    assert (tally.ready, tally.in_flight, tally.failed) == (0, 0, 1)
    operators = f"{url}?namespace={NAMESPACE}"
    [listed] = records(await asyncio.to_thread(run, "dead", "list", "--json", store=operators))
    assert listed["id"] == job_id
    shown = await asyncio.to_thread(run, "dead", "show", job_id, "--payload", store=operators)
    assert "UnreadableJob" in shown.stdout
    assert await store.forget([job_id]) == 1
    assert await store.get(job_id) is None
    assert (await counts(store)).failed == 0


@pytest.mark.parametrize("how", RECORDS)
async def test_a_waiting_job_whose_record_is_spoilt(
    store: RedisStore, client: Any, redis_server: RedisServer, how: str
) -> None:
    first, spoilt, last = await inserted(store)
    damage(client, JOBS, spoilt, RECORDS[how])
    jobs = await claimed(store)
    assert ids(jobs) == [first, last]
    assert await settled(store, jobs, Succeeded(b"1")) == [Applied.APPLIED] * 2
    assert await claimed(store) == []
    await assert_dead_and_visible(store, redis_server.url, spoilt)


@pytest.mark.parametrize("how", ROWS)
async def test_a_job_that_came_back_and_whose_row_is_spoilt(
    store: RedisStore, client: Any, redis_server: RedisServer, how: str
) -> None:
    first, spoilt, last = await inserted(store)
    await settled(store, await claimed(store), Failed(failure()))
    damage(client, STATES, spoilt, lambda row: b"ready\t" + ROWS[how](row).removeprefix(b"ready\t"))
    jobs = await claimed(store)
    assert ids(jobs) == [first, last]
    assert [job.failures for job in jobs] == [1, 1]
    assert await settled(store, jobs, Succeeded(b"1")) == [Applied.APPLIED] * 2
    assert await claimed(store) == []
    await assert_dead_and_visible(store, redis_server.url, spoilt)


@pytest.mark.parametrize("meet", ["held", "lost"])
@pytest.mark.parametrize(
    ("key", "how"), [(JOBS, how) for how in RECORDS.values()] + [(STATES, how) for how in ROWS.values()]
)
async def test_a_job_in_flight_that_is_spoilt(
    store: RedisStore, client: Any, redis_server: RedisServer, meet: str, key: str, how: Damage
) -> None:
    first, spoilt, last = await inserted(store)
    jobs = await claimed(store)
    if how is ROWS["cut in what moves wrote"]:
        await settled(store, jobs, Failed(failure()))
        jobs = await claimed(store)
    damage(client, key, spoilt, how)
    if meet == "held":
        assert ids(await store.held("s")) == [first, last]
        outcome: Outcome = Succeeded(b"1")
    else:
        await store.close_session("s")
        assert ids(await store.lost(10)) == [first, last]
        outcome = Lost(failure())
    assert await settled(store, [jobs[0], jobs[2]], outcome) == [Applied.APPLIED] * 2
    if meet == "lost":
        await store.open_session(Session(id="other", queues=("default",)))
        assert sorted(ids(await claimed(store, "other"))) == sorted([first, last])
        await settled(store, await store.held("other"), Succeeded(b"1"))
        assert await store.lost(10) == []
    else:
        assert (await store.beat("s")).held == 0
    await assert_dead_and_visible(store, redis_server.url, spoilt)


@pytest.mark.parametrize("how", [how for name, how in ROWS.items() if name != "cut in what moves wrote"])
async def test_a_batch_of_moves_with_one_whose_row_is_spoilt(store: RedisStore, client: Any, how: Damage) -> None:
    await inserted(store)
    jobs = await claimed(store)
    damage(client, STATES, jobs[1].id, how)
    answers = await settled(store, jobs, Succeeded(b"1"))
    assert answers == [Applied.APPLIED, Applied.GONE, Applied.APPLIED]
    assert (await counts(store)).succeeded == 2
    assert (await store.note(jobs[1].lease, b"1")) is Applied.STALE
    assert [answer.value for answer in await store.request_cancel([jobs[1].id])] == ["gone"]


async def test_a_state_that_this_version_does_not_know(store: RedisStore, client: Any) -> None:
    """As a newer version might write it: nobody touches the job, it can be seen, the others go on."""
    first, unknown, last = await inserted(store)
    await settled(store, await claimed(store), Failed(failure()))
    damage(client, STATES, unknown, lambda row: b"asleep" + row.removeprefix(b"ready"))
    row = client.hget(STATES, unknown)
    jobs = await claimed(store)
    assert ids(jobs) == [first, last]
    assert await settled(store, jobs, Succeeded(b"1")) == [Applied.APPLIED] * 2
    assert await claimed(store) == []
    seen = await store.get(unknown)
    assert seen is not None
    assert decode_history(seen.failure_history)[0].type == "UnreadableJob"
    assert unknown in ids(list((await store.find(JobQuery())).jobs))
    assert client.hget(STATES, unknown) == row


async def test_a_reason_that_this_version_does_not_know(store: RedisStore, client: Any) -> None:
    [job_id] = await inserted(store, 1)
    await settled(store, await claimed(store), Failed(failure()))
    damage(client, STATES, job_id, lambda row: row.replace(b"\tretried\t", b"\tbored\t"))
    [job] = await claimed(store)
    assert job.failures == 1


async def test_an_entry_of_a_list_without_a_record(store: RedisStore, client: Any) -> None:
    first, gone, last = await inserted(store)
    client.hdel(JOBS, gone)
    jobs = await claimed(store)
    assert ids(jobs) == [first, last]
    answer = await store.claim(ClaimRequest(session_id="s", queues=("default",), limit=10))
    assert (answer.jobs, answer.due_in) == ((), None)
    assert await store.get(gone) is None
    assert ids(list((await store.find(JobQuery())).jobs)) == [last, first]


async def test_an_entry_of_a_list_that_is_no_id(store: RedisStore, client: Any) -> None:
    first, last = await inserted(store, 2)
    client.lpush(f"{NAMESPACE}:{{default}}:ready:5", b"\xff\x00", "")
    client.zadd(f"{NAMESPACE}:{{default}}:later", {b"no tab": 0, b"\xff\t5\t": 0})
    assert ids(await claimed(store)) == [first, last]
    assert await claimed(store) == []


async def test_a_job_in_flight_without_a_record(store: RedisStore, client: Any, redis_server: RedisServer) -> None:
    first, gone, last = await inserted(store)
    jobs = await claimed(store)
    client.hdel(JOBS, gone)
    assert ids(await store.held("s")) == [first, last]
    assert await settled(store, [jobs[0], jobs[2]], Succeeded(b"1")) == [Applied.APPLIED] * 2
    await assert_dead_and_visible(store, redis_server.url, gone)


async def test_an_entry_of_a_processing_hash_without_a_row(store: RedisStore, client: Any) -> None:
    await inserted(store)
    jobs = await claimed(store)
    client.hset(f"{NAMESPACE}:{{default}}:processing:s", "ghost", 1)
    assert ids(await store.held("s")) == ids(jobs)
    await store.close_session("s")
    assert ids(await store.lost(10)) == ids(jobs)
    assert await settled(store, jobs, Lost(failure())) == [Applied.APPLIED] * 3
    assert await store.lost(10) == []


async def test_a_dead_letter_that_was_repaired_is_replayed(store: RedisStore, client: Any) -> None:
    [job_id] = await inserted(store, 1)
    was = damage(client, JOBS, job_id, RECORDS["garbage"])
    assert await claimed(store) == []
    dead = await store.get(job_id)
    assert dead is not None
    assert await store.apply([replay(dead)]) == [Applied.APPLIED]
    assert await claimed(store) == []  # it is as unreadable as before
    client.hset(JOBS, job_id, was)
    dead = await store.get(job_id)
    assert dead is not None
    assert dead.state is State.FAILED
    assert await store.apply([replay(dead)]) == [Applied.APPLIED]
    [job] = await claimed(store)
    assert (job.id, job.payload) == (job_id, b"{}")


async def test_a_key_of_another_kind(store: RedisStore, client: Any) -> None:
    """A script that stops in the middle has written something: nobody may be told that nothing was."""
    client.set(f"{NAMESPACE}:{{default}}:lanes", "a text")
    with pytest.raises(OutcomeUnknown, match="does another program use it"):
        await inserted(store)
    client.delete(f"{NAMESPACE}:{{default}}:jobs", f"{NAMESPACE}:{{default}}:lanes")
    client.set(f"{NAMESPACE}:{{default}}:jobs", "a text")
    with pytest.raises(StoreUnavailable, match="does another program use it"):
        await store.get(SYSTEM.ids.job_id())


async def test_a_session_that_is_spoilt_does_not_hide_the_others(store: RedisStore, client: Any) -> None:
    await inserted(store)
    jobs = await claimed(store)
    for number, fields in enumerate(({"junk": "1"}, {"open": "1", "beat": "x", "host": b"\xff"}, {"open": "0"})):
        client.sadd(f"{NAMESPACE}:sessions", f"spoilt-{number}")
        client.hset(f"{NAMESPACE}:session:spoilt-{number}", mapping=fields)
    client.sadd(f"{NAMESPACE}:sessions", "nothing")
    assert {view.id for view in await all_sessions(store)} == {"s", "spoilt-0", "spoilt-1", "spoilt-2"}
    assert (await store.beat("s")).held == 3
    await store.prune(10)
    assert await store.close_session("s")
    assert ids(await store.lost(10)) == ids(jobs)


async def test_what_is_in_an_outbox_and_is_no_job_stays_there(store: RedisStore, client: Any) -> None:
    outbox = f"{NAMESPACE}:{{default}}:outbox"
    client.hset(outbox, "junk", b"\xff\x00")
    await inserted(store, 1)
    [job] = await claimed(store)
    follower = NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", queue="other")
    move = msgspec.structs.replace(settle(job, Succeeded(b"1"), POLICY, SYSTEM.random), then=(follower,))
    assert await store.apply([move]) == [Applied.APPLIED]
    assert (await store.get(follower.id)) is not None
    assert client.hkeys(outbox) == [b"junk"]
    await store.prune(10)
