"""The caller's own connection as a place for our statements: the jobs share the fate of the caller's transaction.

Accepted are connections of psycopg (blocking and asynchronous), psycopg2 and asyncpg, and SQLAlchemy's Session, Connection,
AsyncSession and AsyncConnection on any of them. A verb is one statement, so it happens as a whole or, with an error, not at
all; as after any error, PostgreSQL then expects the caller to roll back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from holdfast.errors import ForeignConnection, HoldfastError, StoreUnavailable
from holdfast.stores.guests import behind_sqlalchemy, is_asynchronous, kind_of, on_guest, require_blocking
from holdfast.stores.postgres.connections import drive, drive_async, said
from holdfast.stores.postgres.verbs import Query, Verb

T = TypeVar("T")

_MARK = re.compile(r"%s")
_NO_TRANSACTION = (
    "the connection is in autocommit mode and has no transaction: begin one first, so that there is a commit or rollback "
    "for the job to follow"
)
Rows = list[tuple[Any, ...]]


class Guests:
    """Checks that a connection leads to the store's own database, once for each, and runs verbs on it."""

    def __init__(self, namespace: str, where: str) -> None:
        self._whose = Query(f"SELECT id FROM {namespace}_identity", writes=False)  # noqa: S608
        self._where = where
        self._known: WeakKeyDictionary[object, bool] = WeakKeyDictionary()

    def run(self, connection: object, identity: str, verb: Verb[T]) -> T:
        """Carry out the verb on a blocking connection."""
        require_blocking(connection, "aenqueue")
        execute, driver = _blocking(connection)
        try:
            if driver not in self._known:
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
            return await on_guest(connection, lambda guest: self.run(guest, identity, verb))
        execute, driver = asynchronous
        try:
            if driver not in self._known:
                self._admit(driver, await execute(self._whose), identity)
            return await drive_async(verb, execute)
        except HoldfastError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _admit(self, driver: object, rows: Rows, identity: str) -> None:
        if [row[0] for row in rows] != [identity]:
            raise ForeignConnection(
                f"the connection leads to another database than the store's, {self._where}: a job can only be part of a "
                f"transaction on the store's own database"
            )
        self._known[driver] = True

    def _failed(self, error: Exception) -> HoldfastError:
        state = getattr(error, "sqlstate", None) or getattr(error, "pgcode", None)
        if state in ("42P01", "42883"):
            return ForeignConnection(
                f"the connection leads to a database (or search_path) without the store's tables, not to {self._where}: "
                f"{said(error)}"
            )
        if state in (None, "25P02"):
            return ForeignConnection(f"the connection cannot be used here: {said(error)}")
        return StoreUnavailable(f"PostgreSQL says {said(error)}: roll back your transaction, and nothing was written")


def _dollars(text: str) -> str:
    """The statement with $1, $2, ... as asyncpg wants it."""
    numbers = iter(range(1, 100))
    return _MARK.sub(lambda _: f"${next(numbers)}", text)


def _blocking(connection: object) -> tuple[Callable[[Query], Rows], Any]:
    """How to execute a statement on it, and the driver's connection."""
    driver: Any = connection if _is_psycopg(connection) else behind_sqlalchemy(connection)
    if driver is None:
        raise ForeignConnection(
            f"{kind_of(connection)} is no kind of connection that a PostgreSQL store can share: pass one of psycopg or "
            f"asyncpg, or SQLAlchemy's Session or Connection, on the store's own database"
        )
    behind = getattr(driver, "driver_connection", driver)
    if type(behind).__module__.split(".")[0] not in ("psycopg", "psycopg2", "asyncpg"):
        raise ForeignConnection(
            f"the connection uses the driver {type(behind).__module__}, but the store is a PostgreSQL database: a job can "
            f"only be part of a transaction on the store's own database"
        )
    if connection is driver:
        _require_transaction(driver)
    numbered = type(behind).__module__.startswith("asyncpg")

    def execute(query: Query) -> Rows:
        cursor = driver.cursor()
        try:
            cursor.execute(_dollars(query.text) if numbered else query.text, query.values)
            return _tuples(cursor.fetchall()) if cursor.description else []
        finally:
            cursor.close()

    return execute, behind


def _asynchronous(connection: Any) -> tuple[Callable[[Query], Any], Any] | None:
    if hasattr(connection, "run_sync") or not is_asynchronous(connection):
        return None
    if _is_psycopg(connection):
        _require_transaction(connection)

        async def execute_psycopg(query: Query) -> Rows:
            async with connection.cursor() as cursor:
                await cursor.execute(query.text, query.values)
                return _tuples(await cursor.fetchall()) if cursor.description else []

        return execute_psycopg, connection
    if type(connection).__module__.startswith("asyncpg"):
        if not connection.is_in_transaction():
            raise ForeignConnection(_NO_TRANSACTION)

        async def execute_asyncpg(query: Query) -> Rows:
            return _tuples(await connection.fetch(_dollars(query.text), *query.values))

        return execute_asyncpg, connection
    return None


def _is_psycopg(connection: object) -> bool:
    return any(base.__module__.startswith(("psycopg.", "psycopg2.")) for base in type(connection).__mro__)


def _require_transaction(connection: Any) -> None:
    if connection.closed:
        raise ForeignConnection("the connection cannot be used here: it is closed")
    status = getattr(connection.info, "transaction_status", None)
    if getattr(connection, "autocommit", False) and status is not None and int(status) == 0:
        raise ForeignConnection(_NO_TRANSACTION)


def _tuples(rows: Sequence[Any]) -> Rows:
    """Rows as tuples, whatever row factory the caller's connection has."""
    return [tuple(row.values()) if isinstance(row, dict) else tuple(row) for row in rows]
