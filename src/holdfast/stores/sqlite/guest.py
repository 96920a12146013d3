"""The caller's own connection as a place for our statements: the jobs share the fate of the caller's transaction.

Accepted are a `sqlite3.Connection`, and a SQLAlchemy `Session` or `Connection` on it. An `AsyncSession` or
`AsyncConnection` arrives here through its own `run_sync`.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from holdfast.errors import ForeignConnection, StoreUnavailable
from holdfast.stores.guests import behind_sqlalchemy, kind_of
from holdfast.stores.sqlite.database import Cursor
from holdfast.stores.sqlite.writer import Busy, Writer, store_error

T = TypeVar("T")


def write_on(
    connection: object,
    path: Path,
    opened: Callable[[], Writer],
    first: Callable[[GuestConnection], None],
    verb: Callable[[GuestConnection], T],
) -> T:
    """Run the verb in the caller's transaction, `first` before it, as `Writer.begin_with`.

    `opened` gives the store's own writer: the tables are there then.
    """
    try:
        opened().check_file()
    except Busy as error:
        raise StoreUnavailable(
            f"the tables of {path} do not exist yet, and an open transaction (yours?) keeps them from being made: open "
            f"the store before you begin the transaction, with app.open() or `async with app`"
        ) from error
    try:
        return GuestConnection(connection, path).whole_or_nothing(first, verb)
    except sqlite3.Error as error:
        raise store_error(error, path) from error


class GuestConnection:
    """A connection of the caller's, inside a transaction that the caller will end."""

    def __init__(self, connection: object, path: Path) -> None:
        """`ForeignConnection` unless it is open on the store's own file and in a transaction, or able to begin one."""
        self._connection = _driver_connection(connection)
        self._driver = getattr(self._connection, "driver_connection", self._connection)
        try:
            self._require_same_file(path)
        except sqlite3.ProgrammingError as error:  # it is closed, or belongs to another thread
            raise ForeignConnection(f"the connection cannot be used here: {error}") from error
        self._begun = self._begin_if_needed()

    def whole_or_nothing(self, first: Callable[[GuestConnection], None], verb: Callable[[GuestConnection], T]) -> T:
        """Run both. If one fails, nothing of it stays, whatever the caller then does with the transaction.

        A transaction that we began and in which the verb wrote nothing is ended, and what came first with it: the
        caller may not know that it holds the lock.
        """
        changes = self._driver.total_changes
        try:
            self.execute("SAVEPOINT holdfast")
            try:
                first(self)
                changes = self._driver.total_changes
                answer = verb(self)
            except BaseException:
                with contextlib.suppress(sqlite3.Error):  # SQLite has given up the whole transaction
                    self.execute("ROLLBACK TO holdfast")
                    self.execute("RELEASE holdfast")
                changes = self._driver.total_changes
                raise
            self.execute("RELEASE holdfast")
            return answer
        finally:
            if self._begun and self._driver.total_changes == changes and self._driver.in_transaction:
                self.execute("ROLLBACK")

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Cursor:
        """Run one statement. The caller's row factory does not apply."""
        cursor = self._cursor()
        cursor.execute(sql, parameters)
        return cast(Cursor, cursor)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor:
        """Run one statement for every set of parameters."""
        cursor = self._cursor()
        cursor.executemany(sql, list(parameters))
        return cast(Cursor, cursor)

    def _cursor(self) -> Any:
        cursor = self._connection.cursor()
        if isinstance(cursor, sqlite3.Cursor):
            cursor.row_factory = None
        return cursor

    def _require_same_file(self, path: Path) -> None:
        rows = self.execute("PRAGMA database_list").fetchall()
        theirs = next((row[2] for row in rows if row[1] == "main"), "")
        if not theirs or not path.exists() or not os.path.samefile(theirs, path):
            raise ForeignConnection(
                f"the connection is open on {theirs or 'a database in memory'}, the store on {path}: a job can only "
                f"be part of a transaction on the store's own file"
            )

    def _begin_if_needed(self) -> bool:
        """Whether this call began the transaction."""
        if self._driver.in_transaction:
            return False
        if self._driver.isolation_level is None or getattr(self._driver, "autocommit", None) is True:
            raise ForeignConnection(
                "the connection is in autocommit mode and has no transaction: execute BEGIN first, so that there "
                "is a commit or rollback for the job to follow"
            )
        # sqlite3 begins by itself only before the caller's first write, and ours comes first.
        self.execute("BEGIN IMMEDIATE")
        return True


def _driver_connection(connection: object) -> Any:
    if isinstance(connection, sqlite3.Connection):
        if connection.text_factory is not str:
            raise ForeignConnection("the connection gives text in another form than str: leave its text_factory alone")
        return connection
    driver = behind_sqlalchemy(connection)
    if driver is None:
        raise ForeignConnection(
            f"{kind_of(connection)} is no kind of connection that a SQLite store can share: pass a sqlite3.Connection, "
            f"or a SQLAlchemy Session or Connection on the store's file"
        )
    if not isinstance(getattr(driver, "driver_connection", driver), sqlite3.Connection) and not hasattr(
        getattr(driver, "driver_connection", None), "in_transaction"
    ):
        raise ForeignConnection(
            f"the connection uses the driver {type(driver).__module__}, but the store is a SQLite file: a job can "
            f"only be part of a transaction on the store's own database"
        )
    return driver
