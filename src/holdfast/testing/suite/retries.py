"""Retries, backoff, snoozes and releases: what costs an attempt, and when a job comes back."""

# ruff: noqa: S101

from __future__ import annotations

import pytest

from holdfast.failures import KEPT_FAILURES, decode_history
from holdfast.job import Reason, State
from holdfast.lifecycle import Applied
from holdfast.testing.suite.harness import Rig


async def test_a_nack_counts_and_schedules_the_retry(rig: Rig) -> None:
    """After a nack: the retry count is one higher, `run_at` is now plus the backoff, the job is ready."""
    job_id = await rig.add()
    before = await rig.store.now()
    assert await rig.nack(await rig.take()) is Applied.APPLIED
    after = await rig.store.now()
    job = await rig.get(job_id)
    assert (job.failures, job.attempt, job.state) == (1, 1, State.READY)
    assert before + rig.steps(1) <= job.run_at <= after + rig.steps(1)


async def test_a_nacked_job_is_not_claimable_before_its_retry_time(rig: Rig) -> None:
    """Visible again when the retry time has come, and not before."""
    job_id = await rig.add()
    session = await rig.session()
    await rig.nack(await rig.take(session))
    assert await rig.claim(session) == []
    await rig.wait(0.5)
    assert await rig.claim(session) == []
    await rig.wait(0.6)
    assert await rig.claim_ids(session) == [job_id]


async def test_three_retries_are_four_attempts(rig: Rig) -> None:
    """`max_retries` 3, the default: the first attempt and three retries, then failed, and never claimed again."""
    job_id = await rig.add()
    session = await rig.session()
    attempts = 0
    while jobs := await rig.claim(session):
        attempts += 1
        assert (jobs[0].attempt, jobs[0].failures) == (attempts - 1, attempts - 1)
        assert await rig.nack(jobs[0]) is Applied.APPLIED
        await rig.wait(1.1)
    job = await rig.get(job_id)
    assert attempts == 4
    assert (job.state, job.reason, job.failures, job.attempt) == (State.FAILED, Reason.EXHAUSTED, 4, 4)
    assert len(decode_history(job.failure_history)) == 4


@pytest.mark.parametrize("max_retries", [0, 1, 5])
async def test_the_cap_travels_with_the_job(rig: Rig, max_retries: int) -> None:
    """`max_retries` retries, not one more and not one less."""
    job_id = await rig.add(max_retries=max_retries)
    session = await rig.session()
    for _ in range(max_retries):
        await rig.nack(await rig.take(session), retry_after=0)
        assert await rig.state(job_id) is State.READY
    await rig.nack(await rig.take(session), retry_after=0)
    assert await rig.state(job_id) is State.FAILED


async def test_a_permanent_error_is_not_retried(rig: Rig) -> None:
    """Straight to the dead letters, with the retries that were left."""
    job_id = await rig.add()
    await rig.nack(await rig.take(), permanent=True)
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.failures) == (State.FAILED, Reason.PERMANENT, 1)


async def test_a_retry_after_wins_over_the_backoff(rig: Rig) -> None:
    """The handler or a server knows better when to come again."""
    job_id = await rig.add()
    session = await rig.session()
    await rig.nack(await rig.take(session), retry_after=3 * rig.harness.step)
    await rig.wait(1.5)
    assert await rig.claim(session) == []
    await rig.wait(1.6)
    assert await rig.claim_ids(session) == [job_id]


async def test_a_retry_takes_its_place_by_its_due_time(rig: Rig) -> None:
    """It comes after what was there when it became due, and before what came later."""
    session = await rig.session()
    retried = await rig.add()
    await rig.nack(await rig.take(session))
    before = await rig.add()
    await rig.wait(1.5)
    after = await rig.add()
    assert await rig.claim_ids(session) == [before, retried, after]


async def test_a_release_costs_nothing_and_keeps_the_place(rig: Rig) -> None:
    """A job given back is first in line again, with the attempts that it had."""
    first, second = await rig.add_many(2)
    session = await rig.session()
    job = await rig.take(session)
    run_at = job.run_at
    await rig.wait(0.5)
    assert await rig.release(job) is Applied.APPLIED
    job = await rig.get(first)
    assert (job.reason, job.attempt, job.failures, job.crashes, job.snoozes) == (Reason.RELEASED, 0, 0, 0, 0)
    assert (job.run_at, job.suspect, job.failure_history) == (run_at, False, b"")
    assert await rig.claim_ids(session) == [first, second]


async def test_any_number_of_releases_is_free(rig: Rig) -> None:
    """Shutdowns do not wear a job out."""
    job_id = await rig.add(max_retries=0)
    session = await rig.session()
    for _ in range(20):
        await rig.release(await rig.take(session))
    job = await rig.get(job_id)
    assert (job.state, job.attempt, job.version) == (State.READY, 0, 20)


async def test_a_snooze_costs_no_attempt(rig: Rig) -> None:
    """The job comes back later; only the snooze is counted."""
    job_id = await rig.add(max_retries=0)
    session = await rig.session()
    assert await rig.snooze(await rig.take(session), 2) is Applied.APPLIED
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.attempt, job.failures, job.snoozes) == (
        State.READY,
        Reason.SNOOZED,
        0,
        0,
        1,
    )
    await rig.wait(1)
    assert await rig.claim(session) == []
    await rig.wait(1.1)
    assert await rig.claim_ids(session) == [job_id]


async def test_snoozes_are_bounded(rig: Rig) -> None:
    """Beyond their limit the job fails and says why."""
    job_id = await rig.add()
    session = await rig.session()
    for _ in range(rig.policy.max_snoozes):
        await rig.snooze(await rig.take(session), 0)
        assert await rig.state(job_id) is State.READY
    await rig.snooze(await rig.take(session), 0)
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.failures) == (State.FAILED, Reason.SNOOZED_OUT, 0)


async def test_the_history_keeps_the_latest_failures(rig: Rig) -> None:
    """Bounded, the newest kept."""
    job_id = await rig.add(max_retries=KEPT_FAILURES + 2)
    session = await rig.session()
    for _ in range(KEPT_FAILURES + 1):
        await rig.nack(await rig.take(session), retry_after=0)
    job = await rig.get(job_id)
    assert job.failures == KEPT_FAILURES + 1
    assert len(decode_history(job.failure_history)) == KEPT_FAILURES


async def test_a_failed_job_waits_for_a_person(rig: Rig) -> None:
    """Dead letters are kept, with everything needed to understand and to repeat them."""
    job_id = await rig.add(max_retries=0, payload=b'{"x": 1}', retention=0)
    await rig.nack(await rig.take())
    await rig.wait(3)
    await rig.store.prune(1000)
    job = await rig.get(job_id)
    assert (job.state, job.payload) == (State.FAILED, b'{"x": 1}')
    assert await rig.claim(await rig.session()) == []
