"""Blocking work for a coroutine: on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from holdfast.ports import Ports

T = TypeVar("T")


def on_thread(work: Callable[[], T], *, name: str, ports: Ports) -> asyncio.Future[T]:
    """What the work answers, done on a thread of its own. It goes on if nobody awaits it any more."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            answer = work()
        except BaseException as error:
            _tell(loop, _fail, future, error)
        else:
            _tell(loop, _succeed, future, answer)

    ports.spawner.thread(run, name)
    return future


def _tell(loop: asyncio.AbstractEventLoop, deliver: Callable[..., None], *args: object) -> None:
    with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
        loop.call_soon_threadsafe(deliver, *args)


def _succeed(future: asyncio.Future[T], answer: T) -> None:
    if not future.done():
        future.set_result(answer)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
