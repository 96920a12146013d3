"""A verb as a generator: it yields what is to be asked of the server and is sent the answer. One text, two drivers.

A request says whether it `writes`, that is whether it may have had an effect if its answer is lost. When a later
request of the same verb fails without an effect of its own, the verb as a whole may still have had one.
"""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from typing import Protocol, TypeVar

from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable


class Request(Protocol):
    """What a verb yields."""

    @property
    def writes(self) -> bool:
        """Whether it may have had an effect if its answer is lost."""


R = TypeVar("R", bound=Request)
A = TypeVar("A")
T = TypeVar("T")


def drive(verb: Generator[R, A, T], execute: Callable[[R], A]) -> T:
    """Carry out a verb with a function that executes one request."""
    written = False
    try:
        request = next(verb)
        while True:
            try:
                answer = execute(request)
            except StoreUnavailable as error:
                request = verb.throw(_after(written, error))
            except Exception as error:
                request = verb.throw(error)
            else:
                written = written or request.writes
                request = verb.send(answer)
    except StopIteration as end:
        outcome: T = end.value
        return outcome
    finally:
        verb.close()


class Overlaps:
    """Calls that let their caller do something else while the server works: so many at a time. Each has a connection
    for as long as that takes, which nobody knows, and some must be left for others.
    """

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)

    def drive(self, verb: Generator[R, A, T], execute: Callable[..., A], meanwhile: Callable[[], object] | None) -> T:
        """As `drive`. `execute` is handed `meanwhile`, too, if there are not so many already."""
        if meanwhile is None or not self._free.acquire(blocking=False):
            return drive(verb, execute)
        try:
            return drive(verb, partial(execute, meanwhile=meanwhile))
        finally:
            self._free.release()


async def drive_async(verb: Generator[R, A, T], execute: Callable[[R], Awaitable[A]]) -> T:
    """The same with a coroutine function."""
    written = False
    try:
        request = next(verb)
        while True:
            try:
                answer = await execute(request)
            except StoreUnavailable as error:
                request = verb.throw(_after(written, error))
            except Exception as error:
                request = verb.throw(error)
            else:
                written = written or request.writes
                request = verb.send(answer)
    except StopIteration as end:
        outcome: T = end.value
        return outcome
    finally:
        verb.close()


def _after(written: bool, error: StoreUnavailable) -> StoreError:
    return OutcomeUnknown(f"a part of it was done, then: {error}") if written else error
