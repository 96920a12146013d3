"""Waiting for jobs: one blocking call over all queues of a worker, on a connection of its own.

Whoever makes a queue worth a look leaves one token in its `wake` list; who waits takes it. On a cluster a command may
name keys of one slot only, so there is a call for each slot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from holdfast.ports import Ports
from holdfast.stores.redis.dispatch import Batch, Call, Connections
from holdfast.stores.redis.layout import Layout
from holdfast.stores.redis.topology import slot_of
from holdfast.stores.redis.wire import Line, LineFailed, ReplyError
from holdfast.stores.wakeups import WakeupHub

_FIRST_RETRY, _LAST_RETRY = 0.1, 5.0


class Waiting:
    """Turns tokens into wake-ups of the hub, until cancelled."""

    def __init__(self, connections: Connections, layout: Layout, hub: WakeupHub, *, block: float, ports: Ports) -> None:
        self._connections = connections
        self._layout = layout
        self._hub = hub
        self._block = block
        self._ports = ports

    async def run(self, queues: Collection[str]) -> None:
        """Wait for ever, in as many calls as there must be."""
        of_key = {self._layout.key(queue, "wake"): queue for queue in queues}
        groups: dict[int, dict[bytes, str]] = {}
        cluster = self._connections.dispatcher.topology.cluster
        for key, queue in of_key.items():
            groups.setdefault(slot_of(key) if cluster else 0, {})[key] = queue
        async with asyncio.TaskGroup() as waiting:
            for group in groups.values():
                waiting.create_task(self._wait_for(group))

    async def _wait_for(self, of_key: dict[bytes, str]) -> None:
        keys = list(of_key)
        command = ("BLPOP", *keys, self._block)
        retry = _FIRST_RETRY
        while True:
            line: Line | None = None
            try:
                # Any command finds the server, wherever it is now.
                await self._connections.execute(Batch([Call(("EXISTS", keys[0]), keys[0])], writes=False))
                place = self._connections.dispatcher.topology.place_of(keys[0])
                if place is None:
                    continue
                line = await Line.open(place, self._connections.access)
                self._hub.notify(of_key.values())  # what came while nobody waited
                while True:
                    [taken] = await line.ask([command], self._block + self._connections.access.read_timeout)
                    if isinstance(taken, ReplyError):
                        raise taken
                    retry = _FIRST_RETRY
                    if taken is not None:
                        self._hub.notify({of_key[taken[0]]})
            except (LineFailed, ReplyError):
                self._connections.dispatcher.topology.doubt()
            except Exception:  # noqa: S110 - whatever it is: who has stopped waiting wakes nobody
                pass
            finally:
                if line is not None:
                    line.close()
            await self._ports.clock.sleep(retry * (0.5 + self._ports.random.fraction()))
            retry = min(2 * retry, _LAST_RETRY)
