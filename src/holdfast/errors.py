"""Every error that Holdfast raises.

    HoldfastError
    ├── InvalidOption           a name, number or time that cannot work (also a ValueError)
    │   └── UnknownPriority     a priority label that is not configured
    ├── UnknownTask             no task of that name is registered here
    ├── InvalidPayload          an argument that JSON cannot carry there and back unchanged (also a ValueError)
    │   └── PayloadTooLarge
    ├── CalledInEventLoop       a blocking call inside a running event loop: use its a-prefixed twin
    ├── NotInJob                `current()` was called outside of a handler
    ├── ForeignConnection       a connection that does not belong to this store
    ├── QueueFull               the queue holds `max_depth` jobs
    ├── QueueClosed             the store was shut down and takes no new jobs
    ├── KeyConflict             the idempotency key belongs to a job with another payload
    ├── PartlyRefused           some jobs of a batch were refused; it lists which, and why
    ├── CheckpointConflict      another process moved the source's cursor first
    ├── StaleLease              the claim was lost: another worker or a keeper decided about the job
    │   └── SessionClosed       the whole worker session was declared dead
    ├── JobNotFound             no such job: never there, or pruned
    ├── JobStillLive            the job has not ended, so it cannot be replayed
    ├── JobFailed               the job ended as a dead letter; carries its error history
    ├── JobCancelled            the job was cancelled
    ├── ResultNotKept           the job succeeded, but its result could not be stored
    ├── NotFinished             the job has not ended within the time given (also a TimeoutError)
    └── StoreError
        ├── StoreUnavailable    nothing was written; safe to try again
        ├── OutcomeUnknown      it may have been written; repeating it with the same ids is safe
        ├── SchemaOutdated      code and schema do not fit together
        ├── UnsafeStore         the store cannot keep its promise where it is (network file system, ...)
        └── StoreReplaced       the file or the data under the store is no longer what was opened

Messages say what was wrong, where, and what to do. They never contain a payload.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.failures import Failure


def shown(value: object) -> str:
    """A refused value as a message shows it: cut, and never an error of its own, as an int of 5,000 digits would be."""
    try:
        return f"{value!r:.80}"
    except Exception:
        return f"<{type(value).__name__} that cannot be printed>"


def _restored(kind: type[HoldfastError], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> HoldfastError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class HoldfastError(Exception):
    """The root of the tree. Every error survives pickling, as on its way out of a process pool, with its attributes."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Not by calling the class again, as exceptions do: the message that it got is not the one that it made of it.
        return _restored, (type(self), self.args, self._attributes())

    def _attributes(self) -> dict[str, Any]:
        """What a pickle keeps besides the message."""
        return self.__dict__


class InvalidOption(HoldfastError, ValueError):
    """A name, number or time that cannot work."""


class UnknownPriority(InvalidOption):
    """A priority label that is not configured."""


class UnknownTask(HoldfastError):
    """No task of that name is registered here."""


class InvalidPayload(HoldfastError, ValueError):
    """An argument that JSON cannot carry there and back unchanged. `path` says which, as in `$.user.tags[2]`."""

    def __init__(self, problem: str, path: str = "$") -> None:
        super().__init__(f"{path}: {problem}")
        self.path = path


class PayloadTooLarge(InvalidPayload):
    """The encoded arguments are larger than the limit."""


class CalledInEventLoop(HoldfastError):
    """A blocking call was made on a thread that runs an event loop."""


class NotInJob(HoldfastError):
    """`current()` was called where no job runs."""


class ForeignConnection(HoldfastError):
    """The connection handed in does not belong to this store, so it cannot share a transaction with it."""


class QueueFull(HoldfastError):
    """The queue holds as many waiting jobs as it may."""


class QueueClosed(HoldfastError):
    """The store was shut down and takes no new jobs."""


class KeyConflict(HoldfastError):
    """The idempotency key belongs to a job with another payload. `job_id` is that job."""

    def __init__(self, message: str, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class PartlyRefused(HoldfastError):
    """Not every job of a batch was stored.

    `stored` jobs are in the queue: those of `accepted`, which is empty if the caller asked for `progress` instead of
    handles. `refused` maps a position to its error. `stopped_at` is the position from which on
    nothing was stored, because the store or the iterable failed (`stopped_by`); None: everything was tried. If
    `stopped_by` is an `OutcomeUnknown`, the jobs in its `ids` may have been stored all the same.

    `accepted` are handles, which belong to their application. Pickled, they become the ids of their jobs, and a
    `stopped_by` that is none of our errors becomes a `HoldfastError` with its text: it may not be picklable.
    """

    def __init__(
        self,
        accepted: Sequence[Any],
        refused: Mapping[int, HoldfastError],
        *,
        stored: int,
        stopped_at: int | None = None,
        stopped_by: Exception | None = None,
    ) -> None:
        told = [f"{stored} jobs are stored"]
        if refused:
            first = next(iter(refused))
            told.append(f"{len(refused)} were refused, first at position {first}: {refused[first]}")
        if stopped_at is not None:
            fate = "is stored"
            if isinstance(stopped_by, OutcomeUnknown):
                fate += f", unless the {len(stopped_by.ids)} jobs whose outcome is unknown are"
            told.append(f"from position {stopped_at} on nothing {fate}: {stopped_by!r:.500}")
        super().__init__("; ".join(told))
        self.accepted = accepted
        self.stored = stored
        self.refused = refused
        self.stopped_at = stopped_at
        self.stopped_by = stopped_by

    def _attributes(self) -> dict[str, Any]:
        foreign = self.stopped_by is not None and not isinstance(self.stopped_by, HoldfastError)
        return {
            **self.__dict__,
            "accepted": [getattr(job, "id", job) for job in self.accepted],
            "stopped_by": HoldfastError(f"{self.stopped_by!r:.500}") if foreign else self.stopped_by,
        }


class CheckpointConflict(HoldfastError):
    """Another process moved the source's cursor first; nothing of the batch was inserted."""


class StaleLease(HoldfastError):
    """The claim was lost: another worker or a keeper decided about the job."""


class SessionClosed(StaleLease):
    """The worker session was closed; it may claim and settle nothing any more."""


class JobNotFound(HoldfastError):
    """No such job: it never existed, or its retention ended."""


class JobStillLive(HoldfastError):
    """The job has not ended, so it cannot be replayed."""


class JobFailed(HoldfastError):
    """The job ended as a dead letter. `failures` is its error history, oldest first."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = failures


class JobCancelled(HoldfastError):
    """The job was cancelled before it succeeded."""


class ResultNotKept(HoldfastError):
    """The job succeeded, but its result could not be stored."""


class NotFinished(HoldfastError, TimeoutError):
    """The job has not ended within the time given. It goes on."""


class StoreError(HoldfastError):
    """Something about the store itself."""


class StoreUnavailable(StoreError):
    """The store could not be reached or was busy for too long. Nothing was written; trying again is safe."""


class OutcomeUnknown(StoreError):
    """The store may or may not have done it. `ids` are the jobs concerned; repeating with the same ids is safe."""

    def __init__(self, message: str, ids: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.ids = ids


class SchemaOutdated(StoreError):
    """Code and schema do not fit together: one of them must be upgraded first."""


class UnsafeStore(StoreError):
    """The store cannot keep its promise where it is, so it refuses to start."""


class StoreReplaced(StoreError):
    """The file under the store is no longer the one that was opened: restart the process. Or a server lost what it had;
    then the message says what that means.
    """
