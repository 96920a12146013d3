"""What a handler raises to steer its own job: `Retry`, `Snooze`, `GiveUp`.

They are ordinary exceptions, so `except Exception` around them swallows them.
"""

from __future__ import annotations

from datetime import timedelta

from holdfast.errors import InvalidOption, shown


class JobSignal(Exception):
    """The root of the three."""


class Retry(JobSignal):
    """Try again: in `after` seconds (a server's Retry-After, say), or when the task's backoff says so.

    It counts as a failed attempt: beyond `max_retries` the job goes to the dead letters.
    """

    def __init__(self, reason: str = "", *, after: float | timedelta | None = None) -> None:
        super().__init__(reason or "the handler asked for another attempt")
        self.after = None if after is None else _seconds("Retry(after=...)", after)


class Snooze(JobSignal):
    """Not now: run again in so many seconds. Costs no attempt; a job may do so a hundred times."""

    def __init__(self, seconds: float | timedelta, reason: str = "") -> None:
        self.seconds = _seconds("Snooze(...)", seconds)
        super().__init__(reason or f"the handler put the job off for {self.seconds:g} s")


class GiveUp(JobSignal):
    """No attempt will succeed: to the dead letters, at once."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler gave the job up")


def _seconds(what: str, wait: float | timedelta) -> float:
    seconds = wait.total_seconds() if isinstance(wait, timedelta) else wait
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidOption(f"{what} takes seconds or a timedelta, not less than 0, not {shown(wait)}")
    return float(seconds)
