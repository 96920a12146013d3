"""Holdfast as a contestant: its client, and its real worker command with the supervisor, as a user runs them."""

import asyncio
import os
import sys
from importlib.metadata import version
from typing import Any, ClassVar

from benchmarks.holdfast_jobs import app, noop
from benchmarks.program import TEXT, Program, main, own_jobs, plain, run_loop, url
from holdfast import WorkerSettings

COROUTINES = 100
THREADS = 10
"""As docs/guides/workers.md has it: coroutines that wait are cheap, threads are not."""


def concurrency() -> int:
    return THREADS if plain() else COROUTINES


class HoldfastProgram(Program):
    info: ClassVar[dict[str, Any]] = {
        "lib": "Holdfast",
        "version": version("holdfast"),
        "settings": f"holdfast worker --concurrency {COROUTINES} ({THREADS} for plain functions)",
        "durability": "leases, settled after the handler; jobs of a killed process start again at once",
        "threads": True,
        "pending": {"holdfast": True},
    }
    at_once = None  # it takes an iterator, sends a thousand in one statement, and prepares the next meanwhile

    def setup(self) -> None:
        app.counts()

    def enqueue(self, number: int, text: str) -> None:
        noop.enqueue(number, text)

    async def aenqueue(self, number: int, text: str) -> None:
        await noop.aenqueue(number, text)

    async def close(self) -> None:
        await app.aclose()

    def enqueue_many(self, numbers: range, text: str) -> None:
        app.enqueue_many((noop.job(number, text) for number in numbers), progress=_unnoticed)

    def worker(self) -> None:
        command = [sys.executable, "-m", "holdfast", "worker", "benchmarks.holdfast_jobs:app", "--log-level", "warning"]
        os.execv(sys.executable, [*command, "--concurrency", str(concurrency())])


class InMemory(HoldfastProgram):
    """On the memory store, which lives in one process: the worker makes its jobs itself."""

    info: ClassVar[dict[str, Any]] = {
        **HoldfastProgram.info,
        "settings": f"app.worker_service, concurrency {COROUTINES}, in one process with its jobs",
        "fills_itself": True,
        "pending": None,
    }

    def worker(self) -> None:
        self.enqueue_many(range(own_jobs()), TEXT)
        run_loop(self._work())

    async def _work(self) -> None:
        service = app.worker_service(WorkerSettings(concurrency=concurrency(), keepers=False))
        asyncio.get_running_loop().add_signal_handler(15, service.stop)
        await service.run()


def _unnoticed(done: int) -> None:
    """Nothing is kept of a job that is stored."""


if __name__ == "__main__":
    main(InMemory() if url().startswith("memory") else HoldfastProgram())
