"""`task.enqueue(...)` one by one on SQLite (FULL), beside a bare INSERT of the same payload in autocommit mode.

The bare INSERT goes into the smallest table that could hold a job: an id, a task, a payload. Ours also keeps the
lane index, checks the id, encodes and verifies the arguments.
"""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import uuid_utils

from benchmarks.measure import interleaved
from holdfast import Holdfast

ENQUEUES = 2_000
TEXT = "abcdefghijklmnopqrstuvwxyzabcdef"


def run(folder: Path) -> Iterator[dict[str, object]]:
    """One result: rates and their ratio."""
    bare = sqlite3.connect(folder / "bare.db", isolation_level=None)
    bare.execute("PRAGMA journal_mode = WAL")
    bare.execute("PRAGMA synchronous = FULL")
    bare.execute("CREATE TABLE jobs (id TEXT PRIMARY KEY, task TEXT, payload BLOB)")
    payload = b'{"n":12345,"s":"' + TEXT.encode() + b'"}'

    app = Holdfast(f"sqlite:///{folder / 'holdfast.db'}")

    @app.task
    def noop(n: int, s: str) -> None:
        """Nothing."""

    def insert() -> int:
        for _ in range(ENQUEUES):
            bare.execute("INSERT INTO jobs VALUES (?, ?, ?)", (str(uuid_utils.uuid7()), "noop", payload))
        return ENQUEUES

    def enqueue() -> int:
        for _ in range(ENQUEUES):
            noop.enqueue(12345, TEXT)
        return ENQUEUES

    rates = interleaved({"bare INSERT": insert, "enqueue": enqueue})
    bare.close()
    app.close()
    yield {
        "benchmark": "SQLite FULL: enqueue one by one / bare INSERT",
        "ours": rates["enqueue"],
        "reference": rates["bare INSERT"],
        "ratio": rates["enqueue"] / rates["bare INSERT"],
        "target": 0.75,
        "unit": "jobs/s",
    }
