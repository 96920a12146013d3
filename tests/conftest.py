"""Fixtures shared by all tests. Servers are started once per run, when the first test asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.servers import PostgresServer, RedisServer, missing_server_policy


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A private PostgreSQL, shared by the whole run: use a namespace or a database of your own in it."""
    with missing_server_policy():
        server = PostgresServer()
    with server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A private Redis, shared by the whole run: use a namespace of your own in it."""
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server
