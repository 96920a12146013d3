"""Bare MariaDB or MySQL: asyncmy, claims with SKIP LOCKED at READ COMMITTED, a version compared at the end."""

import time
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import asyncmy  # type: ignore[import-untyped, unused-ignore]
import pymysql
import uuid_utils

from benchmarks.bare.loop import Taken, work
from benchmarks.bare.rows import changed, columns, ended, names
from benchmarks.program import Program, main, run_loop, url

ASCII = "VARCHAR(255) CHARACTER SET ascii COLLATE ascii_bin"
COLUMNS = [
    "seq BIGINT UNSIGNED NOT NULL",
    *columns(
        id="CHAR(36) CHARACTER SET ascii COLLATE ascii_bin",
        text=ASCII,
        small="SMALLINT",
        whole="INT",
        big="BIGINT",
        binary="LONGBLOB",
    ),
]
ENDED = ended(text=ASCII, big="BIGINT", binary="LONGBLOB")
NOW = "CAST(UNIX_TIMESTAMP(NOW(6)) * 1000000 AS UNSIGNED)"
COUNTED = COLUMNS[0] + " AUTO_INCREMENT"
SCHEMA = (
    f"CREATE TABLE bare_ready ({', '.join([COUNTED, *COLUMNS[1:]])}, "
    "PRIMARY KEY (queue, priority, seq), KEY (seq)) ENGINE = InnoDB",
    f"CREATE TABLE bare_held ({', '.join(COLUMNS)}, PRIMARY KEY (seq)) ENGINE = InnoDB",
    f"CREATE TABLE bare_ended ({', '.join(COLUMNS + ENDED)}, PRIMARY KEY (seq)) ENGINE = InnoDB",
)
TAKEN = {"version": "version + 1", "attempt": "attempt + 1", "session_id": "'bench'", "claimed_at": NOW}
# Placeholders only: PyMySQL makes one statement of many rows from nothing else.
INSERT = "INSERT INTO bare_ready (id, task, payload, created_at, run_at) VALUES (%s, %s, %s, %s, %s)"


def _access() -> dict[str, Any]:
    parts = urlsplit(url())
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password or "",
        "database": parts.path.lstrip("/"),
    }


def _new(number: int, text: str) -> tuple[str, str, bytes, int, int]:
    now = time.time_ns() // 1000
    return str(uuid_utils.uuid7()), "noop", b'{"n":%d,"s":"%s"}' % (number, text.encode()), now, now


class BareMysql(Program):
    info: ClassVar[dict[str, Any]] = {
        "lib": "bare loop",
        "version": asyncmy.__version__ if hasattr(asyncmy, "__version__") else "",
        "settings": "asyncmy, READ COMMITTED, batches of 500",
        "durability": "a version is compared at the end; nobody rescues",
        "threads": False,
        "pending": {"mysql": "SELECT (SELECT count(*) FROM bare_ready) + (SELECT count(*) FROM bare_held)"},
    }

    def setup(self) -> None:
        with pymysql.connect(**_access(), autocommit=True) as connection, connection.cursor() as cursor:
            for statement in SCHEMA:
                cursor.execute(statement)

    def _cursor(self) -> Any:
        if not hasattr(self, "_open"):
            self._open = pymysql.connect(**_access(), autocommit=True).cursor()
        return self._open

    def enqueue(self, number: int, text: str) -> None:
        self._cursor().execute(INSERT, _new(number, text))

    async def open(self) -> None:
        self._async = await asyncmy.connect(**_access(), autocommit=True)

    async def aenqueue(self, number: int, text: str) -> None:
        async with self._async.cursor() as cursor:
            await cursor.execute(INSERT, _new(number, text))

    async def close(self) -> None:
        await self._async.ensure_closed()

    def enqueue_many(self, numbers: range, text: str) -> None:
        self._cursor().executemany(INSERT, [_new(number, text) for number in numbers])

    def worker(self) -> None:
        run_loop(work(_Loop()))


class _Loop:
    async def open(self) -> None:
        self._claims, self._settles = [await asyncmy.connect(**_access(), autocommit=False) for _ in range(2)]
        for connection in (self._claims, self._settles):
            async with connection.cursor() as cursor:
                await cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
            await connection.commit()
        self._floor = 0

    async def claim(self, limit: int) -> Sequence[Taken]:
        async with self._claims.cursor() as cursor:
            await cursor.execute(
                "SELECT seq, version + 1, payload FROM bare_ready WHERE queue = 'bench' AND priority = 5 "
                f"AND seq > {self._floor} ORDER BY seq LIMIT {limit} FOR UPDATE SKIP LOCKED"
            )
            jobs = [Taken(*row) for row in await cursor.fetchall()]
            if jobs:
                self._floor = jobs[-1].id
                those = f"queue = 'bench' AND priority = 5 AND seq IN ({','.join(str(job.id) for job in jobs)})"
                await cursor.execute(
                    f"INSERT INTO bare_held SELECT {changed(COLUMNS, TAKEN)} FROM bare_ready WHERE {those}"
                )
                await cursor.execute(f"DELETE FROM bare_ready WHERE {those}")
            await self._claims.commit()
        return jobs

    async def settle(self, jobs: Sequence[Taken]) -> int:
        pairs = ",".join(f"({job.id},{job.version})" for job in jobs)
        async with self._settles.cursor() as cursor:
            await cursor.execute(
                f"INSERT INTO bare_ended SELECT {names(COLUMNS)}, 'succeeded', {NOW}, {NOW} + retention, 'null' "
                f"FROM bare_held WHERE (seq, version) IN ({pairs})"
            )
            settled: int = await cursor.execute(f"DELETE FROM bare_held WHERE (seq, version) IN ({pairs})")
            await self._settles.commit()
        return settled


if __name__ == "__main__":
    main(BareMysql())
