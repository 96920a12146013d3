"""Who carries out the steps: on this thread, or on the running event loop. The same steps on any connection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from holdfast.stores.mysql.sql import Answer
from holdfast.stores.mysql.steps import Packet, Pause, Step, Steps

T = TypeVar("T")


class Line(Protocol):
    """A connection, as blocking steps need it. It raises nothing but `Fault` and what a signal handler raises."""

    def send(self, statements: Sequence[str]) -> Sequence[Answer]: ...
    def reconnect(self) -> None: ...
    def pause(self, seconds: float) -> None: ...


class AsyncLine(Protocol):
    """The same on an event loop."""

    async def send(self, statements: Sequence[str]) -> Sequence[Answer]: ...
    async def reconnect(self) -> None: ...
    async def pause(self, seconds: float) -> None: ...


def drive(steps: Steps[T], line: Line) -> T:
    """The answer of the steps, carried out on this thread."""
    try:
        step = next(steps)
        while True:
            try:
                answers = _do(step, line)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answers)
    except StopIteration as end:
        answer: T = end.value
        return answer


def _do(step: Step, line: Line) -> Sequence[Answer]:
    if isinstance(step, Packet):
        return line.send(step.statements)
    if isinstance(step, Pause):
        line.pause(step.seconds)
    else:
        line.reconnect()
    return ()


async def adrive(steps: Steps[T], line: AsyncLine) -> T:
    """The answer of the steps, carried out on the running event loop. A cancelled one stops where it is."""
    try:
        step = next(steps)
        while True:
            try:
                answers = await _ado(step, line)
            except Exception as error:
                step = steps.throw(error)
            else:
                step = steps.send(answers)
    except StopIteration as end:
        answer: T = end.value
        return answer
    finally:
        steps.close()


async def _ado(step: Step, line: AsyncLine) -> Sequence[Answer]:
    if isinstance(step, Packet):
        return await line.send(step.statements)
    if isinstance(step, Pause):
        await line.pause(step.seconds)
    else:
        await line.reconnect()
    return ()
