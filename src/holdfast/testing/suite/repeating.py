"""One more job like the one before, for stores that have a shorter way for it (`Repeating`). Not part of the suite for
every store: a test module for one that has it imports everything from here, too.
"""

# ruff: noqa: S101

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from holdfast import Holdfast, QueueSettings, Settings
from holdfast.errors import QueueFull
from holdfast.job import Job, NewJob
from holdfast.ports import SYSTEM
from holdfast.repeating import Repeating
from holdfast.testing.suite.harness import Rig


async def stored(rig: Rig, job_id: str) -> Job:
    """The job as the store has it."""
    job = await rig.store.get(job_id)
    assert job is not None
    return job


def alike(job: Job) -> Job:
    """What jobs of one kind have in common."""
    return msgspec.structs.replace(job, id="", run_at=0, created_at=0)


def like(rig: Rig) -> NewJob:
    """One with something in every field that may differ."""
    return rig.new(
        share="a b", priority=-3, max_retries=7, task_version="2", correlation_id="c \u2603", retention=10**9
    )


def repeater(rig: Rig, model: NewJob) -> Callable[[str, bytes], bool]:
    """The store's, which has one for such a job."""
    assert isinstance(rig.store, Repeating)
    repeat = rig.store.repeater(model)
    assert repeat is not None
    return repeat


async def test_a_repeated_job_looks_as_any_other(rig: Rig) -> None:
    model = like(rig)
    await rig.store.insert([model])
    job_id, payload = SYSTEM.ids.job_id(), b'{"text":"\xc3\xbc\\r\\n$1"}'
    assert await asyncio.to_thread(repeater(rig, model), job_id, payload)
    usual = msgspec.structs.replace(model, id=SYSTEM.ids.job_id(), payload=payload)
    await rig.store.insert([usual])
    assert alike(await stored(rig, job_id)) == alike(await stored(rig, usual.id))
    assert await rig.claim_ids(await rig.session(), 10) == [model.id, job_id, usual.id]


async def test_what_is_repeated_is_there_or_nothing_was_written(rig: Rig) -> None:
    """Also in a queue that the store has never seen, and for an id that is not fresh."""
    repeat = repeater(rig, rig.new(queue="unseen"))
    ids = [SYSTEM.ids.job_id() for _ in range(3)]
    created = [job_id for job_id in [*ids, *ids] if await asyncio.to_thread(repeat, job_id, b"{}")]
    assert len(created) == len(set(created))
    assert sorted(job.id for job in await rig.dump()) == sorted(created)


async def test_threads_repeat_at_once(rig: Rig) -> None:
    model = rig.new()
    await rig.store.insert([model])
    repeat = repeater(rig, model)
    ids = [SYSTEM.ids.job_id() for _ in range(200)]
    with ThreadPoolExecutor(4) as threads:
        created = await asyncio.to_thread(lambda: list(threads.map(lambda job_id: repeat(job_id, b"{}"), ids)))
    # Two of one moment may be more than the short way can put in order. Whoever hears False inserts it as usual.
    assert {job.id for job in await rig.dump()} == {
        model.id,
        *(job_id for job_id, is_there in zip(ids, created, strict=True) if is_there),
    }


@pytest.mark.parametrize("times", [1, 2, 5])
async def test_enqueue_repeats(rig: Rig, times: int) -> None:
    app = Holdfast(rig.store)

    @app.task(queue="mail")
    def task(n: int) -> None: ...

    handles = await asyncio.to_thread(lambda: [task.enqueue(n) for n in range(times)])
    assert all(handle.created for handle in handles)
    payloads = {job.id: job.payload for job in await rig.dump()}
    assert payloads == {handle.id: b'{"n":%d}' % n for n, handle in enumerate(handles)}


async def test_a_queue_with_a_limit_is_not_filled_by_repeating(rig: Rig) -> None:
    app = Holdfast(rig.store, settings=Settings(queues=QueueSettings(max_depth=2)))

    @app.task
    def task() -> None: ...

    def enqueue() -> None:
        task.enqueue()
        task.enqueue()
        with pytest.raises(QueueFull):
            task.enqueue()

    await asyncio.to_thread(enqueue)
    assert len(await rig.dump()) == 2


__all__ = [name for name in dir() if name.startswith("test_")]
