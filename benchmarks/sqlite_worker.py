"""The whole worker on SQLite (FULL), beside the same claims and settlements without one.

The worker runs a coroutine function that returns its argument, ten at once, with its heartbeat, its event loop and a
task per job. The reference claims a hundred jobs and settles them, over and over. The ratio is what running jobs costs.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import ROUNDS, interleaved
from benchmarks.sqlite_backlog import JOBS, prepared_loop
from holdfast import Holdfast, WorkerSettings

CONCURRENCY = 10


def _worker(app: Holdfast) -> Callable[[], int]:
    async def work() -> int:
        service = app.worker_service(WorkerSettings(concurrency=CONCURRENCY, keepers=False))
        running = asyncio.create_task(service.run())
        while service.settler.counts["succeeded"] < JOBS:  # noqa: ASYNC110  the counter tells nobody
            await asyncio.sleep(0.001)
        service.stop()
        await running
        return service.settler.counts["succeeded"]

    return lambda: asyncio.run(work())


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """One result: jobs per second through a worker and through the bare loop."""
    app = Holdfast(f"sqlite:///{folder / 'worker.db'}")

    @app.task(queue="bench")
    async def noop(n: int, s: str) -> int:
        return n

    enough = (ROUNDS + 1) * (JOBS + 1_000)
    app.enqueue_many(noop.job(n, "abcdefghijklmnopqrstuvwxyzabcdef") for n in range(enough))
    with prepared_loop(folder / "loop.db", (ROUNDS + 1) * JOBS) as loop:
        medians = interleaved({"worker": _worker(app), "loop": loop})
    app.close()
    yield {
        "benchmark": f"SQLite: worker, {CONCURRENCY} no-op coroutines at once / bare claim + settle of 100",
        "unit": "jobs/s",
        "ours": medians["worker"],
        "reference": medians["loop"],
        "ratio": medians["worker"] / medians["loop"],
        "target": None,
    }
