"""The store's own connections: a few per event loop, a few for blocking calls. They are found dead by using them."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import asyncmy
import pymysql

from holdfast.errors import StoreUnavailable
from holdfast.stores.loop_end import LoopEnd
from holdfast.stores.mysql.faults import Fault, store_error
from holdfast.stores.mysql.server import AsyncLine, Line, Server, adiscard, discard
from holdfast.stores.mysql.sql import Answer

MOST_CONNECTIONS = 4
"""For one event loop: claims, settlements and reads overlap."""
MOST_BLOCKING = 8
_GOODBYE = 1.0


class Pool:
    """Connections that nobody uses at the moment, and how many there may be."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._idle: list[pymysql.Connection[Any]] = []
        self._closings = 0
        self._free = threading.BoundedSemaphore(MOST_BLOCKING)
        self._loops: dict[asyncio.AbstractEventLoop, _LoopPool] = {}

    @contextlib.contextmanager
    def line(self, deadline: float) -> Iterator[PooledLine]:
        """A connection for one call on this thread. It goes back only if the call ended in order."""
        if not self._free.acquire(timeout=max(0.0, deadline - self.server.ports.clock.monotonic())):
            raise StoreUnavailable(
                f"all {MOST_BLOCKING} connections for blocking calls to {self.server.where} are in use for "
                f"{self.server.timeout:g} s; nothing was written"
            )
        line = PooledLine(self, deadline)
        try:
            line.connect()
            yield line
            line.give_back()
        finally:
            line.drop()
            self._free.release()

    def take(self) -> tuple[pymysql.Connection[Any] | None, int]:
        """An idle connection, and how often the pool had been closed by then."""
        with self._lock:
            return self._idle.pop() if self._idle else None, self._closings

    def put(self, connection: pymysql.Connection[Any], closings: int) -> None:
        """Back to the idle ones, unless the pool was closed meanwhile."""
        with self._lock:
            if closings == self._closings:
                self._idle.append(connection)
                return
        connection.close()

    def aline(self, deadline: float) -> contextlib.AbstractAsyncContextManager[AsyncPooledLine]:
        """A connection of the running event loop for one call."""
        loop = asyncio.get_running_loop()
        with self._lock:
            if (own := self._loops.get(loop)) is None:
                for dead in [other for other in self._loops if other.is_closed()]:
                    self._loops.pop(dead).close()
                own = self._loops[loop] = _LoopPool(self.server)
        return own.line(deadline)

    async def aclose(self) -> None:
        """As `close`, with a word of goodbye to the server on the connections of this event loop."""
        if (own := self._loops.get(asyncio.get_running_loop())) is not None:
            await own.say_goodbye()
        self.close()

    def close(self) -> None:
        """Close what is idle, from any thread. What is in use is closed when its call ends."""
        with self._lock:
            idle, self._idle = self._idle, []
            loops, self._loops = self._loops, {}
            self._closings += 1
        for connection in idle:
            with contextlib.suppress(Exception):
                connection.close()
        here = asyncio._get_running_loop()
        for loop, own in loops.items():
            own.closed = True
            if loop is here or loop.is_closed():
                own.close()
            else:
                with contextlib.suppress(RuntimeError):  # it was closed this very moment
                    loop.call_soon_threadsafe(own.close)

    def forget(self) -> None:
        """After a fork, in the child: the connections are the parent's. Neither use nor end them."""
        for connection in self._idle:
            discard(connection)
        for own in self._loops.values():
            own.abandon()


class PooledLine:
    """A blocking connection out of the pool, exchanged when it turns out to be dead."""

    def __init__(self, pool: Pool, deadline: float) -> None:
        self._pool = pool
        self._server = pool.server
        self._deadline = deadline
        self._closings = 0
        self._line: Line | None = None

    def connect(self) -> None:
        """Take an idle connection, or make one."""
        connection, self._closings = self._pool.take()
        if connection is None:
            try:
                connection = self._server.connect(self._deadline)
            except Fault as fault:
                raise store_error(fault, self._server.where) from fault
        self._line = Line(connection, self._server, self._deadline)

    def send(self, statements: Sequence[str]) -> Sequence[Answer]:
        """See `drive.Line`."""
        if self._line is None:
            raise Fault(0, "the connection was given up", lost=True)
        try:
            return self._line.send(statements)
        except Fault as fault:
            if fault.spoils:
                self.drop()
            raise

    def reconnect(self) -> None:
        """See `drive.Line`."""
        self.drop()
        self.connect()

    def pause(self, seconds: float) -> None:
        """See `drive.Line`."""
        self._server.ports.clock.pause(seconds)

    def give_back(self) -> None:
        """The call ended in order: somebody else may use the connection."""
        if self._line is not None:
            line, self._line = self._line, None
            self._pool.put(line.connection, self._closings)

    def drop(self) -> None:
        """Close the connection, if it was not given back."""
        if self._line is not None:
            line, self._line = self._line, None
            discard(line.connection)


class _LoopPool:
    """The connections of one event loop. Used only there, but for `close`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.closed = False
        self._idle: list[asyncmy.Connection] = []
        self._free = asyncio.Semaphore(MOST_CONNECTIONS)
        self._end = LoopEnd(self.close)

    @contextlib.asynccontextmanager
    async def line(self, deadline: float) -> AsyncIterator[AsyncPooledLine]:
        try:
            async with asyncio.timeout(max(0.0, deadline - self.server.ports.clock.monotonic())):
                await self._free.acquire()
        except TimeoutError as error:
            raise StoreUnavailable(
                f"all {MOST_CONNECTIONS} connections to {self.server.where} are in use for "
                f"{self.server.timeout:g} s; nothing was written"
            ) from error
        line = AsyncPooledLine(self, deadline)
        try:
            await self._end.watch()
            await line.connect()
            yield line
            line.give_back()
        finally:
            line.drop()
            self._free.release()

    def take(self) -> asyncmy.Connection | None:
        return self._idle.pop() if self._idle else None

    def put(self, connection: asyncmy.Connection) -> None:
        if self.closed:
            adiscard(connection)
        else:
            self._idle.append(connection)

    async def say_goodbye(self) -> None:
        self.closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            try:
                async with asyncio.timeout(_GOODBYE):
                    await connection.ensure_closed()
            except Exception:
                adiscard(connection)

    def close(self) -> None:
        self.closed = True
        idle, self._idle = self._idle, []
        for connection in idle:
            adiscard(connection)

    def abandon(self) -> None:
        self._idle = []


class AsyncPooledLine:
    """The same as `PooledLine` on an event loop. A call that is cancelled leaves no connection behind."""

    def __init__(self, pool: _LoopPool, deadline: float) -> None:
        self._pool = pool
        self._server = pool.server
        self._deadline = deadline
        self._line: AsyncLine | None = None

    async def connect(self) -> None:
        """Take an idle connection, or make one."""
        if (connection := self._pool.take()) is None:
            try:
                connection = await self._server.aconnect(self._deadline)
            except Fault as fault:
                raise store_error(fault, self._server.where) from fault
        self._line = AsyncLine(connection, self._server, self._deadline)

    async def send(self, statements: Sequence[str]) -> Sequence[Answer]:
        """See `drive.AsyncLine`."""
        if self._line is None:
            raise Fault(0, "the connection was given up", lost=True)
        try:
            return await self._line.send(statements)
        except Fault as fault:
            if fault.spoils:
                self.drop()
            raise

    async def reconnect(self) -> None:
        """See `drive.AsyncLine`."""
        self.drop()
        await self.connect()

    async def pause(self, seconds: float) -> None:
        """See `drive.AsyncLine`."""
        await self._server.ports.clock.sleep(seconds)

    def give_back(self) -> None:
        """The call ended in order: somebody else may use the connection."""
        if self._line is not None:
            line, self._line = self._line, None
            self._pool.put(line.connection)

    def drop(self) -> None:
        """Close the connection, if it was not given back."""
        if self._line is not None:
            line, self._line = self._line, None
            adiscard(line.connection)
