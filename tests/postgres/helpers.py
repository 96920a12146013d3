"""What the tests of the PostgreSQL engine share: a namespace of a real server, raw connections, jobs, processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any, cast

import psycopg

from holdfast.job import Job, NewJob
from holdfast.lifecycle import Applied, Outcome, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import MICROSECONDS, SYSTEM
from holdfast.store import ClaimRequest, Session, Store
from holdfast.stores.postgres import PostgresStore

QUEUE = "default"
MINUTE, HOUR, DAY = 60 * MICROSECONDS, 3600 * MICROSECONDS, 86400 * MICROSECONDS
TABLES = ("waiting", "in_flight", "kept", "history", "tallies", "keys", "sessions", "paused", "checkpoints")

Raw = psycopg.Connection[tuple[Any, ...]]

# Children are forked from a server that has everything imported and nothing open: they start within milliseconds.
CHILDREN: ForkServerContext = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(["pytest", "holdfast", "holdfast.stores.postgres", "tests.postgres.helpers"])


def start_child(target: Callable[..., None], *args: Any) -> ForkServerProcess:
    """Run a function of a module in another process."""
    child = CHILDREN.Process(target=target, args=args, daemon=True)
    child.start()
    return child


def raw(url: str, **options: Any) -> Raw:
    """A connection as any other program would open it, in autocommit mode unless said otherwise."""
    return cast(Raw, psycopg.connect(url, **{"autocommit": True, **options}))


class Database:
    """A namespace of a server, and ways to look behind the back of the stores on it."""

    def __init__(self, url: str, namespace: str) -> None:
        self.url = url
        self.namespace = namespace
        self._own: Raw | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_own": None}

    def store(self, **options: Any) -> PostgresStore:
        """A new store on it, not opened yet."""
        return PostgresStore(self.url, **{"namespace": self.namespace, **options})

    def text(self, text: str) -> bytes:
        """The statement, for this namespace instead of {ns}."""
        return text.replace("{ns}", self.namespace).encode()

    def sql(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        """One statement on a connection of the test's own, committed."""
        if self._own is None or self._own.closed:
            self._own = raw(self.url)
        cursor = self._own.execute(self.text(text), values or None)
        return cursor.fetchall() if cursor.description else []

    def close(self) -> None:
        """Close the test's own connection."""
        if self._own is not None:
            self._own.close()

    def value(self, text: str, *values: Any) -> Any:
        """The only value that the statement answers with."""
        [(value,)] = self.sql(text, *values)
        return value

    def number_of(self, table: str) -> int:
        """How many rows a table has."""
        return cast(int, self.value(f"SELECT count(*) FROM {{ns}}_{table}"))

    def exists(self) -> bool:
        """Whether the namespace has its tables."""
        return self.value("SELECT to_regclass('{ns}_schema') IS NOT NULL") is True

    def empty(self) -> None:
        """Leave nothing but the schema."""
        # Deleted, not truncated: a truncated table has new files, and the server syncs each of them.
        mark = "UPDATE {ns}_pruned SET expires_at = 0, id = '00000000-0000-0000-0000-000000000000' WHERE expires_at > 0"
        self.sql(";".join([*(f"DELETE FROM {{ns}}_{table}" for table in TABLES), mark]))

    def connections(self, name: str = "holdfast") -> int:
        """How many connections there are of stores whose URL has that `application_name`."""
        return cast(int, self.value("SELECT count(*) FROM pg_stat_activity WHERE application_name = %s", name))

    def travelling(self) -> Travel:
        """Make its clock adjustable."""
        return Travel(self)


class Travel:
    """The server's real clock, set forward or back by the test."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.sql("CREATE TABLE IF NOT EXISTS {ns}_travel AS SELECT 0::bigint AS us")
        database.sql("GRANT SELECT ON {ns}_travel TO PUBLIC")
        database.sql(
            """CREATE OR REPLACE FUNCTION {ns}_now() RETURNS bigint LANGUAGE sql STABLE
               AS $$ SELECT (extract(epoch FROM statement_timestamp()) * 1000000)::bigint + us FROM {ns}_travel $$"""
        )

    def by(self, us: int) -> None:
        """Let that much time pass, or take it back."""
        self._database.sql("UPDATE {ns}_travel SET us = us + %s", us)

    def home(self) -> None:
        """Back to the real time."""
        self._database.sql("UPDATE {ns}_travel SET us = 0")


def new_job(**changes: Any) -> NewJob:
    """A job that nobody has seen before."""
    return NewJob(**{"id": SYSTEM.ids.job_id(), "task": "mail.welcome", "payload": b"{}", **changes})


def new_jobs(count: int, **changes: Any) -> list[NewJob]:
    """Several of them."""
    return [new_job(**changes) for _ in range(count)]


async def eventually(condition: Callable[[], object], seconds: float = 10) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110  other threads and processes decide, and set no event of ours
            await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], object], seconds: float = 10) -> None:
    """The same outside of an event loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


async def open_session(store: Store) -> str:
    """A session that may claim."""
    session = SYSTEM.ids.session_id()
    await store.open_session(Session(id=session))
    return session


async def claim(store: Store, session: str, limit: int = 10, queue: str = QUEUE) -> tuple[Job, ...]:
    """What is due in a queue."""
    claimed = await store.claim(ClaimRequest(session_id=session, queues=(queue,), limit=limit))
    return claimed.jobs


async def finish(store: Store, jobs: Sequence[Job], outcome: Outcome | None = None) -> list[Applied]:
    """Settle the jobs, as succeeded unless said otherwise."""
    moves = [settle(job, outcome or Succeeded(), RetryPolicy(), SYSTEM.random) for job in jobs]
    return await store.apply(moves)
