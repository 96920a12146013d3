"""The connection that only reads. In WAL mode it sees a consistent snapshot and never waits for a writer."""

from __future__ import annotations

import sqlite3
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
        self._clock = ports.clock
        self._connection = connect(path, durable=True)
        self._connection.execute("PRAGMA query_only = ON")
        self._deadline = 0.0
        # A query that walks millions of rows is stopped at its deadline; SQLite asks this every so many steps.
        self._connection.set_progress_handler(self._too_late, _STEPS_BETWEEN_CHECKS)
        self.calls = CallThread(self._serve, name="holdfast-sqlite-reader", timeout=timeout, ports=ports)

    def _too_late(self) -> bool:
        return self._clock.monotonic() > self._deadline

    def _serve(self, calls: list[Call]) -> None:
        for call in calls:
            self._deadline = call.deadline
            try:
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

    def close(self) -> None:
        """Finish what is waiting, then close the connection."""
        self.calls.close()
        self._connection.close()
