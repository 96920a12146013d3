"""How often an idle worker looks for the jobs of other processes, of which the server tells nothing."""

from __future__ import annotations

from collections.abc import Collection

from holdfast.ports import Clock

TICK = 1.2
"""Seconds between two looks at first."""
_MOST_TICKS = 2
_EARLY = TICK / 2


class Pace:
    """Of those who wait for the same queues. Each look that finds nothing makes the next one a tick later."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._in_vain = 0
        self._last = clock.monotonic()

    @property
    def quiet(self) -> bool:
        """Whether the last look found nothing, so that the next will probably find nothing either."""
        return self._in_vain > 0

    def looked(self, *, found: bool) -> None:
        """Somebody has looked, for whatever reason."""
        self._in_vain = 0 if found else min(self._in_vain + 1, _MOST_TICKS)
        self._last = self._clock.monotonic()

    def is_time(self) -> bool:
        """Whether to look again. To be asked at every tick."""
        return self._clock.monotonic() - self._last > max(1, self._in_vain) * TICK - _EARLY


class Paces:
    """The pace for each set of queues."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paces: dict[frozenset[str], Pace] = {}

    def of(self, queues: Collection[str]) -> Pace:
        """The one that these queues have in common, in whatever order."""
        key = frozenset(queues)
        if (pace := self._paces.get(key)) is None:
            pace = self._paces[key] = Pace(self._clock)
        return pace
