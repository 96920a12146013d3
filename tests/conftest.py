"""Fixtures shared by all tests. Servers are started once per run, when the first test asks for them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tests.servers import (
    MariaDbServer,
    PgBouncerServer,
    PostgresServer,
    RedisCluster,
    RedisServer,
    missing_server_policy,
)

# Before any thread wants them: pytest rewrites the modules of the package, because it has a plugin in it, and two
# threads that do so at once may fail in CPython 3.11 (AST constructor recursion depth mismatch).
for engine in ("mysql", "postgres", "redis", "sqlite"):
    importlib.import_module(f"holdfast.stores.{engine}")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """A private PostgreSQL, shared by the whole run: use a namespace or a database of your own in it.

    It does not wait for the disk at a commit; what is to survive a crash is tested on a server of the test's own.
    """
    with missing_server_policy():
        server = PostgresServer(settings={"synchronous_commit": "off", "max_connections": "300"})
    with server:
        yield server


@pytest.fixture(scope="session")
def pgbouncer_server(postgres_server: PostgresServer) -> Iterator[PgBouncerServer]:
    """A private PgBouncer that pools transactions, in front of the shared PostgreSQL."""
    with missing_server_policy():
        server = PgBouncerServer(postgres_server)
    with server:
        yield server


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaDbServer]:
    """A private MariaDB, shared by the whole run: use a database of your own in it."""
    with missing_server_policy():
        server = MariaDbServer()
    with server:
        yield server


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """A private Redis, shared by the whole run: use a namespace of your own in it."""
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


@pytest.fixture(scope="session")
def redis_cluster() -> Iterator[RedisCluster]:
    """A private Redis Cluster of three masters, shared by the whole run: use a namespace of your own in it."""
    with missing_server_policy():
        cluster = RedisCluster()
    with cluster:
        yield cluster
