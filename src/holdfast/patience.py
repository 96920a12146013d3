"""What some stores can do beyond the port: claims that wait until there are jobs. The queue works without."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, runtime_checkable

from holdfast.store import Claimed, ClaimRequest


class WaitingClaims(Protocol):
    """Claims that wait for jobs, one at a time, on one event loop."""

    async def claim(self, request: ClaimRequest, *, due_in: int | None, seconds: float) -> Claimed:
        """`Store.claim`, carried out when there may be jobs, when `due_in` (what the claim before this one said) is
        over, or after about so many seconds, or sooner. The jobs need not be those that an ordinary claim would serve
        first: each of the queues may have a share of the limit.

        Cancelled, it waits no more. Like any call it may have taken effect, also somewhat later, as long as the session
        is open. The same holds for one that waits when its caller's host goes away.
        """

    async def close(self) -> None:
        """No claim waits any more, and none will: jobs that come are for others."""


@runtime_checkable
class Patient(Protocol):
    """A store in whose server a claim can wait for jobs, so that they come without another question."""

    def waiting_claims(self, queues: Collection[str]) -> WaitingClaims | None:
        """For claims from these queues. None: they are kept in such a way that nobody can wait for all at once."""
