"""The PostgreSQL store passes the conformance suite, as a role that may do no more than a worker needs.

Time passes by setting the server's clock: `test_postgres_pooled.py` waits instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from holdfast.testing.suite.overlapping import *  # noqa: F403
from tests.postgres.helpers import Database, Travel
from tests.postgres.roles import make_roles
from tests.servers import PostgresServer
from tests.store.harnesses import PostgresHarness, empty_postgres

NAMESPACE = "suite"


@pytest.fixture(scope="module")
def worker_url(postgres_server: PostgresServer) -> str:
    return make_roles(postgres_server.url, NAMESPACE)["worker"]


@pytest.fixture(scope="module")
def travel(postgres_server: PostgresServer, worker_url: str) -> Iterator[Travel]:
    with closing(Database(postgres_server.url, NAMESPACE)) as database:
        yield database.travelling()


@pytest.fixture
def harness(postgres_server: PostgresServer, worker_url: str, travel: Travel) -> Harness:
    empty_postgres(postgres_server.url, NAMESPACE)
    return PostgresHarness(worker_url, NAMESPACE, direct=postgres_server.url, travel=travel)
