"""How long a call takes at most while somebody keeps an old snapshot of the history, and retention goes on.

As a program it holds the snapshot for a minute: `python -m tests.postgres.held_snapshot URL`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable

from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.postgres import PostgresStore
from tests.postgres.helpers import MINUTE, Database, finish, new_jobs, raw


async def slowest_calls(
    database: Database, seconds: float, *, now_and_then: Callable[[], None] = lambda: None
) -> tuple[list[float], int]:
    """How long each insert and each settlement took, the longest first, and how many prunes there were."""
    pruned, over = 0, False
    times: list[float] = []

    async def prune(store: PostgresStore) -> None:
        nonlocal pruned
        while not over:
            await store.prune(100)
            pruned += 1
            await asyncio.sleep(0.01)

    with raw(database.url) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute(database.text("SELECT count(*) FROM {ns}_history"))
        async with database.store() as store, database.store() as keeper:
            session = SYSTEM.ids.session_id()
            await store.open_session(Session(id=session))
            pruning = asyncio.ensure_future(prune(keeper))
            settled = 0
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                begun = time.monotonic()
                await store.insert(new_jobs(10, retention=MINUTE))
                inserted = time.monotonic()
                request = ClaimRequest(session_id=session, queues=("default",), limit=10)
                jobs = (await store.claim(request)).jobs
                if settled % 30 == 0:
                    now_and_then()
                claimed = time.monotonic()
                await finish(store, jobs)
                times += (inserted - begun, time.monotonic() - claimed)
                settled += len(jobs)
            over = True
            await pruning
        reader.execute("ROLLBACK")
    return sorted(times, reverse=True), pruned


def main(url: str) -> None:
    """Print what a minute showed."""
    database = Database(url, "held_snapshot")
    database.store().open_blocking()
    times, pruned = asyncio.run(slowest_calls(database, 60))
    print(
        f"{len(times)} calls and {pruned} prunes beside a snapshot of 60 s; the slowest took {times[0] * 1000:.1f} ms"
    )
    database.close()


if __name__ == "__main__":
    main(sys.argv[1])
