"""The event loop of a worker: the fastest there is, ended in bounded time, and not shared with what a handler forks."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from types import FrameType
from typing import Any, Protocol, TypeVar

import msgspec

T = TypeVar("T")

_TIME_TO_CLEAN_UP = 1.0
"""Seconds for what handlers leave in the event loop to end."""


class Stoppable(Protocol):
    """What runs until it is stopped: a worker."""

    async def run(self) -> bool:
        """True if everything ended well."""

    def stop(self) -> None:
        """Finish what runs, within the grace period."""

    def stop_now(self) -> None:
        """Give back what runs."""


S = TypeVar("S", bound=Stoppable)


def run_until_signalled(
    make: Callable[[], S],
    *,
    started: Callable[[S], None] = lambda service: None,
    supervised: bool = False,
) -> bool:
    """Run a worker in this process, until SIGTERM or SIGINT stops it. True if it ended well.

    A second signal gives running jobs back at once; a third ends the process as it would any other. Supervised, only
    the first counts: whoever signals a whole group of processes means one stop, and the supervisor says more if more
    is meant. `started` is called on the event loop.
    """

    async def run() -> bool:
        service = make()
        loop = asyncio.get_running_loop()
        heard = 0

        def stop(number: int) -> None:
            nonlocal heard
            heard += 1
            service.stop()
            if heard > 1 and not supervised:
                service.stop_now()
                loop.remove_signal_handler(number)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop, number)
        started(service)
        return await service.run()

    return run_to_end(run())


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """As `asyncio.run`, on the fastest loop there is, and without waiting for handlers that ignore cancellation."""
    loop = (_fastest_loop() or asyncio.new_event_loop)()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(work)
    finally:
        _cancel(loop, left := asyncio.all_tasks(loop))
        closing = loop.create_task(loop.shutdown_asyncgens())
        loop.run_until_complete(asyncio.wait([closing], timeout=_TIME_TO_CLEAN_UP))
        _cancel(loop, asyncio.all_tasks(loop) - left)
        loop.call_soon(loop.stop)
        loop.run_forever()  # one more turn, in which what was closed just now is really closed
        asyncio.set_event_loop(None)
        loop.close()


def _cancel(loop: asyncio.AbstractEventLoop, tasks: Collection[asyncio.Task[Any]]) -> None:
    """Give them some time to end, and no more."""
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=_TIME_TO_CLEAN_UP))


def _fastest_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError:
        return None
    fastest: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return fastest


def makes_plain_tasks(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether `loop.create_task` now makes an `asyncio.Task` and nothing else. Nobody can say that of a loop that is
    not known here, or of one with a task factory.
    """
    uvloop = getattr(sys.modules.get("uvloop"), "Loop", None)
    known = type(loop).create_task in (asyncio.BaseEventLoop.create_task, getattr(uvloop, "create_task", None))
    return known and loop.get_task_factory() is None


# Forks. A handler may fork, and its copy of this process may come back to the event loop. It must not work or settle as
# if it were the worker. A copy that does something else, as those of `multiprocessing` do, never gets there.

_CAN_PAUSE = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class _Runs(msgspec.Struct, frozen=True):
    """On which thread, and under which frame, an event loop runs."""

    thread: int
    frame: FrameType | None


_loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Runs] = weakref.WeakKeyDictionary()


def _end_when_back() -> None:
    for loop, runs in _loops.items():
        with suppress(RuntimeError):
            handle = loop.call_soon(os._exit, 1)
            if (ready := getattr(loop, "_ready", None)) is not None:
                # Before everything that was about to run: those are other handlers, and they run in the parent.
                ready.remove(handle)
                ready.appendleft(handle)
            elif runs.thread == threading.get_ident():
                _end_at_return(sys._getframe(), runs.frame)


def _end_at_return(frame: FrameType | None, loop: FrameType | None) -> None:
    """End as soon as what the loop has called comes back to it.

    A loop that lets nobody in front of its queue (uvloop) would first run other handlers, and send once more what it
    was about to send. Tracing one frame is all that Python offers here; it makes calls in the copy a little slower.
    """
    while frame is not None and frame.f_back is not loop:
        frame = frame.f_back
    if frame is not None:
        frame.f_trace_lines = False
        frame.f_trace = _end_if_back
        sys.settrace(lambda *_: None)


def _end_if_back(frame: FrameType, event: str, argument: object) -> object:
    if event == "return":
        os._exit(1)
    return _end_if_back


os.register_at_fork(after_in_child=_end_when_back)


def end_in_forks(loop: asyncio.AbstractEventLoop) -> None:
    """From now on a forked copy that comes back to this loop ends. Called from a coroutine that the loop runs."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_flags & _CAN_PAUSE:
        frame = frame.f_back
    _loops[loop] = _Runs(threading.get_ident(), frame)


def no_longer_in_forks(loop: asyncio.AbstractEventLoop) -> None:
    """The worker on this loop has ended."""
    _loops.pop(loop, None)
