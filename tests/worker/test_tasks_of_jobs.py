"""Each coroutine runs in a task of its own. It bears the job's id, and a task factory makes it, if there is one."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Generator
from typing import Any

import pytest
import uvloop

from holdfast import Holdfast, WorkerSettings, current
from holdfast.worker.event_loop import makes_plain_tasks
from tests.worker.bench import PATIENCE

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
PLACE = contextvars.ContextVar("place", default="")


async def names_of_tasks() -> tuple[list[str], list[str]]:
    app = Holdfast("memory://")
    names: dict[str, str] = {}

    @app.task
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        names[current().id] = task.get_name()
        assert PLACE.get() == ""
        PLACE.set("a job's")
        await asyncio.sleep(0)

    jobs = [await work.aenqueue() for _ in range(5)]
    service = app.worker_service(WorkerSettings(concurrency=2))
    running = asyncio.create_task(service.run())
    for job in jobs:
        await job.aresult(timeout=PATIENCE)
    service.stop()
    assert await running
    return [names[job.id] for job in jobs], [job.id for job in jobs]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("factory", [False, True])
def test_a_task_bears_the_id_of_its_job_whoever_makes_it(loop: str, factory: bool) -> None:
    made: list[asyncio.Task[Any]] = []

    def make(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any] | Generator[Any, None, Any], **options: Any
    ) -> asyncio.Task[Any]:
        made.append(asyncio.Task(work, loop=loop, **options))
        return made[-1]

    async def main() -> None:
        running = asyncio.get_running_loop()
        assert makes_plain_tasks(running)
        if factory:
            running.set_task_factory(make)
            assert not makes_plain_tasks(running)
        names, ids = await names_of_tasks()
        assert names == ids
        assert ({task.get_name() for task in made} >= set(ids)) is factory

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(main())


def test_a_loop_that_makes_tasks_in_its_own_way_is_asked_for_them() -> None:
    class Own(asyncio.SelectorEventLoop):
        def create_task(self, *arguments: Any, **options: Any) -> asyncio.Task[Any]:
            return super().create_task(*arguments, **options)

    loop = Own()
    assert not makes_plain_tasks(loop)
    loop.close()
