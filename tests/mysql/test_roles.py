"""The least that each kind of user must be granted, as docs/reference/mysql.md has it. The page itself is run."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.job import Key, State
from holdfast.lifecycle import replay
from holdfast.store import Checkpoint, DepthLimit, JobQuery, all_sessions
from holdfast.stores.mysql import MysqlStore
from tests.mysql.helpers import claim, done, new_job, new_jobs, open_session, sql, store_at
from tests.servers import MariaDbServer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "mysql.md"


@pytest.fixture
def as_user(mariadb_server: MariaDbServer) -> Iterator[Callable[[str], MysqlStore]]:
    """Stores opened as one of the users of the page, in a database `app` that the first of them has migrated."""
    url = mariadb_server.url.removesuffix("/test")
    [grants] = re.findall(r"```sql\n(-- migrating.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)
    sql(f"{url}/test", "DROP DATABASE IF EXISTS app")
    sql(f"{url}/test", "CREATE DATABASE app")
    for user in ("holdfast_migrate", "holdfast_producer", "holdfast_worker", "holdfast_reader"):
        sql(f"{url}/test", f"CREATE OR REPLACE USER {user}@'%'")
    statements = [part.strip() for part in re.sub(r"--.*", "", grants).split(";") if part.strip()]
    stores: list[MysqlStore] = []

    def open_as(user: str) -> MysqlStore:
        stores.append(store_at(f"{url.replace('holdfast@', f'{user}@')}/app"))
        return stores[-1]

    first = True
    for statement in statements:
        if "holdfast_migrate" not in statement and first:
            open_as("holdfast_migrate")._open_blocking()  # a grant names a table that must exist
            first = False
        sql(f"{url}/app", statement)
    yield open_as
    for store in stores:
        store.close()
    sql(f"{url}/test", "DROP DATABASE app")


def fails(call: Any) -> bool:
    """Whether the server denies it."""
    with pytest.raises(StoreUnavailable, match=r"denied.*granted to it"):
        call()
    return True


async def test_a_worker_can_do_all_of_its_work(as_user: Callable[[str], MysqlStore]) -> None:
    store = as_user("holdfast_worker")
    await open_session(store)
    await store.insert([*new_jobs(4, retention=0), new_job(key=Key("k", "h", 1)), new_job(delay=1)])
    await store.insert([new_job()], checkpoint=Checkpoint("default", "c", None, "1"))
    jobs = await claim(store)
    assert len(jobs) == 7
    await store.note(jobs[0].lease, b"half")
    await store.request_cancel([jobs[1].id])
    assert (await store.beat("s")).cancel == (jobs[1].id,)
    assert await store.apply(done(jobs)) == ["applied"] * 7
    [succeeded, *_] = (await store.find(JobQuery(states=(State.SUCCEEDED,)))).jobs
    assert await store.apply([replay(succeeded)]) == ["applied"]
    await store.set_paused("mail", True)
    await store.set_paused("mail", False)
    assert await store.close_session("s")
    assert await store.prune(100) > 0
    assert await store.lost(10) == []
    assert (await store.examine())[0].name == "survives"
    sql_error = await asyncio.to_thread(lambda: fails(lambda: store._on_thread(_drop_table)))
    assert sql_error


def _drop_table() -> Any:
    from holdfast.stores.mysql.sql import one

    yield from one("DROP TABLE holdfast_ready")


async def test_a_producer_can_enqueue_and_nothing_else(as_user: Callable[[str], MysqlStore]) -> None:
    store = as_user("holdfast_producer")
    key = Key("k", "h", 1)
    assert [answer.status for answer in await store.insert([new_job(), new_job(key=key)])] == ["created", "created"]
    await asyncio.sleep(0.01)
    [again] = await store.insert([new_job(key=key)])  # the key's time is over
    assert again.status == "created"
    [blocking] = await asyncio.to_thread(
        store.insert_blocking, [new_job()], limits={"default": DepthLimit(max_depth=9)}
    )
    assert blocking.status == "created"
    for call in (
        lambda: open_session(store),
        lambda: claim(store),
        lambda: store.request_cancel([new_job().id]),
        lambda: store.set_paused("default", True),
        lambda: store.prune(10),
    ):
        with pytest.raises(StoreUnavailable, match="denied"):
            await call()
    with pytest.raises(StoreUnavailable, match="denied"):
        await all_sessions(store)


async def test_a_reader_can_look_and_change_nothing(as_user: Callable[[str], MysqlStore]) -> None:
    worker = as_user("holdfast_worker")
    await worker.insert(new_jobs(3))
    store = as_user("holdfast_reader")
    assert [count.ready for count in await store.counts()] == [3]
    assert len((await store.find(JobQuery())).jobs) == 3
    assert await all_sessions(store) == []
    assert (await store.examine())[0].name == "survives"
    with pytest.raises(StoreUnavailable, match="denied"):
        await store.insert([new_job()])
    with pytest.raises(StoreUnavailable, match="denied"):
        await store.set_paused("default", True)
