"""A session that is closed between two statements of one claim."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.errors import SessionClosed
from holdfast.job import NewJob
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.postgres.query import Query
from tests.postgres.helpers import Database


async def test_what_a_claim_has_taken_before_its_session_was_closed_is_not_kept_from_the_caller(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Store.claim`: one that already has jobs returns them rather than raise."""
    async with database.store() as store, database.store() as other:
        await store.open_session(Session(id="s"))
        await store.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(3)])
        # Got all that it asked for, it does not look back the next time, but then again in a second statement.
        assert len((await store.claim(ClaimRequest(session_id="s", queues=("default",), limit=2))).jobs) == 2
        connections = store._connections
        execute: Callable[[Query], Awaitable[list[tuple[Any, ...]]]] = connections._execute
        asked: list[int] = []

        async def close_after_the_first(query: Query) -> list[tuple[Any, ...]]:
            rows = await execute(query)
            if "_claim" in query.text:
                asked.append(len(rows) - 1)
                await other.close_session("s")
            return rows

        monkeypatch.setattr(connections, "_execute", close_after_the_first)
        request = ClaimRequest(session_id="s", queues=("default",), limit=5)
        claimed = await store.claim(request)
        assert asked == [1, 0]
        assert [job.version for job in claimed.jobs] == [1]
        assert [job.id for job in await store.lost(10)].count(claimed.jobs[0].id) == 1
        with pytest.raises(SessionClosed):
            await store.claim(request)
