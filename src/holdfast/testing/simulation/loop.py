"""An event loop that decides by a seed what runs next, and whose time jumps to the next timer.

Hosts are marked by a context variable that every task inherits. Killing a host drops its callbacks for ever, so that
no `finally` runs and no cancellation is seen, which is what SIGKILL does; pausing it puts them off, like SIGSTOP.

A host may have parts: `worker-1/heart` is the thread of its heartbeat, `worker-1/process-3` a process that it started.
What befalls the host befalls its parts; what befalls a part, only that part.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import random
import threading
from asyncio import events
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any

HOST: ContextVar[str] = ContextVar("host", default="simulator")
NETWORK = "network/"
"""What is on the way for a host is no part of it: it arrives though the host is dead."""
_HEART = "/heart"
_MOST_STEPS = 2_000_000
_TRACE_BITS = (1 << 64) - 1
_TRACE_PRIME = 0x100000001B3


class Stuck(Exception):
    """Nothing is left that could ever run, or nothing comes to an end."""


class _NumberedTask(asyncio.Task[Any]):
    """A task with a hash of its own: asyncio keeps tasks in sets, and else their order would be that of addresses."""

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class SimulatedLoop(asyncio.BaseEventLoop):
    """One thread, no I/O, virtual time. Tasks that are ready together run in an order drawn from the seed; plain
    callbacks keep their order among each other, as asyncio promises.
    """

    # asyncio's own names for its two queues; typeshed does not list them.
    _ready: Any
    _scheduled: list[Any]
    _thread_id: int | None

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.chance = random.Random(seed)  # noqa: S311
        self.steps = 0
        self.surprises: list[str] = []
        """Errors that nobody caught."""
        self._time = 0.0
        self._hosts: dict[str, int] = {"simulator": 1}
        """Each with a number of its own, for the trace."""
        self._dead: set[str] = set()
        self._paused: dict[str, float] = {}
        self._put_off: list[tuple[float, int, events.Handle]] = []
        self._put_off_count = 0
        self._trace = 0
        self._tasks: list[asyncio.Task[Any]] = []

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._time

    @property
    def fingerprint(self) -> str:
        """A digest of who ran when: two runs with the same fingerprint took the same steps."""
        return f"{self._trace:016x}"

    # Hosts.

    def create_task(self, coro: Any, *, name: object = None, context: Context | None = None) -> asyncio.Task[Any]:
        """As ever, but keeping hold of the task: what a killed host leaves behind must not be collected in mid-run."""
        task = _NumberedTask(len(self._tasks), coro, loop=self, name=name, context=context)
        self._tasks.append(task)
        return task

    def context_of(self, host: str) -> Context:
        """A context in which everything belongs to that host."""
        self._hosts.setdefault(host, len(self._hosts) + 1)
        context = copy_context()
        context.run(HOST.set, host)
        return context

    def on_host(self, host: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start the work as a task of that host."""
        return self.create_task(work, context=self.context_of(host))

    def start_heart(self, work: Coroutine[Any, Any, Any]) -> None:
        """Start the work on the thread of the present host's heartbeat."""
        self.on_host(HOST.get() + _HEART, work)

    def call_soon_threadsafe(  # type: ignore[override]  # it takes any arguments
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        """A call to the other thread of the host: a worker's loop and its heart's are one loop here."""
        host = HOST.get()
        other = host.removesuffix(_HEART) if host.endswith(_HEART) else host + _HEART
        return self.call_soon(callback, *args, context=self.context_of(other))

    def kill(self, host: str) -> None:
        """Nothing of the host and its parts ever runs again."""
        self._dead.update(self._with_parts(host))

    def pause(self, host: str, seconds: float) -> None:
        """Nothing of the host and its parts runs for that long."""
        for part in self._with_parts(host):
            self.block(part, seconds)

    def block(self, host: str, seconds: float) -> None:
        """Nothing of the host itself runs for that long. Its parts go on."""
        self._paused[host] = max(self._paused.get(host, 0.0), self._time + seconds)

    def anybody_paused(self) -> bool:
        """Whether a host that lives, or a part of one, stands still now."""
        return any(until > self._time and host not in self._dead for host, until in self._paused.items())

    def _with_parts(self, host: str) -> list[str]:
        return [known for known in self._hosts if known == host or known.startswith(f"{host}/")]

    # What asyncio needs from a loop.

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Nothing may go wrong unnoticed."""
        self.surprises.append(f"{HOST.get()}: {context.get('message')}: {context.get('exception')!r}")

    def _process_events(self, event_list: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        if threading.get_ident() != self._thread_id:
            raise RuntimeError("a real thread touched the simulated loop")

    def _asyncgen_finalizer_hook(self, agen: Any) -> None:
        """What a killed host left half-iterated is dropped as it is."""

    def _run_once(self) -> None:
        """One step: advance time if nothing is ready, choose one callback, run it, drop it or put it off."""
        ready, scheduled = self._ready, self._scheduled
        while scheduled and scheduled[0]._cancelled:
            heapq.heappop(scheduled)._scheduled = False
        if not ready:
            self._jump()
        now = self._time
        while self._put_off and self._put_off[0][0] <= now:
            ready.append(heapq.heappop(self._put_off)[2])
        while scheduled and scheduled[0]._when <= now:
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            ready.append(timer)
        if not ready:
            return
        handle = ready.popleft() if len(ready) == 1 else self._choose()
        if handle._cancelled:
            return
        host = handle._context.get(HOST, "simulator")
        if host in self._dead:
            return
        if self._paused and self._paused.get(host, 0.0) > now:
            self._put_off_count += 1
            heapq.heappush(self._put_off, (self._paused[host], self._put_off_count, handle))
            return
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise Stuck(f"still running after {_MOST_STEPS} steps, at {now:.3f} s: a livelock")
        self._trace = (self._trace ^ self._hosts[host] ^ int(now * 1_000_000) << 8) * _TRACE_PRIME & _TRACE_BITS
        handle._run()

    def _jump(self) -> None:
        upcoming = [self._scheduled[0]._when] if self._scheduled else []
        upcoming += [self._put_off[0][0]] if self._put_off else []
        if not upcoming:
            raise Stuck(f"nothing is left to run at {self._time:.3f} s")
        self._time = max(self._time, min(upcoming))

    def _choose(self) -> Any:
        ready = self._ready
        position = int(self.chance.random() * len(ready))
        if not _is_task(ready[position]):
            position = next(at for at, handle in enumerate(ready) if not _is_task(handle))
        handle = ready[position]
        del ready[position]
        return handle

    def finish(self) -> None:
        """Drop everything that is left and close the loop."""
        for task in self._tasks:
            if task.done() and task._log_traceback:
                self.surprises.append(f"a task ended with an error that nobody heard of: {task.exception()!r}")
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            with contextlib.suppress(BaseException):
                task.get_coro().close()
        self._tasks.clear()
        self._ready.clear()
        self._scheduled.clear()
        self._put_off.clear()
        self.close()


def machine() -> str:
    """The host that the present part belongs to, or for which the network carries something."""
    return HOST.get().removeprefix(NETWORK).partition("/")[0]


def _is_task(handle: Any) -> bool:
    """Whether the callback is a step of a task."""
    return isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)


def run_simulated(loop: SimulatedLoop, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run the work to its end on the loop."""
    events._set_running_loop(None)
    try:
        loop.run_until_complete(work())
    finally:
        loop.finish()
