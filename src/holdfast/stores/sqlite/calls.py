"""A thread that does blocking work for event loops, all that is waiting at a time."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from holdfast.errors import HoldfastError, OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.ports import Ports

T = TypeVar("T")

MOST_CALLS_AT_ONCE = 256
_REPLY_GRACE = 5.0


class Call(msgspec.Struct, eq=False):
    """One verb that somebody awaits. Whoever serves it sets `answer` or `error`."""

    verb: Callable[[sqlite3.Connection], Any]
    deadline: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    answer: Any = None
    error: BaseException | None = None


class CallThread:
    """Hands waiting calls to `serve`, on one thread that starts with the first call. `serve` must not raise.

    `unanswered` is the error for a call that gets no answer: what that means depends on what the calls do.
    """

    def __init__(
        self,
        serve: Callable[[list[Call]], None],
        *,
        name: str,
        timeout: float,
        ports: Ports,
        unanswered: Callable[[str], StoreError] = OutcomeUnknown,
    ) -> None:
        self._serve = serve
        self._name = name
        self._timeout = timeout
        self._unanswered = unanswered
        self._clock = ports.clock
        self._spawner = ports.spawner
        self._waiting: deque[Call] = deque()
        self._arrived = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    async def submit(self, verb: Callable[[sqlite3.Connection], T]) -> T:
        """The verb's answer. It is served within the timeout or refused; a cancelled call may still take effect."""
        loop = asyncio.get_running_loop()
        call = Call(verb, self._clock.monotonic() + self._timeout, loop, loop.create_future())
        with self._arrived:
            if self._stopping:
                raise StoreUnavailable("the store was closed")
            if self._thread is None:
                self._thread = self._spawner.thread(self._run, self._name)
            self._waiting.append(call)
            self._arrived.notify()
        # Whoever serves the call keeps its deadline; this catches a disk that never answers.
        watchdog = loop.call_later(self._timeout + _REPLY_GRACE, self._give_up, call)
        try:
            answer: T = await call.future
            return answer
        finally:
            watchdog.cancel()

    def _give_up(self, call: Call) -> None:
        if not call.future.done():
            call.future.set_exception(
                self._unanswered(f"the store has not answered for {self._timeout + _REPLY_GRACE:g} s")
            )

    def _run(self) -> None:
        while True:
            with self._arrived:
                while not self._waiting:
                    if self._stopping:
                        return
                    self._arrived.wait()
                calls = [self._waiting.popleft() for _ in range(min(len(self._waiting), MOST_CALLS_AT_ONCE))]
            wanted = [call for call in calls if not call.future.cancelled()]
            if wanted:
                self._serve(wanted)
                reply(wanted)
            # The verbs hold payloads and the store; they must not live until somebody calls again.
            del calls, wanted

    def close(self) -> None:
        """Serve what is waiting, then end the thread. Later calls are refused."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()
        if self._thread is not None:
            self._thread.join(self._timeout + _REPLY_GRACE)


def reply(calls: list[Call]) -> None:
    """Hand every call its answer or error, on its own loop. Doing it twice is harmless."""
    loops: dict[asyncio.AbstractEventLoop, list[Call]] = {}
    for call in calls:
        loops.setdefault(call.loop, []).append(call)
    for loop, own in loops.items():
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            loop.call_soon_threadsafe(_deliver, own)


def _deliver(calls: list[Call]) -> None:
    for call in calls:
        if call.future.done():
            continue
        if call.error is None:
            call.future.set_result(call.answer)
        elif isinstance(call.error, HoldfastError):
            call.future.set_exception(call.error)
        else:
            unexpected = StoreUnavailable(f"unexpected {call.error!r}; nothing was written")
            unexpected.__cause__ = call.error
            call.future.set_exception(unexpected)
