"""Who waits for which queues in this process, and how to wake them from any thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection

import msgspec

from holdfast.job import State
from holdfast.lifecycle import Move


class _Waiter(msgspec.Struct, eq=False):
    loop: asyncio.AbstractEventLoop
    event: asyncio.Event
    queues: frozenset[str]


def queues_fed(moves: Collection[Move]) -> set[str]:
    """The queues in which these moves may have put claimable jobs."""
    ready = State.READY
    fed = {move.queue for move in moves if move.to is ready}
    return fed.union(following.queue for move in moves if move.then for following in move.then)


class WakeupHub:
    """Wake-ups inside one process. `notify` may be called from any thread and costs next to nothing when idle."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether anybody waits."""
        return bool(self._waiters)

    def notify(self, queues: Collection[str] | None = None) -> None:
        """Wake everybody who waits for one of these queues, or everybody."""
        if not self._waiters:
            return
        with self._lock:
            waiters = [waiter for waiter in self._waiters if queues is None or not waiter.queues.isdisjoint(queues)]
        here = asyncio._get_running_loop()
        for waiter in waiters:
            if waiter.loop is here:
                waiter.event.set()
            else:
                try:
                    waiter.loop.call_soon_threadsafe(waiter.event.set)
                except RuntimeError:  # its loop was closed without ending the iteration
                    self._forget(waiter)

    async def waiting(self, queues: Collection[str]) -> AsyncIterator[None]:
        """Yields once for every burst of `notify`; ends when its consumer stops."""
        waiter = _Waiter(asyncio.get_running_loop(), asyncio.Event(), frozenset(queues))
        with self._lock:
            self._waiters.append(waiter)
        try:
            while True:
                await waiter.event.wait()
                waiter.event.clear()
                yield
        finally:
            self._forget(waiter)

    def _forget(self, waiter: _Waiter) -> None:
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
