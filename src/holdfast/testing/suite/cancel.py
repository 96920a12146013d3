"""Cancelling: at once when nobody holds the job, by asking its worker otherwise."""

# ruff: noqa: S101

from __future__ import annotations

import pytest

from holdfast.job import Reason, State
from holdfast.lifecycle import Applied, Failed, Lost, Outcome, Released, Snoozed
from holdfast.store import Beat, CancelAnswer
from holdfast.testing.suite.harness import BOOM, Rig, outcome_name

NOT_ACK: list[Outcome] = [Failed(BOOM), Failed(BOOM, permanent=True), Released(), Snoozed(1.0, BOOM)]


async def test_a_waiting_job_is_cancelled_at_once(rig: Rig) -> None:
    """Due, delayed or waiting for its retry."""
    retried = await rig.add()
    await rig.nack(await rig.take())
    due, delayed = await rig.add(), await rig.add(delay=rig.steps(1))
    ids = [due, delayed, retried]
    assert await rig.store.request_cancel(ids) == [CancelAnswer.CANCELLED] * 3
    for job_id in ids:
        job = await rig.get(job_id)
        assert (job.state, job.reason) == (State.CANCELLED, Reason.CANCELLED)
        assert job.ended_at is not None
    await rig.wait(2)
    assert await rig.claim(await rig.session()) == []


async def test_the_next_beat_tells_the_worker(rig: Rig) -> None:
    """A job in flight is only marked; its worker hears of it with every beat until it has settled the job."""
    await rig.add_many(3)
    session, other = await rig.session(), await rig.session()
    one, two, three = await rig.claim(session, 3)
    assert await rig.store.request_cancel([one.id, three.id]) == [CancelAnswer.ASKED] * 2
    assert (await rig.get(one.id)).cancel_asked
    assert await rig.state(one.id) is State.IN_FLIGHT
    for _ in range(2):
        beat = await rig.beat(session)
        assert (beat.open, beat.held, set(beat.cancel)) == (True, 3, {one.id, three.id})
    assert await rig.beat(other) == Beat(open=True, held=0, cancel=())
    assert await rig.settle(one, Released(), cancel_asked=True) is Applied.APPLIED
    await rig.ack(two)
    assert (await rig.beat(session)).cancel == (three.id,)


async def test_answers_to_a_cancel_come_in_order(rig: Rig) -> None:
    """One bad id never stops the others."""
    await rig.add()
    running = await rig.take()
    ended = await rig.add()
    await rig.end(ended, State.SUCCEEDED)
    ready = await rig.add()
    assert await rig.store.request_cancel([ended, ready, "nothing", running.id, ready]) == [
        CancelAnswer.ENDED,
        CancelAnswer.CANCELLED,
        CancelAnswer.GONE,
        CancelAnswer.ASKED,
        CancelAnswer.ENDED,
    ]
    assert await rig.state(ended) is State.SUCCEEDED


async def test_asking_twice_is_asking_once(rig: Rig) -> None:
    """A repeated request, after a lost reply, is answered the same."""
    await rig.add()
    job = await rig.take()
    for _ in range(2):
        assert await rig.store.request_cancel([job.id]) == [CancelAnswer.ASKED]
    assert await rig.settle(job, Released(), cancel_asked=True) is Applied.APPLIED
    assert await rig.store.request_cancel([job.id]) == [CancelAnswer.ENDED]


async def test_an_ack_beats_a_cancel(rig: Rig) -> None:
    """The work was done: the job has succeeded, whoever asked for what."""
    await rig.add()
    job = await rig.take()
    await rig.store.request_cancel([job.id])
    assert await rig.ack(job, b"done") is Applied.APPLIED
    ended = await rig.get(job.id)
    assert (ended.state, ended.reason, ended.result) == (State.SUCCEEDED, Reason.SUCCEEDED, b"done")


@pytest.mark.parametrize("outcome", NOT_ACK, ids=outcome_name)
async def test_every_other_end_of_a_cancelled_job_is_cancelled(rig: Rig, outcome: Outcome) -> None:
    """Nack, release and snooze: first refused to a worker that has not heard, then cancelled."""
    await rig.add()
    job = await rig.take()
    await rig.store.request_cancel([job.id])
    before = await rig.get(job.id)
    assert await rig.settle(job, outcome) is Applied.CANCEL_ASKED
    assert await rig.get(job.id) == before
    assert await rig.settle(job, outcome, cancel_asked=True) is Applied.APPLIED
    ended = await rig.get(job.id)
    assert (ended.state, ended.reason) == (State.CANCELLED, Reason.CANCELLED)
    await rig.wait(2)
    assert await rig.claim(await rig.session()) == []


async def test_a_lost_job_that_was_to_be_cancelled_is_cancelled(rig: Rig) -> None:
    """The keeper that finds it carries out the cancel."""
    await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    await rig.store.request_cancel([job.id])
    await rig.store.close_session(session)
    [lost] = await rig.store.lost(9)
    assert lost.cancel_asked
    assert await rig.settle(lost, Lost(BOOM)) is Applied.APPLIED
    assert await rig.state(job.id) is State.CANCELLED


async def test_a_keeper_that_has_not_heard_of_a_cancel_is_told(rig: Rig) -> None:
    """Asked between its read and its move: nothing is written, and the next look finds it."""
    await rig.add()
    session = await rig.session()
    await rig.take(session)
    await rig.store.close_session(session)
    [lost] = await rig.store.lost(9)
    assert await rig.store.request_cancel([lost.id]) == [CancelAnswer.ASKED]
    assert await rig.settle(lost, Lost(BOOM)) is Applied.CANCEL_ASKED
    assert await rig.rescue() == [lost.id]
    assert await rig.state(lost.id) is State.CANCELLED


async def test_a_cancel_does_not_reach_into_the_next_life(rig: Rig) -> None:
    """A replayed job begins without the request that ended it."""
    await rig.add()
    job = await rig.take()
    await rig.store.request_cancel([job.id])
    await rig.settle(job, Released(), cancel_asked=True)
    assert await rig.replay(job.id) is Applied.APPLIED
    assert not (await rig.get(job.id)).cancel_asked
    session = await rig.session()
    again = await rig.take(session)
    assert not again.cancel_asked
    assert (await rig.beat(session)).cancel == ()
    assert await rig.release(again) is Applied.APPLIED
    assert await rig.state(job.id) is State.READY


async def test_a_cancelled_job_leaves_no_hole_in_its_lane(rig: Rig) -> None:
    """The others are served in their order, a full claim at once."""
    ids = await rig.add_many(6)
    await rig.store.request_cancel([ids[0], ids[2], ids[5]])
    assert await rig.claim_ids(await rig.session(), 3) == [ids[1], ids[3], ids[4]]
