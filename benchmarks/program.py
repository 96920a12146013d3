"""The contestants that live in this folder: the same verbs as `peers/adapters/protocol.py` tells, for ours.

Beside those, a worker that lives in one process with its jobs (`fills_itself`) is told how many to make by BENCH_JOBS.
BENCH_URL says where the server is, or the file.
"""

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.marks import VARIABLE, Marker
from holdfast.entry.child import collect_less_often

TEXT = "0123456789abcdef0123456789abcdef"
CHUNK = 1_000
WARM_UP = 5
LOOK = 0.0003
PATIENCE = 20.0


def url() -> str:
    return os.environ["BENCH_URL"]


def plain() -> bool:
    """Whether the handler is a plain function: said by `worker --plain`, and to the processes that it starts."""
    return "--plain" in sys.argv or os.environ.get("BENCH_PLAIN") == "1"


def own_jobs() -> int:
    return int(os.environ.get("BENCH_JOBS", "0"))


def marker() -> Marker:
    return Marker(os.environ[VARIABLE])


class Program:
    """A contestant in Python. A verb whose method it does not have is none of its own."""

    info: ClassVar[dict[str, Any]]
    at_once: ClassVar[int | None] = CHUNK
    """How many jobs one call of `enqueue_many` is asked for; None for all that there are."""

    def setup(self) -> None:
        """Make the tables. The harness has removed what was there."""

    def enqueue(self, number: int, text: str) -> None:
        """One job, by a blocking call."""
        raise NotImplementedError

    async def open(self) -> None:
        """Before awaited calls."""

    async def aenqueue(self, number: int, text: str) -> None:
        """One job, by an awaited call."""
        raise NotImplementedError

    async def close(self) -> None:
        """After them."""

    def enqueue_many(self, numbers: range, text: str) -> None:
        """A job for each of the numbers, of which there are at most `at_once`."""
        raise NotImplementedError

    def worker(self) -> None:
        """Run jobs until SIGTERM."""
        raise NotImplementedError


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """On the event loop that our worker would take."""
    try:
        import uvloop  # type: ignore[import-not-found, unused-ignore]
    except ImportError:
        asyncio.run(main)
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main)


def _overridden(program: Program, method: str) -> bool:
    return getattr(type(program), method) is not getattr(Program, method)


def _answer(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def _info(program: Program) -> None:
    verbs = [
        verb
        for verb, method in (
            ("enqueue_one", "enqueue"),
            ("enqueue_one_async", "aenqueue"),
            ("enqueue_bulk", "enqueue_many"),
        )
        if _overridden(program, method)
    ]
    _answer(verbs=verbs, language="python", **program.info)


def _enqueue_one(program: Program, count: int) -> None:
    program.enqueue(0, TEXT)  # the first call opens the connection
    began = time.perf_counter()
    for number in range(1, count):
        program.enqueue(number, TEXT)
    _answer(n=count - 1, seconds=time.perf_counter() - began)


async def _enqueue_one_async(program: Program, count: int) -> None:
    await program.open()
    await program.aenqueue(0, TEXT)
    began = time.perf_counter()
    for number in range(1, count):
        await program.aenqueue(number, TEXT)
    seconds = time.perf_counter() - began
    await program.close()
    _answer(n=count - 1, seconds=seconds)


def _enqueue_bulk(program: Program, count: int) -> None:
    step = program.at_once or count
    began = time.perf_counter()
    for first in range(0, count, step):
        program.enqueue_many(range(first, min(first + step, count)), TEXT)
    _answer(n=count, seconds=time.perf_counter() - began)


def _latency(program: Program, count: int, limit: float) -> None:
    marks = Path(os.environ[VARIABLE])
    seen: list[float] = []
    ends = time.monotonic() + limit
    for number in range(count + WARM_UP):
        before = marks.stat().st_size
        began = time.monotonic_ns()
        program.enqueue(number, TEXT)
        given_up = time.monotonic() + PATIENCE
        while marks.stat().st_size == before:
            time.sleep(LOOK)
            if time.monotonic() > given_up:
                raise SystemExit("a job never ran")
        if number >= WARM_UP:
            seen.append((_last_mark(marks) - began) / 1e6)
        time.sleep(random.uniform(0.005, 0.015))
        if time.monotonic() > ends and len(seen) >= 30:
            break
    seen.sort()
    _answer(n=len(seen), p50=seen[len(seen) // 2], p99=seen[min(len(seen) - 1, int(len(seen) * 0.99))])


def _last_mark(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        return int.from_bytes(file.read(8), "little")


def main(program: Program) -> None:
    """Answer the verb that the command line names."""
    verb, *arguments = sys.argv[1:]
    match verb:
        case "info":
            _info(program)
        case "setup":
            program.setup()
            _answer(ok=True)
        case "enqueue_one":
            _enqueue_one(program, int(arguments[0]))
        case "enqueue_one_async":
            run_loop(_enqueue_one_async(program, int(arguments[0])))
        case "enqueue_bulk":
            _enqueue_bulk(program, int(arguments[0]))
        case "latency":
            _latency(program, int(arguments[0]), float(arguments[1]) if len(arguments) > 1 else 25.0)
        case "worker":
            os.environ["BENCH_PLAIN"] = "1" if plain() else ""
            collect_less_often()  # as our supervised processes do, before they have a job
            program.worker()
        case _:
            raise SystemExit(f"unknown verb {verb}")
