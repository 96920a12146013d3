"""The ports of an application under test: a clock that stands still, jitter that does not vary, and no workers."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NoReturn

from holdfast.errors import InvalidOption, NotFinished, shown
from holdfast.ports import SYSTEM, Ports, microseconds
from holdfast.testing.clock import ManualClock

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_FRACTION = 1 - 2**-53


class FrozenClock(ManualClock):
    """A `ManualClock` on which nobody waits: a wait would never end, so it is refused with a word on what to do."""

    @property
    def time(self) -> datetime:
        """The time that it stands at."""
        return moment(self.now())

    def advance(self, seconds: float | timedelta) -> None:
        """Let time pass: what was delayed until then is due. Nothing runs by it."""
        super().advance(seconds.total_seconds() if isinstance(seconds, timedelta) else seconds)

    async def sleep(self, seconds: float) -> None:
        """`NotFinished`, unless it is for nothing."""
        if seconds > 0:
            raise NotFinished(
                "this would wait for ever: the clock of the test stands still, and nothing works in the background. "
                "Run the job first, with drain() or adrain()"
            )
        await super().sleep(seconds)


class LongestWait:
    """Chance without surprises: a backoff with jitter always waits as long as it may."""

    def fraction(self) -> float:
        """As good as 1."""
        return _LONGEST_FRACTION


class NoWorkers:
    """Starts nothing: what runs in the background waits on the clock, and that stands still."""

    def thread(self, target: Callable[[], None], name: str) -> NoReturn:
        """Always an error."""
        raise _no_workers()

    def event_loop(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> NoReturn:
        """Always an error."""
        raise _no_workers()

    def process(self, command: Sequence[str], fds: Sequence[int]) -> NoReturn:
        """Always an error."""
        raise _no_workers()


def _no_workers() -> InvalidOption:
    return InvalidOption(
        "a worker cannot run on the clock of this test, which stands still: run the jobs with drain() or adrain(), or "
        "use isolated(app, frozen=False) for a worker on the real clock"
    )


def frozen_ports(at: datetime | None) -> Ports:
    """Ports whose clock stands at that time (None: at the present)."""
    if at is not None and (not isinstance(at, datetime) or at.utcoffset() is None):
        raise InvalidOption(
            f"at must be a datetime with a time zone, as in datetime(2030, 1, 1, tzinfo=UTC), not {shown(at)}"
        )
    began = SYSTEM.clock.now() if at is None else microseconds(at.timestamp())
    return Ports(clock=FrozenClock(began), random=LongestWait(), spawner=NoWorkers())


def moment(at: int) -> datetime:
    """A stored time as people write it."""
    return _EPOCH + timedelta(microseconds=at)
