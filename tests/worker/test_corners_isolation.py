"""Corners of isolated jobs: requests to stop that come too early or too late, processes that die or go on when nobody
needs them, and processes that cannot be had.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, cast

import msgspec
import pytest

from holdfast import State
from holdfast.entry.isolated import _Isolated
from holdfast.events import JobSettled, PartFailed, ProcessDied
from holdfast.failures import decode_history
from holdfast.job import Job, NewJob, enqueued
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Crashed, Failed, Outcome, Succeeded
from holdfast.ports import SYSTEM, Ports, Process, SystemSpawner
from holdfast.store import ClaimRequest, Session
from holdfast.worker import wire
from holdfast.worker.context import CurrentJob, Stop
from holdfast.worker.isolated_process import IsolatedProcess
from holdfast.worker.isolation import IsolatedPool
from tests.worker import shop as importable
from tests.worker.bench import PATIENCE, Bench, Heard, ended, failed, stored
from tests.worker.modules import everything
from tests.worker.shop import STORE, Shop, named

HOW_OFTEN = 5
"""For races: each round has the chance to lose."""


def claimed(task: str, **arguments: Any) -> Job:
    """A job as a worker has it."""
    new = NewJob(id=SYSTEM.ids.job_id(), task=task, payload=msgspec.json.encode(arguments))
    return msgspec.structs.replace(enqueued(new, 0), session_id="session", version=1)


class Scene:
    """A pool of processes, and what is told."""

    def __init__(self, application: str, shop: Shop | None = None) -> None:
        self.heard = Heard()
        self.app = shop.app if shop else everything.app
        self.pool = IsolatedPool(application, self.app.tasks, ports=SYSTEM, listener=self.heard)
        self.progress: list[bytes | None] = []

    def start(self, job: Job, *, hard_timeout: float | None = None, begun: Callable[[], None] = str) -> _Run:
        """Run the job, as the runner would."""
        run = _Run(CurrentJob(job, self.app.store, SYSTEM, is_async=False, noted=self._note))
        run.task = asyncio.create_task(self.pool.run(job, run.current, hard_timeout, begun))
        return run

    async def run(self, job: Job) -> Outcome:
        return await self.start(job).outcome()

    def _note(self, current: CurrentJob) -> None:
        self.progress.append(current.latest_progress)


class _Run:
    task: asyncio.Task[Outcome]

    def __init__(self, current: CurrentJob) -> None:
        self.current = current

    def stop(self, why: Stop) -> None:
        """As the runner does it."""
        self.current.stop = why
        self.task.cancel()

    async def outcome(self) -> Outcome:
        async with asyncio.timeout(PATIENCE):
            return await self.task


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene("tests.worker.modules.everything:app")
    yield scene
    await scene.pool.close()


@pytest.fixture
async def shop_scene() -> AsyncIterator[Scene]:
    shop = Shop("memory://")
    scene = Scene("tests.worker.shop:app", shop)
    yield scene
    await scene.pool.close()


# A stop in the moment after the end.


class Overheard(asyncio.Queue[wire.FromProcess | None]):
    """What a process says. Somebody does something as soon as it has arrived, before anybody has read it."""

    def __init__(self, act: Callable[[wire.FromProcess | None], None]) -> None:
        super().__init__()
        self._act = act

    async def put(self, item: wire.FromProcess | None) -> None:
        await super().put(item)
        self._act(item)


@pytest.mark.parametrize("why", [Stop.SHUTDOWN, Stop.CANCEL, Stop.TIMEOUT])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("task", "arguments", "expected"),
    [("ping_alone", {}, Succeeded), ("die", {"how": "exit 3"}, Crashed), ("endless_alone", {}, Failed)],
    ids=["returned", "crashed", "hard limit"],
)
async def test_an_isolated_job_that_has_ended_keeps_its_outcome_though_a_stop_comes_in_the_next_moment(
    shop_scene: Scene,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    arguments: dict[str, str],
    expected: type[Outcome],
    steps: int,
    why: Stop,
) -> None:
    monkeypatch.setattr("holdfast.worker.isolation._MOST_IDLE", 0)  # so many are idle that this one is not needed
    loop = asyncio.get_running_loop()
    stops = 0

    def stop_after(steps: int) -> None:
        nonlocal stops
        if steps:
            loop.call_soon(stop_after, steps - 1)
        else:
            stops += 1
            run.stop(why)

    def overhear(message: wire.FromProcess | None) -> None:
        if isinstance(message, wire.Done) or message is None:
            stop_after(steps)

    kill = IsolatedProcess.kill

    def overhear_kill(process: IsolatedProcess) -> None:
        kill(process)
        if expected is Failed:
            loop.call_soon(stop_after, steps)

    take, spawn = IsolatedPool._idle_or_new, IsolatedPool._spawn

    async def watched(pool: IsolatedPool) -> IsolatedProcess:
        process = await take(pool)
        if expected is not Failed:
            process.messages = Overheard(overhear)
        return process

    assert spawn
    monkeypatch.setattr(IsolatedPool, "_idle_or_new", watched)
    monkeypatch.setattr(IsolatedProcess, "kill", overhear_kill)
    if expected is Failed:
        arguments = {"path": "/dev/null", "seconds": cast(Any, 60)}
    run = shop_scene.start(claimed(task, **arguments), hard_timeout=0.1 if expected is Failed else None)
    outcome = await run.outcome()
    assert isinstance(outcome, expected), outcome
    assert stops
    if isinstance(outcome, Failed):
        assert outcome.failure.type == "HardTimeout"
