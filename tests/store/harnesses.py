"""How the conformance suite reaches the engines of this repository."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

from holdfast.job import SessionId
from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import SqliteStore
from holdfast.testing import ManualClock
from holdfast.testing.suite import Harness


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
