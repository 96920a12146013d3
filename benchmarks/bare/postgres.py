"""Bare PostgreSQL: psycopg, claims with SKIP LOCKED, a version compared at the end, history kept."""

import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import psycopg
import uuid_utils

from benchmarks.bare.loop import Taken, work
from benchmarks.bare.rows import changed, columns, ended, names
from benchmarks.program import Program, main, run_loop, url

COLUMNS = columns(id="uuid", text='text COLLATE "C"', small="smallint", whole="int", big="bigint", binary="bytea")
ENDED = ended(text="text", big="bigint", binary="bytea")
NOW = "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"
SCHEMA = f"""
CREATE TABLE bare_ready ({", ".join(COLUMNS)}, PRIMARY KEY (queue, priority, id));
CREATE TABLE bare_held ({", ".join(COLUMNS)}, PRIMARY KEY (id));
CREATE TABLE bare_ended ({", ".join(COLUMNS + ENDED)});
"""
INSERT = f"INSERT INTO bare_ready (id, task, payload, created_at, run_at) VALUES (%s, 'noop', %s, {NOW}, {NOW})"
BULK = f"""
INSERT INTO bare_ready (id, task, payload, created_at, run_at)
SELECT id, 'noop', payload, {NOW}, {NOW} FROM unnest(%s::uuid[], %s::bytea[]) new (id, payload)"""
# Where the last claim ended: what was deleted before is not looked at again.
TAKEN = {"version": "version + 1", "attempt": "attempt + 1", "session_id": "'bench'", "claimed_at": NOW}
CLAIM = f"""
WITH chosen AS MATERIALIZED (
    SELECT ctid FROM bare_ready WHERE queue = 'bench' AND priority = 5 AND id >= %s
    ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED),
taken AS (DELETE FROM bare_ready WHERE ctid = ANY (ARRAY (SELECT ctid FROM chosen)) RETURNING *)
INSERT INTO bare_held ({names(COLUMNS)}) SELECT {changed(COLUMNS, TAKEN)} FROM taken
RETURNING id, version, payload"""
SETTLE = f"""
WITH gone AS (
    DELETE FROM bare_held USING unnest(%s::uuid[], %s::int[]) move (id, version)
    WHERE bare_held.id = move.id AND bare_held.version = move.version RETURNING bare_held.*)
INSERT INTO bare_ended ({names(COLUMNS + ENDED)})
SELECT {names(COLUMNS)}, 'succeeded', {NOW}, {NOW} + retention, 'null' FROM gone"""
# The best plans, whatever the statistics say.
PLANS = "SET enable_seqscan = off; SET enable_hashjoin = off; SET enable_mergejoin = off"


def new_row(number: int, text: str) -> tuple[str, bytes]:
    return str(uuid_utils.uuid7()), b'{"n":%d,"s":"%s"}' % (number, text.encode())


class BarePostgres(Program):
    info: ClassVar[dict[str, Any]] = {
        "lib": "bare loop (psycopg)",
        "version": psycopg.__version__,
        "settings": "psycopg, prepared statements, batches of 500",
        "durability": "a version is compared at the end; nobody rescues",
        "threads": False,
        "pending": {"sql": "SELECT (SELECT count(*) FROM bare_ready) + (SELECT count(*) FROM bare_held)"},
    }

    def setup(self) -> None:
        with psycopg.connect(url(), autocommit=True) as connection:
            connection.execute(SCHEMA.encode())

    def enqueue(self, number: int, text: str) -> None:
        if not hasattr(self, "_connection"):
            self._connection = psycopg.connect(url(), autocommit=True)
        self._connection.execute(INSERT.encode(), new_row(number, text), prepare=True)

    async def open(self) -> None:
        self._async = await psycopg.AsyncConnection.connect(url(), autocommit=True)

    async def aenqueue(self, number: int, text: str) -> None:
        await self._async.execute(INSERT.encode(), new_row(number, text), prepare=True)

    async def close(self) -> None:
        await self._async.close()

    def enqueue_many(self, numbers: range, text: str) -> None:
        if not hasattr(self, "_connection"):
            self._connection = psycopg.connect(url(), autocommit=True)
        ids, payloads = zip(*(new_row(number, text) for number in numbers), strict=True)
        self._connection.execute(BULK.encode(), (list(ids), list(payloads)), prepare=True)

    def worker(self) -> None:
        run_loop(work(_Loop()))


class _Loop:
    async def open(self) -> None:
        self._claims, self._settles = [await psycopg.AsyncConnection.connect(url(), autocommit=True) for _ in range(2)]
        for connection in (self._claims, self._settles):
            await connection.execute(PLANS)
        self._floor = uuid.UUID(int=0)

    async def claim(self, limit: int) -> Sequence[Taken]:
        cursor = self._claims.cursor(binary=True)
        await cursor.execute(CLAIM.encode(), (self._floor, limit), prepare=True)
        jobs = [Taken(*row) for row in await cursor.fetchall()]
        if jobs:
            self._floor = max(job.id for job in jobs)
        return jobs

    async def settle(self, jobs: Sequence[Taken]) -> int:
        ids = [job.id for job in jobs]
        cursor = await self._settles.execute(SETTLE.encode(), (ids, [job.version for job in jobs]), prepare=True)
        return cursor.rowcount


if __name__ == "__main__":
    main(BarePostgres())
