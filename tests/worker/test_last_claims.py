"""The last claims of a worker that stops: what has not started goes back unharmed, and nothing else does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from holdfast import Holdfast, Job, JobHandle, State, WorkerSettings
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Applied, Move
from holdfast.ports import SYSTEM
from holdfast.store import Claimed, ClaimRequest
from holdfast.stores.memory import MemoryStore
from tests.worker.bench import PATIENCE

FOR_EVER = 3600.0


def details(store: MemoryStore, job: JobHandle[Any]) -> Job:
    return store._jobs[job.id]


class LateReplies(MemoryStore):
    """The reply to the claim that takes the second job is on its way until a settlement is."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[str] = []
        self.second_taken = asyncio.Event()
        self._let_through = asyncio.Event()

    async def claim(self, request: ClaimRequest) -> Claimed:
        claimed = await super().claim(request)
        self.taken += [job.id for job in claimed.jobs]
        if claimed.jobs and len(self.taken) > 1:
            self.second_taken.set()
            await self._let_through.wait()
        return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        answers = await super().apply(moves)
        self._let_through.set()
        for _ in range(10):
            await asyncio.sleep(0)  # the claimer hears of the second job before the worker hears of the first
        return answers


async def test_a_job_whose_claim_is_answered_while_the_worker_stops_is_given_back() -> None:
    store = LateReplies()
    app = Holdfast(store)
    begun = asyncio.Event()

    @app.task
    async def endless() -> None:
        begun.set()
        await asyncio.sleep(FOR_EVER)

    first = await endless.aenqueue()
    service = app.worker_service(WorkerSettings(concurrency=2, poll=0.05, grace=FOR_EVER, keepers=False))
    working = asyncio.create_task(service.run())
    async with asyncio.timeout(PATIENCE):
        await begun.wait()
        second = await endless.aenqueue()
        await store.second_taken.wait()
        service.stop_now()
        await working
    assert store.taken == [first.id, second.id]
    assert [details(store, job).state for job in (first, second)] == [State.READY, State.READY]
    assert [details(store, job).attempt for job in (first, second)] == [0, 0]
    assert [details(store, job).suspect for job in (first, second)] == [False, False]


async def test_a_job_that_has_run_is_not_given_back_as_if_it_had_not() -> None:
    """Its session was closed meanwhile by somebody else, who counts its attempt; the worker must not be faster."""
    store = MemoryStore()
    app = Holdfast(store)
    runs = 0

    @app.task
    async def told_to_stop() -> None:
        nonlocal runs
        runs += 1
        await store.close_session(service.worker_id)
        service.stop()

    job = await told_to_stop.aenqueue()
    service = app.worker_service(WorkerSettings(concurrency=1, grace=FOR_EVER, keepers=False))
    async with asyncio.timeout(PATIENCE):
        await service.run()
    assert runs == 1
    assert await Rescue(store, ports=SYSTEM).one_pass() == 1
    assert details(store, job).attempt == 1
    assert details(store, job).suspect
