"""The one connection that writes.

SQLite lets one writer in at a time, so every write of this process goes through one connection under one lock. A
blocking call takes the lock itself. Asynchronous calls queue up for the writer thread, which runs all that are
waiting in one transaction and one flush of the disk (group commit); each call has a savepoint of its own, so a call
that fails leaves no trace and harms no other.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.ports import Ports
from holdfast.stores.sqlite.calls import Call, CallThread
from holdfast.stores.sqlite.file import FileIdentity, connect

T = TypeVar("T")

_LOCK_WAITS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015)
"""Seconds between tries for the lock of another process. SQLite's own waiting cannot be given up half-way."""


class Busy(StoreUnavailable):
    """Another process held the write lock for longer than the deadline. Nothing was written."""


def store_error(error: sqlite3.Error, path: Path, *, committing: bool = False) -> StoreError:
    """The error of our tree for one of SQLite's."""
    code = getattr(error, "sqlite_errorname", "") or ""
    what = f"SQLite says {error} ({code or 'no code'}) for {path}"
    if code.startswith("SQLITE_FULL"):
        return StoreUnavailable(f"{what}: the disk is full. Nothing was written; free some space and try again")
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return Busy(f"{what}: another process is writing. Nothing was written; try again")
    if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StoreUnavailable(f"{what}: check the permissions of the file and its folder")
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreUnavailable(f"{what}: the file is damaged or is no database; restore a backup")
    if committing:
        return OutcomeUnknown(f"{what} while committing: the write may or may not have happened")
    return StoreUnavailable(what)


class Writer:
    """Owns the writing connection. `run` blocks the caller; `calls.submit` is for event loops."""

    def __init__(self, path: Path, *, durable: bool, timeout: float, ports: Ports) -> None:
        self._path = path
        self._timeout = timeout
        self._clock = ports.clock
        self._lock = threading.Lock()
        self._connection = connect(path, durable=durable)
        self._identity = FileIdentity(path)
        self._closed = False
        self.calls = CallThread(self._serve_batch, name="holdfast-sqlite-writer", timeout=timeout, ports=ports)

    def run(self, verb: Callable[[sqlite3.Connection], T]) -> T:
        """Run the verb in a transaction of its own, on this thread. It is on disk when this returns."""
        deadline = self._clock.monotonic() + self._timeout
        with self._locked():
            self._begin(deadline)
            try:
                answer = verb(self._connection)
            except BaseException as error:
                self._rollback()
                if isinstance(error, sqlite3.Error):
                    raise store_error(error, self._path) from error
                raise
            self._commit()
            return answer

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=self._timeout):
            raise StoreUnavailable(
                f"another thread has been writing to {self._path} for {self._timeout:g} s; nothing was written"
            )
        try:
            if self._closed:
                raise StoreUnavailable(f"the store on {self._path} was closed")
            yield
        finally:
            self._lock.release()

    def _begin(self, deadline: float) -> None:
        """Open a write transaction: wait for other processes until the deadline."""
        tries = 0
        while True:
            try:
                self._connection.execute("BEGIN IMMEDIATE")
                break
            except sqlite3.Error as error:
                failure = store_error(error, self._path)
                if not isinstance(failure, Busy):
                    raise failure from error
                if self._clock.monotonic() >= deadline:
                    raise Busy(
                        f"another process has held the write lock of {self._path} for {self._timeout:g} s (a long "
                        f"transaction?); nothing was written, try again"
                    ) from error
            self._clock.pause(_LOCK_WAITS[min(tries, len(_LOCK_WAITS) - 1)])
            tries += 1
        try:
            self._identity.check()
        except BaseException:
            self._rollback()
            raise

    def _commit(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            raise store_error(error, self._path, committing=True) from error

    def _rollback(self) -> None:
        # SQLite has already rolled back after some errors; then there is no transaction to end.
        if self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _serve_batch(self, calls: list[Call]) -> None:
        """Run the calls in one transaction and fill in their answers. Never raises: every call gets its error."""
        try:
            with self._locked():
                self._begin(min(call.deadline for call in calls))
                try:
                    for call in calls:
                        self._serve_one(call)
                except BaseException:
                    self._rollback()
                    raise
                self._commit()
        except sqlite3.Error as error:
            self._fail_all(calls, store_error(error, self._path))
        except BaseException as error:
            self._fail_all(calls, error)

    def _serve_one(self, call: Call) -> None:
        self._connection.execute("SAVEPOINT call")
        try:
            call.answer = call.verb(self._connection)
        except BaseException as error:
            if not self._connection.in_transaction:
                raise  # SQLite gave up the whole transaction: every call of the batch must hear of it
            self._connection.execute("ROLLBACK TO call")
            call.error = store_error(error, self._path) if isinstance(error, sqlite3.Error) else error
        self._connection.execute("RELEASE call")

    @staticmethod
    def _fail_all(calls: list[Call], error: BaseException) -> None:
        for call in calls:
            call.error = error

    def foreign_commits(self) -> int | None:
        """A number that changes when anybody but this writer commits. None while this writer is busy or closed."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._closed:
                return None
            # The pragma counts the commits of all other connections; when idle it only reads shared memory.
            return int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except sqlite3.Error:
            return None
        finally:
            self._lock.release()

    def close(self) -> None:
        """Finish what is waiting, then close the connection. Later calls are refused."""
        self.calls.close()
        with self._lock:
            self._closed = True
            self._connection.close()
