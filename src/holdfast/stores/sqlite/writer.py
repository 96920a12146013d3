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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.ports import Ports
from holdfast.stores.sqlite.calls import Call, CallThread, reply
from holdfast.stores.sqlite.file import FileIdentity, connect, is_busy
from holdfast.stores.sqlite.log import lengthen

T = TypeVar("T")

_COMMITS_OF_A_SHORT_LOG = 32
"""Making the log long costs as much as some thirty commits that lengthen it. Who makes fewer is not kept waiting."""
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
    if code == "SQLITE_BUSY_SNAPSHOT":
        return Busy(
            f"{what}: the transaction began by reading, and another connection has written since. Nothing was written; "
            f"roll back and begin again, with BEGIN IMMEDIATE if it is going to write"
        )
    if is_busy(error):
        return Busy(f"{what}: another connection is writing. Nothing was written; try again")
    if code.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StoreUnavailable(f"{what}: check the permissions of the file and its folder")
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return StoreUnavailable(f"{what}: the file is damaged or is no database; restore a backup")
    if committing:
        return OutcomeUnknown(f"{what} while committing: the write may or may not have happened")
    return StoreUnavailable(what)


def _nothing(connection: sqlite3.Connection) -> None:
    """What a transaction begins with unless somebody wishes more: the tables may not be there yet."""


class Writer:
    """Owns the writing connection. `run` blocks the caller; `calls.submit` is for event loops."""

    def __init__(self, path: Path, *, durable: bool, timeout: float, ports: Ports) -> None:
        self._path = path
        self._timeout = timeout
        self._clock = ports.clock
        self._lock = threading.RLock()  # only its owner can release it: see `_alone`
        self._durable = durable
        self._connection = connect(path, durable=durable, timeout=timeout, clock=self._clock)
        self._connected = True
        self._connections = 1
        self._commits_of_short_log = _COMMITS_OF_A_SHORT_LOG if durable else 0
        self._identity = FileIdentity(path, self._clock)
        self._closed = False
        self._first: Callable[[sqlite3.Connection], None] = _nothing
        self.calls = CallThread(self._serve_batch, name="holdfast-sqlite-writer", timeout=timeout, ports=ports)

    def begin_with(self, first: Callable[[sqlite3.Connection], None]) -> None:
        """From now on, do this at the beginning of every transaction, as a part of it. `run_statement` has none."""
        self._first = first

    def peek(self, verb: Callable[[sqlite3.Connection], T]) -> T:
        """Run a verb that only reads, on this thread, without waiting for whoever writes."""

        def attempt() -> tuple[T] | sqlite3.Error:
            try:
                return (verb(self._connection),)
            except sqlite3.Error as error:
                if is_busy(error):
                    return error
                raise

        return self._patiently(attempt, self._clock.monotonic() + self._timeout)

    def run(self, verb: Callable[[sqlite3.Connection], T], deadline: float | None = None) -> T:
        """Run the verb in a transaction of its own, on this thread. It is on disk when this returns."""
        if deadline is None:
            deadline = self._clock.monotonic() + self._timeout
        try:
            return self._in_transaction(lambda: verb(self._connection), deadline)
        except sqlite3.Error as error:
            raise store_error(error, self._path) from error

    def run_statement(self, sql: str, parameters: Sequence[Any]) -> int:
        """Run one statement, a transaction of its own, on this thread: the shortest way. How many rows it wrote."""
        self._refuse_inside_a_write()
        if self._commits_of_short_log > 0:
            self._see_to_the_log()
        deadline: float | None = None
        try:
            # Nearly always nobody else writes, and then nobody needs to know the time.
            if not (locked := self._lock.acquire(blocking=False)):
                deadline = self._clock.monotonic() + self._timeout
                locked = self._lock.acquire(timeout=self._timeout)
            if locked and self._connected and not self._closed:
                self._identity.check()
                return self._connection.execute(sql, parameters).rowcount
        except sqlite3.Error as error:
            if not is_busy(error):
                raise store_error(error, self._path, committing=True) from error
        finally:
            try:  # noqa: SIM105  see `_alone`
                self._lock.release()
            except RuntimeError:
                pass
        return self.run(lambda connection: connection.execute(sql, parameters).rowcount, deadline)

    def check_file(self) -> None:
        """`StoreReplaced` if the file is no longer the one that was opened: for writes on a caller's connection."""
        self._alone(self._identity.check, self._clock.monotonic() + self._timeout)

    def _refuse_inside_a_write(self) -> None:
        """A signal handler or finalizer may call the store in the middle of a write of its own thread.

        It must not be let in: what it wrote would end with the transaction that it interrupted.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise StoreUnavailable(
                "the store was called by a signal handler or finalizer that interrupted a write of the same thread; "
                "nothing was written: let the handler set a flag, or hand the work to another thread"
            )

    def _in_transaction(self, work: Callable[[], T], deadline: float) -> T:
        """What `work` answers, after its commit."""

        def attempt() -> tuple[T] | sqlite3.Error:
            busy = self._begin()
            if busy is not None:
                return busy
            self._first(self._connection)
            answer = work()
            self._commit()
            return (answer,)

        return self._patiently(attempt, deadline)

    def _patiently(self, attempt: Callable[[], tuple[T] | sqlite3.Error], deadline: float) -> T:
        """What the attempt answers that is not kept out by another process. Between two, nobody else is kept out."""
        tries = 0
        while isinstance(done := self._alone(attempt, deadline), sqlite3.Error):
            if self._clock.monotonic() >= deadline:
                raise Busy(
                    f"another connection has held the write lock of {self._path} for {self._timeout:g} s (a long "
                    f"transaction?); nothing was written, try again"
                ) from done
            self._clock.pause(_LOCK_WAITS[min(tries, len(_LOCK_WAITS) - 1)])
            tries += 1
        return done[0]

    def _alone(self, work: Callable[[], T], deadline: float) -> T:
        """What `work` answers. Meanwhile the connection is this thread's alone; no transaction is left on it after.

        A signal handler (Ctrl-C, a time limit) may raise between any two calls here, also right after the lock was
        taken or a transaction begun. Neither may be left behind: the one would block this process for ever, the
        other every process.
        """
        self._refuse_inside_a_write()
        try:
            if not self._lock.acquire(timeout=max(0.0, deadline - self._clock.monotonic())):
                raise Busy(
                    f"another thread has been writing to {self._path} for {self._timeout:g} s; nothing was written"
                )
            try:
                if self._closed:
                    raise StoreUnavailable(f"the store on {self._path} was closed")
                self._reconnect()
                return work()
            finally:
                try:
                    self._rollback()
                finally:
                    self._rollback()  # the first may have been interrupted
        finally:
            try:  # noqa: SIM105  a call before this one could be interrupted
                self._lock.release()
            except RuntimeError:
                pass  # it never was ours

    def _reconnect(self) -> None:
        """Open the file again after a fork; see `before_fork`."""
        if not self._connected:
            self._identity.check_file()  # SQLite would make a new file where the old one was deleted
            try:
                self._connection = connect(self._path, durable=self._durable, timeout=self._timeout, clock=self._clock)
            except sqlite3.Error as error:
                raise store_error(error, self._path) from error
            self._identity.forget_side_files()
            self._connections += 1
            self._commits_of_short_log = _COMMITS_OF_A_SHORT_LOG if self._durable else 0
            self._connected = True

    def _begin(self) -> sqlite3.Error | None:
        """Open a write transaction, or say why another process keeps us from it."""
        try:
            self._connection.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            if is_busy(error):
                return error
            raise store_error(error, self._path) from error
        self._identity.check()
        return None

    def _commit(self) -> None:
        try:
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._rollback()
            raise store_error(error, self._path, committing=True) from error

    def _rollback(self) -> None:
        # SQLite has already rolled back after some errors; then there is no transaction to end.
        if self._connected and not self._closed and self._connection.in_transaction:
            with contextlib.suppress(sqlite3.Error):
                self._connection.execute("ROLLBACK")

    def _see_to_the_log(self) -> None:
        """Before a write: make the log long once there have been some, when nobody else happens to write."""
        self._commits_of_short_log -= 1
        if self._commits_of_short_log <= 0:  # threads may count at the same time
            try:
                self.run(lambda _: lengthen(f"{self._path}-wal"), self._clock.monotonic())
            except Exception:  # it can wait, and what is really wrong will be told to a caller
                self._commits_of_short_log = _COMMITS_OF_A_SHORT_LOG

    def _serve_batch(self, calls: list[Call]) -> None:
        """Run the calls in one transaction and fill in their answers. Never raises: every call gets its error."""
        if self._commits_of_short_log > 0:
            self._see_to_the_log()
        waiting = calls
        while waiting:
            try:
                self._serve_in_transaction(waiting)
                return
            except Busy as error:
                # Those that have waited long enough hear of it; the others came later and go on waiting.
                now = self._clock.monotonic()
                refused = [call for call in waiting if call.deadline <= now]
                self._fail_all(refused, error)
                reply(refused)
                waiting = [call for call in waiting if call.deadline > now]
            except BaseException as error:
                self._fail_all(waiting, store_error(error, self._path) if isinstance(error, sqlite3.Error) else error)
                return

    def _serve_in_transaction(self, calls: list[Call]) -> None:
        def serve() -> None:
            for call in calls:
                self._serve_one(call)

        self._in_transaction(serve, min(call.deadline for call in calls))

    def _serve_one(self, call: Call) -> None:
        call.error = None
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

    def foreign_commits(self) -> tuple[int, int] | None:
        """What changes when anybody but this writer commits. None while this writer is busy or closed.

        A new connection counts anew, so it is a change in itself: somebody may have committed before it was opened.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            if self._closed:
                return None
            self._reconnect()
            # The pragma counts the commits of all other connections; when idle it only reads shared memory.
            return self._connections, int(self._connection.execute("PRAGMA data_version").fetchone()[0])
        except (sqlite3.Error, StoreError):
            return None
        finally:
            self._lock.release()

    def before_fork(self) -> bool:
        """Close the connection, and let nobody open it again until `after_fork`. False: a write did not end in time.

        SQLite keeps the locks of a file per process, in memory: a child would believe that it holds those of its
        parent, and another process, not seeing any, would delete the log under its hands.
        """
        if not self._lock.acquire(timeout=self._timeout):
            return False
        self._connection.close()
        self._connected = False
        return True

    def after_fork(self) -> None:
        """Go on. The next call opens the file again."""
        self._lock.release()

    def close(self) -> None:
        """Finish what is waiting, then close the connection. Later calls are refused."""
        self.calls.close()
        self._closed = True
        if self._lock.acquire(timeout=self._timeout):  # a disk that never answers must not keep the process here
            self._connection.close()
            self._identity.close()
            self._lock.release()
