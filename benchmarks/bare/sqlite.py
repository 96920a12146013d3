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
from benchmarks.bare.rows import columns, ended, names
from benchmarks.program import Program, main, run_loop, url

COLUMNS = columns(id="TEXT", text="TEXT", small="INTEGER", whole="INTEGER", big="INTEGER", binary="BLOB", empty="x''")
ENDED = ended(text="TEXT", big="INTEGER", binary="BLOB")
SCHEMA = f"""
CREATE TABLE jobs ({", ".join(COLUMNS)}, held INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (id)) WITHOUT ROWID, STRICT;
CREATE INDEX ready ON jobs (queue, priority, run_at) WHERE held = 0;
CREATE TABLE ended ({", ".join(COLUMNS + ENDED)}, PRIMARY KEY (id)) WITHOUT ROWID, STRICT;
"""
INSERT = "INSERT INTO jobs (id, task, payload, created_at, run_at) VALUES (?1, 'noop', ?2, ?3, ?3)"
CLAIM = """
UPDATE jobs SET held = 1, attempt = attempt + 1, version = version + 1, session_id = 'bench', claimed_at = ?2
WHERE id IN (
    SELECT id FROM jobs WHERE queue = 'bench' AND priority = 5 AND held = 0 ORDER BY run_at, id LIMIT ?1)
RETURNING id, version, payload"""
KEEP = f"""
INSERT INTO ended SELECT {names(COLUMNS)}, 'succeeded', ?3, ?3 + retention, x'6e756c6c'
FROM jobs WHERE id = ?1 AND version = ?2 AND held = 1"""
REMOVE = "DELETE FROM jobs WHERE id = ?1 AND version = ?2 AND held = 1"


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
        done, self._ended = self._ended, []
        if not done and not limit:
            return []
        self._connection.execute("BEGIN IMMEDIATE")
        now = time.time_ns() // 1000
        if done:
            self._connection.executemany(KEEP, [(job.id, job.version, now) for job in done])
            removed = self._connection.executemany(REMOVE, [(job.id, job.version) for job in done])
            assert removed.rowcount == len(done)
        rows = self._connection.execute(CLAIM, (limit, now)).fetchall() if limit else []
        self._connection.execute("COMMIT")
        return [Taken(*row) for row in rows]


if __name__ == "__main__":
    main(BareSqlite())
