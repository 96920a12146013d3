"""Calls without a cursor (`direct.py`): prepared where that is safe, and right where it only seemed to be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.stores.postgres import PostgresStore, direct
from holdfast.stores.postgres.query import Query
from tests.postgres.helpers import Database, new_job, raw
from tests.servers import PgBouncerServer, PostgresServer

CALLS = direct._PREPARED_FROM + 2
NAMES = "SELECT name FROM pg_prepared_statements"


async def insert(store: PostgresStore, blocking: bool, times: int = CALLS) -> None:
    for _ in range(times):
        if blocking:
            [inserted] = await asyncio.to_thread(store.insert_blocking, [new_job()], fresh=True)
        else:
            [inserted] = await store.insert([new_job()], fresh=True)
        assert inserted.status == "created"


async def ask(store: PostgresStore, blocking: bool, text: str) -> list[tuple[Any, ...]]:
    """On the connection that made the calls."""
    if blocking:
        return await asyncio.to_thread(store._connections._execute_blocking, Query(text))
    return await store._connections._execute(Query(text))


def kept(store: PostgresStore, blocking: bool) -> direct.Prepared:
    """What the connection that made the calls has prepared."""
    if blocking:
        [connection] = store._connections._idle_blocking
        return connection._made_ready
    [mine] = store._connections._loops.values()
    [waiting] = mine.idle
    return waiting._made_ready


both = pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])


@both
async def test_prepared_where_it_is_used_often(database: Database, store: PostgresStore, blocking: bool) -> None:
    await insert(store, blocking, direct._PREPARED_FROM - 1)
    assert await ask(store, blocking, NAMES) == []
    await insert(store, blocking)
    assert await ask(store, blocking, NAMES) == [(store._verbs._insert_single.name.decode(),)]
    assert database.number_of("waiting") == direct._PREPARED_FROM - 1 + CALLS


@both
@pytest.mark.parametrize("gone", ["DEALLOCATE ALL", "DISCARD ALL"])
async def test_what_was_prepared_is_gone(database: Database, store: PostgresStore, blocking: bool, gone: str) -> None:
    await insert(store, blocking)
    await ask(store, blocking, gone)
    await insert(store, blocking)
    assert database.number_of("waiting") == 2 * CALLS
    assert await ask(store, blocking, NAMES) == []
    assert not kept(store, blocking).may


@both
async def test_somebody_has_prepared_it_already(database: Database, store: PostgresStore, blocking: bool) -> None:
    """As another client of a pooler may have, under the same name and so with the same text."""
    statement = store._verbs._insert_single
    await insert(store, blocking, 1)
    await ask(store, blocking, f"PREPARE {statement.name.decode()} AS {statement.text.decode()}")
    await insert(store, blocking)
    assert kept(store, blocking).names == {statement.name}
    assert database.number_of("waiting") == 1 + CALLS


@both
async def test_the_function_is_made_anew(database: Database, store: PostgresStore, blocking: bool) -> None:
    """As by `pg_restore` or a migration, with the same name: what was prepared finds it, or says that it cannot."""
    [(definition,)] = database.sql("SELECT pg_get_functiondef(to_regproc('{ns}_insert_single'))")
    await insert(store, blocking)
    try:
        database.sql("DO $$ BEGIN EXECUTE 'DROP FUNCTION ' || to_regproc('{ns}_insert_single')::regprocedure; END $$")
        with pytest.raises(StoreUnavailable, match="does not exist"):
            await insert(store, blocking, 1)
        # Another type of answer: the server refuses to go on with what was prepared.
        database.sql(definition.replace("RETURNS bigint", "RETURNS numeric"))
        await insert(store, blocking)
        assert not kept(store, blocking).may
    finally:
        database.sql("DO $$ BEGIN EXECUTE 'DROP FUNCTION ' || to_regproc('{ns}_insert_single')::regprocedure; END $$")
        database.sql(definition)
    assert database.number_of("waiting") == 2 * CALLS


def left_behind(server: PostgresServer, pgbouncer: PgBouncerServer) -> int:
    """How many prepared statements there are on the connections of the pooler, each of which is asked."""
    seen: dict[int, int] = {}
    text = "SELECT pg_backend_pid(), (SELECT count(*) FROM pg_prepared_statements)"
    clients = [raw(pgbouncer.url, autocommit=False, prepare_threshold=None) for _ in range(8)]
    try:
        for client in clients:  # at once, so that each has one to itself
            row = client.execute(text.encode()).fetchone()
            assert row is not None
            seen[row[0]] = row[1]
    finally:
        for client in clients:
            client.rollback()
            client.close()
    return sum(seen.values())


@both
@pytest.mark.parametrize("hidden", [False, True], ids=["seen", "hidden"])
async def test_behind_a_pooler(
    database: Database,
    postgres_server: PostgresServer,
    monkeypatch: pytest.MonkeyPatch,
    blocking: bool,
    hidden: bool,
) -> None:
    """Nothing is prepared; and if the pooler cannot be seen, no harm is done."""
    with PgBouncerServer(postgres_server) as pgbouncer:
        if hidden:
            monkeypatch.setattr(direct, "_is_pooled", lambda *_: False)
        store = PostgresStore(pgbouncer.url, namespace=database.namespace)
        try:
            await insert(store, blocking)
            # Another connection of the pooler's is the next one.
            with raw(pgbouncer.url, autocommit=False, prepare_threshold=None) as client:
                client.execute("SELECT 1")
                await insert(store, blocking)
            await insert(store, blocking)
        finally:
            store.close()
        assert database.number_of("waiting") == 3 * CALLS
        # The control: had it prepared anything, it would be seen.
        assert (left_behind(postgres_server, pgbouncer) > 0) is hidden
