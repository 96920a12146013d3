"""Who has died: the judgement of rescue, by beat counters and one clock. No I/O.

A session is judged dead only if its counter stands still for one TTL of this keeper's own monotonic clock, over looks
at that session which followed each other closely and were each answered in time. No clocks are compared.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from holdfast.job import SessionId
from holdfast.store import SessionView

SLOWEST_LOOK = 1 / 3
"""Of a TTL, from the question to the answer."""
LATEST_LOOK = 2 / 3
"""Of a TTL, after the look at the same session before. Looks are a third apart, and jitter makes that at most half."""


class _Sighting(msgspec.Struct, frozen=True, gc=False):
    beat: int
    since: float
    latest: float


class SessionWatch:
    """Remembers since when each session's beat stands still, for as long as that can matter."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._sightings: OrderedDict[SessionId, _Sighting] = OrderedDict()
        """Those seen last are last."""

    def still(self, views: Sequence[SessionView], asked_at: float, answered_at: float) -> list[SessionView]:
        """Those that are open and whose counter has stood still for one TTL, as of a read between those two moments.

        A sighting counts from the moment when its read was answered until the moment when the present one was asked:
        the shortest time for which the counter can have stood still. A look that took longer than a third of the TTL
        proves nothing, and neither does anything seen before it, of any session. A look at a session that came so late
        after the one before that this process itself must have been stopped is the first at that session.
        """
        if answered_at - asked_at > self._ttl * SLOWEST_LOOK:
            self.forget()
        self._forget_the_late(asked_at)
        return [view for view in views if self._stands_still(view, asked_at, answered_at)]

    def suspects(self, views: Sequence[SessionView]) -> bool:
        """Whether one of them is open and was not seen to have beaten since the look before."""
        seen = self._sightings
        return any(view.open and (view.id not in seen or seen[view.id].beat == view.beat) for view in views)

    def forget(self, session_id: SessionId | None = None) -> None:
        """Start over, with that session, or with all: a look failed, so nothing is known about the time before."""
        if session_id is None:
            self._sightings.clear()
        else:
            self._sightings.pop(session_id, None)

    def _stands_still(self, view: SessionView, asked_at: float, answered_at: float) -> bool:
        known = self._sightings.pop(view.id, None)
        if not view.open:
            return False
        since = known.since if known and known.beat == view.beat else answered_at
        self._sightings[view.id] = _Sighting(view.beat, since, answered_at)
        return asked_at - since >= self._ttl

    def _forget_the_late(self, asked_at: float) -> None:
        while self._sightings:
            session_id = next(iter(self._sightings))
            if asked_at - self._sightings[session_id].latest <= self._ttl * LATEST_LOOK:
                return
            del self._sightings[session_id]
