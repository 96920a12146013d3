"""An application that another process can import: `tests.worker.shop:app`.

Isolated handlers run in processes that import this page anew. A test puts its own application, on its own store, in the
place of `app`, so that the worker finds where it is; the process gets its store from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from holdfast import CurrentJob, GiveUp, Holdfast, Retry, Snooze, Steps, current
from holdfast.store import Store

STORE = "HOLDFAST_TEST_STORE"
AT_ONCE = Steps((0.0,))
visitor: ContextVar[str] = ContextVar("visitor", default="nobody")


class OwnBase(BaseException):
    """What no `except Exception` catches."""


class Unprintable(Exception):
    def __str__(self) -> str:
        raise SystemExit("not even this")


# What handlers do.


def add(left: int, right: int) -> int:
    return left + right


async def add_later(left: int, right: int) -> int:
    await asyncio.sleep(0)
    return left + right


def ping() -> str:
    return "pong"


async def aping() -> str:
    return "pong"


def where() -> dict[str, int]:
    return {"pid": os.getpid(), "parent": os.getppid()}


def visit(name: str) -> str:
    """Who was here before, as far as the context knows."""
    before = visitor.get()
    visitor.set(name)
    return before


async def avisit(name: str) -> str:
    return visit(name)


def look_around() -> dict[str, Any]:
    """What `current()` says."""
    job = current()
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "key": job.key,
        "attempt": job.attempt,
        "correlation_id": job.correlation_id,
        "cancelled": job.cancelled,
        "is_async": job.is_async,
        "state": dict(job.state),
    }


async def alook_around() -> dict[str, Any]:
    return look_around()


def tell_progress(path: str) -> None:
    """Tells of every step, and goes on when the file is there."""
    for step in range(1, 4):
        current().progress({"step": step})
    wait_for_file(path)


def wait_for_file(path: str) -> None:
    deadline = time.monotonic() + 20
    while not os.path.exists(path):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def touch(path: str) -> None:
    with open(path, "a", encoding="ascii") as file:
        file.write("x")


def until_cancelled(path: str) -> str:
    """Begins, tells so, and works until somebody wants it to stop."""
    touch(path)
    deadline = time.monotonic() + 20
    while not current().cancelled:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    raise RuntimeError("I was told to stop")


async def auntil_cancelled(path: str) -> None:
    touch(path)
    await asyncio.sleep(20)


def deaf(path: str, seconds: float) -> str:
    """Begins, tells so, and hears nothing."""
    touch(path)
    time.sleep(seconds)
    return "late"


async def deaf_async(path: str, seconds: float) -> str:
    touch(path)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)
    return "late"


async def slow_at_first(path: str) -> str:
    """The first run would take for ever; it leaves a trace for the second."""
    first = not os.path.exists(path)  # noqa: ASYNC240
    touch(path)
    if first:
        await asyncio.sleep(60)
    return f"attempt {current().attempt} in process {os.getpid()}"


def signals(how: str) -> str:
    """Steers its own job."""
    if current().attempt > 1:
        return f"attempt {current().attempt}"
    match how:
        case "retry":
            raise Retry("busy", after=0.05)
        case "snooze":
            raise Snooze(3600, "later")
        case _:
            raise GiveUp("never")


def misbehave(how: str) -> Any:
    """Everything that a handler should not do and its worker survives."""
    match how:
        case "SystemExit":
            sys.exit(3)
        case "KeyboardInterrupt":
            raise KeyboardInterrupt
        case "GeneratorExit":
            raise GeneratorExit
        case "OwnBase":
            raise OwnBase("mine")
        case "CancelledError":
            raise asyncio.CancelledError("by myself")
        case "Unprintable":
            raise Unprintable
        case "RecursionError":
            return misbehave(how)
        case "MemoryError":
            return bytearray(2**62)
        case "ExceptionGroup":
            raise ExceptionGroup("several", [ValueError("one"), ExceptionGroup("inner", [KeyError("two")])])
        case "cycle":
            first, second = ValueError("first"), ValueError("second")
            first.__cause__, second.__cause__ = second, first
            raise first
        case "50 MB":
            raise ValueError("m" * 50_000_000)
        case "NUL":
            raise ValueError("a\0b\ud800c")
        case "object":
            return object()
        case "NaN":
            return float("nan")
        case "100 MB":
            return "r" * 100_000_000
        case "coroutine":
            return aping()
        case "cwd":
            os.chdir("/")
        case "signal handlers":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            signal.signal(signal.SIGINT, lambda number, frame: None)
        case "threads":
            for _ in range(20):
                threading.Thread(target=time.sleep, args=(1,), daemon=True).start()
        case "prints":
            for _ in range(2_000):
                print("p" * 1_000)
        case "umask":
            os.umask(os.umask(0))
            sys.setswitchinterval(0.005)
        case _:
            raise AssertionError(how)
    return "done"


async def amisbehave(how: str) -> Any:
    return misbehave(how)


def die(how: str) -> None:
    """Takes the whole process with it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    match how:
        case "exit 0":
            os._exit(0)
        case "exit 3":
            os._exit(3)
        case "segfault":
            ctypes.string_at(0)
        case "abort":
            os.abort()
        case "kill -9":
            os.kill(os.getpid(), signal.SIGKILL)


async def adie(how: str) -> None:
    die(how)


def die_and_leave_a_child(seconds: float) -> None:
    """The child keeps everything open that the process had."""
    if os.fork() == 0:
        time.sleep(seconds)
        os._exit(0)
    os._exit(3)


def die_and_leave_a_stranger(seconds: float) -> None:
    """The same with a child that has left the process group."""
    if os.fork() == 0:
        os.setsid()
        time.sleep(seconds)
        os._exit(0)
    os._exit(3)


def die_until(path: str, times: int) -> str:
    """Dies that many times, counted in a file, then lives."""
    touch(path)
    if os.path.getsize(path) <= times:
        os._exit(1)
    return f"run {os.path.getsize(path)}"


def run_out_of_memory() -> int:
    """A real refusal by the operating system, far below what the machine has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (2**30, hard))
    try:
        return len(bytearray(2**31))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def fork_and_return(path: str) -> str:
    """Both processes return from the handler; the child says that it was there."""
    if os.fork() == 0:
        touch(path)
        return "child"
    wait_for_file(path)
    return "parent"


def fork_and_raise(path: str) -> str:
    if os.fork() == 0:
        touch(path)
        raise SystemExit(0)
    wait_for_file(path)
    return "parent"


def write_and_succeed(path: str, name: str) -> str:
    """An order and the success of the job in one transaction, in a process of its own."""
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("INSERT INTO orders VALUES (?)", (name,))
        current().succeed_on(db, "in the transaction")
        db.commit()
    return "by return"


@contextlib.contextmanager
def named(job: CurrentJob) -> Iterator[None]:
    """A middleware: it leaves its name with the job."""
    job.state["middleware"] = "named"
    yield


class Shop:
    """The application with its tasks. Those whose names end in `_alone` run in processes of their own."""

    def __init__(self, store: str | Store, **options: Any) -> None:
        app = self.app = Holdfast(store, **options)
        alone = app.task(isolation="process", backoff=AT_ONCE)
        hopeless = app.task(max_retries=0)
        self.ping = app.task(ping)
        self.aping = app.task(aping)
        self.ping_alone = app.task(name="ping_alone", isolation="process")(ping)
        self.aping_alone = app.task(name="aping_alone", isolation="process")(aping)
        self.add_alone = app.task(name="add_alone", isolation="process")(add)
        self.add_later_alone = app.task(name="add_later_alone", isolation="process")(add_later)
        self.where_alone = app.task(name="where_alone", isolation="process")(where)
        self.visit_alone = app.task(name="visit_alone", isolation="process")(visit)
        self.avisit_alone = app.task(name="avisit_alone", isolation="process")(avisit)
        self.look_around_alone = app.task(name="look_around_alone", isolation="process")(look_around)
        self.alook_around_alone = app.task(name="alook_around_alone", isolation="process")(alook_around)
        self.tell_progress_alone = app.task(name="tell_progress_alone", isolation="process")(tell_progress)
        self.signals_alone = app.task(name="signals_alone", isolation="process")(signals)
        self.until_cancelled_alone = app.task(name="until_cancelled_alone", isolation="process")(until_cancelled)
        self.auntil_cancelled_alone = app.task(name="auntil_cancelled_alone", isolation="process")(auntil_cancelled)
        self.timed_alone = app.task(name="timed_alone", isolation="process", max_retries=0, timeout=0.2)(
            until_cancelled
        )
        self.atimed_alone = app.task(name="atimed_alone", isolation="process", max_retries=0, timeout=0.2)(
            auntil_cancelled
        )
        self.deaf_alone = app.task(
            name="deaf_alone", isolation="process", max_retries=0, timeout=0.1, hard_timeout=0.4
        )(deaf)
        self.endless_alone = app.task(name="endless_alone", isolation="process", timeout=None)(deaf)
        self.slow_at_first = app.task(slow_at_first)
        self.misbehave = hopeless(misbehave)
        self.amisbehave = hopeless(amisbehave)
        self.misbehave_alone = app.task(name="misbehave_alone", isolation="process", max_retries=0)(misbehave)
        self.amisbehave_alone = app.task(name="amisbehave_alone", isolation="process", max_retries=0)(amisbehave)
        self.die_alone = alone(die)
        self.adie_alone = alone(adie)
        self.die_until = alone(die_until)
        self.die_and_leave_a_child = alone(die_and_leave_a_child)
        self.die_and_leave_a_stranger = alone(die_and_leave_a_stranger)
        self.run_out_of_memory = app.task(isolation="process", max_retries=0)(run_out_of_memory)
        self.fork_and_return = app.task(fork_and_return)
        self.fork_and_raise = app.task(fork_and_raise)
        self.fork_and_return_alone = app.task(name="fork_and_return_alone", isolation="process")(fork_and_return)
        self.fork_and_raise_alone = app.task(name="fork_and_raise_alone", isolation="process")(fork_and_raise)
        self.write_and_succeed = app.task(isolation="process", max_retries=0)(write_and_succeed)


app = Shop(os.environ.get(STORE, "memory://"), middleware=[named]).app
