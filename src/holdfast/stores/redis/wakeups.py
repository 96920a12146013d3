"""Waiting for jobs: one blocking call over all queues of a worker, on a connection of its own.

Whoever makes a queue worth a look leaves one token in its `wake` list; who has waited longest takes it. It may be one
that cannot use it, because all its slots are busy: so a moment later, it looks whether jobs are left, and passes the
token on. On a cluster a command may name keys of one slot only, so there is a call for each slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress
from functools import partial
from typing import Any

from holdfast.errors import StoreError
from holdfast.ports import MICROSECONDS, Ports
from holdfast.stores.redis.connections import Connections
from holdfast.stores.redis.dispatch import Batch, Call
from holdfast.stores.redis.topology import slot_of
from holdfast.stores.redis.verbs import Verbs
from holdfast.stores.redis.wire import Line, LineFailed, ReplyError
from holdfast.stores.wakeups import WakeupHub

_FIRST_RETRY, _LAST_RETRY = 0.1, 5.0
_HANDED_OVER_WITHIN = 1.0
_FIRST_PASS, _LAST_PASS = 0.02, 0.25
"""Seconds until a token is passed on: longer each time while it comes back, since then everybody is busy."""
_TURNS_TO_CLAIM = 2
"""Turns of the event loop until whoever was woken has sent its claim. What happens here comes after that: a job waits
for the claim, and nobody for the next wait.
"""


class Waiting:
    """Turns tokens into wake-ups of the hub, until cancelled."""

    def __init__(self, connections: Connections, verbs: Verbs, hub: WakeupHub, *, block: float, ports: Ports) -> None:
        self._connections = connections
        self._verbs = verbs
        self._hub = hub
        self._block = block
        self._ports = ports
        self._passing: dict[str, asyncio.Task[None]] = {}
        self._until_due: set[str] = set()
        self._pauses: dict[str, float] = {}

    async def run(self, queues: Collection[str]) -> None:
        """Wait for ever, in as many calls as there must be."""
        of_key = {self._verbs.layout.key(queue, "wake"): queue for queue in queues}
        groups: dict[int, dict[bytes, str]] = {}
        cluster = self._connections.dispatcher.topology.cluster
        for key, queue in of_key.items():
            groups.setdefault(slot_of(key) if cluster else 0, {})[key] = queue
        try:
            async with asyncio.TaskGroup() as waiting:
                for group in groups.values():
                    waiting.create_task(self._wait_for(group))
        finally:
            for passing in self._passing.values():
                passing.cancel()
            await self._hand_over(queues)

    async def _hand_over(self, queues: Collection[str]) -> None:
        """Who waits no more may have taken a token a moment ago."""
        with suppress(StoreError, TimeoutError):
            async with asyncio.timeout(_HANDED_OVER_WITHIN):
                await self._connections.execute(Batch([self._verbs.call("pass_on", queue, []) for queue in queues]))

    async def _wait_for(self, of_key: dict[bytes, str]) -> None:
        retry = _FIRST_RETRY
        while True:
            try:
                line = await self._open(next(iter(of_key)))
                retry = _FIRST_RETRY
                try:
                    self._hub.notify(of_key.values())  # what came while nobody waited
                    line.heard = partial(self._wake, of_key)
                    await self._take_tokens(line, of_key)
                finally:
                    line.close()
            except (LineFailed, ReplyError):
                self._connections.dispatcher.topology.doubt()
            except Exception:  # noqa: S110 - whatever it is: who has stopped waiting wakes nobody
                pass
            await self._ports.clock.sleep(retry * (0.5 + self._ports.random.fraction()))
            retry = min(2 * retry, _LAST_RETRY)

    async def _open(self, key: bytes) -> Line:
        # Any command finds the server, wherever it is now.
        await self._connections.execute(Batch([Call(("EXISTS", key), key)], writes=False))
        place = self._connections.dispatcher.topology.place_of(key)
        if place is None:
            raise LineFailed("the server has just gone", sent=False)
        return await Line.open(place, self._connections.access)

    def _wake(self, of_key: dict[bytes, str], replies: list[Any]) -> None:
        """Wake whoever waits for the queue whose token has come."""
        [taken] = replies
        if isinstance(taken, list):
            self._hub.notify({of_key[taken[0]]})

    async def _take_tokens(self, line: Line, of_key: dict[bytes, str]) -> None:
        command = ("BLPOP", *of_key, self._block)
        while True:
            [taken] = await line.ask([command], self._block + self._connections.access.read_timeout)
            if isinstance(taken, ReplyError):
                raise taken
            if taken is not None:
                for _ in range(_TURNS_TO_CLAIM):
                    await self._ports.clock.sleep(0)
                queue = of_key[taken[0]]
                if queue in self._until_due:
                    self._until_due.discard(queue)
                    self._passing.pop(queue).cancel()
                if queue not in self._passing:
                    self._passing[queue] = asyncio.ensure_future(self._pass_on(queue))

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
