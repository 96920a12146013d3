"""Fencing: who lost a claim can change nothing about the job any more."""

# ruff: noqa: S101

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.job import Job, State
from holdfast.lifecycle import Applied, Lost, Outcome
from holdfast.testing.suite.harness import BOOM, OUTCOMES, Rig, outcome_name

every_outcome = pytest.mark.parametrize("outcome", OUTCOMES, ids=outcome_name)


async def _refused(rig: Rig, job: Job, outcome: Outcome) -> None:
    """Nothing that the old holder says about the job, progress included, has any effect."""
    before = await rig.get(job.id)
    assert await rig.settle(job, outcome) is Applied.STALE
    assert await rig.store.note(job.lease, b"late") is Applied.STALE
    assert await rig.get(job.id) == before


@every_outcome
async def test_a_closed_sessions_moves_are_stale_before_any_rescue(rig: Rig, outcome: Outcome) -> None:
    """From the moment a session is closed its settlements are refused, though nobody has taken the job yet."""
    await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    await rig.store.close_session(session)
    await _refused(rig, job, outcome)
    assert await rig.state(job.id) is State.IN_FLIGHT


@every_outcome
async def test_moves_are_stale_after_a_rescue(rig: Rig, outcome: Outcome) -> None:
    """The job was given back; its old holder comes too late."""
    await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    await rig.store.close_session(session)
    await rig.rescue()
    await _refused(rig, job, outcome)
    assert await rig.state(job.id) is State.READY


@every_outcome
async def test_moves_are_stale_after_another_session_claimed_the_job(rig: Rig, outcome: Outcome) -> None:
    """A delayed settlement cannot corrupt a newer claim, which goes on undisturbed."""
    await rig.add()
    session, heir = await rig.session(), await rig.session()
    job = await rig.take(session)
    await rig.store.close_session(session)
    await rig.rescue()
    newer = await rig.take(heir)
    assert newer.id == job.id
    await _refused(rig, job, outcome)
    assert await rig.ack(newer, b"newer") is Applied.APPLIED
    await _refused(rig, job, outcome)
    assert (await rig.get(job.id)).result == b"newer"


@every_outcome
async def test_moves_are_stale_after_the_same_session_claimed_the_job_again(rig: Rig, outcome: Outcome) -> None:
    """The session fits, the version does not."""
    await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    await rig.release(job)
    newer = await rig.take(session)
    await _refused(rig, job, outcome)
    assert await rig.ack(newer) is Applied.APPLIED


@every_outcome
async def test_moves_of_another_open_session_are_stale(rig: Rig, outcome: Outcome) -> None:
    """The version fits, the session does not."""
    await rig.add()
    job = await rig.take()
    await _refused(rig, replace(job, session_id=await rig.session()), outcome)
    assert await rig.ack(job) is Applied.APPLIED


@every_outcome
async def test_moves_with_a_version_of_the_future_are_stale(rig: Rig, outcome: Outcome) -> None:
    """Versions are compared for equality, not for order."""
    await rig.add()
    job = await rig.take()
    await _refused(rig, replace(job, version=job.version + 1), outcome)
    await _refused(rig, replace(job, version=job.version - 1), outcome)
    assert await rig.ack(job) is Applied.APPLIED


@every_outcome
@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.CANCELLED])
async def test_old_leases_stay_stale_after_a_replay(rig: Rig, state: State, outcome: Outcome) -> None:
    """A replay raises the version, so no lease of the first life fits the second: waiting, running or ended."""
    job_id = await rig.add()
    session = await rig.session()
    old = await rig.take(session)
    if state is State.CANCELLED:
        await rig.release(old)
        await rig.store.request_cancel([job_id])
    else:
        await (rig.ack(old) if state is State.SUCCEEDED else rig.nack(old, permanent=True))
    assert await rig.state(job_id) is state
    version = (await rig.get(job_id)).version
    assert await rig.replay(job_id) is Applied.APPLIED
    assert (await rig.get(job_id)).version == version + 1
    await _refused(rig, old, outcome)
    newer = await rig.take(session)
    assert newer.version == version + 2
    await _refused(rig, old, outcome)
    await rig.ack(newer)
    await _refused(rig, old, outcome)


@every_outcome
async def test_moves_are_stale_after_a_cancelled_job_was_rescued(rig: Rig, outcome: Outcome) -> None:
    """An operator's cancel, carried out by a keeper, is not undone by the old holder."""
    job_id = await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    await rig.store.request_cancel([job_id])
    await rig.store.close_session(session)
    await rig.rescue()
    await _refused(rig, job, outcome)
    assert await rig.state(job_id) is State.CANCELLED


async def test_a_job_of_an_open_session_cannot_be_declared_lost(rig: Rig) -> None:
    """A keeper that is behind the times does no harm."""
    job_id = await rig.add()
    job = await rig.take()
    assert await rig.settle(job, Lost(BOOM)) is Applied.STALE
    assert await rig.state(job_id) is State.IN_FLIGHT
    assert await rig.ack(job) is Applied.APPLIED


async def test_a_late_keeper_does_not_take_the_job_from_its_new_holder(rig: Rig) -> None:
    """A rescue of an older claim is stale once the job was claimed again, even if that session is closed too."""
    job_id = await rig.add()
    first, second = await rig.session(), await rig.session()
    await rig.take(first)
    await rig.store.close_session(first)
    [seen] = await rig.store.lost(9)
    await rig.rescue()
    await rig.take(second)
    assert await rig.settle(seen, Lost(BOOM)) is Applied.STALE
    await rig.store.close_session(second)
    assert await rig.settle(seen, Lost(BOOM)) is Applied.STALE
    assert await rig.rescue() == [job_id]


async def test_progress_of_a_settled_claim_is_stale(rig: Rig) -> None:
    """Neither a waiting nor an ended job takes progress."""
    await rig.add_many(2)
    session = await rig.session()
    released, done = await rig.claim(session, 2)
    await rig.release(released)
    await rig.ack(done)
    for job in (released, done):
        assert await rig.store.note(job.lease, b"late") is Applied.STALE
        assert (await rig.get(job.id)).progress is None


async def test_a_late_result_does_not_replace_the_first(rig: Rig) -> None:
    """A second ack of the same claim keeps the result of the first."""
    await rig.add()
    job = await rig.take()
    await rig.ack(job, b"first")
    assert await rig.ack(job, b"second") is Applied.ALREADY
    assert (await rig.get(job.id)).result == b"first"
