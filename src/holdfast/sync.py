"""Blocking calls: the asynchronous ones, run to their end on an event loop in a thread of its own.

There is one implementation of everything, the asynchronous one. The portal starts with the first blocking call and is
made anew in a forked child.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import weakref
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
        self._inherited: list[asyncio.AbstractEventLoop] = []
        with _portals_lock:
            _portals.add(self)

    def run(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of the coroutine. `name` is the blocking method, for the error inside an event loop.

        If the waiting is interrupted (a signal handler raises: Ctrl-C, a time limit), the coroutine is cancelled.
        """
        try:
            refuse_in_event_loop(name)
        except CalledInEventLoop:
            work.close()
            raise
        future: concurrent.futures.Future[T] | None = None
        try:
            with self._lock:
                future = asyncio.run_coroutine_threadsafe(work, self._running_loop())
            return future.result()
        except concurrent.futures.CancelledError:
            raise OutcomeUnknown(f"{name}() was still under way when the application was closed") from None
        except BaseException:
            if future is None or not future.done():  # else the error is the coroutine's own
                self._abandon(work)
            raise

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None or self._thread is None:  # one without the other: starting it was interrupted
            self._loop = asyncio.new_event_loop()
            self._thread = self._spawner.thread(self._loop.run_forever, "holdfast-portal")
        return self._loop

    def _abandon(self, work: Coroutine[Any, Any, Any]) -> None:
        """Cancel the coroutine. By itself, not by its future: the interruption may have come before we had that."""
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # closed meanwhile, which has cancelled it
                loop.call_soon_threadsafe(_cancel_tasks_of, work)

    def close(self) -> None:
        """End the thread; a call that another thread waits for is broken off. Used again, the portal starts again."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is not None and thread is not None:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result()
            loop.call_soon_threadsafe(loop.stop)
            thread.join()
            loop.close()

    def _after_fork_in_child(self) -> None:
        self._lock = threading.Lock()  # a thread that the child does not have may have held the old one
        if self._loop is not None:
            # Closed, or collected, it would take its wake-up pipe out of the epoll that it shares with the parent.
            self._inherited.append(self._loop)
        self._loop = self._thread = None


def _cancel_tasks_of(work: Coroutine[Any, Any, Any]) -> None:
    tasks = [task for task in asyncio.all_tasks() if task.get_coro() is work]
    for task in tasks:
        task.cancel()
    if not tasks:
        work.close()  # it never became one, or has ended


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_portals: weakref.WeakSet[Portal] = weakref.WeakSet()
_portals_lock = threading.Lock()


def _after_fork_in_child() -> None:
    for portal in _portals:
        portal._after_fork_in_child()
    _portals_lock.release()


os.register_at_fork(
    before=_portals_lock.acquire, after_in_parent=_portals_lock.release, after_in_child=_after_fork_in_child
)
