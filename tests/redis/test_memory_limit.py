"""A server without memory takes no new jobs, loudly; everything that lets workers catch up goes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Holdfast
from holdfast.errors import StoreError, StoreUnavailable, UnsafeStore
from holdfast.job import Job, NewJob, State
from holdfast.lifecycle import Applied, Failed, Lost, Outcome, Released, Snoozed, Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import CancelAnswer, ClaimRequest, JobQuery, QueueCounts, Session
from holdfast.stores.redis import RedisStore, scripts
from holdfast.testing.suite.harness import BOOM
from tests.postgres.helpers import claim, new_job, new_jobs
from tests.redis.fake import FORWARD, FakeServer, text
from tests.redis.helpers import outside, store_at, with_clock
from tests.servers import RedisServer, missing_server_policy

LATER = "local clock = redis.call('TIME')\nlocal now = clock[1] * 1000000 + clock[2] + 30 * 86400 * 1000000\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    server.ask("FLUSHALL")
    async with store_at(server.url) as store:
        await store.open_session(Session(id="s", queues=("default",)))
        yield store


@contextmanager
def no_memory(server: RedisServer) -> Iterator[None]:
    """While the server has more in memory than it may have."""
    server.ask("CONFIG", "SET", "maxmemory", "1")
    try:
        yield
    finally:
        server.ask("CONFIG", "SET", "maxmemory", "0")


def told(caught: pytest.ExceptionInfo[StoreUnavailable]) -> str:
    message = str(caught.value)
    assert "OOM command not allowed" in message
    assert "it has reached its maxmemory: raise it, or let workers catch up. Nothing was written" in message
    assert "4242" not in message
    return message


async def take(store: RedisStore, count: int) -> list[Job]:
    jobs = await claim(store, "s", count)
    assert len(jobs) == count
    return list(jobs)


async def moved(store: RedisStore, job: Job, outcome: Outcome, then: tuple[NewJob, ...] = ()) -> Applied:
    move = settle(job, outcome, RetryPolicy(), SYSTEM.random)
    [answer] = await store.apply([replace(move, then=then)])
    return answer


async def consistent(store: RedisStore) -> QueueCounts:
    """The tallies, which are what the jobs themselves say."""
    [counts] = await store.counts()
    page = await store.find(JobQuery(limit=1000))
    assert page.next is None
    by_state = {state: sum(job.state is state for job in page.jobs) for state in State}
    assert by_state[State.READY] == counts.ready + counts.scheduled
    for state in (State.IN_FLIGHT, State.SUCCEEDED, State.FAILED, State.CANCELLED):
        assert by_state[state] == getattr(counts, state.value)
    return counts


@pytest.mark.parametrize("known", [False, True])
async def test_new_jobs_are_refused_loudly(server: RedisServer, store: RedisStore, known: bool) -> None:
    if known:
        await store.insert([new_job()])
    before = outside(server.url).hlen("holdfast:{default}:jobs")
    with no_memory(server):
        for jobs in (new_jobs(1, payload=b'{"card":4242}'), new_jobs(250), [new_job(queue="b"), new_job(queue="c")]):
            with pytest.raises(StoreUnavailable) as caught:
                await store.insert(jobs)
            told(caught)
            with pytest.raises(StoreUnavailable) as caught:
                await asyncio.to_thread(store.insert_blocking, jobs)
            told(caught)
    assert outside(server.url).hlen("holdfast:{default}:jobs") == before
    await store.insert(new_jobs(250))
    assert (await consistent(store)).ready == before + 250


def test_as_an_application_sees_it(server: RedisServer) -> None:
    server.ask("FLUSHALL")
    app = Holdfast(server.url)

    @app.task
    def pay(card: str) -> None: ...

    app.open()
    with no_memory(server):
        with pytest.raises(StoreUnavailable) as caught:
            pay.enqueue("4242")
        told(caught)
        with pytest.raises(StoreUnavailable) as caught:
            app.enqueue_many([pay.job("4242")] * 3)
        told(caught)
    pay.enqueue("4242")
    app.close()

    async def main() -> None:
        with no_memory(server):
            with pytest.raises(StoreUnavailable) as caught:
                await pay.aenqueue("4242")
            told(caught)
            with pytest.raises(StoreUnavailable) as caught:
                await app.aenqueue_many([pay.job("4242")] * 3)
            told(caught)
        await app.aclose()

    asyncio.run(main())


async def test_everything_else_goes_on(server: RedisServer, store: RedisStore) -> None:
    """One verb after the other, with jobs that came at once, later, and back."""
    await store.insert([*new_jobs(30, share="a"), *new_jobs(10, delay=1, share="b"), new_job(retention=0)])
    waiting = new_jobs(3, queue="still")
    await store.insert([*waiting, *new_jobs(5, queue="other")])
    dead = (await take(store, 1))[0]
    await moved(store, dead, Failed(BOOM, permanent=True))
    forgotten = (await take(store, 1))[0]
    await moved(store, forgotten, Succeeded())
    held = await take(store, 1)
    with no_memory(server):
        jobs = await take(store, 15)
        assert await moved(store, jobs[0], Succeeded(b"x" * 1000)) == "applied"
        assert await moved(store, jobs[1], Failed(BOOM)) == "applied"
        assert await moved(store, jobs[2], Released()) == "applied"
        assert await moved(store, jobs[3], Failed(BOOM, permanent=True)) == "applied"
        assert await moved(store, jobs[4], Snoozed(1000, BOOM)) == "applied"
        assert await moved(store, jobs[5], Succeeded(), (new_job(), new_job(queue="elsewhere"))) == "applied"
        assert await store.request_cancel([waiting[0].id, jobs[6].id]) == [CancelAnswer.CANCELLED, CancelAnswer.ASKED]
        beat = await store.beat("s")
        assert (beat.open, beat.cancel) == (True, (jobs[6].id,))
        failed = await store.get(dead.id)
        assert failed is not None
        assert await store.apply([replay(failed)]) == ["applied"]
        assert await store.forget([forgotten.id]) == 1
        # A queue that this session has not claimed from before.
        other = await store.claim(ClaimRequest(session_id="s", queues=("other",), limit=5))
        assert len(other.jobs) == 5
        # A worker that was just started, in a process of its own.
        async with store_at(server.url) as second:
            await second.open_session(Session(id="new", queues=("default", "other", "never seen")))
            assert len(await claim(second, "new", 3)) == 3
            await second.set_paused("default", True)
            await second.set_paused("unknown", True)
            assert {each.queue: each.paused for each in await second.counts()}["default"]
            await second.set_paused("default", False)
            await second.set_paused("unknown", False)
            # It dies, and a keeper brings its jobs back.
            assert await second.close_session("new")
            assert not (await second.beat("new")).open
            lost = await second.lost(100)
            assert len(lost) == 3
            answers = await second.apply([settle(each, Lost(BOOM), RetryPolicy(), SYSTEM.random) for each in lost])
            assert set(answers) == {"applied"}
        await store.set_paused("default", True)
        assert await claim(store, "s") == ()
        await store.set_paused("default", False)
        assert await moved(store, held[0], Succeeded()) == "applied"
        # A month later, with a job for another queue that could not be delivered.
        old = with_clock(store_at(server.url), LATER)
        assert await old.prune(100) >= 3
        old.close()
        with pytest.raises(StoreUnavailable):
            await store.insert([new_job()])
        rest = await store.held("s")
        answers = await store.apply([settle(job, Succeeded(), RetryPolicy(), SYSTEM.random) for job in rest])
        assert set(answers) == {"applied"}
        assert await store.close_session("s")
    # With memory again, what could not be delivered is.
    await store.prune(1)
    assert {each.queue: each.ready for each in await store.counts()}["elsewhere"] == 1
    await all_consistent(store)


async def all_consistent(store: RedisStore) -> None:
    """The tallies of every queue are what its jobs say, and everything that waits can be claimed."""
    await store.open_session(Session(id="last", queues=("default",)))
    for counts in await store.counts():
        page = await store.find(JobQuery(limit=1000, queue=counts.queue))
        states = [job.state for job in page.jobs]
        assert states.count(State.READY) == counts.ready + counts.scheduled, counts
        for state in (State.IN_FLIGHT, State.SUCCEEDED, State.FAILED, State.CANCELLED):
            assert states.count(state) == getattr(counts, state.value), counts
        claimed = await store.claim(ClaimRequest(session_id="last", queues=(counts.queue,), limit=1000))
        assert len(claimed.jobs) == counts.ready


@pytest.mark.parametrize("name", ["moves", "pause", "forget", "prune", "beat", "root", "part", "epoch", "enter"])
async def test_without_the_first_write_it_would_not(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The negative control: each script that makes a harmless write first needs it, or only removes."""
    piece = scripts._piece

    def without(wanted: str) -> str:
        text = piece(wanted)
        if wanted != name:
            return text
        lines = text.splitlines()
        at = next(number for number, line in enumerate(lines) if line.startswith("redis.call(") and ", ''" in line)
        return "\n".join([*lines[:at], *lines[at + 1 :]])

    monkeypatch.setattr(scripts, "_piece", without)
    server.ask("FLUSHALL")
    store = store_at(server.url)
    await store.open_session(Session(id="s", queues=("default",)))
    if name in ("forget", "prune"):
        await test_everything_else_goes_on(server, store)
    else:
        with pytest.raises(StoreError, match="OOM"):
            await test_everything_else_goes_on(server, store)
    store.close()


def test_every_script_that_writes_is_one_of_them() -> None:
    """A new script that writes must say how it does without memory."""
    removes_first = {"claim"}  # LPOP or ZREM come before what needs memory
    refused = {"insert", "put", "note"}  # new jobs, and what a handler says of its progress
    for name, script in scripts.load_scripts().items():
        grows = any(
            f"'{word}'" in script.text for word in ("HSET", "SADD", "ZADD", "RPUSH", "SET", "HINCRBY", "HSETNX")
        )
        first = any(f"redis.call('{word}', " in script.text and ", '')" in script.text for word in ("HDEL", "SREM"))
        assert grows <= (first or name in removes_first | refused), name


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-lru", "allkeys-random", "volatile-ttl"])
async def test_a_server_that_may_throw_jobs_away_is_refused(server: RedisServer, policy: str) -> None:
    """Field bug B21. Sidekiq (#2883), BullMQ (#2215), RQ (#1280): a Redis that evicts keys when memory is short dropped
    jobs and locks without a word. Here such a server is refused at the first call, and again; without the look at its
    policy the insert would succeed.
    """
    server.ask("FLUSHALL")
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)
    try:
        store = store_at(server.url)
        for _ in range(2):
            with pytest.raises(
                UnsafeStore, match=f"maxmemory-policy {policy}: .* CONFIG SET maxmemory-policy noeviction"
            ):
                await store.insert([new_job()])
        with pytest.raises(UnsafeStore, match=policy):
            await asyncio.to_thread(store.open_blocking)
        store.close()
    finally:
        server.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    assert server.ask("DBSIZE") == 0


async def test_an_old_server_is_refused(server: RedisServer) -> None:
    def answer(words: list[bytes]) -> Any:
        return text(b"# Server\r\nredis_version:6.0.16\r\n") if words[0] == b"INFO" else FORWARD

    server.ask("FLUSHALL")
    with FakeServer(answer, behind=server.port) as fake:
        store = store_at(fake.url)
        with pytest.raises(UnsafeStore, match=r"is Redis 6\.0\.16: it takes 6\.2 or newer"):
            await store.insert([new_job()])
        store.close()
    assert server.ask("DBSIZE") == 0
