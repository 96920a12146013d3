"""Values that the unit tests begin with, and chance that is not left to chance."""

from __future__ import annotations

from typing import Any

from holdfast.failures import Failure, append_failures
from holdfast.job import Job, Key, NewJob, Reason, State

BROKEN = Failure(at=1_700_000_000_000_000, attempt=1, type="ValueError", message="broken")
KEY = Key(text="welcome:42", payload_hash="h", window=60_000_000)


class FixedRandom:
    """A `Random` that always answers the same."""

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    def fraction(self) -> float:
        return self._fraction


def new_job(**changes: Any) -> NewJob:
    """A valid new job, with changes."""
    return NewJob(**{"id": "01900000-0000-7000-8000-000000000001", "task": "mail.welcome", "payload": b"{}", **changes})


def claimed_job(**changes: Any) -> Job:
    """A job in flight that has been through something: no counter is zero and no two are alike."""
    fields: dict[str, Any] = {
        "id": "01900000-0000-7000-8000-000000000001",
        "task": "mail.welcome",
        "payload": b"{}",
        "task_version": "1",
        "queue": "mail",
        "share": "",
        "priority": 5,
        "state": State.IN_FLIGHT,
        "reason": Reason.CLAIMED,
        "run_at": 1_000,
        "created_at": 900,
        "version": 9,
        "session_id": "s1",
        "attempt": 6,
        "failures": 2,
        "crashes": 1,
        "snoozes": 4,
        "suspect": False,
        "cancel_asked": False,
        "max_retries": 3,
        "retention": 60_000_000,
        "key": KEY,
        "correlation_id": None,
        "claimed_at": 2_000,
        "ended_at": None,
        "failure_history": append_failures(b"", [BROKEN]),
        "result": None,
        "progress": None,
    }
    return Job(**{**fields, **changes})
