"""Two callers at one key, in the worst order: one brings a job back while the other inserts a new one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.job import Key, NewJob, State
from holdfast.lifecycle import Applied, replay
from holdfast.ports import SYSTEM
from holdfast.store import InsertStatus, JobQuery
from holdfast.stores import open_store
from tests.faults.engines import ON_SQL, SqlDatabase

pytestmark = ON_SQL
_KEY = Key("k", "hash", 3600 * 1_000_000)
_SOON = 20.0


def new_job(key: Key | None = _KEY) -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", key=key)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  the server decides
        await asyncio.sleep(0.02)


async def test_of_a_replay_and_an_insert_with_one_key_only_one_gets_it(database: SqlDatabase) -> None:
    async with open_store(database.url(), SYSTEM) as store, asyncio.timeout(_SOON):
        # The replay may lock what lies next to its job, by id; the other job is not next to it.
        second, between, first = new_job(), new_job(key=None), new_job()
        await store.insert([first, between])
        await store.request_cancel([first.id])  # which frees the key
        cancelled = await store.get(first.id)
        assert cancelled is not None
        # The replay has seen that the key is free when it has to wait, to count one cancelled job less.
        with database.locked(database.totals_table):
            replaying = asyncio.create_task(store.apply([replay(cancelled)]))
            await _until(lambda: database.waiting_for_locks() == 1)
            inserting = asyncio.create_task(store.insert([second]))
            await _until(lambda: inserting.done() or database.waiting_for_locks() == 2)
        [replayed], [inserted] = await replaying, await inserting
        print(f"{database.engine}: the replay is {replayed}, the insert {inserted.status}")
        assert (replayed, inserted.status) in [
            (Applied.APPLIED, InsertStatus.EXISTING),
            (Applied.KEY_TAKEN, InsertStatus.CREATED),
        ]
        jobs = (await store.find(JobQuery())).jobs
        assert sum(job.state is State.READY and job.key is not None for job in jobs) == 1
