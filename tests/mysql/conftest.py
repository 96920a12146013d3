"""Fixtures of these tests: the server, and a store in a namespace with nothing in it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator

import pytest

from holdfast.stores.mysql import MysqlStore
from tests.mysql.helpers import drop, empty, store_at

NAMESPACE = "jobs"


@pytest.fixture(params=["mariadb", *(["mysql"] if os.environ.get("HOLDFAST_TEST_MYSQL") else [])])
def url(request: pytest.FixtureRequest) -> str:
    if request.param == "mysql":
        return os.environ["HOLDFAST_TEST_MYSQL"]
    return str(request.getfixturevalue("mariadb_server").url)


@pytest.fixture
def bare(url: str) -> Iterator[str]:
    """A namespace without tables."""
    drop(url, "bare")
    yield "bare"
    drop(url, "bare")


@pytest.fixture
async def store(url: str) -> AsyncIterator[MysqlStore]:
    empty(url, NAMESPACE)
    async with store_at(url, NAMESPACE) as opened:
        yield opened
