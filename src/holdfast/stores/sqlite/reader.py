"""The connection that only reads. In WAL mode it sees a consistent snapshot and never waits for a writer."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

from holdfast.errors import StoreUnavailable
from holdfast.ports import Ports
from holdfast.stores.sqlite.calls import Call, CallThread
from holdfast.stores.sqlite.file import connect
from holdfast.stores.sqlite.writer import store_error

_STEPS_BETWEEN_CHECKS = 50_000


class Reader:
    """Owns the reading connection. `calls.submit` runs a verb in a read transaction of its own."""

    def __init__(self, path: Path, *, timeout: float, ports: Ports) -> None:
        self._path = path
        self._timeout = timeout
        self._clock = ports.clock
        self._lock = threading.Lock()
        self._deadline = 0.0
        self._connection = self._connect()
        self._connected = True
        self.calls = CallThread(
            self._serve, name="holdfast-sqlite-reader", timeout=timeout, ports=ports, unanswered=StoreUnavailable
        )

    def _connect(self) -> sqlite3.Connection:
        connection = connect(self._path, durable=True, timeout=self._timeout, clock=self._clock)
        connection.execute("PRAGMA query_only = ON")
        # No writer is ever in the way, only somebody who repairs the log after a crash or closes the file as the last.
        connection.execute(f"PRAGMA busy_timeout = {round(self._timeout * 1000)}")
        # A query that walks millions of rows is stopped at its deadline; SQLite asks this every so many steps.
        connection.set_progress_handler(self._too_late, _STEPS_BETWEEN_CHECKS)
        return connection

    def _too_late(self) -> bool:
        return self._clock.monotonic() > self._deadline

    def _serve(self, calls: list[Call]) -> None:
        for call in calls:
            with self._lock:
                self._serve_one(call)

    def _serve_one(self, call: Call) -> None:
        self._deadline = call.deadline
        try:
            if not self._connected:
                self._connection = self._connect()
                self._connected = True
            self._connection.execute("BEGIN")
            try:
                call.answer = call.verb(self._connection)
            finally:
                self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            call.error = (
                StoreUnavailable(f"reading {self._path} took longer than its deadline; ask for less")
                if self._too_late()
                else store_error(error, self._path)
            )
        except BaseException as error:
            call.error = error

    def before_fork(self) -> bool:
        """As `Writer.before_fork`."""
        if not self._lock.acquire(timeout=self._timeout):
            return False
        self._connection.close()
        self._connected = False
        return True

    def after_fork(self) -> None:
        """As `Writer.after_fork`."""
        self._lock.release()

    def close(self) -> None:
        """Finish what is waiting, then close the connection."""
        self.calls.close()
        if self._lock.acquire(timeout=self._timeout):  # a disk that never answers must not keep the process here
            self._connection.close()
            self._lock.release()
