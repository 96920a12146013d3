"""The caller's own connection as a place for our statements: the jobs share the fate of the caller's transaction.

Accepted are connections of psycopg (blocking and asynchronous), psycopg2 and asyncpg, and SQLAlchemy's Session,
Connection, AsyncSession and AsyncConnection on any of them. A verb is one statement, so it happens as a whole or, with
an error, not at all; as after any error, PostgreSQL then expects the caller to roll back. Whatever the caller has set
up for rows, cursors and types is left alone, and not relied on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from psycopg import AsyncCursor, Cursor
from psycopg.rows import tuple_row

from holdfast.errors import ForeignConnection, HoldfastError, StoreUnavailable
from holdfast.stores.driving import drive, drive_async
from holdfast.stores.guests import behind_sqlalchemy, is_asynchronous, kind_of, on_guest, require_blocking
from holdfast.stores.postgres.connections import said
from holdfast.stores.postgres.query import Query, Verb

T = TypeVar("T")

_MARK = re.compile(r"%s")
_NO_TRANSACTION = (
    "the connection is in autocommit mode and has no transaction: begin one first, so that there is a commit or "
    "rollback for the job to follow"
)
_CLOSED = "the connection cannot be used here: it is closed"
Rows = list[tuple[Any, ...]]


class Guests:
    """Checks that a connection leads to the store's own database, once for each, and runs verbs on it."""

    def __init__(self, namespace: str, where: str) -> None:
        self._whose = Query(f"SELECT id FROM {namespace}_identity", writes=False)  # noqa: S608
        self._where = where
        self._known: WeakKeyDictionary[object, bool] = WeakKeyDictionary()

    def run(self, connection: object, identity: str, verb: Verb[T], *, instead: str) -> T:
        """Carry out the verb on a blocking connection. `instead`: what to call with an asynchronous one."""
        require_blocking(connection, instead)
        execute, driver = _blocking(connection)
        try:
            if not self._knows(driver):
                self._admit(driver, execute(self._whose), identity)
            return drive(verb, execute)
        except HoldfastError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    async def arun(self, connection: object, identity: str, verb: Verb[T]) -> T:
        """Carry out the verb on a connection that was given in a coroutine."""
        asynchronous = _asynchronous(connection)
        if asynchronous is None:
            return await on_guest(connection, lambda guest: self.run(guest, identity, verb, instead=""))
        execute, driver = asynchronous
        try:
            if not self._knows(driver):
                self._admit(driver, await execute(self._whose), identity)
            return await drive_async(verb, execute)
        except HoldfastError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _knows(self, driver: object) -> bool:
        with suppress(TypeError):  # what a pool of asyncpg lends cannot be referred to weakly: it is asked every time
            return driver in self._known
        return False

    def _admit(self, driver: object, rows: Rows, identity: str) -> None:
        if [row[0] for row in rows] != [identity]:
            raise ForeignConnection(
                f"the connection leads to another database than the store's, {self._where}: a job can only be part of "
                f"a transaction on the store's own database"
            )
        with suppress(TypeError):
            self._known[driver] = True

    def _failed(self, error: Exception) -> HoldfastError:
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if state in ("42P01", "42883"):
            return ForeignConnection(
                f"the connection leads to a database (or search_path) without the store's tables, not to "
                f"{self._where}: {said(error)}"
            )
        if state in (None, "25P02"):
            return ForeignConnection(f"the connection cannot be used here: {said(error)}")
        return StoreUnavailable(f"PostgreSQL says {said(error)}: roll back your transaction, and nothing was written")


def _for_asyncpg(text: str) -> str:
    """The statement with $1, $2, ..., and JSON sent as text: callers often give JSON a codec of their own."""
    numbers = iter(range(1, 100))
    return _MARK.sub(lambda _: f"${next(numbers)}", text.replace("%s::json", "%s::text::json"))


def _blocking(connection: object) -> tuple[Callable[[Query], Rows], Any]:
    """How to execute a statement on it, and the driver's connection."""
    driver: Any = connection if _is_of(connection, "psycopg", "psycopg2") else behind_sqlalchemy(connection)
    if driver is None:
        raise ForeignConnection(
            f"{kind_of(connection)} is no kind of connection that a PostgreSQL store can share: pass one of psycopg or "
            f"asyncpg, or SQLAlchemy's Session or Connection, on the store's own database"
        )
    behind = getattr(driver, "driver_connection", driver)
    if not _is_of(behind, "psycopg", "psycopg2", "asyncpg"):
        raise ForeignConnection(
            f"the connection uses the driver {type(behind).__module__.split('.')[0]}, but the store is a PostgreSQL "
            f"database: a job can only be part of a transaction on the store's own database"
        )
    if getattr(driver, "autocommit", False):
        _require_transaction(behind)
    elif connection is driver and getattr(driver, "closed", False):
        raise ForeignConnection(_CLOSED)
    numbered = _is_of(behind, "asyncpg")

    def execute(query: Query) -> Rows:
        cursor = Cursor(driver, row_factory=tuple_row) if _is_of(driver, "psycopg") else driver.cursor()
        try:
            cursor.execute(_for_asyncpg(query.text) if numbered else query.text, query.values)
            return _tuples(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()

    return execute, behind


def _asynchronous(connection: Any) -> tuple[Callable[[Query], Any], Any] | None:
    if hasattr(connection, "run_sync") or not is_asynchronous(connection):
        return None
    if _is_of(connection, "psycopg"):
        if connection.closed:
            raise ForeignConnection(_CLOSED)
        if connection.autocommit:
            _require_transaction(connection)

        async def execute_psycopg(query: Query) -> Rows:
            async with AsyncCursor(connection, row_factory=tuple_row) as cursor:
                await cursor.execute(query.text, query.values)
                return await cursor.fetchall() if cursor.description else []

        return execute_psycopg, connection
    if _is_of(connection, "asyncpg"):
        _require_transaction(connection)

        async def execute_asyncpg(query: Query) -> Rows:
            return _tuples(await connection.fetch(_for_asyncpg(query.text), *query.values))

        return execute_asyncpg, connection
    return None


def _is_of(connection: object, *drivers: str) -> bool:
    """Whether it is a connection of one of these drivers, or of a class that was derived from it."""
    return any(base.__module__.split(".")[0] in drivers for base in type(connection).__mro__)


def _require_transaction(connection: Any) -> None:
    """`ForeignConnection` unless the driver's connection, which begins none by itself, is in a transaction."""
    try:
        if _is_of(connection, "asyncpg"):
            closed, begun = connection.is_closed(), connection.is_in_transaction()
        else:
            closed, begun = connection.closed, int(connection.info.transaction_status) != 0
    except Exception as error:  # a pool has it back
        raise ForeignConnection(f"the connection cannot be used here: {said(error)}") from error
    if closed:
        raise ForeignConnection(_CLOSED)
    if not begun:
        raise ForeignConnection(_NO_TRANSACTION)


def _tuples(rows: Sequence[Any]) -> Rows:
    """Rows as tuples, whatever the driver and its caller make of them."""
    return [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows]
