"""The PostgreSQL store passes the conformance suite."""

from __future__ import annotations

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from tests.servers import PostgresServer
from tests.store.harnesses import PostgresHarness, empty_postgres


@pytest.fixture
def harness(postgres_server: PostgresServer) -> Harness:
    empty_postgres(postgres_server.url, "suite")
    return PostgresHarness(postgres_server.url, "suite")
