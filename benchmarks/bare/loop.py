"""The loop that all bare contestants share: a claimer and a settler around a task per job."""

import asyncio
import contextvars
import signal
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec

from benchmarks.program import marker

BATCH = 500
"""What was fastest on every engine: claimed and settled by the hundreds, four times as many in flight."""

current: contextvars.ContextVar[Any] = contextvars.ContextVar("current")


class Arguments(msgspec.Struct):
    """What a job has."""

    n: int
    s: str


class Taken(msgspec.Struct, gc=False):
    """A claimed job: what settles it, and its payload."""

    id: Any
    version: Any
    payload: bytes


class Bare(Protocol):
    async def open(self) -> None: ...
    async def claim(self, limit: int) -> Sequence[Taken]: ...
    async def settle(self, jobs: Sequence[Taken]) -> int: ...


async def work(store: Bare, batch: int = BATCH, idle: float = 0.02) -> None:
    """Claim, run and settle until SIGTERM. An empty store is looked at again after the pause."""
    mark = marker()
    decode = msgspec.json.Decoder(Arguments).decode
    done: list[Taken] = []
    running: set[asyncio.Task[None]] = set()
    free = asyncio.Event()
    ready = asyncio.Event()
    in_flight = 0

    async def noop(n: int, s: str) -> None:
        mark()

    async def run(job: Taken) -> None:
        current.set(job)
        arguments = decode(job.payload)
        await noop(arguments.n, arguments.s)
        done.append(job)
        ready.set()

    async def claim() -> None:
        nonlocal in_flight
        while True:
            if in_flight > 3 * batch:
                free.clear()
                await free.wait()
                continue
            jobs = await store.claim(batch)
            if not jobs:
                await asyncio.sleep(idle)
            in_flight += len(jobs)
            for job in jobs:
                task = asyncio.create_task(run(job))
                running.add(task)
                task.add_done_callback(running.discard)

    async def settle() -> None:
        nonlocal in_flight
        while True:
            if not done:
                ready.clear()
                await ready.wait()
            jobs = done[:BATCH]
            del done[:BATCH]
            assert await store.settle(jobs) == len(jobs)
            in_flight -= len(jobs)
            free.set()

    await store.open()
    await until_stopped(claim, settle)


async def until_stopped(*loops: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run these until SIGTERM, or until one fails."""
    tasks = [asyncio.create_task(loop()) for loop in loops]

    def stop() -> None:
        for task in tasks:
            task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
