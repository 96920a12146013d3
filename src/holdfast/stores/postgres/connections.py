"""Connections to the server: a few for each event loop, a few for blocking calls, none shared over a fork.

Every connection is in autocommit mode and keeps no settings between two statements, nor anything prepared where a
pooler may stand in between (`links.py`, `direct.py`). Every call has a deadline. A connection on which a call failed
to end is thrown away; one that the server has closed meanwhile is noticed before it is used.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from psycopg import errors as sqlstates

from holdfast.errors import InvalidOption, OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.ports import Ports
from holdfast.stores.driving import Overlaps, drive_async
from holdfast.stores.postgres.direct import Direct
from holdfast.stores.postgres.links import AsyncLink, BlockingLink, Rows, is_alive
from holdfast.stores.postgres.query import Query, Verb

T = TypeVar("T")

_MOST_PER_LOOP = 4
_MOST_BLOCKING = 16
_FIRST_PAUSE = 0.005
_LONGEST_PAUSE = 0.25
IN_THE_WAY = (sqlstates.SerializationFailure, sqlstates.DeadlockDetected, sqlstates.LockNotAvailable)
"""Another transaction got in the way, and nothing was written: try the statement again."""


class Server:
    """Where the server is and how to talk to it."""

    def __init__(self, conninfo: dict[str, Any], *, shown: str, timeout: float, ports: Ports) -> None:
        self.shown = shown
        self.timeout = timeout
        self.ports = ports
        seconds = max(2, round(timeout))
        self._options = {
            "connect_timeout": seconds,
            "keepalives_idle": seconds,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": 1000 * seconds,
            "application_name": "holdfast",
            **conninfo,
            "client_encoding": "UTF8",
        }

    async def connect(self) -> AsyncLink:
        """A new connection for the running event loop."""
        try:
            return await AsyncLink.connect(autocommit=True, prepare_threshold=None, **self._options)
        except psycopg.Error as error:
            raise self._unreachable(error) from error

    def connect_blocking(self) -> BlockingLink:
        """A new blocking connection."""
        try:
            connection = BlockingLink.connect(autocommit=True, prepare_threshold=None, **self._options)
        except psycopg.Error as error:
            raise self._unreachable(error) from error
        connection.patience = self.timeout
        return connection

    def _unreachable(self, error: Exception) -> StoreUnavailable:
        return StoreUnavailable(f"cannot connect to {self.shown}: {str(error).strip()}")

    def failure(self, error: Exception, query: Query | Direct) -> StoreError:
        """The error of our tree for a statement that did not end well."""
        what = f"PostgreSQL says {said(error)} for {self.shown}"
        state = getattr(error, "sqlstate", None) or ""
        if isinstance(error, sqlstates.InsufficientPrivilege):
            return StoreUnavailable(
                f"{what}: grant the role what docs/reference/postgresql.md lists; nothing was written"
            )
        if isinstance(error, (sqlstates.UndefinedTable, sqlstates.UndefinedFunction)):
            return StoreUnavailable(
                f"{what}: are the tables there, and on the search_path? `holdfast migrate` makes them"
            )
        if not state and isinstance(error, (psycopg.DataError, psycopg.ProgrammingError)):
            return StoreUnavailable(f"{what}: nothing was sent")  # the driver itself refused a value
        lost = not state or state.startswith(("08", "57P")) or isinstance(error, TimeoutError)
        if lost and query.writes:
            return OutcomeUnknown(f"{what}: the connection was lost, so the write may or may not have happened")
        return StoreUnavailable(f"{what}. Nothing was written")


def said(error: Exception) -> str:
    """What the server complains about, in one line. Its details and contexts may quote a payload."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class _Pauses:
    """The waits between the tries of a statement that others got in the way of."""

    def __init__(self, ports: Ports, began: float, timeout: float) -> None:
        self._ports = ports
        self._deadline = began + timeout
        self._next = _FIRST_PAUSE

    def next(self) -> float | None:
        """Seconds to wait before the next try, or None if there is no time for another."""
        pause = self._next * (0.5 + self._ports.random.fraction())
        self._next = min(2 * self._next, _LONGEST_PAUSE)
        return pause if self._ports.clock.monotonic() + pause < self._deadline else None


# Asynchronous calls.


class _OfLoop:
    """The connections of one event loop."""

    def __init__(self) -> None:
        self.idle: list[AsyncLink] = []
        self.slots = asyncio.Semaphore(_MOST_PER_LOOP)

    def take(self) -> AsyncLink | None:
        """An idle connection. Somebody may close them all at this moment, on another thread."""
        try:
            return self.idle.pop()
        except IndexError:
            return None

    def close(self) -> None:
        """Close what is idle."""
        while (connection := self.take()) is not None:
            connection.pgconn.finish()


class Connections:
    """All connections of a store. `run` and `run_blocking` carry out a verb."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, _OfLoop] = {}
        self._idle_blocking: list[BlockingLink] = []
        self._slots = threading.BoundedSemaphore(_MOST_BLOCKING)
        self._overlaps = Overlaps(_MOST_BLOCKING // 2)

    async def run(self, verb: Verb[T]) -> T:
        """Carry out the verb. Every statement has the store's deadline."""
        return await drive_async(verb, self._execute)

    async def call(self, direct: Direct) -> bytes | None:
        """Make a direct call. It, too, has the store's deadline."""
        answered: bytes | None
        [(answered,)] = await self._execute(direct)
        return answered

    async def _execute(self, query: Query | Direct) -> Rows:
        clock = self.server.ports.clock
        began = clock.monotonic()
        pauses: _Pauses | None = None
        while True:
            try:
                return await self._try(query)
            except IN_THE_WAY as error:
                pauses = pauses or _Pauses(self.server.ports, began, self.server.timeout)
                pause = pauses.next()
                if pause is None:
                    raise self.server.failure(error, query) from error
            except psycopg.Error as error:
                if getattr(error, "sqlstate", "") and str(error.sqlstate).startswith("HF"):
                    raise  # raised by our own functions, for the store to understand
                raise self.server.failure(error, query) from error
            except UnicodeError as error:
                raise InvalidOption(f"a text cannot be stored: {error}") from error
            await clock.sleep(pause)

    async def _try(self, query: Query | Direct) -> Rows:
        mine = self._of_loop()
        if not mine.slots.locked() and (connection := mine.take()) is not None:
            if is_alive(connection):
                return await self._ask(mine, connection, query)
            await connection.close()
        sent = False
        try:
            async with asyncio.timeout(self.server.timeout):
                async with mine.slots:
                    connection = await self._connection(mine)
                    sent = True
                    return await self._asked(mine, connection, query)
        except TimeoutError as error:
            if sent:
                raise self.server.failure(TimeoutError("no answer within the deadline"), query) from error
            raise StoreUnavailable(
                f"no connection to {self.server.shown} within {self.server.timeout:g} s; nothing was sent"
            ) from error

    async def _ask(self, mine: _OfLoop, connection: AsyncLink, query: Query | Direct) -> Rows:
        """The usual case: neither a slot nor a connection has to be waited for. Then the connection's own deadline
        does, which costs less than one around it all.
        """
        await mine.slots.acquire()
        try:
            connection.patience = self.server.timeout
            return await self._asked(mine, connection, query)
        except TimeoutError as error:
            raise self.server.failure(TimeoutError("no answer within the deadline"), query) from error
        finally:
            connection.patience = None
            mine.slots.release()

    async def _connection(self, mine: _OfLoop) -> AsyncLink:
        while (connection := mine.take()) is not None:
            if is_alive(connection):
                return connection
            await connection.close()
        return await self.server.connect()

    async def _asked(self, mine: _OfLoop, connection: AsyncLink, query: Query | Direct) -> Rows:
        usable = False
        try:
            rows = await connection.ask(query)
            usable = True
            return rows
        except psycopg.Error:
            usable = not connection.broken and not connection.closed  # the statement failed, the connection did not
            raise
        finally:
            if usable:
                mine.idle.append(connection)
            else:  # cancelled, late or broken: nobody knows what the server still does with it
                connection.pgconn.finish()

    def _of_loop(self) -> _OfLoop:
        loop = asyncio.get_running_loop()
        mine = self._loops.get(loop)
        if mine is None:
            with self._lock:
                # Not left to the garbage collector: a semaphore that somebody had to wait for keeps its loop alive.
                for ended in [other for other in self._loops if other.is_closed()]:
                    self._loops.pop(ended).close()
                mine = self._loops.setdefault(loop, _OfLoop())
        return mine

    # Blocking calls.

    def run_blocking(self, verb: Verb[T], meanwhile: Callable[[], object] | None = None) -> T:
        """The same on the calling thread. `meanwhile` is called whenever a statement has been sent, if possible."""
        return self._overlaps.drive(verb, self._execute_blocking, meanwhile)

    def call_blocking(self, direct: Direct) -> bytes | None:
        """The same on the calling thread."""
        answered: bytes | None
        [(answered,)] = self._execute_blocking(direct)
        return answered

    def _execute_blocking(self, query: Query | Direct, meanwhile: Callable[[], object] | None = None) -> Rows:
        clock = self.server.ports.clock
        began = clock.monotonic()
        pauses: _Pauses | None = None
        while True:
            try:
                return self._try_blocking(query, meanwhile)
            except IN_THE_WAY as error:
                if pauses is None:  # what was done meanwhile is not to be held against the statement
                    began = began if meanwhile is None else clock.monotonic()
                    pauses = _Pauses(self.server.ports, began, self.server.timeout)
                pause = pauses.next()
                if pause is None:
                    raise self.server.failure(error, query) from error
            except psycopg.Error as error:
                raise self.server.failure(error, query) from error
            except UnicodeError as error:
                raise InvalidOption(f"a text cannot be stored: {error}") from error
            clock.pause(pause)

    def _try_blocking(self, query: Query | Direct, meanwhile: Callable[[], object] | None) -> Rows:
        if not self._slots.acquire(timeout=self.server.timeout):
            raise StoreUnavailable(f"all {_MOST_BLOCKING} blocking connections to {self.server.shown} are in use")
        connection: BlockingLink | None = None
        try:
            while connection is None:
                with self._lock:
                    connection = self._idle_blocking.pop() if self._idle_blocking else None
                if connection is None:
                    connection = self.server.connect_blocking()
                elif not is_alive(connection):
                    connection.close()
                    connection = None
            connection.meanwhile = meanwhile
            try:
                rows = connection.ask(query)
            except psycopg.Error as error:
                if not connection.broken and not isinstance(error, sqlstates._WaitTimeout):
                    self._put_back(connection)
                    connection = None
                raise
            self._put_back(connection)
            connection = None
            return rows
        finally:
            self._slots.release()
            if connection is not None:
                connection.throw_away()

    def _put_back(self, connection: BlockingLink) -> None:
        with self._lock:
            self._idle_blocking.append(connection)

    # The end.

    def close(self) -> None:
        """Close every connection that is idle; those in use close when their call ends badly, or with the process."""
        with self._lock:
            idle = [*self._idle_blocking]
            self._idle_blocking.clear()
            loops = list(self._loops.values())
        for connection in idle:
            connection.pgconn.finish()
        for mine in loops:
            mine.close()
