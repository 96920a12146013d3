"""Every test here runs on every engine that has a server."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Iterator

import pytest

from tests.faults.engines import ENGINES, Database
from tests.servers import Server, missing_server_policy

_numbers = itertools.count(1)


@pytest.fixture
def fault_seconds() -> float:
    """How long the long tests go on. HOLDFAST_FAULT_SECONDS=30 makes them longer than they are in a usual run."""
    return float(os.environ.get("HOLDFAST_FAULT_SECONDS", "4"))


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    if request.param == "mariadb" and importlib.util.find_spec("holdfast.stores.mysql.store") is None:
        pytest.skip("not there yet")
    return str(request.param)


@pytest.fixture
def database(engine: str, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database of the test's own on the server that all tests share."""
    server: Server = request.getfixturevalue(f"{engine}_server")
    database = ENGINES[engine](server, f"faults_{next(_numbers)}")
    database.create()
    yield database
    database.drop()


@pytest.fixture
def own_server(engine: str) -> Iterator[Database]:
    """A database on a server of the test's own, to be killed or stopped."""
    with missing_server_policy():
        server = ENGINES[engine].start()
    with server:
        yield ENGINES[engine](server)
