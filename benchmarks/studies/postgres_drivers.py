"""Drivers for PostgreSQL: the store's own verbs through psycopg 3 and asyncpg, on one connection each.

Contestants: psycopg as the store uses it (asynchronous, binary results, nothing prepared), the same with prepared
statements, psycopg blocking, asyncpg without its cache of statements (as a pooler in transaction mode wants it) and
with it. Every one carries out the same verbs: a claim, up to the `Job` objects, and the settlement of what was claimed,
a batch at a time; and an enqueue, one job to a call. Beside the rates stands what 10,000 jobs cost the client, in
seconds of CPU.
"""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
from rich.progress import Progress

from benchmarks.measure import Figures, in_turns, median, quiet_progress, scaled
from benchmarks.studies.postgres_backlog import PAYLOAD, UUID7, fill_just_enqueued
from holdfast.job import NewJob
from holdfast.lifecycle import Applied, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, InsertStatus, Session
from holdfast.stores.driving import drive, drive_async
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.lookback import LookBack
from holdfast.stores.postgres.query import Query, Verb
from holdfast.stores.postgres.verbs import Verbs
from tests.servers import PostgresServer

NAMESPACE = "drivers"
BATCHES = (100, 500)
JOBS = scaled(20_000, 500)
ENQUEUES = scaled(3_000)
ROUNDS = 3
REFERENCE = "psycopg"

Run = Callable[[Verb[Any]], Awaitable[Any]]
"""Carries out a verb on a driver's connection."""


@asynccontextmanager
async def _psycopg(url: str, prepare_threshold: int | None = None) -> AsyncIterator[Run]:
    async with await psycopg.AsyncConnection.connect(
        url, autocommit=True, prepare_threshold=prepare_threshold
    ) as connection:

        async def execute(query: Query) -> list[tuple[Any, ...]]:
            cursor = await connection.execute(query.text, query.values, binary=True)
            return await cursor.fetchall() if cursor.description else []

        yield lambda verb: drive_async(verb, execute)


@asynccontextmanager
async def _psycopg_blocking(url: str) -> AsyncIterator[Run]:
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:

        def execute(query: Query) -> list[tuple[Any, ...]]:
            cursor = connection.execute(query.text, query.values, binary=True)
            return cursor.fetchall() if cursor.description else []

        async def carried_out(verb: Verb[Any]) -> Any:
            return drive(verb, execute)

        yield carried_out


@asynccontextmanager
async def _asyncpg(url: str, **options: int) -> AsyncIterator[Run]:
    connection = await asyncpg.connect(url, **options)

    async def execute(query: Query) -> Any:
        return await connection.fetch(_numbered(query.text), *query.values)  # its records will do as tuples

    try:
        yield lambda verb: drive_async(verb, execute)
    finally:
        await connection.close()


@cache
def _numbered(text: str) -> str:
    """The statement with $1, $2, ... as asyncpg wants it."""
    numbers = iter(range(1, 100))
    return re.sub("%s", lambda _: f"${next(numbers)}", text)


DRIVERS: dict[str, Callable[[str], AbstractAsyncContextManager[Run]]] = {
    REFERENCE: _psycopg,
    "psycopg prepared": lambda url: _psycopg(url, prepare_threshold=0),
    "psycopg blocking": _psycopg_blocking,
    "asyncpg without cache": lambda url: _asyncpg(url, statement_cache_size=0),
    "asyncpg with cache": _asyncpg,
}


class Work:
    """What is done with one driver."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._verbs = Verbs(NAMESPACE)
        self._look = LookBack(SYSTEM.clock)

    async def open_session(self) -> None:
        await self._run(self._verbs.open_session(Session(id="bench")))

    async def claim_and_settle(self, batch: int) -> int:
        request = ClaimRequest(session_id="bench", queues=("bench",), limit=batch)
        for _ in range(JOBS // batch):
            claimed = await self._run(self._verbs.claim(request, self._look))
            assert len(claimed.jobs) == batch
            moves = [settle(job, Succeeded(b"null"), RetryPolicy(), SYSTEM.random) for job in claimed.jobs]
            assert await self._run(self._verbs.apply(moves, [])) == [Applied.APPLIED] * batch
        return JOBS

    async def enqueue(self) -> int:
        for _ in range(ENQUEUES):
            job = NewJob(id=SYSTEM.ids.job_id(), task="noop", payload=PAYLOAD, queue="enqueued")
            [inserted] = await self._run(self._verbs.insert([job], None, []))
            assert inserted.status is InsertStatus.CREATED
        return ENQUEUES


def _contestants(name: str, work: Work, runner: asyncio.Runner) -> dict[str, Callable[[], Figures]]:
    def measured(begin: Callable[[], Coroutine[Any, Any, int]]) -> Callable[[], Figures]:
        def measure() -> Figures:
            started, used = time.perf_counter(), time.process_time()
            jobs = runner.run(begin())
            took, cpu = time.perf_counter() - started, time.process_time() - used
            return {"rate": jobs / took, "cpu": 10_000 * cpu / jobs}

        return measure

    contestants = {f"claim+settle of {batch}": measured(partial(work.claim_and_settle, batch)) for batch in BATCHES}
    contestants["enqueue one by one"] = measured(work.enqueue)
    return {f"{what}, {name}": measure for what, measure in contestants.items()}


def _measured(url: str, progress: Progress) -> dict[str, list[Figures]]:
    store = PostgresStore(url, namespace=NAMESPACE)
    store.open_blocking()
    store.close()
    with psycopg.connect(url, autocommit=True) as connection, asyncio.Runner() as runner:
        connection.execute(UUID7)
        stack = AsyncExitStack()
        try:
            by_driver = []
            for name, opened in DRIVERS.items():
                work = Work(runner.run(stack.enter_async_context(opened(url))))
                runner.run(work.open_session())
                by_driver.append(_contestants(name, work, runner))
            # Each work with one driver after the other, then the next work.
            works = zip(*(contestants.items() for contestants in by_driver), strict=True)
            needed = JOBS * len(BATCHES) * len(DRIVERS)
            return in_turns(
                dict(chain(*works)), ROUNDS, progress, lambda _: fill_just_enqueued(connection, NAMESPACE, needed)
            )
        finally:
            runner.run(stack.aclose())


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """For each work a rate and a cost of every driver, beside those of psycopg as the store uses it."""
    with quiet_progress() as progress, PostgresServer() as server:
        seen = _measured(server.url, progress)
    works = [*(f"claim+settle of {batch}" for batch in BATCHES), "enqueue one by one"]
    for figure, unit in (("rate", "jobs/s"), ("cpu", "CPU s/10,000 jobs")):
        for what in works:
            reference = median(seen[f"{what}, {REFERENCE}"], figure)
            for name in DRIVERS:
                if name != REFERENCE:
                    ours = median(seen[f"{what}, {name}"], figure)
                    yield {
                        "benchmark": f"PostgreSQL: {what}, {name} / {REFERENCE}",
                        "ours": ours,
                        "reference": reference,
                        "ratio": ours / reference,
                        "target": None,
                        "unit": unit,
                    }
