"""The PostgreSQL store passes the conformance suite through PgBouncer, each statement perhaps on another connection."""

from __future__ import annotations

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from tests.servers import PgBouncerServer, PostgresServer
from tests.store.harnesses import PostgresHarness, empty_postgres

NAMESPACE = "pooled"


@pytest.fixture
def harness(postgres_server: PostgresServer, pgbouncer_server: PgBouncerServer) -> Harness:
    empty_postgres(postgres_server.url, NAMESPACE)
    return PostgresHarness(pgbouncer_server.url, NAMESPACE, direct=postgres_server.url)
