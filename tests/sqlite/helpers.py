"""What the tests of the SQLite engine share: jobs, raw connections, and other processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from holdfast.job import Job, NewJob
from holdfast.lifecycle import Applied, Outcome, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.sqlite import SqliteStore

QUEUE = "default"

# Children are forked from a server that has everything imported and nothing open: they start within milliseconds.
CHILDREN: ForkServerContext = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["pytest", "holdfast", "holdfast.stores.sqlite", "tests.sqlite.helpers"])


def start_child(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Run a function of a module in another process."""
    child = CHILDREN.Process(target=target, args=args, daemon=True)
    child.start()
    return child


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a program in an interpreter of its own, to its end."""
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def new_job(**changes: Any) -> NewJob:
    """A job that nobody has seen before."""
    return NewJob(**{"id": SYSTEM.ids.job_id(), "task": "mail.welcome", "payload": b"{}", **changes})


def new_jobs(count: int, **changes: Any) -> list[NewJob]:
    """Several of them."""
    return [new_job(**changes) for _ in range(count)]


def raw(path: Path) -> sqlite3.Connection:
    """A connection as any other program would open it: autocommit, no waiting."""
    return sqlite3.connect(path, isolation_level=None, timeout=0, check_same_thread=False)


def run_sql(path: Path, sql: str, parameters: Sequence[Any] = ()) -> list[Any]:
    """One statement by a connection of its own, committed."""
    connection = raw(path)
    try:
        return connection.execute(sql, parameters).fetchall()
    finally:
        connection.close()


def live_ids(path: Path, namespace: str = "holdfast") -> list[str]:
    """The ids of the jobs that have not ended, read by another connection."""
    jobs = " UNION ALL ".join(f"SELECT id, run_at FROM {namespace}_{table}" for table in ("live", "arrived"))
    return [row[0] for row in run_sql(path, f"SELECT id FROM ({jobs}) ORDER BY run_at, id")]


def arrived_ids(path: Path, namespace: str = "holdfast") -> list[str]:
    """Those among them that have arrived and that nobody has taken in yet, in the order of their arrival."""
    return [row[0] for row in run_sql(path, f"SELECT id FROM {namespace}_arrived ORDER BY rowid")]


def is_sound(path: Path) -> bool:
    """Whether SQLite finds no fault with the file."""
    return run_sql(path, "PRAGMA integrity_check") == [("ok",)]


async def eventually(condition: Callable[[], object], seconds: float = 5) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  other threads and processes decide, and set no event of ours
            await asyncio.sleep(0.001)


async def open_session(store: SqliteStore) -> str:
    """A session that may claim."""
    session = SYSTEM.ids.session_id()
    await store.open_session(Session(id=session))
    return session


async def claim(store: SqliteStore, session: str, limit: int = 10, queue: str = QUEUE) -> tuple[Job, ...]:
    """What is due in a queue."""
    claimed = await store.claim(ClaimRequest(session_id=session, queues=(queue,), limit=limit))
    return claimed.jobs


async def finish(store: SqliteStore, jobs: Sequence[Job], outcome: Outcome | None = None) -> list[Applied]:
    """Settle the jobs, as succeeded unless said otherwise."""
    moves = [settle(job, outcome or Succeeded(), RetryPolicy(), SYSTEM.random) for job in jobs]
    return await store.apply(moves)
