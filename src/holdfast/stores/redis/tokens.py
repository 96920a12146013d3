"""Tokens that this process has taken. It may be one that cannot use them, because all its slots are busy: so a moment
later, it looks whether jobs are left, and passes the token on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

from holdfast.errors import StoreError
from holdfast.ports import MICROSECONDS, Ports
from holdfast.stores.redis.connections import Connections
from holdfast.stores.redis.dispatch import Batch
from holdfast.stores.redis.verbs import Verbs

_HANDED_OVER_WITHIN = 1.0
_FIRST_PASS, _LAST_PASS = 0.02, 0.25
"""Seconds until a token is passed on: longer each time while it comes back, since then everybody is busy."""


class Tokens:
    """Sees to it that each token is of use to somebody."""

    def __init__(self, connections: Connections, verbs: Verbs, ports: Ports) -> None:
        self._connections = connections
        self._verbs = verbs
        self._ports = ports
        self._passing: dict[str, asyncio.Task[None]] = {}
        self._until_due: set[str] = set()
        self._pauses: dict[str, float] = {}

    def taken(self, queue: str) -> None:
        """The queue's token was taken here."""
        if queue in self._until_due:
            self._until_due.discard(queue)
            self._passing.pop(queue).cancel()
        if queue not in self._passing:
            self._passing[queue] = asyncio.ensure_future(self._pass_on(queue))

    async def hand_over(self, queues: Collection[str]) -> None:
        """Nobody waits here any more: a token that was taken a moment ago is for others."""
        for passing in self._passing.values():
            passing.cancel()
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_HANDED_OVER_WITHIN):
                await self.offer(queues)

    async def offer(self, queues: Collection[str]) -> None:
        """A token for whoever waits, in each of the queues that has due jobs."""
        await self._connections.execute(Batch([self._verbs.call("pass_on", queue, []) for queue in queues]))

    async def _pass_on(self, queue: str) -> None:
        """Look whether jobs are left, now, and when the next one is due: the others have not heard of that one."""
        pause = self._pauses.get(queue, _FIRST_PASS)
        task = asyncio.current_task()
        try:
            while True:
                await self._ports.clock.sleep(pause)
                [left] = await self._connections.execute(Batch([self._verbs.call("pass_on", queue, [])]))
                self._pauses[queue] = min(2 * pause, _LAST_PASS) if left < 0 else _FIRST_PASS
                if left <= 0:
                    return
                self._until_due.add(queue)
                pause = left / MICROSECONDS + _FIRST_PASS
        except StoreError:
            return
        finally:
            if self._passing.get(queue) is task:
                del self._passing[queue]
                self._until_due.discard(queue)
