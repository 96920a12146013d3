"""Everything nondeterministic: time, randomness, ids, threads and processes enter the program here and nowhere else.

A simulation replaces `Ports` as a whole and replays a run from its seed; a test forbids the direct use of `time`,
`random`, `uuid`, `threading.Thread` and `asyncio.sleep` in any other module.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

import msgspec
import uuid_utils

MICROSECONDS = 1_000_000
"""Microseconds in a second: stored times and durations are whole microseconds."""


def microseconds(seconds: float) -> int:
    """A duration in seconds as whole microseconds, rounded to the nearest."""
    return round(seconds * MICROSECONDS)


Process = subprocess.Popen[bytes]
"""A program that was started here."""


class Clock(Protocol):
    """Two clocks: one that people read, one that never jumps."""

    def now(self) -> int:
        """Microseconds since 1970-01-01 UTC. May jump; only an embedded store may order jobs by it."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes back. For deadlines and for watching others."""

    async def sleep(self, seconds: float) -> None:
        """Let other tasks run for at least that long."""

    def pause(self, seconds: float) -> None:
        """Block the calling thread for that long."""


class Random(Protocol):
    """A source of jitter."""

    def fraction(self) -> float:
        """A number from 0 (included) to 1 (excluded)."""


class Ids(Protocol):
    """Names that nobody else has."""

    def job_id(self) -> str:
        """A UUIDv7, so that ids sort by the time of their making."""

    def session_id(self) -> str:
        """128 random bits: a session must not be guessed or repeated."""


class Spawner(Protocol):
    """Starts threads and processes."""

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """A started daemon thread."""

    def event_loop(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """Run the coroutine to its end on an event loop of its own, in a daemon thread."""

    def process(self, command: Sequence[str], fds: Sequence[int]) -> Process:
        """A started program in a process group of its own, which inherits these file descriptors. Never a fork that
        goes on in our code: that would carry locks and connections over.
        """


class SystemClock:
    """The clocks of this machine."""

    def now(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class SystemRandom:
    """Good enough for jitter, which is all that it is for."""

    def fraction(self) -> float:
        return random.random()  # noqa: S311


class SystemIds:
    """UUIDv7 for jobs, `secrets` for sessions."""

    def job_id(self) -> str:
        return str(uuid_utils.uuid7())

    def session_id(self) -> str:
        return secrets.token_hex(16)


class SystemSpawner:
    """Daemon threads: they never keep a process alive that wants to end."""

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        started = threading.Thread(target=target, name=name, daemon=True)
        started.start()
        return started

    def event_loop(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        self.thread(lambda: asyncio.run(main()), name)

    def process(self, command: Sequence[str], fds: Sequence[int]) -> Process:
        return subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True
        )


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """One bundle, handed to every room by the composition root."""

    clock: Clock = SystemClock()
    random: Random = SystemRandom()
    ids: Ids = SystemIds()
    spawner: Spawner = SystemSpawner()


SYSTEM = Ports()
