"""What makes a transaction of a plan: begin, commit, rerun after a conflict, and what a lost connection means.

It is a generator itself, so that the two drivers of `drive.py`, blocking and not, are a few lines each and cannot
differ in what they decide.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

import msgspec

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.ports import Ports
from holdfast.stores.mysql.faults import RERUN, Fault, store_error
from holdfast.stores.mysql.sql import Again, Answer, Batch, Plan

T = TypeVar("T")

MakePlan = Callable[[], Plan[T]]

_FIRST_PAUSE = 0.002
_LONGEST_PAUSE = 0.2


class Packet(msgspec.Struct, frozen=True, gc=False):
    """Statements to send, one after the other or at once."""

    statements: Sequence[str]


class Pause(msgspec.Struct, frozen=True, gc=False):
    """Wait that many seconds, then go on with no answers."""

    seconds: float


class Reconnect(msgspec.Struct, frozen=True, gc=False):
    """Take another connection, then go on with no answers."""


Step = Packet | Pause | Reconnect
Steps = Generator[Step, Sequence[Answer], T]


class Call(msgspec.Struct, frozen=True):
    """How a verb is to be run, and until when."""

    where: str
    deadline: float
    ports: Ports
    begin: Sequence[str] = ("START TRANSACTION",)
    commit: Sequence[str] = ("COMMIT",)
    undo: Sequence[str] = ("ROLLBACK",)
    reconnects: int = 0
    """How many lost connections to replace: idle ones may have been closed by the server long ago."""
    repeatable: bool = False
    """Doing it twice is as good as once."""

    def time_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - self.ports.clock.monotonic()


def transaction(make_plan: MakePlan[T], call: Call) -> Steps[T]:
    """Carry out the plan as one transaction, as often as it takes."""
    tries = reconnects = 0
    while True:
        begun = _Progress()
        try:
            return (yield from _once(make_plan(), call, begun))
        except Fault as fault:
            if fault.lost:
                reconnects += 1
                if (begun.committing and not call.repeatable) or reconnects > call.reconnects or call.time_left() <= 0:
                    raise _lost(fault, call, begun) from fault
                yield Reconnect()
                continue
            if fault.code not in RERUN:
                yield from _undo(call)
                raise store_error(fault, call.where) from fault
            problem: Exception = fault
        except Again as again:
            problem = again
        except Exception:  # what the plan refuses; somebody who gives up half-way gives up the connection too
            yield from _undo(call)
            raise
        yield from _undo(call)
        pause = min(_FIRST_PAUSE * 2.0**tries, _LONGEST_PAUSE) * (0.5 + call.ports.random.fraction())
        if call.time_left() <= pause:
            raise StoreUnavailable(
                f"others kept changing the same rows of {call.where} until the deadline ({problem!r:.200}); "
                f"nothing was written, try again"
            ) from problem
        tries += 1
        yield Pause(pause)


class _Progress:
    """How far a try has come."""

    committing = False


def _once(plan: Plan[T], call: Call, progress: _Progress) -> Steps[T]:
    opening = call.begin
    answers: Sequence[Answer] | None = None
    while True:
        try:
            batch = plan.send(answers) if answers is not None else next(plan)
        except StopIteration as end:
            if not opening and call.commit and not progress.committing:  # nothing begun: nothing to commit
                progress.committing = True
                yield Packet(call.commit)
            answer: T = end.value
            return answer
        answers = yield from _send(batch, opening, call, progress)
        opening = ()


def _send(batch: Batch, opening: Sequence[str], call: Call, progress: _Progress) -> Steps[Sequence[Answer]]:
    closing = call.commit if batch.last else ()
    progress.committing = progress.committing or bool(closing)
    answers = yield Packet([*opening, *batch.statements, *closing])
    return answers[len(opening) : len(opening) + len(batch.statements)]


def _undo(call: Call) -> Steps[None]:
    if not call.undo:
        return
    try:
        yield Packet(call.undo)
    except Fault as fault:
        if not fault.lost:
            raise store_error(fault, call.where) from fault
        # A connection that is gone has taken its transaction with it.


def _lost(fault: Fault, call: Call, progress: _Progress) -> Exception:
    if progress.committing and not call.repeatable:
        return OutcomeUnknown(
            f"the connection to {call.where} was lost during the commit ({fault}): it may have been written; "
            f"repeating it is safe"
        )
    return store_error(fault, call.where)
