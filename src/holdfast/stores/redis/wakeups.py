"""Waiting for jobs: one blocking call over all queues of a worker, on a connection of its own.

Whoever makes a queue worth a look leaves one token in its `wake` list; who has waited longest takes it, and sees to it
that it is of use (`tokens.py`). On a cluster a command may name keys of one slot only, so there is a call for each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from functools import partial
from typing import Any

from holdfast.ports import Ports
from holdfast.stores.redis.connections import Connections
from holdfast.stores.redis.tokens import Tokens
from holdfast.stores.redis.topology import slot_of
from holdfast.stores.redis.verbs import Verbs
from holdfast.stores.redis.wire import Line, LineFailed, ReplyError
from holdfast.stores.wakeups import WakeupHub

_FIRST_RETRY, _LAST_RETRY = 0.1, 5.0
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
        self._tokens = Tokens(connections, verbs, ports)

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
            await self._tokens.hand_over(queues)

    async def _wait_for(self, of_key: dict[bytes, str]) -> None:
        retry = _FIRST_RETRY
        while True:
            try:
                line = await self._connections.line_apart(next(iter(of_key)))
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
                self._tokens.taken(of_key[taken[0]])
