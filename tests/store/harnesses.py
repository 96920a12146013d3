"""How the conformance suite reaches the engines of this repository."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import psycopg

from holdfast.job import JobId, NewJob, SessionId
from holdfast.ports import Ports, microseconds
from holdfast.store import Checkpoint, DepthLimit, Inserted, Store
from holdfast.stores.memory import MemoryStore
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.redis import RedisStore
from holdfast.stores.sqlite import SqliteStore
from holdfast.testing import ManualClock
from holdfast.testing.suite import Harness
from tests.mysql.helpers import sql, store_at
from tests.postgres.helpers import Database, Travel
from tests.redis.helpers import later_by, outside
from tests.redis.helpers import store_at as redis_store_at


class ManualHarness(Harness):
    """An engine that takes its time from our process."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.ports = Ports(clock=self.clock)

    async def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)


class MemoryHarness(ManualHarness):
    def __init__(self) -> None:
        super().__init__()
        self.store = MemoryStore(ports=self.ports)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        async with self.store as store:
            yield store

    def second(self) -> contextlib.AbstractAsyncContextManager[Store]:
        return self.open()

    async def erase_session(self, session_id: SessionId) -> None:
        del self.store._sessions[session_id]


class SqliteHarness(ManualHarness):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.path = folder / "jobs.db"

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        async with SqliteStore(self.path, durability="relaxed", ports=self.ports) as store:
            yield store

    def second(self) -> contextlib.AbstractAsyncContextManager[Store]:
        return self.open()

    async def erase_session(self, session_id: SessionId) -> None:
        with contextlib.closing(sqlite3.connect(self.path, timeout=5)) as connection, connection:
            connection.execute("DELETE FROM holdfast_sessions WHERE id = ?", (session_id,))


class _AloneSqliteStore(SqliteStore):
    """Jobs that could have been enqueued by `task.enqueue` are: they go the way of the blocking call."""

    named: set[JobId]

    async def insert(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
        fresh: bool = False,
    ) -> list[Inserted]:
        ids = {job.id for job in jobs}
        new = not ids & self.named
        self.named |= ids
        if len(jobs) == 1 and checkpoint is None:
            return self.insert_blocking(jobs, limits=limits, fresh=new)
        return await super().insert(jobs, limits=limits, checkpoint=checkpoint, fresh=fresh)


class AloneSqliteHarness(SqliteHarness):
    """SQLite, with every job that can be among the arrivals until somebody takes it in."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._named: set[JobId] = set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        async with _AloneSqliteStore(self.path, durability="relaxed", ports=self.ports) as store:
            store.named = self._named
            yield store


class PostgresHarness(Harness):
    """A namespace of its own on a real server. `direct`: where the owner of the tables connects. `travel`: its clock,
    if time is to pass at once.
    """

    def __init__(self, url: str, namespace: str, *, direct: str, travel: Travel | None = None) -> None:
        self.url = url
        self.namespace = namespace
        self.step = 10.0 if travel else 0.25
        self._direct = direct
        self._travel = travel

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        async with PostgresStore(self.url, namespace=self.namespace) as store:
            yield store

    def second(self) -> contextlib.AbstractAsyncContextManager[Store]:
        return self.open()

    async def pass_time(self, seconds: float) -> None:
        if self._travel:
            self._travel.by(microseconds(seconds))
        else:
            await asyncio.sleep(seconds)

    async def erase_session(self, session_id: SessionId) -> None:
        self._execute(f"DELETE FROM {self.namespace}_sessions WHERE id = %s", session_id)

    async def age_closed_sessions(self, seconds: float) -> None:
        self._execute(f"UPDATE {self.namespace}_sessions SET beat_at = beat_at - %s WHERE NOT open", int(seconds * 1e6))

    def _execute(self, text: str, *values: object) -> None:
        with psycopg.connect(self._direct, autocommit=True) as connection:
            connection.execute(text.encode(), values)


def empty_postgres(url: str, namespace: str) -> None:
    """Leave nothing in the namespace but its schema, if it has one."""
    with contextlib.closing(Database(url, namespace)) as database:
        if database.exists():
            database.empty()


class MysqlHarness(Harness):
    """A namespace of its own on a real server with a real clock."""

    step = 0.25

    def __init__(self, url: str, namespace: str) -> None:
        self.url = url
        self.namespace = namespace

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        async with store_at(self.url, self.namespace) as store:
            yield store

    def second(self) -> contextlib.AbstractAsyncContextManager[Store]:
        return self.open()

    async def pass_time(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def erase_session(self, session_id: SessionId) -> None:
        for table in ("sessions", "gates"):
            sql(self.url, f"DELETE FROM {self.namespace}_{table} WHERE id = %s", session_id)

    async def age_closed_sessions(self, seconds: float) -> None:
        older = int(seconds * 1e6)
        sql(self.url, f"UPDATE {self.namespace}_sessions SET beat_at = beat_at - %s WHERE open = 0", older)


class RedisHarness(Harness):
    """A namespace of its own on a real server or cluster. Time passes by setting the clock that its scripts read."""

    def __init__(self, url: str, namespace: str, *, direct: str) -> None:
        self.url = f"{url}?namespace={namespace}"
        self.namespace = namespace
        self._client = outside(direct)
        self._passed = 0
        self._opened: list[RedisStore] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        store = later_by(redis_store_at(self.url), self._passed)
        self._opened.append(store)
        async with store:
            yield store

    def second(self) -> contextlib.AbstractAsyncContextManager[Store]:
        return self.open()

    async def pass_time(self, seconds: float) -> None:
        self._passed += microseconds(seconds)
        for store in self._opened:
            later_by(store, self._passed)

    async def erase_session(self, session_id: SessionId) -> None:
        self._client.delete(f"{self.namespace}:session:{session_id}")
        self._client.srem(f"{self.namespace}:sessions", session_id)
        for queue in self._client.smembers(f"{self.namespace}:queues"):
            self._client.hdel(f"{self.namespace}:{{{queue.decode()}}}:parts", session_id)

    async def age_closed_sessions(self, seconds: float) -> None:
        for session_id in self._client.smembers(f"{self.namespace}:sessions"):
            root = f"{self.namespace}:session:{session_id.decode()}"
            if self._client.hget(root, "open") == b"0":
                self._client.hincrby(root, "beat_at", -microseconds(seconds))
