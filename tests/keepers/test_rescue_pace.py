"""When a keeper looks, when it looks for lost jobs, and how long it rests; and where its limits lie exactly."""

from __future__ import annotations

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.events import KeeperFailed
from holdfast.job import NewJob
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.watch import SessionWatch
from holdfast.ports import SYSTEM, Ports
from holdfast.store import ClaimRequest, Session, SessionView
from tests.keepers.crowd import TTL, Crowd
from tests.unit.samples import FixedRandom

INTERVAL = TTL / 3


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


def walks_with_a_search(crowd: Crowd) -> list[int]:
    """The numbers of the walks after which lost jobs were looked for. Each walk has one page here."""
    return [sum(at <= searched for at, _ in crowd.store.pages) for searched in crowd.store.batches]


async def test_a_keeper_that_finds_nobody_dead_looks_for_lost_jobs_with_every_third_walk(crowd: Crowd) -> None:
    """What others closed and did not bring back."""
    await crowd.add(1, alive=True)
    await crowd.run(7 * TTL)
    walks = len(crowd.store.pages)
    assert walks >= 15
    assert walks_with_a_search(crowd) == list(range(1, walks + 1, 3))


async def test_a_keeper_that_closed_a_session_looks_for_its_jobs_at_once_and_with_the_next_walk(crowd: Crowd) -> None:
    """A claim that was under way may have come through after the first look."""
    await crowd.add(1)
    await crowd.run(5 * TTL)
    assert len(crowd.rescued()) == 1
    closed = sum(at < crowd.store.closed_at for at, _ in crowd.store.pages)
    searches = [walk for walk in walks_with_a_search(crowd) if walk >= closed]
    assert searches[:4] == [closed, closed + 1, closed + 4, closed + 7]


async def test_after_one_lost_job_a_keeper_looks_whether_there_is_another(crowd: Crowd) -> None:
    await crowd.store.open_session(Session(id="worker"))
    await crowd.store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}")])
    await crowd.store.claim(ClaimRequest(session_id="worker", queues=("default",), limit=1))
    await crowd.store.close_session("worker")
    await crowd.run(INTERVAL / 2)
    assert walks_with_a_search(crowd) == [1, 1]


async def test_a_keeper_of_a_store_that_fails_rests_between_its_attempts(crowd: Crowd) -> None:
    def fail(number: int) -> None:
        crowd.clock.advance(0.01)
        raise StoreUnavailable("gone")

    crowd.store.before_page = fail
    await crowd.add(1)
    await crowd.run(4 * TTL)
    rests = [seconds for _, seconds in crowd.clock.slept]
    assert 9 <= len(rests) <= 17
    assert min(rests) >= 0.75 * (INTERVAL - 0.02)


@pytest.mark.parametrize(("thrown", "factor"), [(0.0, 0.75), (0.5, 1.0), (1.0, 1.25)])
async def test_the_rest_between_walks_is_a_third_of_a_ttl_give_or_take_a_quarter(
    crowd: Crowd, thrown: float, factor: float
) -> None:
    crowd.store.page_cost = crowd.store.batch_cost = 0.0
    ports = Ports(clock=crowd.clock, random=FixedRandom(thrown))
    crowd.keeper = Rescue(crowd.store, ports=ports, ttl=TTL)
    await crowd.add(1, alive=True)
    await crowd.run(4 * TTL)
    assert {seconds for _, seconds in crowd.clock.slept} == {INTERVAL * factor}


@pytest.mark.parametrize(("took", "too_long"), [(TTL * 2 / 3, False), (TTL * 2 / 3 + 0.5, True)])
async def test_a_walk_may_take_two_thirds_of_a_ttl(crowd: Crowd, took: float, too_long: bool) -> None:
    crowd.store.page_cost = took
    await crowd.add(1)
    await crowd.run(took + INTERVAL / 10)
    error = f"a look at all sessions took {took:.1f} s, too long to judge anybody by a TTL of 15 s"
    assert crowd.events == ([KeeperFailed("rescue", error)] if too_long else [])


# The watch.


def view(name: str = "s") -> SessionView:
    return SessionView(id=name, beat=0, open=True, opened_at=0, beat_at=0, host="", pid=0, queues=())


@pytest.mark.parametrize(("took", "proves"), [(3.0, True), (3.01, False)])
def test_a_look_may_take_a_third_of_a_ttl(took: float, proves: bool) -> None:
    watch = SessionWatch(9.0)
    for at in (0.0, 3.0, 6.0):
        assert watch.still([view()], at, at) == []
    assert watch.still([view()], 9.0, 9.0 + took) == ([view()] if proves else [])


@pytest.mark.parametrize(("apart", "proves"), [(6.0, True), (6.01, False)])
def test_looks_may_be_two_thirds_of_a_ttl_apart(apart: float, proves: bool) -> None:
    watch = SessionWatch(9.0)
    assert watch.still([view()], 0.0, 0.0) == []
    assert watch.still([view()], apart, apart) == []
    assert watch.still([view()], 2 * apart, 2 * apart) == ([view()] if proves else [])


def test_of_a_session_that_beat_in_time_nothing_is_known_any_more_and_of_the_others_everything() -> None:
    watch = SessionWatch(9.0)
    both = [view("a"), view("b")]
    for at in (0.0, 3.0, 6.0):
        assert watch.still(both, at, at) == []
    watch.forget("a")
    watch.forget("never seen")
    assert watch.still(both, 9.0, 9.0) == [view("b")]
