"""An event loop that decides by a seed what runs next, and whose time jumps to the next timer.

Hosts are marked by a context variable that every task inherits. Killing a host drops its callbacks for ever, so that
no `finally` runs and no cancellation is seen, which is what SIGKILL does; pausing it puts them off, like SIGSTOP.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import heapq
import random
import threading
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

HOST: ContextVar[str] = ContextVar("host", default="simulator")
_MOST_STEPS = 2_000_000


class Stuck(Exception):
    """Nothing is left that could ever run, or nothing comes to an end."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """One thread, no I/O, virtual time. Task wake-ups that are ready together run in an order drawn from the seed."""

    # asyncio's own names for its two queues; typeshed does not list them.
    _ready: Any
    _scheduled: list[Any]
    _thread_id: int | None

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)  # noqa: S311
        self.steps = 0
        self._time = 0.0
        self._dead: set[str] = set()
        self._paused: dict[str, float] = {}
        self._put_off: list[tuple[float, int, events.Handle]] = []
        self._put_off_count = 0
        self._trace = hashlib.sha256()
        self._tasks: list[asyncio.Task[Any]] = []

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._time

    @property
    def fingerprint(self) -> str:
        """A digest of who ran when: two runs with the same fingerprint took the same steps."""
        return self._trace.hexdigest()[:16]

    # Hosts.

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """As ever, but keeping hold of the task: what a killed host leaves behind must not be collected in mid-run."""
        task: asyncio.Task[Any] = super().create_task(*args, **kwargs)
        self._tasks.append(task)
        return task

    def context_of(self, host: str) -> Context:
        """A context in which everything belongs to that host."""
        context = copy_context()
        context.run(HOST.set, host)
        return context

    def on_host(self, host: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start the work as a task of that host."""
        return self.create_task(work, context=self.context_of(host))

    def kill(self, host: str) -> None:
        """Nothing of the host ever runs again."""
        self._dead.add(host)

    def pause(self, host: str, seconds: float) -> None:
        """Nothing of the host runs for that long."""
        self._paused[host] = self._time + seconds

    # What asyncio needs from a loop.

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise RuntimeError("a real thread touched the simulated loop")

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """What a killed host left half-iterated is dropped as it is."""

    def _run_once(self) -> None:
        """One step: advance time if nothing is ready, choose one callback, run it, drop it or put it off."""
        while self._scheduled and self._scheduled[0]._cancelled:
            heapq.heappop(self._scheduled)._scheduled = False
        if not self._ready:
            self._jump()
        while self._put_off and self._put_off[0][0] <= self._time:
            self._ready.append(heapq.heappop(self._put_off)[2])
        while self._scheduled and self._scheduled[0]._when <= self._time:
            timer = heapq.heappop(self._scheduled)
            timer._scheduled = False
            self._ready.append(timer)
        if not self._ready:
            return
        handle = self._choose()
        if handle._cancelled:
            return
        host = handle._context.get(HOST, "simulator")
        if host in self._dead:
            return
        if self._paused.get(host, 0.0) > self._time:
            self._put_off_count += 1
            heapq.heappush(self._put_off, (self._paused[host], self._put_off_count, handle))
            return
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise Stuck(f"still running after {_MOST_STEPS} steps, at {self._time:.3f} s: a livelock")
        self._trace.update(f"{self._time:.6f} {host}\n".encode())
        handle._run()

    def _jump(self) -> None:
        upcoming = [self._scheduled[0]._when] if self._scheduled else []
        upcoming += [self._put_off[0][0]] if self._put_off else []
        if not upcoming:
            raise Stuck(f"nothing is left to run at {self._time:.3f} s")
        self._time = max(self._time, min(upcoming))

    def _choose(self) -> Any:
        position = self.chance.randrange(len(self._ready))
        self._ready.rotate(-position)
        handle = self._ready.popleft()
        self._ready.rotate(position)
        return handle

    def finish(self) -> None:
        """Drop everything that is left and close the loop."""
        for task in self._tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()
        self._tasks.clear()
        self._ready.clear()
        self._scheduled.clear()
        self._put_off.clear()
        self.close()


def run_simulated(loop: SimulatedLoop, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the work to its end on the loop."""
    events._set_running_loop(None)
    try:
        loop.run_until_complete(work())
    finally:
        loop.finish()
