"""Claims that wait in the store, for stores that have them (`Patient`). Not part of the suite for every store: a test
module for one that has them imports everything from here, too.
"""

# ruff: noqa: S101

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from holdfast.errors import SessionClosed
from holdfast.job import SessionId
from holdfast.patience import Patient, WaitingClaims
from holdfast.store import Claimed, ClaimRequest, Store
from holdfast.testing.suite.harness import QUEUE, Rig

SOON = 5.0
LONG = 20.0
BLOCKED_WITHIN = 0.3
"""Seconds until a claim that was begun certainly waits in the server."""


@asynccontextmanager
async def waiting_claims(store: Store, queues: Sequence[str] = (QUEUE,)) -> AsyncIterator[WaitingClaims]:
    """The store's, closed in the end."""
    assert isinstance(store, Patient)
    claims = store.waiting_claims(queues)
    assert claims is not None
    try:
        yield claims
    finally:
        await claims.close()


async def known_session(rig: Rig, queues: Sequence[str] = (QUEUE,)) -> SessionId:
    """A session that has claimed from the queues before, as a worker's has whose claim waits."""
    session = await rig.session()
    assert await rig.claim(session, queues=queues) == []
    return session


def begin(
    claims: WaitingClaims,
    session_id: SessionId,
    limit: int = 1,
    *,
    queues: Sequence[str] = (QUEUE,),
    due_in: int | None = None,
    seconds: float = LONG,
) -> asyncio.Task[Claimed]:
    """A claim that waits."""
    request = ClaimRequest(session_id=session_id, queues=tuple(queues), limit=limit)

    async def claim() -> Claimed:
        return await claims.claim(request, due_in=due_in, seconds=seconds)

    return asyncio.get_running_loop().create_task(claim())


async def test_a_waiting_claim_brings_the_job_that_comes(rig: Rig) -> None:
    """Inserted by another client, while the claim waits. A second wait brings the next."""
    session = await known_session(rig)
    async with rig.harness.second() as other, waiting_claims(rig.store) as claims:
        for _ in range(3):
            claim = begin(claims, session, 5)
            await asyncio.sleep(BLOCKED_WITHIN)
            assert not claim.done()
            job_id = await rig.using(other).add()
            claimed = await asyncio.wait_for(claim, SOON)
            assert [job.id for job in claimed.jobs] == [job_id]
            assert claimed.due_in is None
            assert (await rig.get(job_id)).session_id == session


async def test_a_waiting_claim_brings_what_was_there_before(rig: Rig) -> None:
    """It does not matter whether the job or the wait was first."""
    session = await known_session(rig)
    job_id = await rig.add()
    async with waiting_claims(rig.store) as claims:
        claimed = await asyncio.wait_for(begin(claims, session), SOON)
    assert [job.id for job in claimed.jobs] == [job_id]


async def test_a_waiting_claim_ends_without_jobs(rig: Rig) -> None:
    """After the time that it was given, about."""
    session = await known_session(rig)
    async with waiting_claims(rig.store) as claims:
        claimed = await asyncio.wait_for(begin(claims, session, seconds=0.2), SOON)
    assert claimed.jobs == ()
    assert claimed.due_in is None


async def test_a_waiting_claim_takes_no_more_than_its_limit(rig: Rig) -> None:
    """However many jobs come at once. It says that there may be more."""
    session = await known_session(rig)
    async with rig.harness.second() as other, waiting_claims(rig.store) as claims:
        claim = begin(claims, session, 3)
        await asyncio.sleep(BLOCKED_WITHIN)
        ids = await rig.using(other).add_many(10)
        claimed = await asyncio.wait_for(claim, SOON)
    assert [job.id for job in claimed.jobs] == ids[:3]
    assert claimed.due_in == 0
    assert len(await rig.store.held(session)) == 3


async def test_a_waiting_claim_brings_a_delayed_job_in_time(rig: Rig) -> None:
    """Whether it was known when the wait began, or came later."""
    session = await known_session(rig)
    known = await rig.add(delay=600_000)
    began = asyncio.get_running_loop().time()
    async with rig.harness.second() as other, waiting_claims(rig.store) as claims:
        claimed = await asyncio.wait_for(begin(claims, session, 5, due_in=600_000), SOON)
        if not claimed.jobs:  # the insert woke it
            assert claimed.due_in is not None
            claimed = await asyncio.wait_for(begin(claims, session, 5, due_in=claimed.due_in), SOON)
        assert [job.id for job in claimed.jobs] == [known]
        assert 0.5 < asyncio.get_running_loop().time() - began < 1.5
        claim = begin(claims, session, 5)
        await asyncio.sleep(BLOCKED_WITHIN)
        later = await rig.using(other).add(delay=300_000)
        claimed = await asyncio.wait_for(claim, SOON)
        assert claimed.jobs == ()
        assert claimed.due_in is not None
        claimed = await asyncio.wait_for(begin(claims, session, 5, due_in=claimed.due_in), SOON)
        assert [job.id for job in claimed.jobs] == [later]


async def test_a_waiting_claim_of_a_session_that_is_closed_meanwhile_is_refused(rig: Rig) -> None:
    """It takes nothing, and says so when there are jobs."""
    session = await known_session(rig)
    async with rig.harness.second() as other, waiting_claims(rig.store) as claims:
        claim = begin(claims, session)
        await asyncio.sleep(BLOCKED_WITHIN)
        assert await other.close_session(session)
        job_id = await rig.using(other).add()
        with pytest.raises(SessionClosed):
            await asyncio.wait_for(claim, SOON)
    assert (await rig.get(job_id)).session_id is None


async def test_a_waiting_claim_of_an_unknown_session_is_refused(rig: Rig) -> None:
    """As an ordinary one is."""
    async with waiting_claims(rig.store) as claims:
        with pytest.raises(SessionClosed):
            await asyncio.wait_for(begin(claims, "never-opened", seconds=0.1), SOON)


async def test_a_waiting_claim_that_is_cancelled_takes_nothing_later(rig: Rig) -> None:
    """Others get the job that comes then, also one that has waited behind it."""
    one, two = await known_session(rig), await known_session(rig)
    async with (
        rig.harness.second() as other,
        rig.harness.second() as producer,
        waiting_claims(rig.store) as first,
        waiting_claims(other) as second,
    ):
        given_up = begin(first, one)
        await asyncio.sleep(BLOCKED_WITHIN)
        behind = begin(second, two)
        await asyncio.sleep(BLOCKED_WITHIN)
        given_up.cancel()
        await asyncio.wait([given_up])
        await asyncio.sleep(BLOCKED_WITHIN)
        job_id = await rig.using(producer).add()
        claimed = await asyncio.wait_for(behind, SOON)
        assert [job.id for job in claimed.jobs] == [job_id]
        again = begin(first, one)
        await asyncio.sleep(BLOCKED_WITHIN)
        next_id = await rig.using(producer).add()
        assert [job.id for job in (await asyncio.wait_for(again, SOON)).jobs] == [next_id]


async def test_of_several_waiting_claims_each_job_goes_to_one(rig: Rig) -> None:
    """And all of them get some, if there are enough."""
    sessions = [await known_session(rig) for _ in range(3)]
    async with (
        rig.harness.second() as other,
        waiting_claims(rig.store) as first,
        waiting_claims(rig.store) as second,
        waiting_claims(other) as third,
    ):
        claims = [begin(claims, session, 2) for claims, session in zip((first, second, third), sessions, strict=True)]
        await asyncio.sleep(BLOCKED_WITHIN)
        ids = await rig.add_many(6)
        claimed = await asyncio.wait_for(asyncio.gather(*claims), SOON)
    assert sorted(job.id for each in claimed for job in each.jobs) == sorted(ids)
    assert [len(each.jobs) for each in claimed] == [2, 2, 2]


async def test_a_waiting_claim_yields_nothing_from_a_paused_queue_until_it_is_resumed(rig: Rig) -> None:
    """The job that waited behind the pause comes then."""
    session = await known_session(rig)
    await rig.store.set_paused(QUEUE, True)
    async with rig.harness.second() as other, waiting_claims(rig.store) as claims:
        claim = begin(claims, session)
        await asyncio.sleep(BLOCKED_WITHIN)
        job_id = await rig.using(other).add()
        if (claimed := await asyncio.wait_for(claim, SOON)).jobs == ():
            claim = begin(claims, session)
            await asyncio.sleep(BLOCKED_WITHIN)
            assert not claim.done()
            await other.set_paused(QUEUE, False)
            claimed = await asyncio.wait_for(claim, SOON)
        assert [job.id for job in claimed.jobs] == [job_id]


async def test_a_job_that_comes_when_waiting_has_ended_is_for_others(rig: Rig) -> None:
    """A claim that waits elsewhere brings it."""
    one, two = await known_session(rig), await known_session(rig)
    async with rig.harness.second() as other, waiting_claims(other) as elsewhere:
        async with waiting_claims(rig.store) as claims:
            await asyncio.wait_for(begin(claims, one, seconds=0.1), SOON)
        claim = begin(elsewhere, two)
        await asyncio.sleep(BLOCKED_WITHIN)
        job_id = await rig.add()
        assert [job.id for job in (await asyncio.wait_for(claim, SOON)).jobs] == [job_id]


__all__ = [name for name in dir() if name.startswith("test_")]
