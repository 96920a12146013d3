"""What every Python adapter answers, and how: `python ADAPTER.py VERB [ARGUMENT ...]` prints one JSON object.

    info                  what the library is and how it is set up; `verbs` names the verbs that it has
    setup                 empty its server and make its schema
    enqueue_one N         N jobs, one call after the other: blocking calls, or awaited ones if it has no others
    enqueue_one_async N   the same by its own awaitable call, where it has one
    enqueue_bulk N        N jobs by its own call for many, a thousand at a time, where it has one
    worker [--plain]      run a worker in the foreground; `--plain`: the handler is a plain function, not a coroutine
    latency N [SECONDS]   N jobs, one at a time: milliseconds from the call to the handler; a worker must be running

The environment says the rest: the addresses (BENCH_REDIS_URL, BENCH_POSTGRES_URL, BENCH_RABBITMQ_URL,
BENCH_SQLITE_PATH), BENCH_ENGINE and BENCH_VARIANT from the catalogue, and BENCH_MARKS, a file to which every handler
appends the time it began: eight bytes, CLOCK_MONOTONIC in nanoseconds. Its size tells how many jobs have run, whatever
the language and however many processes and threads. The servers must be private: `setup` empties them.

An adapter defines `PEER`, a `Peer`, and calls `main()`. It may not be called like the library that it imports.
"""

import asyncio
import importlib
import inspect
import json
import os
import random
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

HERE = Path(__file__).resolve().parent
ENGINE = os.environ.get("BENCH_ENGINE", "")
VARIANT = os.environ.get("BENCH_VARIANT", "")
PLAIN = "--plain" in sys.argv or "BENCH_PLAIN" in os.environ
"""Whether the worker's handler is to be a plain function."""
TEXT = "0123456789abcdef0123456789abcdef"
BULK = 1_000
WARM_UP = 5
LATENCY_SECONDS = 25.0
LATENCY_AT_LEAST = 30
JOB_SECONDS = 20.0

Items = list[tuple[int, str]]

_marks = os.environ.get("BENCH_MARKS", "")
_descriptor = os.open(_marks, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644) if _marks else -1
_packed = struct.Struct("<q").pack


def mark() -> None:
    """What every handler does, and nothing else."""
    os.write(_descriptor, _packed(time.monotonic_ns()))


def address(name: str) -> str:
    """An address from the environment."""
    try:
        return os.environ[name]
    except KeyError:
        raise SystemExit(f"{name} is not set") from None


@dataclass(frozen=True, kw_only=True)
class Info:
    """What a library is and how it is set up.

    `threads`: plain functions run in threads of one process. `pending`: how to see in the server that nothing is left;
    None if it cannot be seen, `{"sql": …}` or `{"sqlite": [path, …]}` for a count, or `{"redis": [command, …]}`, whose
    integers (the first one of each answer) are added up.
    """

    lib: str
    version: str
    backend: str
    settings: str
    durability: str
    threads: bool
    pending: dict[str, Any] | None


class Peer:
    """How one library is driven. What it does not have is left out: `enqueue_async`, `enqueue_many`, and `enqueue` if
    all of its calls are awaited.
    """

    info: Info

    def setup(self) -> Awaitable[None] | None:
        """Empty the server, make the schema."""

    def connect(self) -> None:
        """Before blocking calls."""

    def disconnect(self) -> None:
        """After them."""

    async def connect_async(self) -> None:
        """Before awaited calls."""

    async def disconnect_async(self) -> None:
        """After them."""

    def worker(self) -> None:
        """Run until a signal comes. PLAIN says which handler it has."""
        raise NotImplementedError


def main() -> None:
    """Answer the verb of the command line for the adapter that was started.

    The adapter is imported once more by its own name: that is the name by which a worker finds its handlers.
    """
    peer: Peer = importlib.import_module(Path(sys.argv[0]).stem).PEER
    verb, *arguments = sys.argv[1:]
    if verb not in _verbs(peer):
        raise SystemExit(f"no such verb: {verb}")
    if verb == "worker":
        peer.worker()
    else:
        print(json.dumps(_answer(peer, verb, arguments)), flush=True)


def _answer(peer: Peer, verb: str, arguments: list[str]) -> dict[str, Any]:
    if verb == "info":
        return {**asdict(peer.info), "language": "python", "runtime": sys.version.split()[0], "verbs": _verbs(peer)}
    if verb == "setup":
        outcome = peer.setup()
        if outcome is not None:
            run(_awaited(outcome))
        return {"ok": True}
    count = int(arguments[0])
    if verb == "latency":
        return _latency(peer, count, float(arguments[1]) if len(arguments) > 1 else LATENCY_SECONDS)
    calls = {"enqueue_bulk": "enqueue_many", "enqueue_one_async": "enqueue_async"}
    call = getattr(peer, calls.get(verb, "enqueue" if hasattr(peer, "enqueue") else "enqueue_async"))
    many = verb == "enqueue_bulk"
    if inspect.iscoroutinefunction(call):
        seconds = run(_enqueue_awaited(peer, call, count, many=many))
    else:
        seconds = _enqueue_blocking(peer, call, count, many=many)
    return {"n": count, "seconds": seconds}


def _verbs(peer: Peer) -> list[str]:
    verbs = ["info", "setup", "enqueue_one", "worker", "latency"]
    if hasattr(peer, "enqueue_async"):
        verbs.append("enqueue_one_async")
    if hasattr(peer, "enqueue_many"):
        verbs.append("enqueue_bulk")
    return verbs


def _batches(count: int) -> list[Items]:
    return [[(number, TEXT) for number in range(low, min(count, low + BULK))] for low in range(0, count, BULK)]


def _enqueue_blocking(peer: Peer, call: Callable[..., object], count: int, *, many: bool) -> float:
    peer.connect()
    started = time.perf_counter()
    if many:
        for batch in _batches(count):
            call(batch)
    else:
        for number in range(count):
            call(number, TEXT)
    seconds = time.perf_counter() - started
    peer.disconnect()
    return seconds


async def _enqueue_awaited(peer: Peer, call: Callable[..., Awaitable[object]], count: int, *, many: bool) -> float:
    await peer.connect_async()
    started = time.perf_counter()
    if many:
        for batch in _batches(count):
            await call(batch)
    else:
        for number in range(count):
            await call(number, TEXT)
    seconds = time.perf_counter() - started
    await peer.disconnect_async()
    return seconds


def _latency(peer: Peer, count: int, seconds: float) -> dict[str, Any]:
    if hasattr(peer, "enqueue"):
        return _latency_blocking(peer, peer.enqueue, count, seconds)
    return run(_latency_awaited(peer, peer.enqueue_async, count, seconds))  # type: ignore[attr-defined]


def _latency_blocking(peer: Peer, call: Callable[[int, str], object], count: int, seconds: float) -> dict[str, Any]:
    peer.connect()
    watch = _Watch(count, seconds)
    while watch.goes_on():
        watch.begin()
        call(watch.number, TEXT)
        watch.called()
        while not watch.has_run():
            time.sleep(0.0003)
        time.sleep(random.uniform(0.005, 0.015))
    peer.disconnect()
    return watch.figures()


async def _latency_awaited(
    peer: Peer, call: Callable[[int, str], Awaitable[object]], count: int, seconds: float
) -> dict[str, Any]:
    await peer.connect_async()
    watch = _Watch(count, seconds)
    while watch.goes_on():
        watch.begin()
        await call(watch.number, TEXT)
        watch.called()
        while not watch.has_run():  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.0003)
        await asyncio.sleep(random.uniform(0.005, 0.015))
    await peer.disconnect_async()
    return watch.figures()


class _Watch:
    """The times of one job after the other, by the file of marks. The first few do not count."""

    def __init__(self, count: int, seconds: float) -> None:
        self.number = -1
        self._count = count + WARM_UP
        self._deadline = time.monotonic() + seconds
        self._until_run: list[float] = []
        self._in_call: list[float] = []
        self._started = self._returned = self._before = 0

    def goes_on(self) -> bool:
        """Until all are done, or the time is up and enough are done."""
        self.number += 1
        late = time.monotonic() > self._deadline and len(self._until_run) >= LATENCY_AT_LEAST
        return self.number < self._count and not late

    def begin(self) -> None:
        self._before = _ran()
        self._started = time.monotonic_ns()

    def called(self) -> None:
        self._returned = time.monotonic_ns()

    def has_run(self) -> bool:
        if _ran() == self._before:
            if time.monotonic_ns() - self._returned > JOB_SECONDS * 1e9:
                raise SystemExit(f"a job did not run within {JOB_SECONDS:.0f} s")
            return False
        if self.number >= WARM_UP:
            self._until_run.append((_last_mark() - self._started) / 1e6)
            self._in_call.append((self._returned - self._started) / 1e6)
        return True

    def figures(self) -> dict[str, Any]:
        times, calls = sorted(self._until_run), sorted(self._in_call)
        last = len(times) - 1
        return {
            "n": len(times),
            "p50": times[len(times) // 2],
            "p99": times[min(last, int(len(times) * 0.99))],
            "max": times[last],
            "call_p50": calls[len(calls) // 2],
        }


def _ran() -> int:
    return os.stat(_marks).st_size // 8


def _last_mark() -> int:
    with open(_marks, "rb") as marks:
        marks.seek(-8, os.SEEK_END)
        (nanoseconds,) = struct.unpack("<q", marks.read(8))
    return int(nanoseconds)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run it on uvloop where the library's environment has it, as its authors then do."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    return uvloop.run(coroutine)


async def _awaited(outcome: Awaitable[None]) -> None:
    await outcome


def become(*program: str) -> NoReturn:
    """Turn into the library's own worker program, of the same environment, with the adapters importable."""
    executable = str(Path(sys.executable).parent / program[0])
    plain = {"BENCH_PLAIN": "1"} if PLAIN else {}
    os.chdir(HERE)
    os.execve(executable, [executable, *program[1:]], {**os.environ, **plain, "PYTHONPATH": str(HERE)})


def versions(*names: str) -> str:
    """The installed versions of these distributions: the first alone, the others with their names."""
    first, *others = names
    return ", ".join([version(first), *(f"{name} {version(name)}" for name in others)])


def empty_redis() -> None:
    """Remove every key of the database that the address names."""
    import redis

    with redis.Redis.from_url(address("BENCH_REDIS_URL")) as connection:
        connection.flushdb()


def empty_postgres() -> None:
    """Remove every schema of the database, and make an empty `public`."""
    import psycopg

    with psycopg.connect(address("BENCH_POSTGRES_URL"), autocommit=True) as connection:
        connection.execute("SET client_min_messages = warning")
        found = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname NOT LIKE 'pg\\_%' AND nspname <> 'information_schema'"
        ).fetchall()
        for (name,) in found:
            connection.execute(psycopg.sql.SQL("DROP SCHEMA {} CASCADE").format(psycopg.sql.Identifier(name)))
        connection.execute("CREATE SCHEMA public")
