"""Rescue among many sessions: page by page, a little work at a time, and nobody is judged the worse for it."""

from __future__ import annotations

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.events import JobsRescued, SessionRescued
from holdfast.job import Job, NewJob, SessionId
from holdfast.keepers import watch
from holdfast.keepers.watch import SessionWatch
from holdfast.ports import SYSTEM
from holdfast.store import Beat, ClaimRequest, Session, SessionView, all_sessions
from tests.keepers.crowd import PAGE, TTL, WORK, Crowd, ScatteredStore


@pytest.fixture
def crowd() -> Crowd:
    return Crowd()


# Who is judged.


async def test_among_a_thousand_sessions_the_dead_are_closed_and_the_living_are_not(crowd: Crowd) -> None:
    await crowd.add(700, prefix="a", alive=True)
    dead = await crowd.add(300, prefix="b")
    await crowd.run(TTL - 0.1)
    assert crowd.rescued() == []
    await crowd.run(1.75 * TTL)
    assert sorted(crowd.rescued()) == sorted(dead)
    await crowd.run(5 * TTL)
    assert len(crowd.rescued()) == len(dead)
    assert crowd.failures() == []


async def test_so_are_ten_thousand_on_a_slow_store(crowd: Crowd) -> None:
    """A walk that takes several passes is over early enough for the next one to tell who has died."""
    crowd.store.page_cost = 0.03
    await crowd.add(9_900, prefix="a", alive=True)
    dead = await crowd.add(100, prefix="b")
    await crowd.run(2.5 * TTL)
    assert sorted(crowd.rescued()) == sorted(dead)
    assert crowd.failures() == []


async def test_a_keeper_that_cannot_look_at_everybody_in_time_judges_nobody_and_says_so() -> None:
    crowd = Crowd(ttl=0.5)
    crowd.store.page_cost = 0.05
    await crowd.add(1_000)
    await crowd.run(10)
    assert crowd.rescued() == []
    assert "a look at all sessions took" in crowd.failures()[0]


@pytest.fixture(params=["guarded", "unguarded"])
def guarded(request: pytest.FixtureRequest) -> bool:
    """Each guard is tried with and without: if nothing happens without it, the test proves nothing."""
    return bool(request.param == "guarded")


@pytest.mark.parametrize("where", ["between pages", "between passes"])
async def test_a_paused_keeper_judges_nobody(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, guarded: bool, where: str
) -> None:
    """The machine stops while every counter has stood still for a while; then everybody goes on, the keeper first."""
    if not guarded:
        monkeypatch.setattr(watch, "LATEST_LOOK", float("inf"))
    await crowd.add(500, alive=True)
    sleep, stopped = crowd.clock.sleep, False

    async def sleep_and_stop(seconds: float) -> None:
        nonlocal stopped
        await sleep(seconds)
        if not stopped and crowd.clock.monotonic() > TTL and (seconds < 0.05) == (where == "between pages"):
            stopped = True
            crowd.clock.advance(3 * TTL)
            for session_id in crowd.store.alive:
                crowd.store.alive[session_id] += 3 * TTL

    monkeypatch.setattr(crowd.clock, "sleep", sleep_and_stop)
    await crowd.run(8 * TTL)
    assert stopped
    assert bool(crowd.rescued()) is not guarded


async def test_a_page_that_fails_makes_nobody_look_dead(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch, guarded: bool
) -> None:
    """Whoever was seen on another page neither: the store was away for all. The walk begins anew."""
    if not guarded:
        monkeypatch.setattr(SessionWatch, "forget", lambda self, session_id=None: None)
    await crowd.add(500)
    failed_at: list[float] = []

    def fail(number: int) -> None:
        if not failed_at and crowd.clock.monotonic() > 0.9 * TTL and crowd.store.pages[-1][1] is not None:
            failed_at.append(crowd.clock.monotonic())
            raise StoreUnavailable("gone for a moment")

    crowd.store.before_page = fail
    await crowd.run(1.8 * TTL)
    assert bool(crowd.rescued()) is not guarded
    assert len(crowd.failures()) == 1
    after = next(page for page in crowd.store.pages if page[0] > failed_at[0])
    assert after[1] is None
    assert after[0] - failed_at[0] >= 0.75 * TTL / 3
    await crowd.run(2.8 * TTL)
    assert len(crowd.rescued()) == 500


async def test_a_slow_page_makes_nobody_look_dead(crowd: Crowd, monkeypatch: pytest.MonkeyPatch, guarded: bool) -> None:
    """Not those on the other pages either: their beats may have been as slow."""
    if not guarded:
        monkeypatch.setattr(watch, "SLOWEST_LOOK", float("inf"))
    await crowd.add(500)
    slow_at: list[float] = []

    def be_slow(number: int) -> None:
        if not slow_at and crowd.clock.monotonic() > 0.8 * TTL and crowd.store.pages[-1][1] is not None:
            slow_at.append(crowd.clock.monotonic())
            crowd.clock.advance(0.4 * TTL)

    crowd.store.before_page = be_slow
    await crowd.run(2.1 * TTL)
    assert slow_at
    assert bool(crowd.rescued()) is not guarded


async def test_a_beat_that_takes_long_is_a_slow_page(crowd: Crowd, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at somebody who stands still needs a write, too: reads may go on while no worker can write its beat."""
    await crowd.add(150)
    beat, asked = crowd.store.beat, 0

    async def slow(session_id: SessionId) -> Beat:
        nonlocal asked
        asked += 1
        if asked % 2 == 0:
            crowd.clock.advance(0.34 * TTL)
        return await beat(session_id)

    monkeypatch.setattr(crowd.store, "beat", slow)
    await crowd.run(8 * TTL)
    assert crowd.rescued() == []


async def test_sessions_that_come_and_go_between_pages(crowd: Crowd) -> None:
    """Newcomers before and behind the place of the walk are judged in their time, those gone are forgotten."""
    await crowd.add(250, prefix="m")
    goers = await crowd.add(250, prefix="p")
    comers: set[SessionId] = set()

    def change(number: int) -> None:
        if number == 2:
            for session_id in goers:
                del crowd.store._sessions[session_id]
            for prefix in ("a", "z"):
                for count in range(50):
                    comers.add(session_id := f"{prefix}{count:05d}")
                    view = SessionView(
                        id=session_id, beat=0, open=True, opened_at=0, beat_at=0, host="", pid=0, queues=()
                    )
                    crowd.store._sessions[session_id] = view

    crowd.store.before_page = change
    await crowd.run(0.9 * TTL)
    assert not goers & set(crowd.keeper._watch._sightings)
    await crowd.run(2 * TTL)
    assert len(crowd.rescued()) == 250 + len(comers) == len(set(crowd.rescued()))
    assert comers <= set(crowd.rescued())


async def test_a_session_that_is_on_two_pages_is_one_session() -> None:
    crowd = Crowd(kind=ScatteredStore)
    dead = await crowd.add(220)
    assert sorted(view.id for view in await all_sessions(crowd.store)) == sorted(dead)
    await crowd.run(2 * TTL)
    assert sorted(crowd.rescued()) == sorted(dead)


# What the watch remembers.


def view(session_id: SessionId, beat: int = 0) -> SessionView:
    return SessionView(id=session_id, beat=beat, open=True, opened_at=0, beat_at=0, host="", pid=0, queues=())


def test_a_session_that_is_not_on_a_page_is_not_forgotten() -> None:
    watched = SessionWatch(TTL)
    for at in (0, 5, 10):
        assert watched.still([view("a")], at, at) == []
        assert watched.still([view("b")], at + 1, at + 1) == []
    assert watched.still([view("a")], 15, 15) == [view("a")]
    assert watched.still([view("b")], 15.9, 15.9) == []
    assert watched.still([view("b")], 16, 16) == [view("b")]


def test_a_late_look_at_one_session_tells_nothing_of_the_others() -> None:
    watched = SessionWatch(TTL)
    for at in (0, 5, 10):
        watched.still([view("a"), view("late")][: 2 if at == 0 else 1], at, at)
    assert watched.still([view("a"), view("late")], 15, 15) == [view("a")]
    for at in (20, 25):
        assert watched.still([view("late")], at, at) == []
    assert watched.still([view("late")], 30, 30) == [view("late")]


def test_what_is_not_seen_any_more_does_not_stay_in_memory() -> None:
    watched = SessionWatch(TTL)
    for at in range(0, 1_000, 5):
        watched.still([view(f"{at}-{number}") for number in range(100)], at, at)
        assert len(watched._sightings) <= 300


# The pace.


async def test_a_few_sessions_are_looked_at_three_times_in_a_ttl_without_a_pause(crowd: Crowd) -> None:
    await crowd.add(PAGE)
    await crowd.run(0.9 * TTL)
    assert crowd.between_pages() == []
    assert all(0.74 * TTL / 3 <= pause <= 1.25 * TTL / 3 for pause in crowd.between_passes())
    assert [cursor for _, cursor in crowd.store.pages] == [None] * len(crowd.between_passes())


async def test_a_pass_is_cut_short_and_the_next_one_goes_on_where_it_stopped(crowd: Crowd) -> None:
    crowd.store.page_cost = 0.05
    await crowd.add(10 * PAGE, alive=True)
    await crowd.run(0.25 * TTL)
    passes = crowd.between_passes()
    began = [at for at, seconds in crowd.clock.slept if seconds >= 0.05]
    pages = [sum(at < end for at, _ in crowd.store.pages) for end in began]
    assert pages == [4, 8, 10]
    assert [cursor for _, cursor in crowd.store.pages] == [None, *(f"s{number:05d}" for number in range(99, 999, 100))]
    assert all(0.75 * WORK <= pause <= 1.25 * WORK + 0.1 for pause in passes[:2])
    whole = began[2] + passes[2]
    assert 0.74 * TTL / 3 <= whole <= 1.25 * TTL / 3, "the next walk is as far from this one as if it had been short"


async def test_a_pass_with_little_work_is_not_cut_short(crowd: Crowd) -> None:
    """However long its pauses are together."""
    await crowd.add(50 * PAGE, alive=True)
    await crowd.run(0.2 * TTL)
    assert len(crowd.store.pages) == 50
    assert sum(crowd.between_pages()) > WORK
    assert len(crowd.between_passes()) == 1


async def test_pauses_between_pages_differ_by_a_half(crowd: Crowd) -> None:
    await crowd.add(20 * PAGE, alive=True)
    await crowd.run(5 * TTL)
    pauses = crowd.between_pages()
    assert len(pauses) > 200
    assert 0.005 <= min(pauses) < 0.006
    assert 0.014 < max(pauses) <= 0.015
    passes = crowd.between_passes()
    assert max(passes) <= 1.25 * TTL / 3
    assert max(passes) - min(passes) > 0.2 * TTL / 3


async def test_many_dead_on_one_page_are_closed_over_several_passes(crowd: Crowd) -> None:
    crowd.store.close_cost = 0.05
    dead = await crowd.add(PAGE)
    await crowd.run(3 * TTL)
    assert sorted(crowd.rescued()) == sorted(dead) == sorted(set(crowd.rescued()))
    rests = [seconds for at, seconds in crowd.clock.slept if seconds < 0.5]
    assert len(rests) >= PAGE * 0.05 / WORK * 0.75
    assert min(rests) >= 0.75 * WORK


async def test_a_session_that_nobody_can_close_keeps_no_other_from_being_closed(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing and reading are so slow that a pass closes only one; the first is never the one to wait for."""
    crowd.store.close_cost = crowd.store.page_cost = 2 * WORK
    dead = await crowd.add(3)
    close = crowd.store.close_session

    async def refuse(session_id: SessionId, *, if_beat: int | None = None) -> bool:
        return session_id != "s00000" and await close(session_id, if_beat=if_beat)

    monkeypatch.setattr(crowd.store, "close_session", refuse)
    await crowd.run(3 * TTL)
    assert set(crowd.rescued()) == dead - {"s00000"}


# Jobs.


async def hold_jobs(crowd: Crowd, session_id: SessionId, count: int) -> None:
    await crowd.store.open_session(Session(id=session_id))
    await crowd.store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(count)])
    await crowd.store.claim(ClaimRequest(session_id=session_id, queues=("default",), limit=count))


async def lose_jobs(crowd: Crowd, count: int) -> None:
    await hold_jobs(crowd, "gone", count)
    await crowd.store.close_session("gone")


@pytest.mark.parametrize("lives_for", [1, 2, 3])
async def test_jobs_are_back_in_the_pass_that_closed_their_session(crowd: Crowd, lives_for: int) -> None:
    """Whenever that is, and not only when it is time to look for what others have lost."""
    await hold_jobs(crowd, "worker", 1)
    crowd.store.alive["worker"] = 0.0

    def die(number: int) -> None:
        if number == lives_for:
            crowd.store.alive.clear()

    crowd.store.before_page = die
    await crowd.run(3 * TTL)
    assert crowd.events == [SessionRescued("worker"), JobsRescued(1, 0)]
    assert min(at - crowd.store.closed_at for at in crowd.store.batches if at >= crowd.store.closed_at) < 0.01


async def test_lost_jobs_come_back_batch_by_batch_over_several_passes(crowd: Crowd) -> None:
    crowd.store.batch_cost = 0.1
    await lose_jobs(crowd, 1_000)
    walks_before = len(crowd.store.pages)
    await crowd.run(0.2 * TTL)
    assert [event for event in crowd.events if isinstance(event, JobsRescued)] == [JobsRescued(100, 0)] * 10
    gaps = [after - before for before, after in zip(crowd.store.batches, crowd.store.batches[1:], strict=False)]
    within = [gap for gap in gaps if gap < 0.12]
    assert len(within) == 5
    assert all(0.105 <= gap <= 0.115 for gap in within)
    assert max(gaps) < 0.1 + 1.25 * (WORK + 0.1)
    assert len(crowd.store.pages) - walks_before == 1, "nobody is looked at more often than is needed"


async def test_sessions_are_looked_at_while_many_jobs_come_back(crowd: Crowd) -> None:
    """Bringing back for longer than a TTL keeps nobody from being judged."""
    crowd.store.batch_cost = 4.0
    await lose_jobs(crowd, 1_000)
    dead = await crowd.add(1)
    await crowd.run(2.5 * TTL)
    assert crowd.rescued() == sorted(dead)


async def test_a_batch_that_fails_is_tried_again_with_the_next_pass(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    await lose_jobs(crowd, 1)
    lost, asked = crowd.store.lost, 0

    async def fail_once(limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise StoreUnavailable("gone for a moment")
        return await lost(limit, session_id=session_id)

    monkeypatch.setattr(crowd.store, "lost", fail_once)
    await crowd.run(0.5 * TTL)
    assert len(crowd.failures()) == 1
    assert JobsRescued(1, 0) in crowd.events
