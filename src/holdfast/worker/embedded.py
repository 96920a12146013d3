"""A worker inside the program that enqueues: one daemon thread, for small applications and for tests."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

import msgspec

from holdfast.errors import HoldfastError, StoreError
from holdfast.events import Event, JobSettled, Listener, PartFailed, hears_routine, tell
from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.worker.event_loop import run_to_end
from holdfast.worker.service import WorkerService

KEPT_EXCEPTIONS = 1_000
_LOOK_EVERY = 0.01
_START_DEADLINE = 30.0
_LAST_WORDS = 5.0


class JobException(msgspec.Struct, frozen=True):
    """An attempt that failed: which job, and the type and message of what it raised."""

    job_id: str
    task: str
    type: str
    error: str
    correlation_id: str | None


class _Ear:
    """Keeps the failed attempts, and tells the application's own listener everything."""

    def __init__(self, listener: Listener) -> None:
        self.exceptions: deque[JobException] = deque(maxlen=KEPT_EXCEPTIONS)
        self.routine = hears_routine(listener)
        self._listener = listener

    def __call__(self, event: Event) -> None:
        if isinstance(event, JobSettled) and event.error:
            kind, _, message = event.error.partition(": ")
            self.exceptions.append(JobException(event.job_id, event.task, kind, message, event.correlation_id))
        elif isinstance(event, PartFailed):
            self.exceptions.append(JobException("", event.part, "PartFailed", event.error, None))
        tell(self._listener, event)


class EmbeddedWorker:
    """A running worker. Use it as a context manager, or call `stop`."""

    def __init__(
        self,
        make: Callable[[Listener], WorkerService],
        store: Store,
        *,
        queues: tuple[str, ...],
        refuse_new: Callable[[], None] | None,
        ports: Ports,
        listener: Listener,
    ) -> None:
        self._ear = _Ear(listener)
        self.exceptions = self._ear.exceptions
        """The failed attempts, latest last, for tests to look at."""
        self._make = make
        self._store = store
        self._queues = queues
        self._refuse_new = refuse_new
        self._ports = ports
        self._service: WorkerService | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._ended = threading.Event()
        ports.spawner.thread(self._serve, "holdfast-worker")
        if not self._ready.wait(_START_DEADLINE) or self._error is not None:
            self.stop(drain=False, timeout=0)
            raise self._error or HoldfastError(f"the worker did not start within {_START_DEADLINE:g} s")

    def _serve(self) -> None:
        try:
            run_to_end(self._run())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
            self._ready.set()

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        service = self._service = self._make(self._ear)
        running = asyncio.create_task(service.run())
        while not service.worker_id and not running.done():
            await self._ports.clock.sleep(_LOOK_EVERY)
        self._ready.set()
        await running

    # Stopping.

    def stop(self, *, drain: bool = False, timeout: float | None = None) -> bool:
        """Stop, after running handlers have finished. True if the worker has ended (and, with `drain`, run dry).

        `drain`: first work until the worker's queues are empty, delayed jobs and retries included; a store in memory
        takes no new jobs from then on. `timeout` bounds the waiting, in seconds; then what runs is given back.
        """
        if drain and self._refuse_new is not None:
            self._refuse_new()
        loop, service = self._loop, self._service
        if loop is None or service is None or self._ended.is_set():
            return self._ended.is_set()
        deadline = None if timeout is None else self._ports.clock.monotonic() + timeout
        dry = not drain or self._wait_until_dry(loop, service, deadline)
        self._call(loop, service.stop)
        left = None if deadline is None else max(0.0, deadline - self._ports.clock.monotonic())
        if not self._ended.wait(left):
            self._call(loop, service.stop_now)
            self._ended.wait(_LAST_WORDS)
        return dry and self._ended.is_set()

    def _call(self, loop: asyncio.AbstractEventLoop, wish: Callable[[], None]) -> None:
        # Nobody waits for an answer: a loop that is just ending gives none.
        with suppress(RuntimeError):  # it has ended
            loop.call_soon_threadsafe(wish)

    def _wait_until_dry(self, loop: asyncio.AbstractEventLoop, service: WorkerService, deadline: float | None) -> bool:
        """False if the time was over first, or the worker ended by itself."""
        work = self._run_dry(service, deadline)
        try:
            dry = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError:  # the loop has ended
            work.close()
            return False
        while not self._ended.is_set():
            with suppress(TimeoutError):
                return dry.result(_LOOK_EVERY)
            if deadline is not None and self._ports.clock.monotonic() > deadline + _LOOK_EVERY:
                break  # a handler blocks the loop
        dry.cancel()
        return False

    async def _run_dry(self, service: WorkerService, deadline: float | None) -> bool:
        """Wait until nothing is left in the worker's queues. False if the time was over first."""
        while True:
            if service.idle:
                with suppress(StoreError):  # it comes back, or the time is over
                    counts = [count for count in await self._store.counts() if count.queue in self._queues]
                    if not any(count.ready + count.scheduled + count.in_flight for count in counts if not count.paused):
                        return True
            if deadline is not None and self._ports.clock.monotonic() >= deadline:
                return False
            await self._ports.clock.sleep(_LOOK_EVERY)

    def __enter__(self) -> EmbeddedWorker:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop(drain=False)
