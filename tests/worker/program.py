"""The application that the worker processes of these tests run.

Where the store is and where to write comes from the environment. Every handler notes what it does in a ledger, a file
to which each line is added by one write: what it says has happened, whatever became of the process or of the store.
A handler that is to last waits for a gate, a file that the test makes.

A guard of the product is switched off, for a negative control, by replacing it in here: never by the product itself.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from holdfast import Holdfast, current
from holdfast.keepers.rescue import Rescue, Stint, Walk
from holdfast.policy import Steps
from holdfast.ports import MICROSECONDS
from holdfast.store import all_sessions
from holdfast.stores.redis import RedisStore
from holdfast.worker import supervisor
from holdfast.worker.board import Board, Started
from holdfast.worker.claimer import Claimer
from holdfast.worker.heart import Heart
from holdfast.worker.runner import Runner

FOLDER = Path(os.environ.get("HOLDFAST_TEST_FOLDER", "."))
LEDGER = FOLDER / "ledger"

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # processes crash here on purpose
app = Holdfast(os.environ.get("HOLDFAST_TEST_STORE", "memory://"))


def write_down(event: str, **more: Any) -> None:
    """Add a line to the ledger."""
    job = current()
    entry = {"event": event, "job": job.id, "task": job.task, "attempt": job.attempt, "at": time.monotonic()}
    line = msgspec.json.encode({**entry, "pid": os.getpid(), "parent": os.getppid(), **more}) + b"\n"
    ledger = os.open(LEDGER, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(ledger, line)
    finally:
        os.close(ledger)


def is_open(gate: str) -> bool:
    return (FOLDER / f"gate-{gate}").exists()


async def wait_for(gate: str) -> None:
    while not is_open(gate):  # noqa: ASYNC110  another process opens it
        await asyncio.sleep(0.005)


def wait_blocking(gate: str) -> None:
    while not is_open(gate):
        time.sleep(0.005)


# Jobs that behave.


@app.task
async def note(number: int = 0) -> int:
    write_down("start", number=number)
    return number


@app.task
def note_in_thread(number: int = 0) -> int:
    write_down("start", number=number)
    return number


@app.task
async def linger(seconds: float, number: int = 0) -> None:
    write_down("start", number=number)
    await asyncio.sleep(seconds)


@app.task(timeout=None)
async def hold(gate: str) -> str:
    write_down("start")
    try:
        await wait_for(gate)
    except asyncio.CancelledError:
        write_down("told to stop")
        raise
    write_down("end")
    return "held"


@app.task(timeout=None)
def hold_in_thread(gate: str) -> str:
    write_down("start")
    wait_blocking(gate)
    write_down("end")
    return "held"


@app.task(timeout=None)
def hold_at_first(gate: str) -> str:
    """The first attempt waits; later ones return at once."""
    attempt = current().attempt
    write_down("start")
    if attempt == 1:
        wait_blocking(gate)
    write_down("end")
    return f"attempt {attempt}"


# Jobs that do harm.


@app.task(backoff=Steps((0.05,)))
async def poison() -> None:
    write_down("start")
    raise ValueError("on purpose")


def die(how: str) -> None:
    """End this process, without a word."""
    match how:
        case "exit":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()
        case _:
            raise ValueError(how)


@app.task(isolation="process", backoff=Steps((0.05,)))
def die_alone(how: str) -> None:
    write_down("start")
    die(how)


@app.task(backoff=Steps((0.05,)))
async def die_among_others(gate: str, how: str) -> None:
    write_down("start")
    await wait_for(gate)
    die(how)


@app.task(isolation="process", backoff=Steps((0.05,)))
def die_alone_with_heirs() -> None:
    """As `multiprocessing` does: a forked process has every connection of this one, and outlives it."""
    heir = os.fork()
    if not heir:
        time.sleep(300)
        os._exit(0)
    write_down("start", others=[heir])
    die("exit")


@app.task
async def fork_and_return() -> str:
    """Both come back: the worker, and a copy of it that must not work."""
    forked = os.fork()
    if forked:
        write_down("start", others=[forked])
    return "worker" if forked else "copy"


@app.task
async def fork_and_go_on(gate: str) -> str:
    """The copy does not even come back: it waits on the event loop, and everything else on that loop goes on, too."""
    forked = os.fork()
    if forked:
        write_down("start", others=[forked])
    await wait_for(gate)
    return "worker" if forked else "copy"


@app.task
async def die_once(how: str) -> str:
    write_down("start")
    died = FOLDER / f"died-{current().id}"
    if not died.exists():
        died.touch()
        die(how)
    return "alive"


@app.task(timeout=None)
async def block(seconds: float) -> None:
    """Keep everybody else from the event loop."""
    write_down("start")
    time.sleep(seconds)  # noqa: ASYNC251  that is the point
    write_down("end")


@app.task(timeout=None, hard_timeout=1.0)
async def wedge() -> None:
    write_down("start")
    time.sleep(300)  # noqa: ASYNC251  that is the point


@app.task(timeout=None, hard_timeout=1.0)
def wedge_in_thread() -> None:
    write_down("start")
    time.sleep(300)


@app.task(timeout=None)
async def stubborn(gate: str) -> None:
    """Never mind cancellation."""
    write_down("start")
    while not is_open(gate):
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)


_ballast: list[bytearray] = []


@app.task
async def grow(mebibytes: int) -> None:
    """Take memory, and keep it."""
    write_down("start")
    for _ in range(mebibytes):  # in pieces: nobody is to wait for it, least of all the heartbeat
        _ballast.append(bytearray(b"x" * 2**20))
        await asyncio.sleep(0)


_LEAVES_A_DAEMON = """
import os, sys, time
if os.fork():
    os._exit(0)
os.setsid()
if os.fork():
    os._exit(0)
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(os.getpid()))
os.rename(sys.argv[1] + ".new", sys.argv[1])
time.sleep(300)
"""


def start_others(folder: Path, name: str) -> tuple[int, int]:
    """Start a program that lasts, and a daemon that leaves its group, its session and its parent. Their pids."""
    daemon_says = folder / f"daemon-{name}"
    lasting = subprocess.Popen(["sleep", "300"])
    subprocess.run([sys.executable, "-c", _LEAVES_A_DAEMON, str(daemon_says)], check=True)
    while not daemon_says.exists():
        time.sleep(0.005)
    return lasting.pid, int(daemon_says.read_text())


@app.task(timeout=None)
def start_processes(gate: str) -> None:
    lasting, daemon = start_others(FOLDER, f"{current().id}-{current().attempt}")
    write_down("start", others=[lasting, daemon])
    wait_blocking(gate)
    write_down("end")


@app.task(timeout=None, isolation="process", backoff=Steps((0.05,)))
def start_processes_alone(gate: str) -> None:
    lasting, daemon = start_others(FOLDER, f"{current().id}-{current().attempt}")
    write_down("start", others=[lasting, daemon])
    wait_blocking(gate)
    write_down("end")


@app.task
def leave_a_short_daemon() -> None:
    """A daemon that ends by itself soon: somebody has to reap it."""
    subprocess.run(["sh", "-c", "sleep 0.01 &"], check=True)
    write_down("start")


# Guards that can be switched off.


async def _never_beat(self: Heart) -> None:
    await asyncio.sleep(3600)


async def _close_by_the_wall_clock(self: Rescue, walk: Walk, stint: Stint) -> bool:
    """What a simple queue does: no counter is watched, two clocks are compared."""
    views = await all_sessions(self._store)
    now = time.time_ns() // 1000
    late = [view.id for view in views if view.open and now - view.beat_at > self._ttl * MICROSECONDS]
    self._owed = any([await self._store.close_session(session_id) for session_id in late])
    walk.over = True
    return False


async def _never_mind(self: Claimer) -> None:
    self._in_doubt = False


def _nothing_started(self: Board) -> list[Started]:
    return []


def _switch_off(guards: Iterable[str]) -> None:
    for guard in guards:
        match guard:
            case "heartbeat":
                Heart._beat_on = _never_beat  # type: ignore[method-assign]
            case "counter watch":
                Rescue._look = _close_by_the_wall_clock  # type: ignore[method-assign]
            case "reconcile":
                Claimer._give_back_unknown = _never_mind  # type: ignore[method-assign]
            case "started list":
                Board.started = _nothing_started  # type: ignore[method-assign]
            case _:
                raise ValueError(guard)


_switch_off(filter(None, os.environ.get("HOLDFAST_TEST_GUARD_OFF", "").split(",")))


# How far a worker claims ahead depends on how fast it is. Tests that need jobs in waiting must not depend on that.


def _claim_ahead(count: int) -> None:
    def wanted(self: Runner) -> int:
        return self.free + count if self.free and not self._buffer else 0

    Runner.wanted = property(wanted)  # type: ignore[assignment,method-assign]
    Runner.release_stale = lambda self: 0  # type: ignore[method-assign]
    RedisStore.waiting_claims = lambda self, queues: None  # type: ignore[method-assign]  # it takes what can start


if ahead := int(os.environ.get("HOLDFAST_TEST_CLAIM_AHEAD", "0")):
    _claim_ahead(ahead)
if "HOLDFAST_TEST_LOOK_EVERY" in os.environ:  # a closer look, for tests that count
    supervisor._LOOK_EVERY = float(os.environ["HOLDFAST_TEST_LOOK_EVERY"])
