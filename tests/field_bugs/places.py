"""Where the tests of field bugs keep their jobs: a place of each engine, new for each test, several at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import pytest

from holdfast.ports import SYSTEM, Ports
from holdfast.store import Store
from holdfast.stores import open_store
from tests.faults.engines import ENGINES, Database
from tests.faults.stage import StoreStage
from tests.servers import Server

T = TypeVar("T")

MEMORY, SQLITE, POSTGRES, MARIADB, REDIS = "memory", "sqlite", "postgres", "mariadb", "redis"
SHARED_BY_PROCESSES = (SQLITE, POSTGRES, MARIADB, REDIS)
EVERY_ENGINE = (MEMORY, *SHARED_BY_PROCESSES)

_numbers = itertools.count(1)


class Place:
    """An empty store of an engine, in a folder of its own, and on a database of its own if it has a server."""

    def __init__(self, engine: str, folder: Path, server: Server | None) -> None:
        self.engine = engine
        self.folder = folder
        self.database: Database | None = None
        if server is not None:
            self.database = ENGINES[engine](server, f"field_bugs_{next(_numbers)}")
        self._in_memory = open_store("memory://", SYSTEM)

    @property
    def url(self) -> str:
        if self.database is not None:
            return self.database.url()
        return f"sqlite:///{self.folder / 'jobs.db'}"

    def store(self, ports: Ports = SYSTEM) -> Store:
        """A way to the jobs: always the same in memory, a new one elsewhere."""
        return self._in_memory if self.engine == MEMORY else open_store(self.url, ports)

    @contextmanager
    def opened(self) -> Iterator[Place]:
        """The place, until the block ends."""
        if self.database is None:
            yield self
            return
        self.database.create()
        try:
            yield self
        finally:
            self.database.drop()


class MakePlace:
    """Makes places for a test: what the fixture `places` is."""

    def __init__(self, request: pytest.FixtureRequest, folders: pytest.TempPathFactory) -> None:
        self._request = request
        self._folders = folders
        self._pools: list[ThreadPoolExecutor] = []

    def of(self, engine: str) -> Place:
        """A new place, not opened yet."""
        server = self._request.getfixturevalue(f"{engine}_server") if engine in ENGINES else None
        return Place(engine, self._folders.mktemp(engine), server)

    def play(self, engines: tuple[str, ...], scene: Callable[[StoreStage], T]) -> Played[T]:
        """Begin a scene with worker processes on all these engines at once."""

        def play(place: Place) -> T:
            with StoreStage(place.folder, place.url) as stage:
                return scene(stage)

        return self.ask(engines, play)

    def ask(self, engines: tuple[str, ...], question: Callable[[Place], T]) -> Played[T]:
        """The same for what needs no processes."""

        def ask(place: Place) -> T:
            with place.opened():
                return question(place)

        places = [self.of(engine) for engine in engines]  # fixtures are no matter for threads
        pool = ThreadPoolExecutor(len(places))
        self._pools.append(pool)
        return Played({place.engine: pool.submit(ask, place) for place in places})

    def close(self) -> None:
        """Wait until everything is over, whether or not anybody asks for it."""
        for pool in self._pools:
            pool.shutdown()


class Played(Generic[T]):
    """What was found on each engine, once it is over there. What was raised there is raised for whoever asks."""

    def __init__(self, found: Mapping[str, Future[T]]) -> None:
        self._found = found

    def __getitem__(self, engine: str) -> T:
        return self._found[engine].result()

    def items(self) -> Iterator[tuple[str, T]]:
        """Of every engine."""
        return ((engine, self[engine]) for engine in self._found)


def on(*engines: str) -> pytest.MarkDecorator:
    """The mark of a test that looks at one engine at a time."""
    return pytest.mark.parametrize("engine", engines)
