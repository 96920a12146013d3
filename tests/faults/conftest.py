"""Every test here runs on every engine that has a server, unless its mark says `ON_SQL` or `ON_REDIS`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.faults.engines import ENGINES, Database
from tests.servers import Server, missing_server_policy

_numbers = itertools.count(1)


@pytest.fixture
def fault_seconds() -> float:
    """How long the long tests go on. HOLDFAST_FAULT_SECONDS=30 makes them longer than they are in a usual run."""
    return float(os.environ.get("HOLDFAST_FAULT_SECONDS", "3"))


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def database(engine: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of the test's own on the server that all tests share."""
    server: Server = request.getfixturevalue(f"{engine}_server")
    with _created(ENGINES[engine](server, f"faults_{next(_numbers)}")) as database:
        yield database


@pytest.fixture(scope="module")
def own_server(engine: str) -> Iterator[Server]:
    """A server to be killed or stopped."""
    with missing_server_policy():
        server = ENGINES[engine].start()
    with server:
        yield server


@pytest.fixture
def own_database(engine: str, own_server: Server) -> Iterator[Database]:
    """A database there, with the durability that the server ships with."""
    with _created(ENGINES[engine](own_server, f"faults_{next(_numbers)}"), durable=True) as database:
        yield database


@contextmanager
def _created(database: Database, *, durable: bool = False) -> Iterator[Database]:
    database.create(durable=durable)
    try:
        yield database
    finally:
        database.drop()
