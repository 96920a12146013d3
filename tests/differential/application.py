"""The application that a workload is asked of. Its handlers do what their payload says, and note that they ran."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast import CurrentJob, FullJitter, GiveUp, Holdfast, Retry, Snooze, WorkerSettings, current
from holdfast.store import Store
from holdfast.testing.history.events import Effect, End, Rules, Start
from holdfast.testing.history.recording import Note
from tests.differential.workload import QUEUES

BACKOFF = FullJitter(base=0.02, max=0.06)
WORKER = WorkerSettings(queues=QUEUES, concurrency=6, poll=0.2, lease_ttl=60.0, max_snoozes=2)
RULES = Rules(backoff=BACKOFF, max_crashes=WORKER.max_crashes, max_snoozes=WORKER.max_snoozes)
_SOON = 0.02
_TOO_LONG = 60.0


class Hopeless(Exception):
    """What no retry mends."""


def make_application(store: Store, note: Note) -> Holdfast:
    """An application on that store."""
    runs: Counter[str] = Counter()

    @contextmanager
    def noting(job: CurrentJob) -> Iterator[None]:
        version = job.lease.version
        wished: float | None = None
        note(Start(at=time.monotonic(), job_id=job.id, version=version))
        try:
            yield
            note(Effect(at=time.monotonic(), job_id=job.id, version=version))
        except Retry as retry:
            wished = retry.after
            raise
        finally:
            note(End(at=time.monotonic(), job_id=job.id, version=version, wished=wished))

    app = Holdfast(store, middleware=[noting])

    def act(steps: list[str]) -> Any:
        """The step of this run: the number of the run decides, not that of the attempt, because a snooze is none."""
        job = current()
        run = runs[job.id]
        runs[job.id] += 1
        match steps[run] if run < len(steps) else "ok":
            case "fail":
                raise ValueError(f"in run {run}")
            case "permanent":
                raise Hopeless(f"in run {run}")
            case "give up":
                raise GiveUp(f"in run {run}")
            case "retry":
                raise Retry(f"in run {run}", after=_SOON)
            case "snooze":
                raise Snooze(_SOON, f"in run {run}")
            case "exit":
                sys.exit(run)
            case "not JSON":
                return object()
            case "NUL":
                return "a\0b"
        return run

    @app.task(name="work", backoff=BACKOFF, permanent=(Hopeless,), on_failed="mourn")
    async def work(label: int, steps: list[str]) -> Any:
        return act(steps)

    @app.task(name="plain", backoff=BACKOFF, permanent=(Hopeless,))
    def plain(label: int, steps: list[str]) -> Any:
        return act(steps)

    @app.task(name="slow", backoff=BACKOFF, timeout=_SOON, on_failed="mourn")
    async def slow(label: int, steps: list[str]) -> None:
        await asyncio.sleep(_TOO_LONG)

    @app.task(name="mourn", queue=QUEUES[1])
    async def mourn(task: str, queue: str, reason: str, error: str, attempt: int, arguments: dict[str, Any]) -> str:
        return reason

    return app
