"""Inserts whose caller does something else while the server works, for stores that have them (`Overlapping`). Not part
of the suite for every store: a test module for one that has them imports everything from here, too.
"""

# ruff: noqa: S101

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.batches import PreparedJob
from holdfast.job import NewJob, State
from holdfast.store import DepthLimit, Inserted, InsertStatus, Overlapping
from holdfast.testing.suite.harness import Rig

SOON = 10.0


async def insert_while(rig: Rig, jobs: Sequence[NewJob], meanwhile: Callable[[], object]) -> list[Inserted]:
    """The store's, on a thread of its own."""
    assert isinstance(rig.store, Overlapping)
    return await asyncio.to_thread(rig.store.insert_while, jobs, meanwhile)


@pytest.mark.parametrize("most", [None, 1, 2, 9])
async def test_an_overlapped_insert_answers_as_any_other(rig: Rig, most: int | None) -> None:
    """New jobs, one that is there, some that come twice; and a queue that is full, or becomes full."""

    async def answers(queue: str, insert: Callable[..., Any]) -> list[InsertStatus]:
        jobs = [rig.new(queue=queue) for _ in range(3)]
        await rig.store.insert(jobs[1:2])
        limits = {queue: DepthLimit(max_depth=most)} if most else None
        inserted: list[Inserted] = await asyncio.to_thread(insert, [*jobs, *jobs], limits=limits)
        assert [answer.job_id for answer in inserted] == [job.id for job in (*jobs, *jobs)]
        return [answer.status for answer in inserted]

    assert isinstance(rig.store, Overlapping)
    overlapped = await answers("overlapped", partial(rig.store.insert_while, meanwhile=lambda: None))
    assert overlapped == await answers("usual", rig.store.insert_blocking)


async def test_the_jobs_are_stored_while_the_caller_does_something_else(rig: Rig) -> None:
    """They are on their way when it begins, and nothing that it does can keep them from arriving."""
    jobs = [rig.new() for _ in range(1000)]
    begun, seen = threading.Event(), threading.Event()

    def meanwhile() -> None:
        begun.set()
        seen.wait(SOON)

    inserting = asyncio.ensure_future(insert_while(rig, jobs, meanwhile))
    async with rig.harness.second() as other:
        assert await asyncio.to_thread(begun.wait, SOON)
        async with asyncio.timeout(SOON):
            while await other.get(jobs[-1].id) is None:  # noqa: ASYNC110 - the server has it soon
                await asyncio.sleep(0.01)
        assert not inserting.done()
        seen.set()
    assert [answer.status for answer in await inserting] == [InsertStatus.CREATED] * 1000


async def test_enqueue_many_reads_the_next_calls_meanwhile(rig: Rig) -> None:
    """A thousand ahead, and no more."""
    app = Holdfast(rig.store)

    @app.task
    def task(n: int) -> None: ...

    read = 0

    def calls() -> Iterator[PreparedJob[None]]:
        nonlocal read
        for n in range(2_500):
            read += 1
            yield task.job(n)

    told: list[tuple[int, int]] = []

    def enqueue() -> int:
        return app.enqueue_many(calls(), progress=lambda number: told.append((number, read)))

    assert await asyncio.to_thread(enqueue) == 2_500
    assert told == [(1_000, 2_000), (2_000, 2_500), (2_500, 2_500)]
    assert len(await rig.dump()) == 2_500


async def test_the_caller_may_use_the_store_meanwhile(rig: Rig) -> None:
    """Also to overlap once more: as deep as it goes, each insert does what it says."""
    jobs = [rig.new() for _ in range(80)]

    def further(at: int) -> None:
        if at < len(jobs):
            rig.store.insert_while(jobs[at : at + 2], lambda: further(at + 2))  # type: ignore[attr-defined]

    await insert_while(rig, [rig.new(), rig.new()], lambda: further(0))
    found = await rig.dump()
    assert 4 <= len(found) <= 82
    assert {job.state for job in found} == {State.READY}


async def test_a_caller_who_is_interrupted_meanwhile_leaves_nothing_behind(rig: Rig) -> None:
    """Nobody else gets the answer that this one did not wait for."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    def insert() -> None:
        with pytest.raises(KeyboardInterrupt):
            rig.store.insert_while([rig.new() for _ in range(1000)], interrupted)  # type: ignore[attr-defined]

    await asyncio.to_thread(insert)
    new = [rig.new(), rig.new()]
    answers = await asyncio.to_thread(rig.store.insert_blocking, new)
    assert answers == [Inserted(job.id, InsertStatus.CREATED) for job in new]


__all__ = [name for name in dir() if name.startswith("test_")]
