"""Retention: removes what has been kept for long enough, so that a store does not grow for ever.

Ended jobs go when their retention is over, keys when their window is, closed sessions when nobody needs to see them any
more. Which rows those are is the store's matter, by its own clock; dead letters are never among them. Here is only the
pace: small batches with a pause after each, because on an embedded engine every other write waits for them.
"""

from __future__ import annotations

from holdfast.events import JobsPruned, KeeperFailed, Listener, ignore, tell
from holdfast.ports import Ports
from holdfast.store import Store

DEFAULT_EVERY = 60.0
_PRUNED_AT_ONCE = 500
_MOST_BATCHES = 200
_JITTER = 0.25


class Retention:
    """The keeper. Any number may run at once, in any process."""

    def __init__(
        self, store: Store, *, ports: Ports, listener: Listener = ignore, every: float = DEFAULT_EVERY
    ) -> None:
        self._store = store
        self._ports = ports
        self._listener = listener
        self._every = every

    async def run(self) -> None:
        """Pass after pass, `every` seconds apart with jitter, until cancelled. A failing store is tried again.

        A pass that was cut short is followed by the next one at once: else a busy store would grow faster than it is
        tidied.
        """
        while True:
            cut_short = False
            try:
                cut_short = await self.one_pass() >= _PRUNED_AT_ONCE * _MOST_BATCHES
            except Exception as error:  # whatever it is: a keeper that has died tidies nothing
                tell(self._listener, KeeperFailed("retention", repr(error)))
            if not cut_short:
                jitter = 1 + _JITTER * (2 * self._ports.random.fraction() - 1)
                await self._ports.clock.sleep(self._every * jitter)

    async def one_pass(self) -> int:
        """Remove what is over, batch by batch, until one comes back short or the pass is long enough. How many rows.

        What was removed is told even if a later batch fails.
        """
        clock = self._ports.clock
        removed = 0
        try:
            for _ in range(_MOST_BATCHES):
                began = clock.monotonic()
                batch = await self._store.prune(_PRUNED_AT_ONCE)
                removed += batch
                if batch < _PRUNED_AT_ONCE:
                    break
                # As long as the batch took: at least half of the time belongs to others, however slow the store is.
                await clock.sleep(clock.monotonic() - began)
        finally:
            if removed:
                tell(self._listener, JobsPruned(removed))
        return removed
