"""`task.enqueue(...)` one by one on SQLite (FULL), beside a bare INSERT in autocommit mode, without any library.

Twice: beside an INSERT of the same row into the same table, which shows what the library costs; and beside an INSERT
into the smallest table that could hold a job (id, task, payload), which shows what the columns and the lane index cost.
"""

import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uuid_utils

from benchmarks.measure import interleaved
from holdfast import Holdfast
from holdfast.stores.sqlite import SqliteStore

ENQUEUES = 1_000
TEXT = "abcdefghijklmnopqrstuvwxyzabcdef"
PAYLOAD = b'{"n":12345,"s":"' + TEXT.encode() + b'"}'


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _into_the_same_table(path: Path) -> Callable[[], int]:
    store = SqliteStore(path)
    store.insert_blocking([])
    store.close()
    connection = _connect(path)
    columns = (
        "id, task, payload, task_version, queue, share, priority, max_retries, retention, created_at, run_at, state, "
        "reason, version, attempt, failures, crashes, snoozes, suspect, cancel_asked, failure_history"
    )
    statement = f"""
        INSERT INTO holdfast_live ({columns})
        VALUES (?, ?, ?, '1', 'default', '', 5, 3, 604800000000, ?, ?, 'ready', 'enqueued', 0, 0, 0, 0, 0, 0, 0, x'')"""

    def insert() -> int:
        for _ in range(ENQUEUES):
            now = time.time_ns() // 1000
            connection.execute(statement, (str(uuid_utils.uuid7()), "noop", PAYLOAD, now, now))
        return ENQUEUES

    return insert


def _into_the_smallest_table(path: Path) -> Callable[[], int]:
    connection = _connect(path)
    connection.execute("CREATE TABLE jobs (id TEXT PRIMARY KEY, task TEXT, payload BLOB)")

    def insert() -> int:
        for _ in range(ENQUEUES):
            connection.execute("INSERT INTO jobs VALUES (?, ?, ?)", (str(uuid_utils.uuid7()), "noop", PAYLOAD))
        return ENQUEUES

    return insert


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """Two results: rates and their ratios."""
    app = Holdfast(f"sqlite:///{folder / 'holdfast.db'}")

    @app.task
    def noop(n: int, s: str) -> None:
        """Nothing."""

    def enqueue() -> int:
        for _ in range(ENQUEUES):
            noop.enqueue(12345, TEXT)
        return ENQUEUES

    rates = interleaved(
        {
            "the same row": _into_the_same_table(folder / "same.db"),
            "three columns": _into_the_smallest_table(folder / "smallest.db"),
            "enqueue": enqueue,
        }
    )
    app.close()
    for reference, target in (("the same row", 0.75), ("three columns", None)):
        yield {
            "benchmark": f"SQLite FULL: enqueue one by one / bare INSERT of {reference}",
            "ours": rates["enqueue"],
            "reference": rates[reference],
            "ratio": rates["enqueue"] / rates[reference],
            "target": target,
            "unit": "jobs/s",
        }
