"""Bare MariaDB or MySQL: asyncmy, claims with SKIP LOCKED at READ COMMITTED, a version compared at the end."""

from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import asyncmy  # type: ignore[import-untyped, unused-ignore]
import pymysql
import uuid_utils

from benchmarks.bare.loop import Taken, work
from benchmarks.program import Program, main, run_loop, url

SCHEMA = (
    """CREATE TABLE bare_ready (
        seq BIGINT UNSIGNED AUTO_INCREMENT, id CHAR(36) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
        task VARCHAR(255) NOT NULL, payload LONGBLOB NOT NULL, queue VARCHAR(255) CHARACTER SET ascii NOT NULL,
        priority SMALLINT NOT NULL, version BIGINT NOT NULL DEFAULT 0, attempt INT NOT NULL DEFAULT 0,
        PRIMARY KEY (queue, priority, seq), KEY (seq)) ENGINE = InnoDB""",
    """CREATE TABLE bare_held (
        seq BIGINT UNSIGNED PRIMARY KEY, id CHAR(36) CHARACTER SET ascii COLLATE ascii_bin, task VARCHAR(255),
        payload LONGBLOB, queue VARCHAR(255), priority SMALLINT, version BIGINT, attempt INT, session_id VARCHAR(128)
        ) ENGINE = InnoDB""",
    """CREATE TABLE bare_ended (
        seq BIGINT UNSIGNED PRIMARY KEY, id CHAR(36) CHARACTER SET ascii COLLATE ascii_bin, task VARCHAR(255),
        payload LONGBLOB, queue VARCHAR(255), state SMALLINT, attempt INT, result LONGBLOB) ENGINE = InnoDB""",
)
INSERT = "INSERT INTO bare_ready (id, task, payload, queue, priority) VALUES (%s, 'noop', %s, 'bench', 5)"


def _access() -> dict[str, Any]:
    parts = urlsplit(url())
    return {
        "host": parts.hostname,
        "port": parts.port,
        "user": parts.username,
        "password": parts.password or "",
        "database": parts.path.lstrip("/"),
    }


def _new(number: int, text: str) -> tuple[str, bytes]:
    return str(uuid_utils.uuid7()), b'{"n":%d,"s":"%s"}' % (number, text.encode())


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
                    "INSERT INTO bare_held SELECT seq, id, task, payload, queue, priority, version + 1, attempt + 1, "
                    f"'bench' FROM bare_ready WHERE {those}"
                )
                await cursor.execute(f"DELETE FROM bare_ready WHERE {those}")
            await self._claims.commit()
        return jobs

    async def settle(self, jobs: Sequence[Taken]) -> int:
        pairs = ",".join(f"({job.id},{job.version})" for job in jobs)
        async with self._settles.cursor() as cursor:
            await cursor.execute(
                "INSERT INTO bare_ended SELECT seq, id, task, payload, queue, 2, attempt, 'null' FROM bare_held "
                f"WHERE (seq, version) IN ({pairs})"
            )
            settled: int = await cursor.execute(f"DELETE FROM bare_held WHERE (seq, version) IN ({pairs})")
            await self._settles.commit()
        return settled


if __name__ == "__main__":
    main(BareMysql())
