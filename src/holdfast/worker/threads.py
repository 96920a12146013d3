"""Threads for plain functions. They start when they are needed, take calls in turn, and report in bursts.

A thread cannot be killed. One whose handler never ends is left behind, and another takes its place.
"""

from __future__ import annotations

import asyncio
import os
import queue
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from holdfast.ports import Ports

T = TypeVar("T")


class HandlerThreads(Generic[T]):
    """Runs calls on at most as many threads as calls are under way at once. Used from one event loop."""

    def __init__(self, ports: Ports, name: str) -> None:
        self._ports = ports
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._calls: queue.SimpleQueue[tuple[Callable[[], T], Callable[[T], None]] | None] = queue.SimpleQueue()
        self._done: deque[tuple[Callable[[T], None], T]] = deque()
        self._told = False
        self._threads = 0
        self._busy = 0

    def submit(self, call: Callable[[], T], done: Callable[[T], None]) -> None:
        """Run the call, which must not raise, on a thread; `done` gets its result on the event loop.

        `RuntimeError` if there is no thread and none can be started.
        """
        if self._busy >= self._threads:
            try:
                self._ports.spawner.thread(self._serve, f"{self._name}-{self._threads + 1}")
                self._threads += 1
            except RuntimeError:  # the machine has no more; those that there are take it in turn
                if not self._threads:
                    raise
        self._busy += 1
        self._calls.put((call, done))

    def close(self) -> None:
        """Let idle threads end. One that is still in a handler goes on until that returns, or the process ends."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _serve(self) -> None:
        process = os.getpid()
        while (job := self._calls.get()) is not None:
            call, done = job
            result = call()
            if os.getpid() != process:
                # The handler forked, and its child came back here. It must not work or settle as if it were the worker.
                os._exit(1)
            self._done.append((done, result))
            del job, call, done, result  # what a handler returned must not live until the next one
            if not self._told:
                self._told = True
                try:
                    self._loop.call_soon_threadsafe(self._report)
                except RuntimeError:
                    return  # the loop is closed: the worker has ended without this handler

    def _report(self) -> None:
        self._told = False
        while self._done:
            done, result = self._done.popleft()
            self._busy -= 1
            done(result)
