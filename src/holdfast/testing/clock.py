"""A clock that stands still until somebody moves it."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import msgspec

from holdfast.ports import SystemClock, microseconds

_START = 1_700_000_000_000_000
_REAL_PAUSE = 0.001


class _Sleeper(msgspec.Struct, eq=False):
    until: float
    loop: asyncio.AbstractEventLoop
    awake: asyncio.Future[None]


class ManualClock:
    """A `Clock` whose two faces move together, and only by `advance`. May be used from any thread.

    A task that sleeps is woken when somebody has advanced the time far enough. A thread that pauses is held for a
    real moment and time does not move for it, so threads that wait for one another go on while time stands still.
    """

    def __init__(self, now: int = _START) -> None:
        self._now = now
        self._monotonic = 0.0
        self._sleepers: list[_Sleeper] = []
        self._lock = threading.Lock()
        self._real = SystemClock()

    def now(self) -> int:
        """Microseconds since 1970-01-01 UTC."""
        return self._now

    def monotonic(self) -> float:
        """Seconds since this clock was made."""
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Let time pass, and wake whoever has slept long enough."""
        if seconds < 0:
            raise ValueError(f"time does not go back, not even by {-seconds} s")
        with self._lock:
            self._now += microseconds(seconds)
            self._monotonic += seconds
            rested = [sleeper for sleeper in self._sleepers if sleeper.until <= self._monotonic]
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper.until > self._monotonic]
        for sleeper in rested:
            with contextlib.suppress(RuntimeError):  # its loop was closed: nobody sleeps there any more
                sleeper.loop.call_soon_threadsafe(_wake, sleeper.awake)

    async def sleep(self, seconds: float) -> None:
        """Wait until `advance` has moved the clock that far. Nothing or less only lets other tasks run."""
        if seconds <= 0:
            await self._real.sleep(0)
            return
        loop = asyncio.get_running_loop()
        awake: asyncio.Future[None] = loop.create_future()
        with self._lock:
            self._sleepers.append(_Sleeper(self._monotonic + seconds, loop, awake))
        await awake

    def pause(self, seconds: float) -> None:
        """Hold the calling thread for a real moment. The clock does not move."""
        self._real.pause(min(seconds, _REAL_PAUSE))


def _wake(awake: asyncio.Future[None]) -> None:
    if not awake.done():
        awake.set_result(None)
