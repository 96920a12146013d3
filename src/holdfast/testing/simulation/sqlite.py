"""SQLite inside the simulation: real SQL on a real file, each call one step of the simulated loop, and no threads."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from holdfast.job import NewJob
from holdfast.ports import Ports
from holdfast.store import Checkpoint, DepthLimit, Inserted
from holdfast.stores.sqlite.calls import Call
from holdfast.stores.sqlite.store import SqliteStore, _Opened
from holdfast.stores.wakeups import WakeupHub

T = TypeVar("T")

_IN_MEMORY = Path("/dev/shm")  # noqa: S108  where it exists, files cost no disk


class SteppedSqliteStore(SqliteStore):
    """The store of one simulated host: its own connections to the file, used where the caller stands.

    Its stores share one hub for wake-ups, where real processes would watch each other's commits from a thread.
    """

    def __init__(self, file: SimulatedFile, ports: Ports) -> None:
        super().__init__(file.path, durability="relaxed", ports=ports)
        self._file = file
        self._hub = file.hub
        file.stores.append(self)

    def beside(self) -> SteppedSqliteStore:
        """See `Store.beside`: connections of its own."""
        return SteppedSqliteStore(self._file, self._ports)

    async def _open_elsewhere(self) -> _Opened:
        return self._open()

    async def __aexit__(self, *exc: object) -> None:
        """Close the connections."""
        self.close()

    async def _write(self, verb: Callable[[sqlite3.Connection], T]) -> T:
        return self._open().writer.run(verb)

    async def insert(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
        fresh: bool = False,
    ) -> list[Inserted]:
        """See `Store.insert`. A job alone goes the way of `insert_blocking`, which has more to it: it arrives first."""
        if fresh and checkpoint is None:
            return self.insert_blocking(jobs, limits=limits, fresh=True)
        return await super().insert(jobs, limits=limits, checkpoint=checkpoint, fresh=fresh)

    async def _read(self, verb: Callable[[sqlite3.Connection], T]) -> T:
        loop = asyncio.get_running_loop()
        call = Call(verb, self._clock.monotonic() + self._timeout, loop, loop.create_future())
        self._open().reader._serve([call])
        if call.error is not None:
            raise call.error
        answer: T = call.answer
        return answer

    def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """See `Store.wakeups`."""
        return self._hub.waiting(queues)


class SimulatedFile:
    """A database file with our tables, in a folder that goes with it. `close` it at the end of a run."""

    def __init__(self) -> None:
        self._folder = _new_folder()
        self.path = Path(self._folder.name, "jobs.db")
        self.path.write_bytes(_empty_file())
        self.hub = WakeupHub()
        self.stores: list[SteppedSqliteStore] = []

    def close(self) -> None:
        """Close every connection, also those that killed hosts left open, and remove the file."""
        for store in self.stores:
            store.close()
        self._folder.cleanup()


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    where = _IN_MEMORY if os.access(_IN_MEMORY, os.W_OK) else None
    return tempfile.TemporaryDirectory(prefix="holdfast-simulation-", dir=where)


@cache
def _empty_file() -> bytes:
    """A file with our tables and nothing in it: migrating one is enough."""
    with _new_folder() as folder:
        path = Path(folder, "empty.db")
        store = SqliteStore(path, durability="relaxed")
        store._open()
        store.close()
        return path.read_bytes()
