"""Bare SQLite (WAL, FULL): a settlement and the next claim in one transaction, on one writer thread."""

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import uuid_utils

from benchmarks.bare.loop import Taken, work
from benchmarks.program import Program, main, run_loop, url

SCHEMA = """
CREATE TABLE jobs (
    id TEXT NOT NULL PRIMARY KEY, task TEXT NOT NULL, payload BLOB NOT NULL, queue TEXT NOT NULL,
    priority INTEGER NOT NULL, state INTEGER NOT NULL DEFAULT 0, run_at INTEGER NOT NULL, version INTEGER NOT NULL
    DEFAULT 0, attempt INTEGER NOT NULL DEFAULT 0, session_id TEXT
) WITHOUT ROWID, STRICT;
CREATE INDEX ready ON jobs (queue, priority, run_at) WHERE state = 0;
CREATE TABLE ended (
    id TEXT NOT NULL PRIMARY KEY, task TEXT NOT NULL, payload BLOB NOT NULL, queue TEXT NOT NULL,
    state INTEGER NOT NULL, ended_at INTEGER NOT NULL, attempt INTEGER NOT NULL, result BLOB
) WITHOUT ROWID, STRICT;
"""
INSERT = "INSERT INTO jobs (id, task, payload, queue, priority, run_at) VALUES (?, 'noop', ?, 'bench', 5, ?)"
CLAIM = """
UPDATE jobs SET state = 1, attempt = attempt + 1, version = version + 1, session_id = 'bench'
WHERE id IN (SELECT id FROM jobs WHERE queue = 'bench' AND state = 0 ORDER BY priority, run_at, id LIMIT ?)
RETURNING id, version, payload"""
KEEP = """
INSERT INTO ended SELECT id, task, payload, queue, 2, ?3, attempt, x'6e756c6c'
FROM jobs WHERE id = ?1 AND version = ?2 AND state = 1"""
REMOVE = "DELETE FROM jobs WHERE id = ?1 AND version = ?2 AND state = 1"


def _path() -> Path:
    return Path(url().removeprefix("sqlite:///"))


def _connect() -> sqlite3.Connection:
    connection = sqlite3.connect(_path(), isolation_level=None, check_same_thread=False, timeout=30)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    return connection


def _new(number: int, text: str) -> tuple[str, bytes, int]:
    return str(uuid_utils.uuid7()), b'{"n":%d,"s":"%s"}' % (number, text.encode()), time.time_ns() // 1000


class BareSqlite(Program):
    info: ClassVar[dict[str, Any]] = {
        "lib": "bare loop",
        "version": sqlite3.sqlite_version,
        "settings": "sqlite3, WAL, synchronous FULL, batches of 500",
        "durability": "a version is compared at the end; nobody rescues",
        "threads": False,
        "pending": {"sqlite": [None, "SELECT count(*) FROM jobs"]},
    }

    def setup(self) -> None:
        _connect().executescript(SCHEMA)

    def enqueue(self, number: int, text: str) -> None:
        if not hasattr(self, "_connection"):
            self._connection = _connect()
        self._connection.execute(INSERT, _new(number, text))

    def enqueue_many(self, numbers: range, text: str) -> None:
        if not hasattr(self, "_connection"):
            self._connection = _connect()
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany(INSERT, [_new(number, text) for number in numbers])
        self._connection.execute("COMMIT")

    def worker(self) -> None:
        run_loop(work(_Loop()))


class _Loop:
    """What is to be settled waits for the next claim, which carries it in its transaction."""

    async def open(self) -> None:
        self._connection = _connect()
        self._thread = ThreadPoolExecutor(1)
        self._ended: list[Taken] = []

    async def claim(self, limit: int) -> Sequence[Taken]:
        jobs: list[Taken] = await self._hop(self._claim, limit)
        return jobs

    async def settle(self, jobs: Sequence[Taken]) -> int:
        self._ended += jobs
        await self._hop(self._claim, 0)
        return len(jobs)

    async def _hop(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _claim(self, limit: int) -> list[Taken]:
        ended, self._ended = self._ended, []
        if not ended and not limit:
            return []
        self._connection.execute("BEGIN IMMEDIATE")
        if ended:
            now = time.time_ns() // 1000
            self._connection.executemany(KEEP, [(job.id, job.version, now) for job in ended])
            removed = self._connection.executemany(REMOVE, [(job.id, job.version) for job in ended])
            assert removed.rowcount == len(ended)
        rows = self._connection.execute(CLAIM, (limit,)).fetchall() if limit else []
        self._connection.execute("COMMIT")
        return [Taken(*row) for row in rows]


if __name__ == "__main__":
    main(BareSqlite())
