"""asyncio alone: a task per job, a hundred at once, nothing stored. What the memory engine is measured beside."""

import asyncio
import platform
from typing import Any, ClassVar

import msgspec

from benchmarks.bare.loop import Arguments, Taken, current, until_stopped
from benchmarks.program import TEXT, Program, main, marker, own_jobs, run_loop

AT_ONCE = 100


class Alone(Program):
    info: ClassVar[dict[str, Any]] = {
        "lib": "asyncio alone",
        "version": platform.python_version(),
        "settings": f"a task per job, {AT_ONCE} at once",
        "durability": "none",
        "threads": False,
        "fills_itself": True,
        "pending": None,
    }

    def worker(self) -> None:
        jobs = [Taken(number, 1, b'{"n":%d,"s":"%s"}' % (number, TEXT.encode())) for number in range(own_jobs())]
        run_loop(_drain(jobs))


async def _drain(jobs: list[Taken]) -> None:
    mark = marker()
    decode = msgspec.json.Decoder(Arguments).decode
    ended: list[Taken] = []

    async def noop(n: int, s: str) -> None:
        mark()

    async def run(job: Taken) -> None:
        current.set(job)
        arguments = decode(job.payload)
        await noop(arguments.n, arguments.s)
        ended.append(job)

    async def drain() -> None:
        for first in range(0, len(jobs), AT_ONCE):
            await asyncio.wait([asyncio.create_task(run(job)) for job in jobs[first : first + AT_ONCE]])
        await asyncio.Event().wait()  # as a worker does, until it is told to stop

    await until_stopped(drain)


if __name__ == "__main__":
    main(Alone())
