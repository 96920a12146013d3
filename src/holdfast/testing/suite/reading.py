"""Reading: one job, lists in pages, the clock."""

# ruff: noqa: S101

from __future__ import annotations

import pytest

from holdfast.job import JobId, State
from holdfast.lifecycle import Applied
from holdfast.store import JobQuery
from holdfast.testing.suite.harness import Rig


async def _ids(rig: Rig, **query: object) -> list[JobId]:
    page = await rig.store.find(JobQuery(**query))  # type: ignore[arg-type]
    assert page.next is None
    return [job.id for job in page.jobs]


def _newest_first(*ids: JobId) -> list[JobId]:
    return sorted(ids, reverse=True)


async def test_an_unknown_job_is_none(rig: Rig) -> None:
    """Not an error."""
    assert await rig.store.get("nothing") is None
    assert await rig.store.get("") is None


async def test_the_newest_id_comes_first(rig: Rig) -> None:
    """Whatever the states, and whatever the order of the inserts."""
    ids = sorted(rig.new().id for _ in range(6))
    for job_id in (*ids[3:], *ids[:3]):
        await rig.add(id=job_id)
    for job in await rig.claim(await rig.session(), 3):
        await rig.ack(job)
    assert await _ids(rig) == ids[::-1]


async def test_find_filters(rig: Rig) -> None:
    """By states, queue, task and correlation id, each alone and all together."""
    plain = await rig.add()
    mail = await rig.add(queue="mail", task="send", correlation_id="r1")
    other = await rig.add(queue="mail", task="fetch", correlation_id="r1")
    await rig.end(await rig.add(queue="done", task="send"), State.SUCCEEDED, queue="done")
    [done] = await _ids(rig, queue="done")
    await rig.add(queue="run")
    running = await rig.take(queue="run")
    assert await _ids(rig, queue="mail") == _newest_first(mail, other)
    assert await _ids(rig, task="send") == _newest_first(mail, done)
    assert await _ids(rig, correlation_id="r1") == _newest_first(mail, other)
    assert await _ids(rig, correlation_id="R1") == []
    assert await _ids(rig, states=(State.SUCCEEDED,)) == [done]
    assert await _ids(rig, states=(State.IN_FLIGHT,)) == [running.id]
    assert await _ids(rig, states=(State.READY,)) == _newest_first(plain, mail, other)
    assert await _ids(rig, states=(State.SUCCEEDED, State.IN_FLIGHT)) == _newest_first(done, running.id)
    assert await _ids(rig, states=(State.FAILED, State.CANCELLED)) == []
    both = {"states": (State.READY,), "queue": "mail", "task": "send", "correlation_id": "r1"}
    assert await _ids(rig, **both) == [mail]
    assert await _ids(rig, **{**both, "task": "other"}) == []


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 10])
async def test_pages_are_complete_and_without_duplicates(rig: Rig, limit: int) -> None:
    """Over live and ended jobs; the last page says that it is the last."""
    ids = await rig.add_many(7)
    for job in await rig.claim(await rig.session(), 4):
        await rig.ack(job)
    pages, cursor = [], None
    while True:
        page = await rig.store.find(JobQuery(limit=limit, cursor=cursor))
        pages.append([job.id for job in page.jobs])
        if (cursor := page.next) is None:
            break
    assert [job_id for page_ids in pages for job_id in page_ids] == _newest_first(*ids)
    assert all(len(page_ids) == limit for page_ids in pages[:-1])
    assert len(pages) == -(-7 // limit)


async def test_pages_are_stable_while_jobs_come_and_move(rig: Rig) -> None:
    """What was there at the first page and stays is listed exactly once."""
    ids = await rig.add_many(6)
    first = await rig.store.find(JobQuery(limit=3))
    await rig.add_many(2)
    for job in await rig.claim(await rig.session(), 4):
        await rig.ack(job)
    rest = await rig.store.find(JobQuery(limit=100, cursor=first.next))
    assert [job.id for job in (*first.jobs, *rest.jobs)] == _newest_first(*ids)


async def test_a_filter_and_a_page_go_together(rig: Rig) -> None:
    """A page is full of what matches, however much lies between."""
    wanted = []
    for _ in range(4):
        wanted.append(await rig.add(task="wanted"))
        await rig.add_many(3, task="other")
    page = await rig.store.find(JobQuery(task="wanted", limit=3))
    assert [job.id for job in page.jobs] == _newest_first(*wanted)[:3]
    page = await rig.store.find(JobQuery(task="wanted", limit=3, cursor=page.next))
    assert [job.id for job in page.jobs] == _newest_first(*wanted)[3:]
    assert page.next is None


async def test_find_shows_whole_jobs(rig: Rig) -> None:
    """The same that `get` shows, in every state."""
    await rig.add_many(4)
    session = await rig.session()
    one, two, three = await rig.claim(session, 3)
    await rig.ack(one, b"r")
    await rig.nack(two)
    await rig.store.note(three.lease, b"p")
    for job in await rig.dump():
        assert await rig.get(job.id) == job


async def test_the_clock_is_the_stores(rig: Rig) -> None:
    """It moves with time and is the same for every client."""
    before = await rig.store.now()
    await rig.wait(1)
    async with rig.harness.second() as store:
        after = await store.now()
    assert after >= before + rig.steps(0.9)
    assert await rig.store.now() >= after


async def test_a_second_client_sees_everything(rig: Rig) -> None:
    """One set of data, however many clients."""
    await rig.add(key=rig.key())
    session = await rig.session()
    job = await rig.take(session)
    async with rig.harness.second() as store:
        other = rig.using(store)
        assert await other.get(job.id) == job
        assert await store.held(session) == [job]
        assert (await store.beat(session)).held == 1
        assert await other.ack(job, b"r") is Applied.APPLIED
        assert await store.counts() == await rig.store.counts()
    assert (await rig.get(job.id)).result == b"r"
