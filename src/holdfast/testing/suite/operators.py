"""What operators and keepers do: replay, prune, forget."""

# ruff: noqa: S101

from __future__ import annotations

import pytest
from msgspec.structs import replace

from holdfast.failures import decode_history
from holdfast.job import Reason, State, enqueued
from holdfast.lifecycle import Applied, Succeeded, cancel, replay
from holdfast.store import JobQuery, all_sessions
from holdfast.testing.suite.harness import BOOM, EVERY_BYTE, QUEUE, Rig

ENDS = [State.SUCCEEDED, State.FAILED, State.CANCELLED]
LONG = 2 * 3600.0


# Replay.


@pytest.mark.parametrize("state", ENDS)
async def test_a_replayed_job_starts_over(rig: Rig, state: State) -> None:
    """Ready now, with its payload bit for bit, its counters at the beginning and a higher version."""
    job_id = await rig.add(payload=EVERY_BYTE, max_retries=1)
    ended = await rig.end(job_id, state)
    await rig.wait(1)
    before = await rig.store.now()
    assert await rig.replay(job_id) is Applied.APPLIED
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.ended_at, job.result) == (State.READY, Reason.REPLAYED, None, None)
    assert (job.failures, job.crashes, job.snoozes, job.suspect) == (0, 0, 0, False)
    assert (job.version, job.payload, job.attempt) == (ended.version + 1, EVERY_BYTE, ended.attempt)
    assert job.failure_history == ended.failure_history
    assert before <= job.run_at <= await rig.store.now()
    claimed = await rig.take()
    assert (claimed.id, claimed.version) == (job_id, ended.version + 2)
    assert await rig.ack(claimed) is Applied.APPLIED


async def test_a_replayed_job_has_all_its_retries_again(rig: Rig) -> None:
    """And keeps the history of its first life."""
    job_id = await rig.add(max_retries=1)
    session = await rig.session()
    for _ in range(2):
        await rig.nack(await rig.take(session), retry_after=0)
    assert await rig.state(job_id) is State.FAILED
    await rig.replay(job_id)
    await rig.nack(await rig.take(session), retry_after=0)
    assert await rig.state(job_id) is State.READY
    await rig.nack(await rig.take(session), retry_after=0)
    job = await rig.get(job_id)
    assert (job.state, len(decode_history(job.failure_history))) == (State.FAILED, 4)


async def test_a_replayed_job_goes_to_the_end_of_its_lane(rig: Rig) -> None:
    """It does not overtake what was waiting: its due time is the moment of the replay."""
    old = await rig.add()
    await rig.end(old, State.FAILED)
    waiting = await rig.add_many(2)
    await rig.wait(0.1)
    await rig.replay(old)
    await rig.wait(0.1)
    last = await rig.add()
    assert await rig.claim_ids(await rig.session()) == [*waiting, old, last]


async def test_a_repeated_replay_was_made_already(rig: Rig) -> None:
    """The same move twice replays once; after the next claim it is stale."""
    job_id = await rig.add()
    await rig.end(job_id, State.FAILED)
    move = replay(await rig.get(job_id))
    assert await rig.apply(move) is Applied.APPLIED
    assert await rig.apply(move) is Applied.ALREADY
    job = await rig.take()
    assert await rig.apply(move) is Applied.STALE
    await rig.nack(job, permanent=True)
    assert await rig.apply(move) is Applied.STALE
    assert await rig.state(job_id) is State.FAILED


async def test_a_live_job_cannot_be_replayed(rig: Rig) -> None:
    """Neither a waiting nor a running one."""
    job_id = await rig.add()
    assert await rig.replay(job_id) is Applied.STALE
    await rig.take()
    assert await rig.replay(job_id) is Applied.STALE
    assert await rig.state(job_id) is State.IN_FLIGHT


async def test_the_operators_cancel_is_guarded_too(rig: Rig) -> None:
    """A cancel of the waiting job is stale once somebody has claimed it."""
    job_id = await rig.add()
    move = cancel(await rig.get(job_id))
    await rig.take()
    assert await rig.apply(move) is Applied.STALE
    assert await rig.state(job_id) is State.IN_FLIGHT


async def test_a_replayed_batch_comes_back_oldest_first(rig: Rig) -> None:
    """Whatever the order in which the operator lists them: jobs of one due time are served by id."""
    ids = await rig.add_many(4)
    await rig.store.request_cancel(ids)
    order = [ids[2], ids[0], ids[3], ids[1]]
    moves = [replay(await rig.get(job_id)) for job_id in order]
    assert await rig.store.apply(moves) == [Applied.APPLIED] * 4
    assert await rig.claim_ids(await rig.session()) == ids


# Prune.


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.CANCELLED])
async def test_an_ended_job_is_kept_for_its_retention(rig: Rig, state: State) -> None:
    """Counted from its end, and pruned after that."""
    job_id = await rig.add(retention=rig.steps(2))
    await rig.wait(3)
    await rig.end(job_id, state)
    await rig.wait(1)
    assert await rig.store.prune(1000) == 0
    assert await rig.state(job_id) is state
    await rig.wait(1.1)
    assert await rig.store.prune(1000) == 1
    assert await rig.store.get(job_id) is None
    assert await rig.store.counts() == []


async def test_dead_letters_and_live_jobs_are_never_pruned(rig: Rig) -> None:
    """Whatever their retention says and however old they are."""
    failed = await rig.add(retention=0)
    await rig.end(failed, State.FAILED)
    await rig.add(retention=0)
    await rig.take()
    await rig.add(retention=0)
    await rig.add(retention=0, delay=rig.steps(1))
    await rig.wait(5)
    assert await rig.store.prune(1000) == 0
    assert len(await rig.dump()) == 4


async def test_a_replayed_job_is_not_pruned_by_its_old_end(rig: Rig) -> None:
    """Its retention begins again when it ends again."""
    job_id = await rig.add(retention=rig.steps(1))
    await rig.end(job_id, State.SUCCEEDED)
    await rig.replay(job_id)
    await rig.wait(2)
    assert await rig.store.prune(1000) == 0
    await rig.end(job_id, State.SUCCEEDED)
    assert await rig.store.prune(1000) == 0
    await rig.wait(1.1)
    assert await rig.store.prune(1000) == 1


async def test_a_job_that_ended_twice_is_pruned_once(rig: Rig) -> None:
    """Whatever is left of its old end, and whatever else ended with it: the answer and the counts are right."""
    twice, other = await rig.add_many(2, retention=rig.steps(1))
    await rig.store.request_cancel([twice])
    await rig.replay(twice)
    await rig.store.request_cancel([other, twice])
    await rig.wait(1.1)
    assert await rig.store.prune(1000) == 2
    assert await rig.store.counts() == []


async def test_prune_is_limited_and_goes_on(rig: Rig) -> None:
    """Many rows are removed page by page, and the answer says how many."""
    ids = await rig.add_many(5, retention=0)
    await rig.store.request_cancel(ids)
    await rig.wait(0.1)
    assert [await rig.store.prune(2) for _ in range(4)] == [2, 2, 1, 0]
    assert await rig.dump() == []


async def test_prune_removes_keys_whose_window_is_over(rig: Rig) -> None:
    """Not those still held."""
    await rig.add(key=rig.key("short", steps=1))
    await rig.add(key=rig.key("long", steps=9))
    await rig.wait(1.1)
    assert await rig.store.prune(1000) == 1
    assert await rig.store.prune(1000) == 0
    assert len(await rig.dump()) == 2


async def test_prune_removes_sessions_closed_long_ago(rig: Rig) -> None:
    """Not open ones, not freshly closed ones, and not one that still holds a job."""
    await rig.add()
    open_one, gone, holder = await rig.session(), await rig.session(), await rig.session()
    await rig.take(holder)
    for session in (gone, holder):
        await rig.store.close_session(session)
    assert await rig.store.prune(1000) == 0
    await rig.harness.age_closed_sessions(LONG)
    assert await rig.store.prune(1000) == 1
    assert {view.id for view in await all_sessions(rig.store)} == {open_one, holder}
    assert len(await rig.rescue()) == 1
    assert await rig.store.prune(1000) == 1
    assert {view.id for view in await all_sessions(rig.store)} == {open_one}


# Forget.


@pytest.mark.parametrize("state", ENDS)
async def test_ended_jobs_can_be_forgotten(rig: Rig, state: State) -> None:
    """For good, dead letters included; how many it was."""
    job_id = await rig.add()
    await rig.end(job_id, state)
    assert await rig.store.forget([job_id, "nothing"]) == 1
    assert await rig.store.get(job_id) is None
    assert await rig.store.forget([job_id]) == 0
    assert await rig.store.counts() == []


async def test_live_jobs_cannot_be_forgotten(rig: Rig) -> None:
    """Neither waiting nor running ones, beside one that can."""
    ended = await rig.add()
    await rig.end(ended, State.FAILED)
    await rig.add()
    running = await rig.take()
    ready = await rig.add()
    assert await rig.store.forget([ready, ended, running.id]) == 1
    assert await rig.state(ready) is State.READY
    assert await rig.ack(running) is Applied.APPLIED


async def test_naming_a_job_twice_forgets_it_once(rig: Rig) -> None:
    """The answer counts jobs, not names."""
    job_id = await rig.add()
    await rig.end(job_id, State.CANCELLED)
    assert await rig.store.forget([job_id, job_id]) == 1


async def test_a_forgotten_id_can_be_used_again(rig: Rig) -> None:
    """The store knows nothing of it any more."""
    new = rig.new()
    await rig.store.insert([new])
    old = await rig.take()
    await rig.ack(old)
    await rig.store.forget([new.id])
    await rig.store.insert([new])
    assert (await rig.get(new.id)).state is State.READY
    assert await rig.apply(rig.move(old, Succeeded())) is Applied.STALE


async def test_a_forgotten_id_is_claimed_once(rig: Rig) -> None:
    """Cancelled, forgotten and enqueued again within one moment, even in another lane, it is one job."""
    new = rig.new()
    for priority in (5, 5, 1):
        await rig.store.request_cancel([new.id])
        await rig.store.forget([new.id])
        assert await rig.add(id=new.id, priority=priority) == new.id
    assert await rig.claim_ids(await rig.session()) == [new.id]


# Counters.


async def test_counts_follow_every_move(rig: Rig) -> None:
    """Per queue and state, due and scheduled apart, paused queues included."""
    assert await rig.store.counts() == []
    await rig.store.set_paused("paused", True)
    await rig.add_many(7)
    await rig.add(delay=rig.steps(2))
    await rig.add(queue="other")
    session = await rig.session()
    jobs = await rig.claim(session, 5)
    await rig.ack(jobs[0])
    await rig.ack(jobs[1])
    await rig.nack(jobs[2], permanent=True)
    await rig.nack(jobs[3])
    await rig.store.request_cancel([(await rig.take(session)).id])
    [cancelled] = [job.id for job in (await rig.store.find(JobQuery(states=(State.READY,), queue="other"))).jobs]
    await rig.store.request_cancel([cancelled])
    main, other, paused = await rig.store.counts()
    assert [main.queue, other.queue, paused.queue] == [QUEUE, "other", "paused"]
    assert (main.ready, main.scheduled, main.in_flight) == (1, 2, 2)
    assert (main.succeeded, main.failed, main.cancelled, main.paused) == (2, 1, 0, False)
    assert (other.ready, other.cancelled) == (0, 1)
    assert (paused.paused, paused.ready) == (True, 0)
    await rig.wait(3)
    await rig.replay(jobs[0].id)
    await rig.store.forget([jobs[1].id, cancelled])
    await rig.store.set_paused("paused", False)
    [main] = await rig.store.counts()
    assert (main.ready, main.scheduled, main.succeeded, main.failed) == (4, 0, 0, 1)
    assert decode_history((await rig.get(jobs[2].id)).failure_history) == [BOOM]


async def test_a_move_sees_the_jobs_that_follow_an_earlier_one(rig: Rig) -> None:
    """Within one batch, too: a job of `then` is there when a later move names it."""
    await rig.add()
    job = await rig.take(await rig.session())
    following = rig.new()
    done = replace(rig.move(job, Succeeded()), then=(following,))
    called_off = cancel(enqueued(following, 0))
    assert await rig.store.apply([done, called_off]) == [Applied.APPLIED, Applied.APPLIED]
    assert await rig.state(following.id) is State.CANCELLED
