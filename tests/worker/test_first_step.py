"""A job that is stopped between its start and the first step of its handler. The simulation found it leaking a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from holdfast import Holdfast, State, WorkerSettings
from holdfast.job import Job
from holdfast.worker.runner import Runner


async def test_a_job_cancelled_before_its_first_step_frees_its_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    app = Holdfast("memory://")
    ran = []

    @app.task
    async def work(name: str) -> None:
        ran.append(name)

    first, second = await work.aenqueue("first"), await work.aenqueue("second")
    feed = Runner.feed

    def feed_and_cancel(runner: Runner, jobs: Iterable[Job]) -> None:
        jobs = list(jobs)
        feed(runner, jobs)
        if first.id in {job.id for job in jobs}:
            runner.cancel([first.id])

    monkeypatch.setattr(Runner, "feed", feed_and_cancel)
    service = app.worker_service(WorkerSettings(concurrency=1))
    running = asyncio.create_task(service.run())
    await second.aresult(timeout=10)
    assert (await first.arefresh()).state is State.CANCELLED
    assert ran == ["second"]
    service.stop()
    assert await running
