"""Blocking calls: the asynchronous ones, run to their end on an event loop in a thread of its own.

There is one implementation of everything, the asynchronous one. The portal starts with the first blocking call and is
made anew in a forked child.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from holdfast.errors import CalledInEventLoop, OutcomeUnknown
from holdfast.ports import Ports

T = TypeVar("T")


def refuse_in_event_loop(name: str) -> None:
    """`CalledInEventLoop` if this thread runs an event loop, which a blocking call would stop."""
    if asyncio._get_running_loop() is None:
        return
    raise CalledInEventLoop(f"{name}() would block the running event loop: use `await a{name}(...)` instead")


class Portal:
    """Runs coroutines from threads that have no event loop."""

    def __init__(self, ports: Ports) -> None:
        self._spawner = ports.spawner
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    def run(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine. `name` is the blocking method, for the error inside an event loop."""
        try:
            refuse_in_event_loop(name)
        except CalledInEventLoop:
            work.close()
            raise
        with self._lock:
            future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise OutcomeUnknown(f"{name}() was still under way when the application was closed") from None

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._process != os.getpid():
            self._loop = asyncio.new_event_loop()
            self._process = os.getpid()
            self._thread = self._spawner.thread(self._loop.run_forever, "holdfast-portal")
        return self._loop

    def close(self) -> None:
        """End the thread; a call that another thread waits for is broken off. Used again, the portal starts again."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None and self._process == os.getpid():
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
