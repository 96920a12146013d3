"""Where a claim looks: new lanes, look-backs and what they cost."""

from __future__ import annotations

import asyncio
from itertools import groupby, pairwise
from typing import Any

import pytest

from holdfast.job import Job, NewJob, enqueued
from holdfast.lanes import Lane
from holdfast.ports import MICROSECONDS, SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.lookback import LookBack
from holdfast.testing import ManualClock
from tests.servers import PostgresServer
from tests.store.harnesses import empty_postgres

REQUEST = ClaimRequest(session_id="s", queues=("default",), limit=10)
EVERYTHING = 3


def job(run_at: int, **fields: object) -> Job:
    new = NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", run_at=run_at, **fields)  # type: ignore[arg-type]
    return enqueued(new, 0)


class Scene:
    """A look-back on a clock of the test's own."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.look = LookBack(self.clock)
        self.look.learn(["default"], [("default", 5, "")])

    def claim(self, seconds: float, jobs: int, run_at: int = 0, limit: int = 10) -> int:
        """A claim that takes that long and finds that many. How deep it looked."""
        plan = self.look.plan(REQUEST, exactly=True)
        self.clock.advance(seconds)
        self.look.again(plan, [job(run_at + n) for n in range(jobs)], limit)
        return plan.depth

    def since(self) -> int:
        plan = self.look.plan(REQUEST, exactly=True)
        since: int = plan.lanes[0]["since"]
        return since


class Raced(LookBack):
    """Whenever it looks what jobs had in common, another thread forgets it a moment later."""

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name == "_same" and found is not None:
            self._same = None
        return found


def test_another_thread_may_forget_what_jobs_had_in_common() -> None:
    look = Raced(ManualClock())
    look.learn(["default"], [("default", 5, "")])
    options = ("t", "1", 3, 60, None)
    look.again(look.plan(REQUEST, exactly=True), [job(0)], 10, options)
    assert [look.plan(REQUEST, exactly=True).same for _ in range(2)] == [options, None]


def test_a_claimer_that_finds_too_little_looks_at_everything() -> None:
    scene = Scene()
    assert [scene.claim(0.001, 3) for _ in range(20)] == [EVERYTHING] * 20


def test_a_busy_claimer_goes_on_where_it_ended() -> None:
    scene = Scene()
    start = 1_000 * MICROSECONDS
    scene.claim(0.001, 10, start)
    assert {scene.claim(0.001, 10, start + 100) for _ in range(20)} == {0}
    assert scene.since() == start + 109


def test_a_busy_claimer_looks_back_now_and_then() -> None:
    scene = Scene()
    depths = [scene.claim(0.01, 10, 1_000 * MICROSECONDS) for _ in range(500)]
    assert EVERYTHING in depths[10:]
    assert depths.count(0) > 400


def test_dear_looks_are_rare_and_their_share_is_bounded() -> None:
    """As under a held snapshot: looking at everything takes half a second, going on ten milliseconds."""
    scene = Scene()
    spent = dict.fromkeys(range(4), 0.0)
    began = scene.clock.monotonic()
    while scene.clock.monotonic() - began < 300:
        plan = scene.look.plan(REQUEST, exactly=True)
        took = {0: 0.01, 1: 0.03, 2: 0.2, 3: 0.3}[plan.depth]
        scene.clock.advance(took)
        spent[plan.depth] += took
        scene.look.again(plan, [job(1_000 * MICROSECONDS) for _ in range(10)], 10)
    assert spent[3] > 0
    assert spent[1] + spent[2] + spent[3] < 0.1 * sum(spent.values())


def test_one_stall_does_not_blind() -> None:
    """A claim that waited nine seconds for something else says nothing about what looking costs."""
    scene = Scene()
    scene.claim(0.001, 0)
    scene.claim(9.0, 0)
    assert scene.claim(0.001, 0) == EVERYTHING


def test_a_slow_machine_is_no_reason_to_look_at_less() -> None:
    """Every claim takes long, however little it looks at: nothing piles up, and what comes back is wanted at once."""
    scene = Scene()
    depths = [scene.claim(0.3, 0) for _ in range(100)]
    assert depths.count(EVERYTHING) > 40
    assert max(len(list(run)) for deep, run in groupby(depths, EVERYTHING.__eq__) if not deep) < 10


def test_a_hungry_claimer_looks_seldom_at_what_piles_up() -> None:
    """The control: looking at everything takes long, and going on does not."""
    scene = Scene()
    began, deep = scene.clock.monotonic(), 0.0
    while scene.clock.monotonic() - began < 300:
        plan = scene.look.plan(REQUEST, exactly=True)
        took = 0.3 if plan.depth == EVERYTHING else 0.01
        deep += 0.3 if plan.depth == EVERYTHING else 0.0
        scene.clock.advance(took)
        scene.look.again(plan, [], 10)
    assert 0 < deep < 15


def test_what_was_slow_once_does_not_hide_what_piles_up_later() -> None:
    scene = Scene()
    for _ in range(50):
        scene.claim(0.3, 0)
    deep = 0.0
    for _ in range(1000):
        plan = scene.look.plan(REQUEST, exactly=True)
        took = 0.5 if plan.depth == EVERYTHING else 0.01
        deep += 0.5 if plan.depth == EVERYTHING else 0.0
        scene.clock.advance(took)
        scene.look.again(plan, [], 10)
    assert deep < 15


def test_however_dear_everything_is_looked_at_within_half_a_minute() -> None:
    scene = Scene()
    looked = []
    while scene.clock.monotonic() < 200:
        if scene.claim(2.0, 10, 1_000 * MICROSECONDS) == EVERYTHING:
            looked.append(scene.clock.monotonic())
    assert max(later - earlier for earlier, later in pairwise(looked)) < 30


def test_jobs_that_come_back_to_their_place_are_looked_for() -> None:
    scene = Scene()
    scene.claim(0.001, 10, 1_000 * MICROSECONDS)
    assert scene.since() > 0
    scene.look.forget_place({"default"})
    assert scene.since() == 0


def dear_look(back: int) -> Scene:
    """A busy claimer that has passed the place `back`, and for whom a look at everything is dear."""
    scene = Scene()
    for _ in range(40):
        scene.claim(1.0 if scene.look.plan(REQUEST, exactly=True).depth else 0.01, 10, back + 100)
    assert scene.claim(0.01, 10, back + 100) == 0
    return scene


def test_however_dear_looks_are_what_came_back_is_looked_for_at_once_and_followed() -> None:
    back = 1_000 * MICROSECONDS
    scene = dear_look(back)
    scene.clock.advance(2.0)
    scene.look.forget_place({"default"})
    assert scene.claim(1.0, 10, back) == EVERYTHING
    assert scene.since() == back + 9  # there may be more that came back, and did not fit into one claim


def test_of_another_queue_it_is_not() -> None:
    back = 1_000 * MICROSECONDS
    scene = dear_look(back)
    scene.clock.advance(2.0)
    scene.look.forget_place({"another"})
    scene.claim(1.0, 10, back)
    assert scene.since() == back + 109


def test_what_comes_back_while_a_claim_is_on_its_way_is_looked_for_by_the_next() -> None:
    """The claim may have passed that place before."""
    back = 1_000 * MICROSECONDS
    scene = dear_look(back)
    scene.clock.advance(2.0)
    scene.look.forget_place({"default"})
    early = scene.look.plan(REQUEST, exactly=True)
    scene.look.forget_place({"default"})
    scene.clock.advance(0.01)
    scene.look.again(early, [job(back + 200)] * 10, 10)
    assert scene.look.due_in(early, None) is not None
    assert scene.claim(0.01, 10, back) == EVERYTHING
    assert scene.since() == back + 9


def test_jobs_that_come_back_all_the_time_leave_time_for_others() -> None:
    scene = dear_look(1_000 * MICROSECONDS)
    spent = {True: 0.0, False: 0.0}
    for _ in range(1000):
        scene.look.forget_place(None)
        took = 1.0 if scene.look.plan(REQUEST, exactly=True).depth == EVERYTHING else 0.01
        spent[scene.claim(took, 10, 1_000 * MICROSECONDS) == EVERYTHING] += took
    assert 0 < spent[True] < 2 * spent[False]


def test_many_lanes_are_learned_again_after_a_while() -> None:
    """Shares that are empty for good must not be asked for ever."""
    scene = Scene()
    scene.look.learn(["default"], [("default", 5, f"s{n:02}") for n in range(50)])
    assert len(scene.look.plan(REQUEST, exactly=True).lanes) == 50
    scene.clock.advance(60)
    plan = scene.look.plan(REQUEST, exactly=True)
    assert plan.lanes == []
    assert len(plan.gaps) == 1


def test_the_gaps_cover_everything_but_the_lanes() -> None:
    scene = Scene()
    shares = [(0, "a"), (0, "b"), (5, ""), (5, "é"), (9, "z")]
    scene.look.learn(["default"], [("default", *share) for share in shares])
    gaps = scene.look.plan(REQUEST, exactly=True).gaps

    def covered(priority: int, share: str) -> bool:
        return any(
            gap["after_priority"] < priority < gap["before_priority"]
            if "after_priority" in gap
            else gap["priority"] == priority and gap["from_share"] <= share < gap["to_share"]
            for gap in gaps
        )

    for priority in range(-100, 101):
        for share in ("", " ", "a", "a ", "aa", "b", "c", "z", "é", "éa", "\U0010ffff" * 32):
            assert covered(priority, share) is ((priority, share) not in shares), Lane("default", priority, share)


@pytest.fixture
async def store(postgres_server: PostgresServer) -> PostgresStore:
    empty_postgres(postgres_server.url, "lanes")
    store = PostgresStore(postgres_server.url, namespace="lanes")
    await store.open_session(Session(id="s"))
    return store


async def test_a_claim_ends_while_new_lanes_keep_coming(store: PostgresStore) -> None:
    """A tenant per share, and a new tenant with every look: what is known is claimed."""
    await store.insert([_new("first")])
    shares = iter(range(10_000))
    run = store._connections._execute
    looks = []

    async def with_a_new_lane(query):  # type: ignore[no-untyped-def]
        if "lanes_claim" in query.text:
            looks.append(query)
            await run(next(store._verbs.insert([_new(f"tenant {next(shares)}")], None, [])))
        return await run(query)

    store._connections._execute = with_a_new_lane  # type: ignore[method-assign]
    async with asyncio.timeout(20):
        claimed = await store.claim(ClaimRequest(session_id="s", queues=("default",), limit=1))
    assert len(claimed.jobs) == 1
    assert len(looks) <= 5
    store.close()


def _new(share: str) -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", share=share)
