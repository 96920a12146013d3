"""Idempotency keys: one key, one job, for as long as it is held."""

# ruff: noqa: S101

from __future__ import annotations

import pytest

from holdfast.job import State
from holdfast.lifecycle import Applied, Failed, Released, replay
from holdfast.store import DepthLimit, Inserted, InsertStatus
from holdfast.testing.suite.harness import BOOM, QUEUE, Rig

CREATED, EXISTING, CONFLICT = InsertStatus.CREATED, InsertStatus.EXISTING, InsertStatus.KEY_CONFLICT


async def _insert(rig: Rig, payload_hash: str = "h", *, queue: str = QUEUE, text: str = "k") -> Inserted:
    [inserted] = await rig.store.insert([rig.new(queue=queue, key=rig.key(text, payload_hash))])
    return inserted


async def test_the_same_key_and_payload_is_the_same_job(rig: Rig) -> None:
    """The caller is told which job it is, and nothing is written."""
    job_id = await rig.add(key=rig.key())
    assert await _insert(rig) == Inserted(job_id, EXISTING)
    assert len(await rig.dump()) == 1


async def test_the_same_key_with_another_payload_is_a_conflict(rig: Rig) -> None:
    """The caller is told which job has the key, and nothing is written."""
    job_id = await rig.add(key=rig.key())
    assert await _insert(rig, "other") == Inserted(job_id, CONFLICT)
    assert len(await rig.dump()) == 1


async def test_a_key_is_held_while_its_job_runs(rig: Rig) -> None:
    """In flight, waiting for a retry, and rescued."""
    job_id = await rig.add(key=rig.key())
    session = await rig.session()
    job = await rig.take(session)
    assert await _insert(rig) == Inserted(job_id, EXISTING)
    await rig.nack(job, retry_after=0)
    assert await _insert(rig) == Inserted(job_id, EXISTING)
    await rig.take(session)
    await rig.store.close_session(session)
    await rig.rescue()
    assert await _insert(rig, "other") == Inserted(job_id, CONFLICT)


async def test_a_succeeded_job_holds_its_key(rig: Rig) -> None:
    """Work that was done is not done again within the window."""
    job_id = await rig.add(key=rig.key())
    await rig.end(job_id, State.SUCCEEDED)
    assert await _insert(rig) == Inserted(job_id, EXISTING)
    assert await _insert(rig, "other") == Inserted(job_id, CONFLICT)


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED])
async def test_a_failed_or_cancelled_job_frees_its_key(rig: Rig, state: State) -> None:
    """The caller may try again, with any payload."""
    await rig.end(await rig.add(key=rig.key()), state)
    assert (await _insert(rig, "other")).status is CREATED


async def test_a_job_cancelled_in_flight_frees_its_key(rig: Rig) -> None:
    """When it is cancelled, not when that was asked."""
    job_id = await rig.add(key=rig.key())
    job = await rig.take()
    await rig.store.request_cancel([job_id])
    assert await _insert(rig) == Inserted(job_id, EXISTING)
    await rig.settle(job, Released(), cancel_asked=True)
    assert (await _insert(rig)).status is CREATED


async def test_a_key_is_free_after_its_window(rig: Rig) -> None:
    """Counted from the insert, whether or not anybody has pruned."""
    [first] = await rig.store.insert([rig.new(key=rig.key(steps=2))])
    await rig.wait(1)
    [second] = await rig.store.insert([rig.new(key=rig.key(steps=2))])
    assert second == Inserted(first.job_id, EXISTING)
    await rig.wait(1.1)
    [third] = await rig.store.insert([rig.new(key=rig.key(steps=2))])
    assert third.status is CREATED
    assert await rig.state(first.job_id) is State.READY


async def test_the_old_holder_does_not_free_the_key_of_the_new_one(rig: Rig) -> None:
    """A job whose window is over may fail; the key is another's by then."""
    first = await rig.add(key=rig.key(steps=1))
    await rig.wait(1.1)
    second = await rig.add(key=rig.key())
    await rig.store.request_cancel([first])
    assert await rig.state(first) is State.CANCELLED
    assert await _insert(rig) == Inserted(second, EXISTING)


async def test_keys_are_per_queue(rig: Rig) -> None:
    """The same text in another queue is another key."""
    await rig.add(key=rig.key())
    assert (await _insert(rig, queue="other")).status is CREATED


async def test_keys_are_compared_exactly(rig: Rig) -> None:
    """Case, spaces and composition matter."""
    for text in ("key", "KEY", "key ", " key", "k\u00e9", "ke\u0301"):
        assert (await _insert(rig, text=text)).status is CREATED, text


async def test_a_key_of_the_longest_length(rig: Rig) -> None:
    """512 bytes are kept and compared to their end."""
    text = "k" * 511
    assert (await _insert(rig, text=text + "a")).status is CREATED
    assert (await _insert(rig, text=text + "b")).status is CREATED
    assert (await _insert(rig, text=text + "a")).status is EXISTING


async def test_one_key_twice_in_a_batch_is_one_job(rig: Rig) -> None:
    """The first wins, within the same call too."""
    first, twin, conflict = (rig.new(key=rig.key("k", hashed)) for hashed in ("h", "h", "x"))
    assert await rig.store.insert([first, twin, conflict]) == [
        Inserted(first.id, CREATED),
        Inserted(first.id, EXISTING),
        Inserted(first.id, CONFLICT),
    ]
    assert len(await rig.dump()) == 1


async def test_a_conflict_in_a_batch_does_not_stop_the_others(rig: Rig) -> None:
    """One refused job in the middle, its neighbours are inserted."""
    holder = await rig.add(key=rig.key())
    before, conflict, after = rig.new(), rig.new(key=rig.key("k", "x")), rig.new(key=rig.key("k2"))
    assert await rig.store.insert([before, conflict, after]) == [
        Inserted(before.id, CREATED),
        Inserted(holder, CONFLICT),
        Inserted(after.id, CREATED),
    ]
    assert await rig.store.get(conflict.id) is None
    assert await rig.claim_ids(await rig.session()) == [holder, before.id, after.id]


async def test_a_job_refused_by_a_full_queue_takes_no_key(rig: Rig) -> None:
    """Nothing is written for it, its key included."""
    await rig.add()
    new = rig.new(key=rig.key())
    assert await rig.store.insert([new], limits={QUEUE: DepthLimit(max_depth=1)}) == [
        Inserted(new.id, InsertStatus.FULL)
    ]
    assert await _insert(rig, "other") != Inserted(new.id, CONFLICT)


async def test_a_key_that_exists_is_found_in_a_full_queue(rig: Rig) -> None:
    """A repeated call is answered with its job, not with `full`."""
    job_id = await rig.add(key=rig.key())
    answers = await rig.store.insert([rig.new(key=rig.key())], limits={QUEUE: DepthLimit(max_depth=1)})
    assert answers == [Inserted(job_id, EXISTING)]


# Replay.


@pytest.mark.parametrize("state", [State.FAILED, State.CANCELLED, State.SUCCEEDED])
async def test_a_replayed_job_takes_its_key_again(rig: Rig, state: State) -> None:
    """With a new window, as if it had just been enqueued."""
    job_id = await rig.add(key=rig.key(steps=2))
    await rig.end(job_id, state)
    await rig.wait(1.5)
    assert await rig.replay(job_id) is Applied.APPLIED
    await rig.wait(1)
    assert await _insert(rig) == Inserted(job_id, EXISTING)
    await rig.wait(1.1)
    assert (await _insert(rig)).status is CREATED


async def test_a_job_whose_key_is_taken_cannot_be_replayed(rig: Rig) -> None:
    """`key_taken`, nothing changes, and the other moves of the batch are made."""
    one, blocked, two = await rig.add(), await rig.add(key=rig.key()), await rig.add(key=rig.key("k2"))
    for job in await rig.claim(await rig.session(), 3):
        await rig.nack(job, permanent=True)
    holder = await rig.add(key=rig.key("k", "x"))
    before = await rig.get(blocked)
    moves = [replay(await rig.get(job_id)) for job_id in (one, blocked, two)]
    assert await rig.store.apply(moves) == [Applied.APPLIED, Applied.KEY_TAKEN, Applied.APPLIED]
    assert await rig.get(blocked) == before
    assert await _insert(rig, "x") == Inserted(holder, EXISTING)
    assert sorted(await rig.claim_ids(await rig.session())) == sorted([holder, one, two])


async def test_a_blocked_replay_succeeds_when_the_key_is_free(rig: Rig) -> None:
    """After the other job has failed, or its window is over."""
    blocked = await rig.add(key=rig.key())
    await rig.end(blocked, State.FAILED)
    holder = await rig.add(key=rig.key())
    assert await rig.replay(blocked) is Applied.KEY_TAKEN
    await rig.store.request_cancel([holder])
    assert await rig.replay(blocked) is Applied.APPLIED
    assert await _insert(rig) == Inserted(blocked, EXISTING)


@pytest.mark.parametrize("older_first", [True, False])
async def test_two_replays_for_one_key_in_a_batch(rig: Rig, older_first: bool) -> None:
    """The first of the batch takes the key, the second finds it taken, whichever has the lower id."""
    ids = []
    for _ in range(2):
        ids.append(await rig.add(key=rig.key()))
        await rig.end(ids[-1], State.FAILED)
    first, second = ids if older_first else reversed(ids)
    moves = [replay(await rig.get(first)), replay(await rig.get(second))]
    assert await rig.store.apply(moves) == [Applied.APPLIED, Applied.KEY_TAKEN]
    assert await rig.state(second) is State.FAILED
    assert await _insert(rig) == Inserted(first, EXISTING)


async def test_a_key_freed_in_a_batch_can_be_taken_in_it(rig: Rig) -> None:
    """Moves are made in their order: a failure frees what the next move takes."""
    waiting = await rig.add(key=rig.key())
    await rig.end(waiting, State.FAILED)
    await rig.add(key=rig.key())
    holder = await rig.take()
    moves = [rig.move(holder, Failed(BOOM, permanent=True)), replay(await rig.get(waiting))]
    assert await rig.store.apply(moves) == [Applied.APPLIED, Applied.APPLIED]
    assert await _insert(rig) == Inserted(waiting, EXISTING)


async def test_a_key_freed_later_in_a_batch_is_taken(rig: Rig) -> None:
    """Moves are made in their order: what the next one frees is not free yet."""
    waiting = await rig.add(key=rig.key())
    await rig.end(waiting, State.FAILED)
    failing = await rig.add(key=rig.key())
    holder = await rig.take()
    moves = [replay(await rig.get(waiting)), rig.move(holder, Failed(BOOM, permanent=True))]
    assert await rig.store.apply(moves) == [Applied.KEY_TAKEN, Applied.APPLIED]
    assert [await rig.state(job_id) for job_id in (waiting, failing)] == [State.FAILED, State.FAILED]


async def test_a_key_outlives_its_pruned_job(rig: Rig) -> None:
    """A key is held for its window, even if the succeeded job was kept for less."""
    job_id = await rig.add(key=rig.key(steps=9), retention=0)
    await rig.end(job_id, State.SUCCEEDED)
    await rig.wait(1)
    assert await rig.store.prune(1000) == 1
    assert await rig.store.get(job_id) is None
    assert await _insert(rig) == Inserted(job_id, EXISTING)
