"""When to try again. Policies are plain values and callables; chance is handed in, so every delay can be replayed.

The first retry follows failure number 1. A backoff never yields less than nothing or more than `LONGEST_BACKOFF`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from holdfast.errors import InvalidOption, shown
from holdfast.job import check_whole
from holdfast.ports import Random

LONGEST_BACKOFF = 366 * 24 * 3600.0
"""Seconds. What a callable asks for beyond this is cut."""

_MOST_DOUBLINGS = 60


def _is_number(value: object, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _check_seconds(what: str, seconds: float) -> None:
    if not _is_number(seconds, 0, LONGEST_BACKOFF):
        raise InvalidOption(f"{what} must be a number of seconds from 0 to {LONGEST_BACKOFF:.0f}, not {shown(seconds)}")


class FullJitter(msgspec.Struct, frozen=True, gc=False):
    """`random(0, min(base · 2^(failures − 1), max))`: the default. A thousand jobs that fail together do not return
    together.
    """

    base: float = 0.5
    max: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what would overflow or go back in time."""
        _check_seconds("base", self.base)
        _check_seconds("max", self.max)

    def seconds(self, failures: int, random: Random) -> float:
        """The wait before the retry that follows failure number `failures`."""
        return random.fraction() * min(self.base * 2.0 ** min(failures - 1, _MOST_DOUBLINGS), self.max)


class Exponential(msgspec.Struct, frozen=True, gc=False):
    """`min(base · factor^(failures − 1), max)`, without jitter."""

    base: float = 0.5
    factor: float = 2.0
    max: float = 30.0

    def __post_init__(self) -> None:
        """Refuse what would overflow or shrink."""
        _check_seconds("base", self.base)
        _check_seconds("max", self.max)
        if not _is_number(self.factor, 1, 100):
            raise InvalidOption(f"factor must be a number from 1 to 100, not {shown(self.factor)}")

    def seconds(self, failures: int, random: Random) -> float:
        """The wait before the retry that follows failure number `failures`."""
        return min(self.base * self.factor ** min(failures - 1, _MOST_DOUBLINGS), self.max)


class Steps(msgspec.Struct, frozen=True):
    """Fixed waits, one after the other; the last one repeats: `Steps((5, 30, 300))`."""

    waits: tuple[float, ...]

    def __post_init__(self) -> None:
        """Refuse an empty ladder."""
        if not isinstance(self.waits, tuple) or not self.waits:
            raise InvalidOption("Steps needs a tuple of at least one wait, as in Steps((5, 30, 300))")
        for wait in self.waits:
            _check_seconds("each wait", wait)

    def seconds(self, failures: int, random: Random) -> float:
        """The wait before the retry that follows failure number `failures`."""
        return self.waits[min(failures, len(self.waits)) - 1]


Backoff = FullJitter | Exponential | Steps | Callable[[int], float]
"""A policy value, or any callable from the number of failures so far (1, 2, …) to seconds."""


def backoff_seconds(backoff: Backoff, failures: int, random: Random) -> float:
    """The wait that the backoff asks for, bounded.

    A callable is foreign code: when it raises or answers nonsense the default policy decides, because a job must not
    be stuck for the mistake.
    """
    if isinstance(backoff, FullJitter | Exponential | Steps):
        return backoff.seconds(failures, random)
    try:
        wait = float(backoff(failures))
    except Exception:
        wait = math.nan
    if not wait >= 0:
        return FullJitter().seconds(failures, random)
    return min(wait, LONGEST_BACKOFF)


class RetryPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """The limits that decide between another attempt and the dead letters. `max_retries` travels with the job."""

    backoff: Backoff = FullJitter()
    max_crashes: int = 3
    max_snoozes: int = 100

    def __post_init__(self) -> None:
        """Refuse limits that could not be compared when a job ends."""
        if not (isinstance(self.backoff, FullJitter | Exponential | Steps) or callable(self.backoff)):
            raise InvalidOption(f"backoff must be a policy or a callable, not {shown(self.backoff)}")
        check_whole("max_crashes", self.max_crashes, 1, 1_000_000)
        check_whole("max_snoozes", self.max_snoozes, 0, 1_000_000)
