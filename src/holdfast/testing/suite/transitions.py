"""The transitions of a job, one by one, and batches of them."""

# ruff: noqa: S101

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.failures import decode_history
from holdfast.job import Reason, State
from holdfast.lifecycle import Applied, Failed, Lost, Outcome, Released, Snoozed, Succeeded
from holdfast.store import MOST_PER_CALL
from holdfast.testing.suite.harness import BOOM, EVERY_BYTE, OUTCOMES, QUEUE, Rig, outcome_name


async def test_enqueue_makes_a_job_ready(rig: Rig) -> None:
    """- → Ready by enqueue: it can be claimed."""
    job_id = await rig.add()
    job = await rig.get(job_id)
    assert (job.state, job.reason) == (State.READY, Reason.ENQUEUED)
    assert (await rig.take()).id == job_id


async def test_a_claim_puts_a_job_in_flight(rig: Rig) -> None:
    """Ready → InFlight by claim."""
    job_id = await rig.add()
    await rig.take()
    job = await rig.get(job_id)
    assert (job.state, job.reason) == (State.IN_FLIGHT, Reason.CLAIMED)


async def test_an_ack_ends_a_job(rig: Rig) -> None:
    """InFlight → Succeeded by ack: complete, with its result, never processed again."""
    job_id = await rig.add()
    session = await rig.session()
    before = await rig.store.now()
    assert await rig.ack(await rig.take(session), b'{"a": 1}') is Applied.APPLIED
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.result) == (State.SUCCEEDED, Reason.SUCCEEDED, b'{"a": 1}')
    assert (job.attempt, job.failures, job.session_id) == (1, 0, session)
    assert job.ended_at is not None
    assert before <= job.ended_at <= await rig.store.now()
    await rig.wait(5)
    assert await rig.claim(session) == []


async def test_a_nack_with_retries_left_makes_a_job_ready(rig: Rig) -> None:
    """InFlight → Ready by nack: one more failure, later."""
    job_id = await rig.add()
    assert await rig.nack(await rig.take()) is Applied.APPLIED
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.failures, job.ended_at) == (State.READY, Reason.RETRIED, 1, None)


async def test_a_nack_without_retries_left_fails_a_job(rig: Rig) -> None:
    """InFlight → Failed by nack: in the dead letters, with payload and history."""
    job_id = await rig.add(max_retries=0, payload=EVERY_BYTE)
    assert await rig.nack(await rig.take()) is Applied.APPLIED
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.payload) == (State.FAILED, Reason.EXHAUSTED, EVERY_BYTE)
    assert decode_history(job.failure_history) == [BOOM]
    assert job.ended_at is not None


async def test_a_lost_lease_makes_a_job_ready(rig: Rig) -> None:
    """InFlight → Ready when the session that held it is closed and a keeper has found it."""
    job_id = await rig.add()
    session = await rig.session()
    await rig.take(session)
    await rig.store.close_session(session)
    assert await rig.state(job_id) is State.IN_FLIGHT
    assert await rig.rescue() == [job_id]
    job = await rig.get(job_id)
    assert (job.state, job.reason) == (State.READY, Reason.LOST)
    assert (await rig.take()).id == job_id


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.CANCELLED])
async def test_an_ended_job_is_never_claimed(rig: Rig, state: State) -> None:
    """Whatever time passes and whoever asks."""
    job_id = await rig.add()
    await rig.end(job_id, state)
    session = await rig.session()
    for turn in range(17):
        await rig.wait(0.1)
        assert await rig.claim(session, turn=turn) == []
    assert await rig.state(job_id) is state


async def test_results_and_history_are_kept_byte_for_byte(rig: Rig) -> None:
    """To a store both are opaque bytes: all 256 values come back unchanged, in every state."""
    await rig.add_many(3)
    retried, failed, succeeded = await rig.claim(await rig.session(), 3)
    opaque = bytes(reversed(EVERY_BYTE)) + EVERY_BYTE
    await rig.store.apply(
        [
            replace(rig.move(retried, Failed(BOOM)), failure_history=opaque),
            replace(rig.move(failed, Failed(BOOM, permanent=True)), failure_history=opaque),
            replace(rig.move(succeeded, Succeeded(opaque)), failure_history=opaque),
        ]
    )
    for job_id in (retried.id, failed.id, succeeded.id):
        assert (await rig.get(job_id)).failure_history == opaque
    assert (await rig.get(succeeded.id)).result == opaque
    await rig.wait(1)
    assert (await rig.take()).failure_history == opaque


async def test_no_result_and_an_empty_result_differ(rig: Rig) -> None:
    """None stays None, and empty bytes stay empty bytes."""
    await rig.add_many(2)
    session = await rig.session()
    nothing, empty = await rig.take(session), await rig.take(session)
    await rig.ack(nothing, None)
    await rig.ack(empty, b"")
    assert (await rig.get(nothing.id)).result is None
    assert (await rig.get(empty.id)).result == b""


async def test_what_never_changes_is_kept_through_every_move(rig: Rig) -> None:
    """Payload, key, correlation id and the rest of the description survive retry, crash, end and replay."""
    new = rig.new(
        payload=EVERY_BYTE,
        task_version="3",
        share="s",
        priority=7,
        max_retries=9,
        retention=rig.steps(50),
        key=rig.key("κ", "hash"),
        correlation_id="c",
    )
    await rig.store.insert([new])
    created = (await rig.get(new.id)).created_at

    async def same() -> bool:
        job = await rig.get(new.id)
        names = ("task", "payload", "task_version", "queue", "share", "priority", "max_retries", "retention", "key")
        return all(getattr(job, name) == getattr(new, name) for name in (*names, "correlation_id")) and (
            job.created_at == created
        )

    session = await rig.session()
    await rig.nack(await rig.take(session), retry_after=0)
    assert await same()
    await rig.take(session)
    await rig.store.close_session(session)
    await rig.rescue()
    assert await same()
    await rig.nack(await rig.take(), permanent=True)
    assert await same()
    assert await rig.replay(new.id) is Applied.APPLIED
    assert await same()
    await rig.ack(await rig.take())
    assert await same()


# Repeating a move.


@pytest.mark.parametrize("outcome", OUTCOMES, ids=outcome_name)
async def test_a_repeated_move_was_made_already(rig: Rig, outcome: Outcome) -> None:
    """After a lost reply the same move is answered `already` and changes nothing, also from a closed session."""
    job_id = await rig.add()
    session = await rig.session()
    move = rig.move(await rig.take(session), outcome)
    assert await rig.apply(move) is Applied.APPLIED
    after = await rig.get(job_id)
    assert await rig.apply(move) is Applied.ALREADY
    await rig.store.close_session(session)
    assert await rig.apply(move) is Applied.ALREADY
    assert await rig.get(job_id) == after


async def test_a_repeated_rescue_was_made_already(rig: Rig) -> None:
    """Two keepers that found the same lost job move it once."""
    job_id = await rig.add()
    session = await rig.session()
    await rig.take(session)
    await rig.store.close_session(session)
    [job] = await rig.store.lost(9)
    move = rig.move(job, Lost(BOOM))
    assert await rig.apply(move) is Applied.APPLIED
    after = await rig.get(job_id)
    assert await rig.apply(move) is Applied.ALREADY
    assert await rig.get(job_id) == after


async def test_only_the_very_same_move_was_made_already(rig: Rig) -> None:
    """Another outcome for a claim that has ended is stale, not `already`."""
    await rig.add_many(2)
    session = await rig.session()
    done, released = await rig.claim(session, 2)
    await rig.ack(done)
    await rig.release(released)
    assert await rig.nack(done) is Applied.STALE
    assert await rig.nack(done, permanent=True) is Applied.STALE
    assert await rig.release(done) is Applied.STALE
    assert await rig.ack(released) is Applied.STALE
    assert await rig.nack(released) is Applied.STALE
    assert await rig.state(done.id) is State.SUCCEEDED
    assert await rig.state(released.id) is State.READY


# Batches.


async def test_one_move_that_fails_its_guard_never_stops_the_others(rig: Rig) -> None:
    """Stale, gone and repeated moves in the middle of a batch are answered; the others are made."""
    await rig.add_many(6)
    session = await rig.session()
    jobs = await rig.claim(session, 6)
    await rig.release(jobs[1])
    await rig.ack(jobs[3])
    await rig.store.forget([jobs[3].id])
    await rig.ack(jobs[4])
    await rig.store.request_cancel([jobs[5].id])
    answers = await rig.store.apply(
        [
            rig.move(jobs[0], Succeeded(b"0")),
            rig.move(jobs[1], Succeeded(b"1")),
            rig.move(jobs[2], Failed(BOOM)),
            rig.move(jobs[3], Succeeded()),
            rig.move(jobs[4], Succeeded()),
            rig.move(jobs[5], Released()),
        ]
    )
    assert answers == [
        Applied.APPLIED,
        Applied.STALE,
        Applied.APPLIED,
        Applied.GONE,
        Applied.ALREADY,
        Applied.CANCEL_ASKED,
    ]
    states = [await rig.state(job.id) for job in (*jobs[:3], *jobs[4:])]
    assert states == [State.SUCCEEDED, State.READY, State.READY, State.SUCCEEDED, State.IN_FLIGHT]


async def test_two_moves_of_one_job_in_a_batch_are_made_in_order(rig: Rig) -> None:
    """The later one sees what the earlier one did."""
    await rig.add_many(3)
    session = await rig.session()
    one, two, three = await rig.claim(session, 3)
    answers = await rig.store.apply(
        [
            rig.move(one, Released()),
            rig.move(two, Succeeded(b"2")),
            rig.move(one, Succeeded(b"1")),
            rig.move(two, Succeeded(b"2")),
            rig.move(three, Succeeded(b"3")),
            rig.move(two, Failed(BOOM)),
        ]
    )
    assert answers == [
        Applied.APPLIED,
        Applied.APPLIED,
        Applied.STALE,
        Applied.ALREADY,
        Applied.APPLIED,
        Applied.STALE,
    ]
    assert await rig.state(one.id) is State.READY
    assert await rig.state(two.id) is State.SUCCEEDED
    assert await rig.state(three.id) is State.SUCCEEDED


async def test_a_batch_may_serve_several_sessions_and_queues(rig: Rig) -> None:
    """Moves of different holders do not disturb one another."""
    await rig.add(queue="a")
    await rig.add(queue="b")
    one, two = await rig.session(), await rig.session()
    first, second = await rig.take(one, queue="a"), await rig.take(two, queue="b")
    await rig.store.close_session(one)
    answers = await rig.store.apply([rig.move(first, Succeeded()), rig.move(second, Succeeded())])
    assert answers == [Applied.STALE, Applied.APPLIED]


async def test_as_many_moves_as_one_call_may_have(rig: Rig) -> None:
    """A batch of the largest size goes through."""
    await rig.add_many(MOST_PER_CALL)
    jobs = await rig.claim(await rig.session(), MOST_PER_CALL)
    answers = await rig.store.apply([rig.move(job, Succeeded()) for job in jobs])
    assert answers == [Applied.APPLIED] * MOST_PER_CALL
    [counts] = await rig.store.counts()
    assert (counts.succeeded, counts.in_flight, counts.ready) == (MOST_PER_CALL, 0, 0)


async def test_a_job_that_does_not_exist_is_gone(rig: Rig) -> None:
    """A move about a job that was forgotten says so."""
    job_id = await rig.add()
    job = await rig.take()
    await rig.ack(job)
    await rig.store.forget([job_id])
    assert await rig.ack(job) is Applied.GONE


# What follows.


@pytest.mark.parametrize(
    "outcome",
    [Succeeded(), Failed(BOOM, permanent=True), Failed(BOOM), Released(), Snoozed(1.0, BOOM)],
    ids=outcome_name,
)
async def test_following_jobs_are_inserted_with_the_move(rig: Rig, outcome: Outcome) -> None:
    """`then` becomes part of the queue in the same step, in its order."""
    await rig.add()
    following = [rig.new(queue="next"), rig.new(queue="next", key=rig.key())]
    move = replace(rig.move(await rig.take(), outcome), then=tuple(following))
    assert await rig.apply(move) is Applied.APPLIED
    session = await rig.session()
    assert await rig.claim_ids(session, queues=["next"]) == [job.id for job in following]


async def test_following_jobs_are_not_inserted_without_the_move(rig: Rig) -> None:
    """A stale move brings nothing, and a repeated one nothing twice."""
    await rig.add_many(2)
    session = await rig.session()
    stale, good = await rig.claim(session, 2)
    await rig.release(stale)
    unwanted, wanted = rig.new(queue="next"), rig.new(queue="next")
    moves = [
        replace(rig.move(stale, Succeeded()), then=(unwanted,)),
        replace(rig.move(good, Succeeded()), then=(wanted,)),
    ]
    assert await rig.store.apply(moves) == [Applied.STALE, Applied.APPLIED]
    assert await rig.apply(moves[1]) is Applied.ALREADY
    assert await rig.store.get(unwanted.id) is None
    assert await rig.claim_ids(session, queues=["next"]) == [wanted.id]


async def test_a_following_job_that_exists_does_not_stop_the_move(rig: Rig) -> None:
    """An id or a key that is there already is no reason to lose an ack."""
    there = await rig.add(queue="next", key=rig.key("k", "h"))
    await rig.add()
    twin, conflict = rig.new(queue="next", key=rig.key("k", "h")), rig.new(queue="next", key=rig.key("k", "x"))
    same = rig.new(queue="next", id=there)
    job = await rig.take()
    move = replace(rig.move(job, Succeeded()), then=(twin, conflict, same))
    assert await rig.apply(move) is Applied.APPLIED
    assert await rig.state(job.id) is State.SUCCEEDED
    assert await rig.claim_ids(await rig.session(), queues=["next"]) == [there]


async def test_following_jobs_know_no_depth_limit(rig: Rig) -> None:
    """What follows from accepted work is accepted work: it may go into the very queue that it came from."""
    await rig.add()
    following = tuple(rig.new() for _ in range(20))
    assert await rig.apply(replace(rig.move(await rig.take(), Succeeded()), then=following)) is Applied.APPLIED
    assert await rig.claim_ids(await rig.session(), queues=[QUEUE]) == [job.id for job in following]
