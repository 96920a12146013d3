"""Wake-ups from other processes: one connection per waiting worker that listens to the namespace's channel.

Whoever enqueues says so, with the name of the queue: in the same transaction, and at most once in a few milliseconds
per process and queue, never once per row. Whoever brings jobs back to an old place says that, too, with each of his
transactions: claimers may have passed that place, and have to look back (`lookback.py`). Through a pooler that shares
transactions nothing would ever be heard: a sound of our own, made at the start, shows it, and a slow, steady pulse
takes its place. Polling is the truth.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Collection

from holdfast.ports import Ports
from holdfast.stores.postgres.connections import Server
from holdfast.stores.postgres.links import AsyncLink
from holdfast.stores.wakeups import WakeupHub

_QUIET = 0.005
"""Seconds in which a queue is told of once."""
_LOOKED_AGAIN_AFTER = (0.01, 0.06)
"""Seconds after a notification: what was committed shortly after it was not told of again."""
_PULSE = 3.0
"""Seconds between wake-ups where nothing is heard: with the heartbeat and the keepers, one query a second."""
_SOUND_HEARD_WITHIN = 3.0
_TRIED_AGAIN_AFTER = 120.0
"""Seconds: the server may only have been slow, just after a restart."""
_FIRST_RETRY, _LAST_RETRY = 0.25, 10.0
_OWN_SOUND = "\x01"
"""In no queue's name."""
_CAME_BACK = "\x02"
"""In no queue's name: before the name of one to which jobs came back."""


def sounds(queues: Collection[str], back: Collection[str]) -> list[str]:
    """What says that jobs have come to these queues, and `back` to old places in those."""
    return [queue for queue in sorted(queues) if queue not in back] + [_CAME_BACK + queue for queue in sorted(back)]


class Announcer:
    """Says which queues are worth a wake-up: each at most once in a few milliseconds. Used from any thread.

    Who is woken looks more than once (`Listener`), so what follows within that time is found, too.
    """

    def __init__(self, ports: Ports, *, on: bool) -> None:
        self._clock = ports.clock
        self._on = on
        self._told: dict[str, float] = {}
        self._lock = threading.Lock()

    def queues(self, queues: Collection[str], back: Collection[str] = ()) -> list[str]:
        """What is to be told now of the queues, and of those of them to which jobs came `back`: these every time."""
        if not self._on or not queues:
            return []
        now = self._clock.monotonic()
        if len(queues) == 1 and not back:  # the usual case, in one step
            [queue] = queues
            if now - self._told.get(queue, -1.0) < _QUIET:
                return []
        with self._lock:
            tell = [queue for queue in queues if queue in back or now - self._told.get(queue, -1.0) >= _QUIET]
            self._told.update(dict.fromkeys(tell, now))
        return sounds(tell, back)


class Listener:
    """Turns notifications into wake-ups of the hub, until cancelled.

    `came_back` hears of queues to which jobs came back, before the hub does; of None, if it may have been any.
    """

    def __init__(
        self, server: Server, namespace: str, hub: WakeupHub, came_back: Callable[[Collection[str] | None], None]
    ) -> None:
        self._server = server
        self._channel = namespace
        self._hub = hub
        self._came_back = came_back

    async def run(self) -> None:
        """Listen; connect again when the connection is lost. While nothing can be heard, `pulse`."""
        ports = self._server.ports
        retry = _FIRST_RETRY
        while True:
            try:
                async with asyncio.timeout(self._server.timeout):
                    connection = await self._server.connect()
                try:
                    async with asyncio.timeout(self._server.timeout + _SOUND_HEARD_WITHIN):
                        heard = await self._hears(connection)
                    if heard:
                        retry = _FIRST_RETRY
                        self._came_back(None)  # while nobody listened
                        self._hub.notify()
                        async for notice in connection.notifies():
                            self._wake(notice.payload)
                finally:
                    connection.pgconn.finish()
                if not heard:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_TRIED_AGAIN_AFTER):
                            await self.pulse()
            except Exception:  # whatever it is: a listener that has died wakes nobody
                await ports.clock.sleep(retry * (0.5 + ports.random.fraction()))
                retry = min(2 * retry, _LAST_RETRY)

    async def pulse(self) -> None:
        """Wake everybody now and then, for ever."""
        ports = self._server.ports
        while True:
            await ports.clock.sleep(_PULSE * (0.9 + 0.2 * ports.random.fraction()))
            self._hub.notify()

    def _wake(self, sound: str) -> None:
        queue = sound.removeprefix(_CAME_BACK)
        if queue != sound:
            self._came_back({queue})
        self._hub.notify({queue})
        loop = asyncio.get_running_loop()
        for seconds in _LOOKED_AGAIN_AFTER:
            loop.call_later(seconds, self._hub.notify, {queue})

    async def _hears(self, connection: AsyncLink) -> bool:
        """Whether what others say reaches this connection."""
        [(pid,)] = await (await connection.execute("SELECT pg_backend_pid()")).fetchall()
        if pid != connection.info.backend_pid:
            return False  # a pooler: a LISTEN would stay behind on one of its connections, for whoever comes next
        await connection.execute(f'LISTEN "{self._channel}"'.encode())
        sound = _OWN_SOUND + self._server.ports.ids.session_id()
        other = await self._server.connect()  # what a connection says itself, it always hears
        try:
            await other.execute("SELECT pg_notify(%s::text, %s::text)", (self._channel, sound))
        finally:
            other.pgconn.finish()
        try:
            async with asyncio.timeout(_SOUND_HEARD_WITHIN):
                async for notice in connection.notifies():
                    if notice.payload == sound:
                        return True
                    self._hub.notify({notice.payload})
        except TimeoutError:
            pass
        return False
