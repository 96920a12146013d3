"""A wire between clients and a server that does what wires do: it is slow, it breaks, it swallows, it says nothing.

It runs in a thread of its own; a test steers it by plain calls, each of which has happened when it returns. Harm is of
two kinds. What lasts until `pass_on` (`hold`, `drop_replies`, `slow_down`, `cut_after`, `refuse`) befalls new
connections too. What happens once (`reset`, `finish`, `lose_servers`, `lose_clients`) befalls those that are there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import msgspec

from tests.servers import free_port

_CHUNK = 65536
_NO_LINGER = struct.pack("ii", 1, 0)
"""With it, a close says RST instead of FIN."""


class _Weather(msgspec.Struct, frozen=True, kw_only=True):
    """What befalls every byte."""

    requests: bool = True
    replies: bool = True
    delay: float = 0.0
    jitter: float = 0.0
    bytes_per_second: float = 0.0
    """0: as many as there are."""
    request_bytes: int | None = None
    """Each connection is reset after so many more."""
    reply_bytes: int | None = None
    replies_dropped: bool = False


class _Wire:
    """One connection: the client's end and the server's."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter, weather: _Weather) -> None:
        self.client = client
        self.server = server
        self.deaf = False
        """The client never hears anything again, neither bytes nor an end."""
        self.marked = False
        """The request that `lose_reply` waits for has come by here; the one that makes it count has not yet."""
        self.dumb = False
        """The same for the server."""
        self.left: dict[str, int | None] = {}
        self.limit(weather)

    def limit(self, weather: _Weather) -> None:
        """How many bytes may pass from now on."""
        self.left = {"request": weather.request_bytes, "reply": weather.reply_bytes}

    def reset(self) -> None:
        """Both ends hear that the other has broken off."""
        _reset(self.client)
        _reset(self.server)


class Proxy:
    """Passes on what comes, in both directions, until it is told otherwise."""

    def __init__(self, server_port: int, *, seed: int = 0) -> None:
        self._server_port = server_port
        self._random = random.Random(seed)
        self._weather = _Weather()
        self._mark: re.Pattern[bytes] | None = None
        self._then: re.Pattern[bytes] | None = None
        self._wires: set[_Wire] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._listener: asyncio.Server | None = None
        self._changed = asyncio.Event()
        self.port = 0
        self.lost = threading.Event()
        """The answer to the request that `lose_reply` waited for has come, and was swallowed."""
        self.cuts = 0
        """How many connections have used up their bytes."""

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._do(self._listen())
        except BaseException:
            self._end_loop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._do(self._close())
        self._end_loop()

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._wires)

    # What lasts.

    def pass_on(self) -> None:
        """Everything passes again, and what was held follows. A connection of which something is missing is reset."""
        self._set(_Weather(), self._reset_incomplete)
        self._do(self._listen())

    def hold(self, *, requests: bool = True, replies: bool = True) -> None:
        """A black hole: connections are made and kept, and nothing comes through, not even their end."""
        self._set(_Weather(requests=not requests, replies=not replies))

    def drop_replies(self) -> None:
        """Requests reach the server; whatever it says is lost."""
        self._set(_Weather(replies_dropped=True))

    def slow_down(self, *, delay: float = 0.0, jitter: float = 0.0, bytes_per_second: float = 0.0) -> None:
        """Everything takes so many seconds more, in each direction, and up to `jitter` more by chance."""
        self._set(_Weather(delay=delay, jitter=jitter, bytes_per_second=bytes_per_second))

    def cut_after(self, *, request_bytes: int | None = None, reply_bytes: int | None = None) -> None:
        """Every connection is reset after so many more bytes, those that are made meanwhile too."""
        weather = _Weather(request_bytes=request_bytes, reply_bytes=reply_bytes)

        def limit_all() -> None:
            for wire in self._wires:
                wire.limit(weather)

        self._set(weather, limit_all)

    def refuse(self) -> None:
        """Nobody can connect. Connections that are there go on."""
        self._do(self._stop_listening())

    def lose_reply(self, mark: re.Pattern[bytes], then: re.Pattern[bytes] | None = None) -> None:
        """The next request with that in it reaches the server, but its client hears nothing any more.

        `then`: not yet the answer to that one is lost, but to the next with this in it on the same connection: its
        commit. `lost` is set when the server has answered. All other connections go on.
        """
        self.lost.clear()
        self._then = then
        self._mark = mark

    # What happens once.

    def reset(self) -> None:
        """Break off every connection (RST), in the middle of whatever it carries."""
        self._harm(_Wire.reset)

    def finish(self) -> None:
        """End every connection (FIN): to each side it looks as if the other had closed it."""

        def finish(wire: _Wire) -> None:
            wire.client.close()
            wire.server.close()

        self._harm(finish)

    def lose_servers(self) -> None:
        """Half open: the server's ends are gone, and the clients do not hear of it."""

        def lose(wire: _Wire) -> None:
            wire.deaf = wire.dumb = True
            _reset(wire.server)

        self._harm(lose)

    def lose_clients(self) -> None:
        """Half open: the clients' ends are gone, and the server does not hear of it."""

        def lose(wire: _Wire) -> None:
            wire.deaf = wire.dumb = True
            _reset(wire.client)

        self._harm(lose)

    # How it works.

    def _set(self, weather: _Weather, also: Callable[[], None] = lambda: None) -> None:
        async def change() -> None:
            self._weather = weather
            also()
            self._changed.set()
            self._changed = asyncio.Event()

        self._do(change())

    def _harm(self, what: Callable[[_Wire], None]) -> None:
        async def harm() -> None:
            for wire in list(self._wires):
                what(wire)

        self._do(harm())

    def _reset_incomplete(self) -> None:
        for wire in self._wires:
            if wire.deaf or wire.dumb:
                wire.reset()

    def _do(self, coroutine: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _listen(self) -> None:
        if self._listener is None:
            # Not a port that the system gives to clients: while we refuse, it must stay ours.
            self.port = self.port or free_port()
            self._listener = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def _close(self) -> None:
        await self._stop_listening()
        for wire in list(self._wires):
            wire.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    async def _serve(self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        while not self._weather.requests:
            await self._changed.wait()
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port)
        except OSError:
            _reset(to_client)
            return
        wire = _Wire(to_client, to_server, self._weather)
        self._wires.add(wire)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(wire, "request", from_client, to_server))
                group.create_task(self._pump(wire, "reply", from_server, to_client))
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            self._wires.discard(wire)
            for end in (to_client, to_server):
                end.close()

    async def _pump(self, wire: _Wire, kind: str, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while True:
                data = await source.read(_CHUNK)
                data = await self._let_through(wire, kind, data)
                if wire.left[kind] == 0:
                    self.cuts += 1
                    target.write(data)
                    await asyncio.sleep(0)  # what may pass has been sent, before the end is
                    wire.reset()
                    return
                if not data:
                    break
                if not self._swallowed(wire, kind, data):
                    target.write(data)
                    await target.drain()
        # Who hears nothing does not hear of the end either. The other pump goes on: who said FIN still listens.
        if not (wire.deaf if kind == "reply" else wire.dumb):
            with contextlib.suppress(OSError, RuntimeError):
                target.write_eof()

    async def _let_through(self, wire: _Wire, kind: str, data: bytes) -> bytes:
        """As much of it as may pass, as soon as it may."""
        while not (self._weather.requests if kind == "request" else self._weather.replies):
            await self._changed.wait()
        weather = self._weather
        seconds = weather.delay + weather.jitter * self._random.random()
        if weather.bytes_per_second:
            seconds += len(data) / weather.bytes_per_second
        if seconds:
            await asyncio.sleep(seconds)
        left = wire.left[kind]
        if left is not None and data:
            data = data[:left]
            wire.left[kind] = left - len(data)
        return data

    def _swallowed(self, wire: _Wire, kind: str, data: bytes) -> bool:
        if kind == "request":
            if self._mark is not None and self._mark.search(data):
                self._mark = None
                wire.marked = True
            if wire.marked and (self._then is None or self._then.search(data)):
                wire.marked = False
                wire.deaf = True
            return wire.dumb
        if self._weather.replies_dropped:
            wire.deaf = True
        if wire.deaf:
            self.lost.set()
        return wire.deaf


def _reset(end: asyncio.StreamWriter) -> None:
    opened = end.get_extra_info("socket")
    with contextlib.suppress(OSError):
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    end.transport.abort()
