"""New jobs: what is kept, what is refused, and that repeating is safe."""

# ruff: noqa: S101

from __future__ import annotations

import asyncio
import unicodedata

import pytest

from holdfast.errors import CheckpointConflict, ForeignConnection, InvalidOption
from holdfast.job import LATEST_TIME, LONGEST_DELAY, Job, Key, Reason, State
from holdfast.lifecycle import Applied
from holdfast.store import MOST_PER_CALL, Checkpoint, DepthLimit, Inserted, InsertStatus
from holdfast.testing.suite.harness import EVERY_BYTE, QUEUE, Rig

CREATED, EXISTING, FULL = InsertStatus.CREATED, InsertStatus.EXISTING, InsertStatus.FULL


async def test_every_field_of_a_new_job_is_kept(rig: Rig) -> None:
    """A stored job has everything that its producer said, and plain beginnings for the rest."""
    before = await rig.store.now()
    new = rig.new(
        task="mail.send-v2",
        payload=b'{"to": 1}',
        task_version="2.1",
        queue="mail",
        share="customer 7",
        priority=-100,
        delay=rig.steps(3),
        max_retries=0,
        retention=rig.steps(9),
        key=rig.key("once", "hash"),
        correlation_id="request 1",
    )
    await rig.store.insert([new])
    job = await rig.get(new.id)
    assert before <= job.created_at <= await rig.store.now()
    assert job == Job(
        id=new.id,
        task="mail.send-v2",
        payload=b'{"to": 1}',
        task_version="2.1",
        queue="mail",
        share="customer 7",
        priority=-100,
        state=State.READY,
        reason=Reason.ENQUEUED,
        run_at=job.created_at + rig.steps(3),
        created_at=job.created_at,
        version=0,
        session_id=None,
        attempt=0,
        failures=0,
        crashes=0,
        snoozes=0,
        suspect=False,
        cancel_asked=False,
        max_retries=0,
        retention=rig.steps(9),
        key=new.key,
        correlation_id="request 1",
        claimed_at=None,
        ended_at=None,
        failure_history=b"",
        result=None,
        progress=None,
    )


async def test_a_claimed_job_has_every_field_too(rig: Rig) -> None:
    """What a claim hands out is what reading shows."""
    await rig.add(payload=b"p", share="s", correlation_id="c", key=rig.key(), task_version="7")
    job = await rig.take()
    assert await rig.get(job.id) == job


@pytest.mark.parametrize("payload", [b"", b"\0", EVERY_BYTE, bytes(reversed(EVERY_BYTE)) * 1024])
async def test_payloads_are_kept_byte_for_byte(rig: Rig, payload: bytes) -> None:
    """To a store a payload is bytes: all 256 values, none at all, and 256 KiB of them come back unchanged."""
    job_id = await rig.add(payload=payload)
    assert (await rig.get(job_id)).payload == payload
    assert (await rig.take()).payload == payload


async def test_text_is_kept_exactly(rig: Rig) -> None:
    """No case folding, no trimming, no normalising, no character left out."""
    composed = unicodedata.normalize("NFC", "é")
    for text in (" a ", "A", "a", composed, unicodedata.normalize("NFD", composed), "🐙" * 30, "'; --", "%_\\{}:*"):
        job_id = await rig.add(queue="text", share=text, correlation_id=text, key=rig.key(text, text))
        job = await rig.get(job_id)
        assert (job.share, job.correlation_id, job.key) == (text, text, rig.key(text, text))


async def test_extreme_numbers_are_kept(rig: Rig) -> None:
    """The bounds of every number fit into every engine."""
    far = await rig.add(run_at=LATEST_TIME, priority=100, max_retries=1000, retention=LONGEST_DELAY)
    late = await rig.add(delay=LONGEST_DELAY, priority=-100, retention=0, key=Key("k", "h", LONGEST_DELAY))
    job = await rig.get(far)
    assert (job.run_at, job.priority, job.max_retries) == (LATEST_TIME, 100, 1000)
    assert job.retention == LONGEST_DELAY
    job = await rig.get(late)
    assert (job.run_at, job.priority, job.retention) == (job.created_at + LONGEST_DELAY, -100, 0)


async def test_no_jobs_are_no_error(rig: Rig) -> None:
    """An empty batch has an empty answer."""
    assert await rig.store.insert([]) == []
    assert await rig.store.apply([]) == []
    assert await rig.store.request_cancel([]) == []
    assert await rig.store.forget([]) == 0


async def test_as_many_jobs_as_one_call_may_have(rig: Rig) -> None:
    """A batch of the largest size goes through, in order."""
    ids = await rig.add_many(MOST_PER_CALL)
    assert await rig.claim_ids(await rig.session(), MOST_PER_CALL) == ids


async def test_one_call_may_serve_several_queues(rig: Rig) -> None:
    """The jobs of one batch need not be of one queue."""
    one, two = rig.new(queue="one"), rig.new(queue="two")
    assert await rig.store.insert([one, two]) == [Inserted(one.id, CREATED), Inserted(two.id, CREATED)]
    assert await rig.claim_ids(await rig.session(), queues=["two"]) == [two.id]


async def test_insert_blocking_equals_insert(rig: Rig) -> None:
    """The call for synchronous code gives the same answers and the same jobs."""
    new = rig.new(payload=EVERY_BYTE, key=rig.key("k", "h"))
    twin = rig.new(key=rig.key("k", "h"))
    other = rig.new(key=rig.key("k", "another"))
    too_many = rig.new()
    batch = [new, twin, other, too_many, new]
    answers = await asyncio.to_thread(rig.store.insert_blocking, batch, limits={QUEUE: DepthLimit(max_depth=1)})
    assert answers == [
        Inserted(new.id, CREATED),
        Inserted(new.id, EXISTING),
        Inserted(new.id, InsertStatus.KEY_CONFLICT),
        Inserted(too_many.id, FULL),
        Inserted(new.id, EXISTING),
    ]
    assert await rig.store.insert(batch, limits={QUEUE: DepthLimit(max_depth=1)}) == [
        Inserted(new.id, EXISTING),
        *answers[1:],
    ]
    assert (await rig.take()).payload == EVERY_BYTE
    assert len(await rig.dump()) == 1


async def test_a_foreign_connection_is_refused(rig: Rig) -> None:
    """A job can share a transaction only with a connection of the store's own database."""
    with pytest.raises(ForeignConnection):
        rig.store.insert_on(object(), [rig.new()])
    with pytest.raises(ForeignConnection):
        await rig.store.ainsert_on(object(), [rig.new()])
    with pytest.raises(ForeignConnection):
        rig.store.apply_on(object(), [])
    with pytest.raises(ForeignConnection):
        await rig.store.aapply_on(object(), [])
    assert await rig.dump() == []


async def test_a_foreign_connection_of_an_event_loop_is_refused(rig: Rig) -> None:
    """The same for one whose calls are awaited; a blocking verb can do nothing with it at all."""
    connection = ForeignAsyncConnection()
    with pytest.raises(ForeignConnection):
        await rig.store.ainsert_on(connection, [rig.new()])
    with pytest.raises(ForeignConnection):
        await rig.store.aapply_on(connection, [])
    with pytest.raises(ForeignConnection):
        await asyncio.to_thread(rig.store.insert_on, connection, [rig.new()])
    with pytest.raises(ForeignConnection):
        await asyncio.to_thread(rig.store.apply_on, connection, [])
    assert await rig.dump() == []


class ForeignAsyncConnection:
    """What an asynchronous driver that no store knows might hand out."""

    async def execute(self, *args: object) -> None:
        """Nobody may call this."""
        raise AssertionError("a statement was run on a foreign connection")

    cursor = commit = rollback = close = execute


# Repeating an insert.


async def test_an_id_twice_in_one_batch_is_one_job(rig: Rig) -> None:
    """The second of two equal ids exists already."""
    new = rig.new()
    assert await rig.store.insert([new, new]) == [Inserted(new.id, CREATED), Inserted(new.id, EXISTING)]
    assert len(await rig.dump()) == 1


@pytest.mark.parametrize("state", [State.SUCCEEDED, State.FAILED, State.CANCELLED])
async def test_repeating_an_insert_is_safe_whatever_became_of_the_job(rig: Rig, state: State) -> None:
    """After an unknown outcome the same ids may be sent again: the job may wait, run, or have ended by then."""
    new = rig.new()
    repeated = [Inserted(new.id, EXISTING)]
    assert await rig.store.insert([new]) == [Inserted(new.id, CREATED)]
    assert await rig.store.insert([new]) == repeated
    job = await rig.take()
    assert await rig.store.insert([new]) == repeated
    assert await rig.release(job) is Applied.APPLIED
    await rig.end(new.id, state)
    ended = await rig.get(new.id)
    assert await rig.store.insert([new]) == repeated
    assert await asyncio.to_thread(rig.store.insert_blocking, [new]) == repeated
    answers = await rig.store.insert([rig.new(), new, rig.new()], limits={QUEUE: DepthLimit(max_depth=9)})
    assert [answer.status for answer in answers] == [CREATED, EXISTING, CREATED]
    assert await rig.get(new.id) == ended
    assert len(await rig.dump()) == 3


async def test_a_repeated_batch_creates_only_what_is_missing(rig: Rig) -> None:
    """A batch whose first half arrived is completed by sending it again."""
    jobs = [rig.new() for _ in range(4)]
    await rig.store.insert(jobs[:2])
    answers = await rig.store.insert(jobs)
    assert [answer.status for answer in answers] == [EXISTING, EXISTING, CREATED, CREATED]
    assert await rig.claim_ids(await rig.session()) == [job.id for job in jobs]


async def test_repeating_an_insert_with_a_key_answers_with_its_own_job(rig: Rig) -> None:
    """A repeated insert exists by its id, whoever holds its key by then."""
    new = rig.new(key=rig.key("k", "first"))
    await rig.store.insert([new])
    await rig.store.request_cancel([new.id])
    other = await rig.add(key=rig.key("k", "second"))
    assert await rig.store.insert([new]) == [Inserted(new.id, EXISTING)]
    assert await rig.state(other) is State.READY


# Depth.


async def test_a_full_queue_takes_no_more(rig: Rig) -> None:
    """At `max_depth` waiting jobs the next one is refused, and nothing of it is written."""
    limits = {QUEUE: DepthLimit(max_depth=2)}
    jobs = [rig.new() for _ in range(3)]
    assert [answer.status for answer in await rig.store.insert(jobs, limits=limits)] == [CREATED, CREATED, FULL]
    assert await rig.store.get(jobs[2].id) is None
    [single] = await rig.store.insert([jobs[2]], limits=limits)
    assert single == Inserted(jobs[2].id, FULL)


async def test_depth_counts_waiting_jobs_due_or_not_and_nothing_else(rig: Rig) -> None:
    """Scheduled jobs take room; jobs in flight, ended jobs and other queues do not."""
    limits = {QUEUE: DepthLimit(max_depth=2)}
    for _ in range(3):
        await rig.add(queue="other")
    running = await rig.add()
    await rig.take()
    await rig.end(await rig.add(), State.CANCELLED)
    await rig.end(await rig.add(), State.SUCCEEDED)
    scheduled, ready, too_many = rig.new(delay=rig.steps(9)), rig.new(), rig.new()
    answers = await rig.store.insert([scheduled, ready, too_many], limits=limits)
    assert [answer.status for answer in answers] == [CREATED, CREATED, FULL]
    assert await rig.state(running) is State.IN_FLIGHT


async def test_a_full_queue_has_room_again_when_a_job_leaves(rig: Rig) -> None:
    """A claim makes room; giving the job back takes it again."""
    limits = {QUEUE: DepthLimit(max_depth=1)}
    await rig.add()
    job = await rig.take()
    assert [answer.status for answer in await rig.store.insert([rig.new()], limits=limits)] == [CREATED]
    await rig.release(job)
    assert [answer.status for answer in await rig.store.insert([rig.new()], limits=limits)] == [FULL]


async def test_a_full_queue_in_a_batch_does_not_stop_the_others(rig: Rig) -> None:
    """Jobs of other queues, and repeated ones, go through beside a refused one."""
    there = rig.new()
    await rig.store.insert([there])
    batch = [rig.new(queue="other"), rig.new(), there, rig.new(queue="other")]
    answers = await rig.store.insert(batch, limits={QUEUE: DepthLimit(max_depth=1)})
    assert [answer.status for answer in answers] == [CREATED, FULL, EXISTING, CREATED]
    assert await rig.claim_ids(await rig.session(), queues=["other"]) == [batch[0].id, batch[3].id]


async def test_warn_depth_says_when_a_queue_is_deep(rig: Rig) -> None:
    """From `warn_depth` waiting jobs on, every new one is answered with `deep`."""
    limits = {QUEUE: DepthLimit(warn_depth=2)}
    answers = await rig.store.insert([rig.new() for _ in range(3)], limits=limits)
    assert [answer.deep for answer in answers] == [False, True, True]
    [one] = await rig.store.insert([rig.new()], limits=limits)
    assert one.deep
    [other] = await rig.store.insert([rig.new(queue="other")], limits=limits)
    assert not other.deep


# Checkpoints.


async def test_a_checkpoint_advances_with_its_jobs(rig: Rig) -> None:
    """A source's cursor moves in the same step as the insert of what it yielded."""
    assert await rig.store.checkpoint(QUEUE, "files") is None
    await rig.store.insert([rig.new(), rig.new()], checkpoint=Checkpoint(QUEUE, "files", None, "2"))
    assert await rig.store.checkpoint(QUEUE, "files") == "2"
    await rig.store.insert([rig.new()], checkpoint=Checkpoint(QUEUE, "files", "2", "3"))
    assert await rig.store.checkpoint(QUEUE, "files") == "3"
    assert await rig.store.checkpoint(QUEUE, "other") is None
    assert await rig.store.checkpoint("other", "files") is None
    assert len(await rig.dump()) == 3


async def test_a_checkpoint_may_advance_without_jobs(rig: Rig) -> None:
    """A source that found nothing still remembers where it was."""
    assert await rig.store.insert([], checkpoint=Checkpoint(QUEUE, "files", None, "1")) == []
    assert await rig.store.checkpoint(QUEUE, "files") == "1"


@pytest.mark.parametrize("was", [None, "0"])
async def test_a_checkpoint_conflict_writes_nothing(rig: Rig, was: str | None) -> None:
    """If another process moved the cursor first, none of the jobs is inserted."""
    await rig.store.insert([], checkpoint=Checkpoint(QUEUE, "files", None, "1"))
    for count in (1, 2):
        with pytest.raises(CheckpointConflict):
            await rig.store.insert([rig.new() for _ in range(count)], checkpoint=Checkpoint(QUEUE, "files", was, "2"))
    assert await rig.store.checkpoint(QUEUE, "files") == "1"
    assert await rig.dump() == []


async def test_a_checkpoint_and_a_full_queue_write_nothing(rig: Rig) -> None:
    """If one job of the batch finds no room, none is inserted and the cursor stays."""
    limits = {QUEUE: DepthLimit(max_depth=2)}
    there = rig.new()
    await rig.store.insert([there])
    batch = [there, rig.new(), rig.new()]
    answers = await rig.store.insert(batch, limits=limits, checkpoint=Checkpoint(QUEUE, "files", None, "1"))
    assert [answer.status for answer in answers] == [FULL] * 3
    assert await rig.store.checkpoint(QUEUE, "files") is None
    assert [job.id for job in await rig.dump()] == [there.id]
    answers = await rig.store.insert(batch[:2], limits=limits, checkpoint=Checkpoint(QUEUE, "files", None, "1"))
    assert [answer.status for answer in answers] == [EXISTING, CREATED]
    assert await rig.store.checkpoint(QUEUE, "files") == "1"


async def test_with_a_checkpoint_only_jobs_that_need_room_count(rig: Rig) -> None:
    """A job that exists by its id or its key, or comes twice in the batch, does not fill the queue."""
    limits = {QUEUE: DepthLimit(max_depth=2)}
    await rig.add(key=rig.key("k", "h"))
    new = rig.new()
    batch = [rig.new(key=rig.key("k", "h")), new, new, rig.new(key=rig.key("k", "another"))]
    answers = await rig.store.insert(batch, limits=limits, checkpoint=Checkpoint(QUEUE, "files", None, "1"))
    assert [answer.status for answer in answers] == [EXISTING, CREATED, EXISTING, InsertStatus.KEY_CONFLICT]
    assert await rig.store.checkpoint(QUEUE, "files") == "1"


async def test_a_checkpoint_serves_one_queue(rig: Rig) -> None:
    """Jobs of another queue than the checkpoint's are a mistake, found before anything is written."""
    with pytest.raises(InvalidOption):
        await rig.store.insert([rig.new(), rig.new(queue="other")], checkpoint=Checkpoint(QUEUE, "files", None, "1"))
    assert await rig.dump() == []
    assert await rig.store.checkpoint(QUEUE, "files") is None
