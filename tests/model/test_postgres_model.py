"""PostgreSQL behaves as the memory store does, whatever is asked of it in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

import psycopg
import pytest

from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.query import Verb
from tests.model.machine import StoreModel, agrees_with_memory, search_for_a_fault
from tests.servers import PostgresServer
from tests.store.harnesses import empty_postgres

T = TypeVar("T")

NAMESPACE = "model"
EXAMPLES = 40


class SteeredStore(PostgresStore):
    """A store whose server goes by the test's clock: the function that reads the time reads a table."""

    shown: int | None = None

    async def _run(self, verb: Verb[T]) -> T:
        now = self._ports.clock.now()
        if now != self.shown:
            self.shown = now
            with psycopg.connect(self._url, autocommit=True) as connection:
                connection.execute(f"UPDATE {NAMESPACE}_clock SET now_us = %s".encode(), (now,))
        return await super()._run(verb)


class PostgresModel(StoreModel):
    url: ClassVar[str]

    def open_store(self, folder: Path, ports: Ports) -> Store:
        empty_postgres(self.url, NAMESPACE)
        return SteeredStore(self.url, namespace=NAMESPACE, ports=ports)


@pytest.fixture(scope="module")
def model(postgres_server: PostgresServer) -> type[PostgresModel]:
    PostgresModel.url = postgres_server.url
    PostgresStore(postgres_server.url, namespace=NAMESPACE).open_blocking()
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {NAMESPACE}_clock AS SELECT 0::bigint AS now_us".encode())
        connection.execute(_replaced("now() RETURNS bigint", f"SELECT now_us FROM {NAMESPACE}_clock"))
    return PostgresModel


def _replaced(signature: str, body: str) -> bytes:
    return f"CREATE OR REPLACE FUNCTION {NAMESPACE}_{signature} LANGUAGE sql STABLE AS $$ {body} $$".encode()


def test_postgres_agrees_with_memory(model: type[PostgresModel]) -> None:
    agrees_with_memory(model, examples=EXAMPLES)


# The negative control: with a guard of the server's functions taken out, the comparison fails. Another, the token in
# `settle`, is found by chance too seldom here; the conformance suite asks for it directly.


def closed_sessions_may_claim(text: str) -> str:
    return text.replace("s.id = p_session AND s.open FOR KEY SHARE", "s.id = p_session FOR KEY SHARE")


@pytest.mark.parametrize(("function", "sabotage"), [("claim", closed_sessions_may_claim)])
def test_the_comparison_notices(model: type[PostgresModel], function: str, sabotage: Callable[[str], str]) -> None:
    with psycopg.connect(model.url, autocommit=True) as connection:
        row = connection.execute(
            "SELECT pg_get_functiondef(oid) FROM pg_proc WHERE proname = %s", (f"{NAMESPACE}_{function}",)
        ).fetchone()
        assert row is not None
        [text] = row
        broken = sabotage(text)
        assert broken != text
        connection.execute(broken.encode())
        try:
            with pytest.raises(AssertionError):
                search_for_a_fault(model, examples=2 * EXAMPLES)
        finally:
            connection.execute(text.encode())
