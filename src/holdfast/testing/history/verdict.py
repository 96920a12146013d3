"""The invariants by number and name, and what it looks like when one does not hold."""

from __future__ import annotations

import msgspec

from holdfast.job import JobId

NAMES = {
    1: "no loss",
    2: "no phantom",
    3: "conservation",
    4: "lease succession",
    5: "fencing",
    6: "absorbing ends",
    7: "attempts",
    8: "explained duplicates",
    9: "overlap",
    10: "never early",
    11: "bounded liveness",
    12: "backoff",
    13: "idempotency",
    19: "dead letters",
    20: "the same on every engine",
    21: "integrity",
    23: "shutdown",
    24: "resources",
}


class Violation(msgspec.Struct, frozen=True):
    """An invariant that does not hold. `job_id` is empty if it is about no job in particular."""

    invariant: int
    job_id: JobId
    what: str

    def __str__(self) -> str:
        """One line for people."""
        job = f"{self.job_id}: " if self.job_id else ""
        return f"invariant {self.invariant} ({NAMES[self.invariant]}): {job}{self.what}"
