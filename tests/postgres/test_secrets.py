"""What no error may tell: passwords, payloads."""

from __future__ import annotations

import asyncio
import traceback

import psycopg
import pytest

from holdfast.errors import InvalidOption, StoreUnavailable
from holdfast.ports import SYSTEM
from holdfast.stores import open_store
from holdfast.stores.postgres import PostgresStore
from tests.postgres.helpers import Database, new_job, raw
from tests.servers import PostgresServer


@pytest.fixture(scope="module")
def guarded(postgres_server: PostgresServer) -> str:
    """Somebody who needs a password."""
    with raw(postgres_server.url) as connection:
        connection.execute("CREATE ROLE guarded LOGIN PASSWORD 'another'")
        rules = postgres_server.folder / "data" / "pg_hba.conf"
        rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + rules.read_text())
        connection.execute("SELECT pg_reload_conf()")
    return postgres_server.url.replace("holdfast@", "guarded:hunter2-%C3%BC%25@")


def everything_said(problem: BaseException | None) -> str:
    words = []
    while problem is not None:
        words += [str(problem), repr(problem), "".join(traceback.format_exception(problem))]
        problem = problem.__cause__ or (None if problem.__suppress_context__ else problem.__context__)
    return "\n".join(words)


async def test_a_wrong_password_is_not_told(guarded: str) -> None:
    for url in (
        guarded,
        f"{guarded}?sslmode=disable",
        guarded.replace("/postgres", "/no_such_database"),
        guarded.replace("127.0.0.1", "127.0.0.1:1,127.0.0.1"),
    ):
        store = open_store(url, SYSTEM)
        assert isinstance(store, PostgresStore)
        assert "hunter2" not in repr(store)
        for call in (
            store.counts,
            store.examine,
            lambda store=store: asyncio.to_thread(store.insert_blocking, [new_job()]),
        ):
            with pytest.raises(StoreUnavailable) as refused:
                await call()
            assert "hunter2" not in everything_said(refused.value)
            assert "password authentication failed" in str(refused.value) or "cannot connect" in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:hunter2@[::1/db",
        "postgresql://u:hunter2@host/db?no_such_option=1",
        "postgresql://u:hunter2%zz@host/db",
    ],
)
def test_a_url_that_cannot_be_read_is_not_quoted(url: str) -> None:
    with pytest.raises(InvalidOption) as refused:
        open_store(url, SYSTEM)
    assert "hunter2" not in everything_said(refused.value)


async def test_a_payload_is_in_no_error(store: PostgresStore, database: Database) -> None:
    """Not even if the server quotes it in its own."""
    database.sql("ALTER TABLE {ns}_waiting ADD CONSTRAINT picky CHECK (octet_length(payload) < 10)")
    job = new_job(payload=b'{"secret": "hunter2"}')
    try:
        with pytest.raises(StoreUnavailable, match="violates check constraint") as refused:
            await store.insert([job])
        with psycopg.connect(database.url) as own, pytest.raises(StoreUnavailable) as refused_there:
            store.insert_on(own, [job])
    finally:
        database.sql("ALTER TABLE {ns}_waiting DROP CONSTRAINT picky")
    for problem in (refused, refused_there):
        assert "hunter2" not in str(problem.value)
        assert job.payload.hex() not in str(problem.value)
