"""The caller's own connection as a place for our statements: the jobs share the fate of the caller's transaction.

Accepted are a connection of PyMySQL, one of asyncmy or aiomysql (awaited), and SQLAlchemy's Session or Connection on
any of them; its AsyncSession and AsyncConnection arrive here through their own `run_sync`.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from holdfast.errors import ForeignConnection
from holdfast.ports import Ports
from holdfast.stores.guests import behind_sqlalchemy, kind_of
from holdfast.stores.mysql.faults import CHANGED_SINCE_READ, DEADLOCK, Fault, fault_of
from holdfast.stores.mysql.sql import Answer, Plan, one

IDENTITY = "@@hostname, @@port, @@datadir, DATABASE()"
"""What two connections to the same database have in common, and two to different ones hardly."""

_IN_TRANSACTION = 1
_AUTOCOMMIT = 2
"""Bits of what the server says of the session with every answer."""


def is_awaited(connection: object) -> bool:
    """Whether it is a connection of asyncmy, aiomysql or their like."""
    return inspect.iscoroutinefunction(getattr(connection, "commit", None)) and hasattr(connection, "server_status")


def identity() -> Plan[tuple[Any, ...]]:
    """Which database this is."""
    answer = yield from one(f"SELECT {IDENTITY}")
    return answer.rows[0]


def same_database(expected: tuple[Any, ...], where: str) -> Plan[None]:
    """`ForeignConnection` unless the connection is open on the same database of the same server."""
    theirs = yield from identity()
    if tuple(map(_plain, theirs)) != tuple(map(_plain, expected)):
        host, port, _, database = map(_plain, theirs)
        raise ForeignConnection(
            f"the connection is open on {host}:{port}/{database}, the store on {where}: a job can only be part of a "
            f"transaction on the store's own database"
        )


def _plain(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


class GuestLine:
    """A blocking connection of the caller's, as a `Line`. Statements go one by one."""

    def __init__(self, connection: object, ports: Ports) -> None:
        """`ForeignConnection` unless it is one of MySQL, in a transaction or able to begin one."""
        behind = behind_sqlalchemy(connection)
        self._connection: Any = connection if behind is None else behind
        if not hasattr(self._connection, "cursor") or inspect.iscoroutinefunction(self._connection.cursor):
            raise _no_connection(connection)
        _require_transaction(getattr(self._connection, "driver_connection", self._connection), connection)
        self._ports = ports

    def send(self, statements: Sequence[str]) -> Sequence[Answer]:
        """See `drive.Line`."""
        return [self._execute(statement) for statement in statements]

    def _execute(self, statement: str) -> Answer:
        try:
            cursor = _plain_cursor(self._connection)
            try:
                cursor.execute(statement)
                return Answer([tuple(row) for row in cursor.fetchall()] if cursor.description else (), cursor.rowcount)
            finally:
                cursor.close()
        except Exception as error:
            raise _guest_fault(error) from error

    def reconnect(self) -> None:
        """See `drive.Line`. Never asked for: a lost transaction is the caller's loss."""
        raise Fault(0, "the caller's connection was lost", lost=True)

    def pause(self, seconds: float) -> None:
        """See `drive.Line`."""
        self._ports.clock.pause(seconds)


class AsyncGuestLine:
    """An awaited connection of the caller's."""

    def __init__(self, connection: object, ports: Ports) -> None:
        """As with `GuestLine`."""
        self._connection: Any = connection
        _require_transaction(connection, connection)
        self._ports = ports

    async def send(self, statements: Sequence[str]) -> Sequence[Answer]:
        """See `drive.AsyncLine`."""
        return [await self._execute(statement) for statement in statements]

    async def _execute(self, statement: str) -> Answer:
        try:
            cursor = _plain_cursor(self._connection)
            if inspect.isawaitable(cursor):
                cursor = await cursor
            try:
                await cursor.execute(statement)
                rows = [tuple(row) for row in await cursor.fetchall()] if cursor.description else ()
                return Answer(rows, cursor.rowcount)
            finally:
                await cursor.close()
        except Exception as error:
            raise _guest_fault(error) from error

    async def reconnect(self) -> None:
        """See `drive.AsyncLine`. Never asked for."""
        raise Fault(0, "the caller's connection was lost", lost=True)

    async def pause(self, seconds: float) -> None:
        """See `drive.AsyncLine`."""
        await self._ports.clock.sleep(seconds)


def _plain_cursor(connection: Any) -> Any:
    """A cursor whose rows are tuples, whatever kind the caller prefers."""
    module = inspect.getmodule(type(connection))
    package = (module.__name__ if module else "").split(".")[0]
    if package in ("pymysql", "asyncmy", "aiomysql"):
        return connection.cursor(import_module(f"{package}.cursors").Cursor)
    return connection.cursor()


def _guest_fault(error: Exception) -> Fault:
    fault = fault_of(getattr(error, "orig", None) or error)
    if fault.code in (DEADLOCK, CHANGED_SINCE_READ):
        # The server has rolled back the caller's whole transaction: nothing of it is left to go on with.
        return Fault(0, f"{fault}: the server has rolled back your whole transaction; begin it again")
    return fault


def _require_transaction(driver: Any, given: object) -> None:
    status = getattr(driver, "server_status", None)
    if not isinstance(status, int):
        raise _no_connection(given)
    if status & _AUTOCOMMIT and not status & _IN_TRANSACTION:
        raise ForeignConnection(
            "the connection is in autocommit mode and has no transaction: begin one first, so that there is a commit "
            "or rollback for the job to follow"
        )


def _no_connection(connection: object) -> ForeignConnection:
    return ForeignConnection(
        f"{kind_of(connection)} is no kind of connection that a MySQL store can share: pass one of PyMySQL, asyncmy or "
        f"aiomysql, or a SQLAlchemy Session or Connection on the store's own database"
    )
