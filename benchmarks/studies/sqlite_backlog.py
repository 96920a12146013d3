"""Claim + settle on SQLite (FULL) in a crowded store, beside the same work in an empty one.

Crowded: a million ready, a million scheduled and a million finished jobs. Each round claims and acknowledges some
thousand jobs, a hundred at a time, as a worker does.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.measure import ROUNDS, interleaved
from holdfast.job import NewJob
from holdfast.lifecycle import Applied, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.sqlite import SqliteStore

JOBS = 5_000
BATCH = 100
PAYLOAD = b'{"n":12345,"s":"abcdefghijklmnopqrstuvwxyzabcdef"}'


def _new_jobs(count: int, delay: int = 0) -> list[NewJob]:
    return [
        NewJob(id=SYSTEM.ids.job_id(), task="noop", payload=PAYLOAD, queue="bench", delay=delay) for _ in range(count)
    ]


def crowd(path: Path, count: int, progress: Progress) -> None:
    """Fill the file with `count` finished, ready and scheduled jobs each."""
    store = SqliteStore(path, durability="relaxed")
    hour = 3_600_000_000
    for what, delay in (("finished", 0), ("ready", 0), ("scheduled", hour)):
        task = progress.add_task(f"{what} jobs", total=count)
        for _ in range(0, count, 1_000):
            store.insert_blocking(_new_jobs(1_000, delay))
            progress.advance(task, 1_000)
        if what == "finished":
            _finish_all(path)
    store.close()


def _finish_all(path: Path) -> None:
    """Move every live job to the ended ones in one statement, as if a worker had run it."""
    columns = (
        "id, task, payload, task_version, queue, share, priority, max_retries, retention, created_at, run_at, "
        "session_id, failures, crashes, snoozes, suspect, cancel_asked, failure_history"
    )
    with sqlite3.connect(path) as connection:
        connection.execute(
            f"""INSERT INTO holdfast_ended ({columns}, state, reason, version, attempt, ended_at, expires_at, result)
                SELECT {columns}, 'succeeded', 'succeeded', 1, 1, run_at, run_at + retention, x'6e756c6c'
                FROM holdfast_live"""
        )
        connection.execute("DELETE FROM holdfast_live")
        connection.execute("INSERT INTO holdfast_totals SELECT 'bench', 'succeeded', count(*) FROM holdfast_ended")
    connection.close()


def _worker(store: SqliteStore) -> Callable[[], int]:
    async def work() -> None:
        request = ClaimRequest(session_id="bench", queues=("bench",), limit=BATCH)
        for _ in range(JOBS // BATCH):
            claimed = await store.claim(request)
            moves = [settle(job, Succeeded(b"null"), RetryPolicy(), SYSTEM.random) for job in claimed.jobs]
            answers = await store.apply(moves)
            assert answers == [Applied.APPLIED] * BATCH

    def measured() -> int:
        asyncio.run(work())
        return JOBS

    asyncio.run(store.open_session(Session(id="bench")))
    return measured


@contextmanager
def prepared_loop(path: Path, jobs: int) -> Iterator[Callable[[], int]]:
    """The bare loop on a new file with so many ready jobs."""
    store = SqliteStore(path)
    for _ in range(0, jobs, 1_000):
        store.insert_blocking(_new_jobs(1_000))
    try:
        yield _worker(store)
    finally:
        store.close()


def run(folder: Path, count: int = 1_000_000) -> Iterator[dict[str, Any]]:
    """One result: rates and their ratio."""
    with Progress(transient=True) as progress:
        crowd(folder / "crowded.db", count, progress)
    crowded = SqliteStore(folder / "crowded.db")
    with prepared_loop(folder / "empty.db", ROUNDS * JOBS) as empty:
        rates = interleaved({"empty": empty, "crowded": _worker(crowded)})
    crowded.close()
    yield {
        "benchmark": f"SQLite FULL: claim+settle among 3 × {count:,} jobs / in an empty store",
        "ours": rates["crowded"],
        "reference": rates["empty"],
        "ratio": rates["crowded"] / rates["empty"],
        "target": 0.7,
        "unit": "jobs/s",
    }
