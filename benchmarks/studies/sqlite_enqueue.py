"""`task.enqueue(...)` one by one on SQLite (FULL), beside a bare INSERT in autocommit mode, without any library.

Three times: beside an INSERT of the same row among the arrivals, which shows what the library costs; beside one into
the table of live jobs, which shows what the arrivals save; and beside one into the smallest table with a key that could
hold a job (id, task, payload).
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


_GIVEN = "id, task, payload, task_version, queue, share, priority, max_retries, retention, created_at, run_at"
_VALUES = "?, ?, ?, '1', 'default', '', 5, 3, 604800000000, ?, ?"
_AMONG_THE_ARRIVALS = f"INSERT INTO holdfast_arrived ({_GIVEN}) VALUES ({_VALUES})"
_AMONG_THE_LIVE = f"""
    INSERT INTO holdfast_live ({_GIVEN}, state, reason, version, attempt, failures, crashes, snoozes, suspect,
                               cancel_asked, failure_history)
    VALUES ({_VALUES}, 'ready', 'enqueued', 0, 0, 0, 0, 0, 0, 0, x'')"""


def _into_our_tables(path: Path, statement: str) -> Callable[[], int]:
    store = SqliteStore(path)
    store.insert_blocking([])
    store.close()
    connection = _connect(path)

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
    """Three results: rates and their ratios."""
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
            "the same row": _into_our_tables(folder / "same.db", _AMONG_THE_ARRIVALS),
            "a live row": _into_our_tables(folder / "live.db", _AMONG_THE_LIVE),
            "three columns": _into_the_smallest_table(folder / "smallest.db"),
            "enqueue": enqueue,
        }
    )
    app.close()
    for reference, target in (("the same row", 0.75), ("a live row", None), ("three columns", None)):
        yield {
            "benchmark": f"SQLite FULL: enqueue one by one / bare INSERT of {reference}",
            "ours": rates["enqueue"],
            "reference": rates[reference],
            "ratio": rates["enqueue"] / rates[reference],
            "target": target,
            "unit": "jobs/s",
        }
