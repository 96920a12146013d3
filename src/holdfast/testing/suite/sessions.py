"""Sessions: who may claim, heartbeats, closing, and what a session holds."""

# ruff: noqa: S101

from __future__ import annotations

import pytest

from holdfast.errors import SessionClosed
from holdfast.job import Lease, Reason, State
from holdfast.lifecycle import Applied
from holdfast.ports import SYSTEM
from holdfast.store import Beat, Session, SessionPage, SessionView, all_sessions
from holdfast.testing.suite.harness import QUEUE, Rig

_MOST_PAGES = 100


async def _view(rig: Rig, session_id: str) -> SessionView:
    [view] = [view for view in await all_sessions(rig.store) if view.id == session_id]
    return view


async def _pages_after(rig: Rig, first: SessionPage, limit: int) -> list[SessionPage]:
    """That page and all that follow. They must end: so few sessions never need so many pages."""
    pages = [first]
    while (cursor := pages[-1].next) is not None:
        assert len(pages) < _MOST_PAGES
        pages.append(await rig.store.sessions(cursor=cursor, limit=limit))
    return pages


def _ids(pages: list[SessionPage]) -> set[str]:
    return {view.id for page in pages for view in page.sessions}


async def test_a_session_is_shown_as_it_introduced_itself(rig: Rig) -> None:
    """Host, process and queues are kept for people; the beat begins at 0."""
    before = await rig.store.now()
    session_id = SYSTEM.ids.session_id()
    await rig.store.open_session(Session(id=session_id, host="hóst-1", pid=2**31 - 1, queues=("a", "b.c")))
    view = await _view(rig, session_id)
    assert before <= view.opened_at <= await rig.store.now()
    assert view == SessionView(
        id=session_id,
        beat=0,
        open=True,
        opened_at=view.opened_at,
        beat_at=view.opened_at,
        host="hóst-1",
        pid=2**31 - 1,
        queues=("a", "b.c"),
    )


async def test_a_session_without_queues_has_none(rig: Rig) -> None:
    """No queues come back as no queues."""
    assert (await _view(rig, await rig.session())).queues == ()


async def test_every_session_is_listed(rig: Rig) -> None:
    """Open and closed ones, whoever opened them."""
    async with rig.harness.second() as store:
        ids = {await rig.session(), await rig.using(store).session()}
        closed = await rig.session()
        await store.close_session(closed)
        views = {view.id: view.open for view in await all_sessions(rig.store)}
        assert views == {**dict.fromkeys(ids, True), closed: False}


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
async def test_sessions_come_in_pages(rig: Rig, limit: int) -> None:
    """Each is on one of them, open or closed, and they end."""
    ids = {await rig.session() for _ in range(7)}
    closed = min(ids)
    await rig.store.close_session(closed)
    pages = await _pages_after(rig, await rig.store.sessions(limit=limit), limit)
    assert _ids(pages) == ids
    assert {view.id for page in pages for view in page.sessions if not view.open} == {closed}


async def test_no_sessions_are_a_page_too(rig: Rig) -> None:
    """An empty one, the last."""
    pages = await _pages_after(rig, await rig.store.sessions(), 100)
    assert _ids(pages) == set()


async def test_sessions_that_come_and_go_between_pages_hide_no_other(rig: Rig) -> None:
    """Those that are there all the while are found, also when the last one of the page before is gone."""
    ids = {await rig.session() for _ in range(9)}
    first = await rig.store.sessions(limit=3)
    gone = {view.id for view in first.sessions}
    for session_id in gone:
        await rig.harness.erase_session(session_id)
    assert _ids(await _pages_after(rig, first, 3)) == ids
    new = {await rig.session() for _ in range(3)}  # anywhere among the others
    found = _ids(await _pages_after(rig, first, 3))
    assert ids <= found <= ids | new
    assert _ids(await _pages_after(rig, await rig.store.sessions(limit=3), 3)) == ids - gone | new


async def test_a_page_shows_the_counters_of_its_own_time(rig: Rig) -> None:
    """Not those of the first page: a beat between two pages is seen."""
    ids = {await rig.session() for _ in range(5)}
    first = await rig.store.sessions(limit=1)
    later = ids - _ids([first])
    for session_id in later:
        await rig.beat(session_id)
    _, *rest = await _pages_after(rig, first, 1)
    assert {view.id: view.beat for page in rest for view in page.sessions if view.id in later} == dict.fromkeys(
        later, 1
    )


async def test_a_beat_raises_the_counter(rig: Rig) -> None:
    """By one each time, for this session only; the time of the beat is kept for people."""
    session, other = await rig.session(), await rig.session()
    opened = await _view(rig, session)
    await rig.wait(1)
    assert await rig.beat(session) == Beat(open=True, held=0, cancel=())
    assert await rig.beat(session) == Beat(open=True, held=0, cancel=())
    view = await _view(rig, session)
    assert view.beat == 2
    assert view.beat_at >= opened.beat_at + rig.steps(0.9)
    assert view.opened_at == opened.opened_at
    assert (await _view(rig, other)).beat == 0


async def test_a_beat_tells_how_many_jobs_the_session_holds(rig: Rig) -> None:
    """Its own jobs in flight, over all queues, as they are now."""
    await rig.add_many(2)
    await rig.add(queue="other")
    await rig.add(delay=rig.steps(9))
    session, idle = await rig.session(), await rig.session()
    jobs = await rig.claim(session, 9, queues=[QUEUE, "other"])
    assert (await rig.beat(session)).held == 3
    assert (await rig.beat(idle)).held == 0
    await rig.ack(jobs[0])
    assert (await rig.beat(session)).held == 2
    await rig.release(jobs[1])
    await rig.nack(jobs[2])
    assert (await rig.beat(session)).held == 0


async def test_opening_a_session_again_is_harmless(rig: Rig) -> None:
    """A repeated open, after a lost reply, keeps the beat and what the session holds."""
    session = await rig.session()
    await rig.add()
    job = await rig.take(session)
    await rig.beat(session)
    await rig.store.open_session(Session(id=session, host="again"))
    assert (await _view(rig, session)).beat == 1
    assert (await rig.beat(session)).held == 1
    assert await rig.ack(job) is Applied.APPLIED


async def test_a_closed_session_stays_closed(rig: Rig) -> None:
    """Neither opening it again nor a beat re-opens it."""
    session = await rig.session()
    assert await rig.store.close_session(session)
    await rig.store.open_session(Session(id=session))
    assert not (await _view(rig, session)).open
    assert await rig.beat(session) == Beat(open=False, held=0, cancel=())
    assert not (await _view(rig, session)).open
    with pytest.raises(SessionClosed):
        await rig.claim(session)


async def test_a_beat_after_close_does_not_reopen(rig: Rig) -> None:
    """The worker learns that it is dead, its counter stands still, and its jobs stay lost."""
    session = await rig.session()
    await rig.add()
    job = await rig.take(session)
    await rig.store.close_session(session)
    beat = await rig.beat(session)
    assert not beat.open
    view = await _view(rig, session)
    assert (view.open, view.beat) == (False, 0)
    assert [lost.id for lost in await rig.store.lost(9)] == [job.id]


async def test_an_unknown_session_cannot_beat_or_be_closed(rig: Rig) -> None:
    """A beat never opens a session, not even one that was never there."""
    assert await rig.beat("nobody") == Beat(open=False, held=0, cancel=())
    assert not await rig.store.close_session("nobody")
    assert await rig.store.held("nobody") == []
    assert await all_sessions(rig.store) == []


async def test_a_session_is_closed_once(rig: Rig) -> None:
    """Only one of several callers has closed it."""
    session = await rig.session()
    assert await rig.store.close_session(session)
    assert not await rig.store.close_session(session)
    assert not await rig.store.close_session(session, if_beat=0)


async def test_close_compares_the_beat(rig: Rig) -> None:
    """A keeper closes a session only if its counter still stands where the keeper saw it."""
    session = await rig.session()
    await rig.beat(session)
    assert not await rig.store.close_session(session, if_beat=0)
    assert not await rig.store.close_session(session, if_beat=2)
    assert (await rig.beat(session)).open
    assert await rig.store.close_session(session, if_beat=2)
    assert not (await rig.beat(session)).open


async def test_closing_touches_no_other_session(rig: Rig) -> None:
    """The others go on beating, claiming and settling."""
    await rig.add_many(2)
    dead, alive = await rig.session(), await rig.session()
    job = await rig.take(alive)
    await rig.store.close_session(dead)
    assert (await rig.beat(alive)).held == 1
    assert len(await rig.claim(alive)) == 1
    assert await rig.ack(job) is Applied.APPLIED


# Claims need a session.


async def test_an_unknown_session_cannot_claim(rig: Rig) -> None:
    """A session that was never opened gets nothing."""
    job_id = await rig.add()
    with pytest.raises(SessionClosed):
        await rig.claim("nobody")
    assert await rig.state(job_id) is State.READY


async def test_a_closed_session_cannot_claim(rig: Rig) -> None:
    """From the moment of its closing, through any client, and nothing is changed by the attempt."""
    job_id = await rig.add()
    session = await rig.session()
    await rig.store.close_session(session)
    before = await rig.get(job_id)
    with pytest.raises(SessionClosed):
        await rig.claim(session)
    async with rig.harness.second() as store:
        with pytest.raises(SessionClosed):
            await rig.using(store).claim(session)
    assert await rig.get(job_id) == before


async def test_a_closed_session_cannot_claim_from_an_empty_queue(rig: Rig) -> None:
    """It hears of its end even when there is nothing to claim."""
    session = await rig.session()
    await rig.store.close_session(session)
    with pytest.raises(SessionClosed):
        await rig.claim(session)


async def test_every_claim_raises_the_version(rig: Rig) -> None:
    """By exactly one, whoever claims and however the claim before ended."""
    job_id = await rig.add(max_retries=9)
    one, two = await rig.session(), await rig.session()
    for version, session in enumerate((one, one, two, one), start=1):
        job = await rig.take(session)
        assert job.lease == Lease(job_id, QUEUE, session, version)
        assert (await rig.get(job_id)).version == version
        await (rig.release(job) if version % 2 else rig.nack(job, retry_after=0))
        assert (await rig.get(job_id)).version == version


async def test_a_claim_says_what_was_claimed(rig: Rig) -> None:
    """State, reason, holder and time, as the store's own clock has them."""
    await rig.add()
    session = await rig.session()
    before = await rig.store.now()
    job = await rig.take(session)
    assert (job.state, job.reason, job.session_id) == (State.IN_FLIGHT, Reason.CLAIMED, session)
    assert job.claimed_at is not None
    assert before <= job.claimed_at <= await rig.store.now()
    assert (job.attempt, job.ended_at, job.progress) == (0, None, None)


# What a session holds.


async def test_held_lists_every_job_of_the_session(rig: Rig) -> None:
    """Over all queues, as they were claimed; nothing of others."""
    await rig.add_many(2)
    await rig.add(queue="other")
    session, other = await rig.session(), await rig.session()
    mine = await rig.claim(session, 1) + await rig.claim(session, 1, queues=["other"])
    theirs = await rig.take(other)
    by_id = {job.id: job for job in await rig.store.held(session)}
    assert by_id == {job.id: job for job in mine}
    assert await rig.store.held(other) == [theirs]
    await rig.ack(mine[0])
    assert await rig.store.held(session) == [mine[1]]


async def test_a_lost_claim_reply_is_found_and_given_back(rig: Rig) -> None:
    """A worker that never heard of its claim sees it in `held`, releases it, and no attempt is used."""
    job_id = await rig.add()
    session = await rig.session()
    await rig.claim(session)  # the reply never arrives
    assert (await rig.beat(session)).held == 1
    [unknown] = await rig.store.held(session)
    assert unknown.id == job_id
    assert await rig.release(unknown) is Applied.APPLIED
    assert await rig.store.held(session) == []
    job = await rig.take(await rig.session())
    assert (job.id, job.attempt, job.failures, job.crashes, job.suspect) == (job_id, 0, 0, 0, False)
    assert job.version == unknown.version + 1


async def test_a_closed_session_still_shows_what_it_held(rig: Rig) -> None:
    """Until a keeper has rescued its jobs."""
    await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    await rig.store.close_session(session)
    assert await rig.store.held(session) == [job]
    await rig.rescue()
    assert await rig.store.held(session) == []


# Progress.


async def test_progress_is_kept_for_the_running_claim(rig: Rig) -> None:
    """Byte for byte, the latest only; the next claim begins without it; the end keeps it."""
    job_id = await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    assert await rig.store.note(job.lease, b"first") is Applied.APPLIED
    assert await rig.store.note(job.lease, bytes(range(256))) is Applied.APPLIED
    assert (await rig.get(job_id)).progress == bytes(range(256))
    await rig.release(job)
    job = await rig.take(session)
    assert job.progress is None
    await rig.store.note(job.lease, b"")
    await rig.ack(job)
    assert (await rig.get(job_id)).progress == b""


async def test_progress_of_an_unknown_job_is_gone(rig: Rig) -> None:
    """There is nothing to note it on."""
    session = await rig.session()
    assert await rig.store.note(Lease("nothing", QUEUE, session, 1), b"x") is Applied.GONE
