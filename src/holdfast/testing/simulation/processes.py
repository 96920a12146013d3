"""Processes of isolated jobs, simulated: parts of a worker's host that die alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.failures import Failure
from holdfast.job import Job
from holdfast.lifecycle import Crashed, Failed, Outcome, Released
from holdfast.registry import Registry
from holdfast.testing.simulation.loop import HOST
from holdfast.testing.simulation.run import Run
from holdfast.worker.context import CurrentJob
from holdfast.worker.handling import Handling, hard_timeout_failure

_PROCESS = "/process-"
_SLOWEST_DEATH = 0.5


class SimulatedProcesses:
    """Where the isolated jobs of all workers run. One for a run; see `holdfast.worker.runner.Isolation`."""

    def __init__(self, run: Run, registry: Registry, handling: Handling) -> None:
        self._run = run
        self._registry = registry
        self._handling = handling
        self._started = 0
        self._deaths: dict[str, asyncio.Future[None]] = {}

    def die(self, host: str) -> bool:
        """End the process that is that part of a host, at once. False if it is none."""
        if _PROCESS not in host:
            return False
        self._run.loop.kill(host)
        if not (death := self._deaths[host]).done():
            death.set_result(None)
        return True

    async def run(
        self, job: Job, current: CurrentJob, hard_timeout: float | None, begun: Callable[[], None]
    ) -> Outcome:
        """See `Isolation.run`."""
        run = self._run
        try:
            await run.ports.clock.sleep(run.chance.choice([0.0, 0.0, 0.3]))
        except asyncio.CancelledError:
            return Released()
        begun()
        self._started += 1
        host = f"{HOST.get()}{_PROCESS}{self._started}"
        handler = run.loop.on_host(host, self._handling.call_async(self._registry[job.task], job, current))
        death = self._deaths[host] = run.loop.create_future()
        if run.chance.random() < run.plan.crash_rate:
            run.loop.call_later(_SLOWEST_DEATH * run.chance.random(), self.die, host)
        deadline = None if hard_timeout is None else run.loop.time() + hard_timeout
        while True:
            left = None if deadline is None else max(0.0, deadline - run.loop.time())
            try:
                await asyncio.wait({handler, death}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                # The runner asks the handler to stop. What it makes of that is still to come.
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
                handler.cancel()
                continue
            if handler.done():
                outcome: Outcome = handler.result()
                return outcome
            if death.done():
                run.happened("process died")
                return Crashed(Failure(run.clock.now(), job.attempt + 1, "ProcessDied", "died by chance"))
            if deadline is not None and run.loop.time() >= deadline:
                run.happened("process killed at its hard limit")
                run.loop.kill(host)
                return Failed(hard_timeout_failure(job, hard_timeout or 0.0, run.ports))

    async def close(self) -> None:
        """Nothing to end: a process ends with its job."""
