"""A deadlock that cannot be missed: the server ends it at the store's expense, and nobody hears of it."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.job import Key, NewJob
from holdfast.ports import SYSTEM
from holdfast.store import Inserted, InsertStatus, Store
from holdfast.stores import open_store
from tests.faults.engines import ON_SQL, Sql, SqlDatabase

pytestmark = ON_SQL
_KEYS = ("a", "m", "z")
_HOUR = 3600 * 1_000_000
_SOON = 20.0


def lock(sql: Sql, database: SqlDatabase, key: str) -> None:
    sql.run(f"SELECT 1 FROM holdfast_keys WHERE queue = 'default' AND {database.key_column} = %s FOR UPDATE", key)


async def insert_into_a_deadlock(store: Store, database: SqlDatabase) -> list[Inserted]:
    """Insert jobs with the keys a, m and z, while somebody else holds z and waits for a.

    m is there to have it happen in this order: the store is the last to wait, so it is certain that all three wait.
    """
    jobs = [NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", key=Key(key, "hash", _HOUR)) for key in _KEYS]
    with ExitStack() as stack:
        for key in _KEYS:
            database.sql(
                f"INSERT INTO holdfast_keys (queue, {database.key_column}, key_hash, job_id, expires_at) "
                f"VALUES ('default', %s, 'old', %s, 0)",
                key,
                SYSTEM.ids.job_id(),
            )
        gate, other = stack.enter_context(database.connect()), stack.enter_context(database.connect())
        gate.run("BEGIN")
        lock(gate, database, "m")
        database.begin_spared(other)
        lock(other, database, "z")
        async with asyncio.timeout(_SOON):
            inserting = asyncio.create_task(store.insert(jobs))
            while database.waiting_for_locks() < 1:  # noqa: ASYNC110  the server decides
                await asyncio.sleep(0.02)
            blocked = asyncio.create_task(asyncio.to_thread(lock, other, database, "a"))
            while database.waiting_for_locks() < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            gate.run("ROLLBACK")
            await blocked  # the store had to let go of a
            other.run("ROLLBACK")
            return await inserting


async def test_a_deadlock_is_retried_and_user_code_does_not_see_it(database: SqlDatabase) -> None:
    async with open_store(database.url(), SYSTEM) as store:
        before = database.deadlocks()
        answers = await insert_into_a_deadlock(store, database)
        assert [answer.status for answer in answers] == [InsertStatus.CREATED] * 3
        assert [count.ready for count in await store.counts()] == [3]
    assert database.deadlocks() == before + 1


async def test_without_retries_the_deadlock_reaches_user_code(
    database: SqlDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    database.never_retry(monkeypatch)
    async with open_store(database.url(), SYSTEM) as store:
        with pytest.raises(StoreUnavailable, match=r"(?i)deadlock"):
            await insert_into_a_deadlock(store, database)
        assert await store.counts() == []
