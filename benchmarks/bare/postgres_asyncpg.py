"""Bare PostgreSQL through asyncpg: the statements of the psycopg loop, by the driver that talks binary throughout."""

import re
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import asyncpg

from benchmarks.bare.loop import Taken, work
from benchmarks.bare.postgres import CLAIM, INSERT, PLANS, SETTLE, BarePostgres, new_row
from benchmarks.program import Program, main, run_loop, url


def _numbered(statement: str) -> str:
    """asyncpg's placeholders are $1, $2."""
    number = iter(range(1, 100))
    return re.sub("%s", lambda _: f"${next(number)}", statement)


class BareAsyncpg(Program):
    """It has no blocking calls; its jobs are filled in by psycopg, which is no figure of its own."""

    info: ClassVar[dict[str, Any]] = {
        **BarePostgres.info,
        "lib": "bare loop (asyncpg)",
        "version": asyncpg.__version__,
        "settings": "asyncpg, prepared statements, batches of 500",
        "without": ["enqueue_bulk"],
    }

    def __init__(self) -> None:
        self._filling = BarePostgres()

    def setup(self) -> None:
        self._filling.setup()

    async def open(self) -> None:
        self._connection = await asyncpg.connect(url())
        self._insert = await self._connection.prepare(_numbered(INSERT))

    async def aenqueue(self, number: int, text: str) -> None:
        await self._insert.fetch(*new_row(number, text))

    async def close(self) -> None:
        await self._connection.close()

    def enqueue_many(self, numbers: range, text: str) -> None:
        self._filling.enqueue_many(numbers, text)

    def worker(self) -> None:
        run_loop(work(_Loop()))


class _Loop:
    async def open(self) -> None:
        claims, settles = [await asyncpg.connect(url()) for _ in range(2)]
        for connection in (claims, settles):
            await connection.execute(PLANS)
        self._connections = claims, settles  # a statement does not keep its connection alive
        self._claim = await claims.prepare(_numbered(CLAIM))
        self._settle = await settles.prepare(_numbered(SETTLE))
        self._floor: Any = uuid.UUID(int=0)

    async def claim(self, limit: int) -> Sequence[Taken]:
        jobs = [Taken(*row) for row in await self._claim.fetch(self._floor, limit)]
        if jobs:
            self._floor = max(job.id for job in jobs)
        return jobs

    async def settle(self, jobs: Sequence[Taken]) -> int:
        await self._settle.fetch([job.id for job in jobs], [job.version for job in jobs])
        return int(self._settle.get_statusmsg().split()[-1])


if __name__ == "__main__":
    main(BareAsyncpg())
