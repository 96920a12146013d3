"""Lanes on Redis, where it gets difficult: clocks that are set back, jobs that come back, shares that come and go."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.config import Settings
from holdfast.errors import InvalidOption
from holdfast.job import Job, JobId, State
from holdfast.lifecycle import Outcome, Released, Succeeded, replay
from holdfast.ports import SYSTEM
from holdfast.store import CancelAnswer, JobQuery, Session
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.dispatch import Batch
from holdfast.stores.redis.layout import Layout, Names
from holdfast.testing.suite import Rig
from tests.redis.conftest import NAMESPACE
from tests.redis.helpers import empty, outside, store_at, with_clock
from tests.servers import RedisServer

NOON = 1_800_000_000_000_000
HOUR = 3600 * 1_000_000


@pytest.fixture
def client(redis_server: RedisServer) -> Any:
    return outside(redis_server.url)


def at(rig: Rig, moment: int) -> None:
    """Let it be that time on the server."""
    assert isinstance(rig.store, RedisStore)
    with_clock(rig.store, f"local now = {moment}\n")


async def session_in(rig: Rig, *queues: str) -> str:
    session_id = SYSTEM.ids.session_id()
    await rig.store.open_session(Session(id=session_id, queues=queues))
    return session_id


# A clock that is set back.


@pytest.mark.parametrize("back", [20_000, HOUR], ids=["20-ms", "an-hour"])
async def test_jobs_in_line_are_claimable_at_once_after_the_clock_was_set_back(rig: Rig, back: int) -> None:
    at(rig, NOON)
    session = await rig.session()
    ids = await rig.add_many(3)
    at(rig, NOON - back)
    assert await rig.claim_ids(session) == ids
    [counts] = await rig.store.counts()
    assert (counts.ready, counts.in_flight) == (0, 3)


@pytest.mark.parametrize("back", [20_000, HOUR], ids=["20-ms", "an-hour"])
async def test_a_clock_that_was_set_back_loses_nothing_where_some_came_back(rig: Rig, back: int) -> None:
    at(rig, NOON)
    session = await rig.session()
    ids = await rig.add_many(4)
    at(rig, NOON + 1)
    given_back = await rig.claim(session, 2)
    await rig.add(delay=1)
    for job in given_back:
        await rig.release(job)
    at(rig, NOON + 2)
    await rig.release(await rig.take(session))  # so that the others are lined up with those of the list
    at(rig, NOON - back)
    early = await rig.claim_ids(session)
    assert set(ids[2:]) <= set(early)
    at(rig, NOON + 3)
    late = await rig.claim_ids(session)
    assert len({*early, *late}) == len(early) + len(late) == 5


# Cancelled while in line, and replayed.


async def lined_up(rig: Rig, session: str, priority: int = 9) -> JobId:
    """A job that was delayed and stands in its lane's `due` set: it was due when a more urgent one was claimed."""
    job_id = await rig.add(priority=priority, delay=rig.steps(1))
    urgent = await rig.add(priority=1)
    await rig.wait(2)
    assert await rig.claim_ids(session, 1) == [urgent]
    return job_id


async def test_a_job_that_is_cancelled_after_its_delay_and_replayed_is_claimable(rig: Rig) -> None:
    session = await rig.session()
    job_id = await lined_up(rig, session)
    assert await rig.store.request_cancel([job_id]) == [CancelAnswer.CANCELLED]
    await rig.replay(job_id)
    urgent = await rig.add(priority=1)
    await rig.wait(1)
    assert await rig.claim_ids(session, 1) == [urgent]
    assert await rig.claim_ids(session) == [job_id]
    assert await rig.claim_ids(session) == []


async def test_a_job_that_was_forgotten_after_its_delay_and_is_sent_again_is_not_early_nor_in_the_way(rig: Rig) -> None:
    session = await rig.session()
    job_id = await lined_up(rig, session)
    await rig.store.request_cancel([job_id])
    assert await rig.store.forget([job_id]) == 1
    await rig.store.insert([rig.new(id=job_id, priority=9, delay=rig.steps(50))])
    other = await rig.add(priority=9)
    assert await rig.claim_ids(session, 1) == [other]
    assert await rig.claim_ids(session) == []
    await rig.wait(51)
    assert await rig.claim_ids(session) == [job_id]
    assert await rig.claim_ids(session) == []


class _Chance:
    """What producers, workers and operators do to one queue, by chance, with a clock of their own."""

    def __init__(self, rig: Rig, seed: int, *, forget: bool, back: bool) -> None:
        self.rig = rig
        self.random = random.Random(seed)
        self.queue = f"chance-{seed}"
        self.forget = forget
        self.ticks = [0, 0, 1, 1, 5, 50, -20] if back else [0, 0, 1, 1, 5, 50]
        self.session = ""
        self.now = NOON
        self.ids: list[JobId] = []
        self.held: list[Job] = []

    def tick(self, microseconds: int) -> None:
        self.now += microseconds
        at(self.rig, self.now)

    def new(self, **fields: Any) -> Any:
        return self.rig.new(queue=self.queue, **fields)

    async def insert(self) -> None:
        new = [
            self.new(
                id=str(uuid.UUID(int=self.random.getrandbits(128), version=4)),
                priority=self.random.choice([1, 5, 9]),
                share=self.random.choice(["", "a"]),
                delay=self.random.choice([0, 0, 1, 30]),
            )
            for _ in range(self.random.randint(1, 3))
        ]
        self.ids += [job.id for job in new]
        await self.rig.store.insert(new)

    async def claim(self, limit: int | None = None) -> int:
        limit = limit or self.random.choice([1, 1, 2, 5])
        jobs = await self.rig.claim(self.session, limit, queues=[self.queue], turn=self.random.randint(0, 40))
        self.held += jobs
        return len(jobs)

    async def settle(self) -> None:
        if self.held:
            job = self.held.pop(self.random.randrange(len(self.held)))
            outcomes: list[Outcome] = [Succeeded(), Released()]
            await self.rig.settle(job, self.random.choice(outcomes))

    async def cancel(self) -> None:
        await self.rig.store.request_cancel(self.some())

    async def replay(self) -> None:
        for job_id in self.some():
            job = await self.rig.get(job_id)
            if job.state in (State.CANCELLED, State.SUCCEEDED):
                await self.rig.apply(replay(job))

    async def send_again(self) -> None:
        for job_id in self.some()[:1] if self.forget else ():
            if await self.rig.store.forget([job_id]):
                again = self.new(id=job_id, priority=self.random.choice([1, 5]), delay=self.random.choice([0, 20]))
                await self.rig.store.insert([again])

    async def prune(self) -> None:
        await self.rig.store.prune(100)

    def some(self) -> list[JobId]:
        return self.random.sample(self.ids, min(3, len(self.ids)))

    async def run(self, steps: int) -> None:
        self.tick(1)
        self.session = await session_in(self.rig, self.queue)
        verbs: dict[Callable[[], Awaitable[object]], int] = {
            self.insert: 30,
            self.claim: 20,
            self.settle: 10,
            self.cancel: 15,
            self.replay: 15,
            self.send_again: 10,
            self.prune: 3,
        }
        for _ in range(steps):
            self.tick(self.random.choice(self.ticks))
            [verb] = self.random.choices([*verbs], [*verbs.values()])
            await verb()
        self.tick(1000)
        while await self.claim(3):
            pass

    async def stuck(self) -> int:
        """How many jobs are ready although nothing can be claimed any more. The counts are right in any case."""
        page = await self.rig.store.find(JobQuery(queue=self.queue, limit=1000))
        states = Counter(job.state for job in page.jobs)
        [counts] = [counts for counts in await self.rig.store.counts() if counts.queue == self.queue]
        assert (counts.in_flight, counts.succeeded, counts.cancelled) == (
            states[State.IN_FLIGHT],
            states[State.SUCCEEDED],
            states[State.CANCELLED],
        )
        assert counts.ready + counts.scheduled == states[State.READY]
        return states[State.READY]


@pytest.mark.parametrize(
    ("forget", "back"),
    [(False, False), (True, False), (True, True)],
    ids=["plain", "ids-used-again", "ids-used-again-and-a-clock-set-back"],
)
async def test_whatever_is_done_to_jobs_in_line_nothing_gets_stuck(rig: Rig, forget: bool, back: bool) -> None:
    stuck = {}
    for seed in range(10):
        chance = _Chance(rig, seed, forget=forget, back=back)
        await chance.run(120)
        stuck[seed] = await chance.stuck()
    assert not any(stuck.values()), f"by seed: {stuck}"


# Shares that come and go.


async def test_a_claim_gets_jobs_although_new_shares_keep_coming(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await session_in(rig, "default")
    assert isinstance(rig.store, RedisStore)
    connections = rig.store._connections
    execute = connections.execute
    asked = 0
    async with rig.harness.second() as other:
        producer = rig.using(other)

        async def after_another_share(batch: Batch) -> list[Any]:
            nonlocal asked
            asked += 1
            await producer.add(share=f"new-{asked}")
            return await execute(batch)

        for first in range(0, 300, 100):
            await other.insert([rig.new(share=f"share-{number}") for number in range(first, first + 100)])
        monkeypatch.setattr(connections, "execute", after_another_share)
        for _ in range(3):
            asked = 0
            async with asyncio.timeout(5):
                assert len(await rig.claim(session, 10)) == 10
            assert asked <= 3


async def test_shares_that_are_gone_are_named_no_more(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await session_in(rig, "default")
    for first in range(0, 1000, 500):
        await rig.store.insert([rig.new(share=f"share-{number}") for number in range(first, first + 500)])
    while await rig.claim(session, 1000):
        pass
    assert isinstance(rig.store, RedisStore)
    connections = rig.store._connections
    execute = connections.execute
    words = [0]

    async def counted(batch: Batch) -> list[Any]:
        words.append(max(len(call.command) for call in batch.calls))
        return await execute(batch)

    monkeypatch.setattr(connections, "execute", counted)
    for _ in range(100):
        assert await rig.claim(session, 10) == []
    assert words[-1] < 100
    job_id = await rig.add(share="share-7")
    assert await rig.claim_ids(session, 10) == [job_id]


# What is left behind.


async def test_a_lane_of_which_every_job_was_cancelled_leaves_nothing_behind(rig: Rig, client: Any) -> None:
    session = await session_in(rig, "default")
    delayed = await lined_up(rig, session)
    ids = [delayed, *await rig.add_many(5, share="s"), *await rig.add_many(5)]
    assert set(await rig.store.request_cancel(ids)) == {CancelAnswer.CANCELLED}
    await rig.store.prune(100)
    for kind in ("ready", "due"):
        assert list(client.scan_iter(match=f"{NAMESPACE}:{{default}}:{kind}:*")) == []
    for job_id in ids:
        await rig.replay(job_id)
    await rig.wait(1)
    assert sorted(await rig.claim_ids(session)) == sorted(ids)


# Names.


def test_no_two_lanes_have_the_same_list() -> None:
    layout = Layout("h", Names())
    lanes = [f"{priority}\t{share}" for priority in (5, 6) for share in ("", "{queue}", "{q}", "a", "a:b", "%s", "{}")]
    for keys in (layout.ready, layout.due):
        assert len({keys("q", lane) for lane in lanes}) == len(lanes)


async def test_names_by_which_two_lanes_would_share_a_list_are_refused(redis_server: RedisServer) -> None:
    settings = Settings.parse({"redis": {"queues": {"5": "colliding:{queue}", "6": "colliding:{queue}:a"}}})
    try:
        with pytest.raises(InvalidOption, match="colliding"):
            async with store_at(f"{redis_server.url}?namespace=colliding", settings=settings):
                pass
    finally:
        empty(redis_server.url, "colliding")
