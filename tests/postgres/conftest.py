"""A namespace for each module of tests, emptied between them; and a store on it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from holdfast.stores.postgres import PostgresStore
from tests.postgres.helpers import Database
from tests.postgres.named import Named
from tests.servers import PostgresServer


@pytest.fixture(scope="module")
def namespace_of_module(postgres_server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Database]:
    """The tables, made."""
    database = Database(postgres_server.url, request.module.__name__.rpartition(".")[2])
    store = database.store()
    store.open_blocking()
    store.close()
    yield database
    database.close()


@pytest.fixture
def database(namespace_of_module: Database) -> Database:
    """The module's namespace, with nothing in it."""
    namespace_of_module.empty()
    return namespace_of_module


@pytest_asyncio.fixture
async def store(database: Database) -> AsyncIterator[PostgresStore]:
    async with database.store() as store:
        yield store


@pytest.fixture
def named(database: Database) -> Iterator[Named]:
    named = Named(database)
    yield named
    named.store.close()
