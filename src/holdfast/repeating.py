"""What some stores can do beyond the port: a shorter way for one more job like the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from holdfast.job import JobId, NewJob


@runtime_checkable
class Repeating(Protocol):
    """A store with a shorter way for one more job like one that it knows. Its class says so: what hands on the methods
    of another store does not count.
    """

    def repeater(self, like: NewJob) -> Callable[[JobId, bytes], bool] | None:
        """A function that inserts a job on the calling thread which differs from `like` in its id and payload only.
        None if there is no shorter way for such jobs.

        `like` is due now and has no key; the id must be fresh. True: the job was created, as by `insert_blocking`.
        False: nothing was written, because there is more to it; then `insert_blocking` is the way. It raises what that
        raises, and may be called from any thread.
        """
