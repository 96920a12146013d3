"""What a long backlog costs: claim, settle and enqueue with a thousand jobs ready, and with a million, on one server.

Both backlogs keep their length: as many are enqueued as are settled. A hundred are claimed while the hundred before
them are settled. The two take turns. The figure is the rate with the long one as a part of that with the short one.
"""

import asyncio
import statistics
import time

from benchmarks.measuring import Figures
from holdfast.job import NewJob
from holdfast.lifecycle import Applied, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import MOST_PER_CALL, Claimed, ClaimRequest, Session, Store
from holdfast.stores import open_store

SHORT = 1_000
BATCH = 100
ROUNDS = 10
ROUND_SECONDS = 1.0
PAYLOAD = b'{"n":12345,"s":"0123456789abcdef0123456789abcdef"}'
REQUEST = ClaimRequest(session_id="bench", queues=("bench",), limit=BATCH)


def growth(url: str, long: int) -> Figures:
    """One figure, `growth`, and the two rates behind it."""
    return asyncio.run(_growth(url, long))


async def _growth(url: str, long: int) -> Figures:
    async with _store(url, "short") as short_store, _store(url, "long") as long_store:
        stores = {"short": short_store, "long": long_store}
        for store in stores.values():
            await store.open_session(Session(id="bench", queues=("bench",)))
        await _fill(short_store, SHORT)
        await _fill(long_store, long)
        rates: dict[str, list[float]] = {name: [] for name in stores}
        for _ in range(ROUNDS):
            for name, store in stores.items():
                rates[name].append(await _work(store, ROUND_SECONDS))
    medians = {name: statistics.median(seen) for name, seen in rates.items()}
    return {"growth": medians["long"] / medians["short"], "rate_long": medians["long"], "rate_short": medians["short"]}


def _store(url: str, name: str) -> Store:
    """Two stores on one server, by their namespaces; on SQLite by their files, because a file has one writer."""
    where = f"{url}.{name}" if url.startswith("sqlite") else f"{url}?namespace={name}"
    return open_store(where, SYSTEM)


async def _fill(store: Store, count: int) -> None:
    for first in range(0, count, MOST_PER_CALL):
        await store.insert([_new() for _ in range(min(MOST_PER_CALL, count - first))])


def _new() -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="noop", payload=PAYLOAD, queue="bench")


async def _work(store: Store, seconds: float) -> float:
    done = 0
    began = time.perf_counter()
    settling: asyncio.Task[None] | None = None
    while time.perf_counter() - began < seconds:
        claimed = await store.claim(REQUEST)
        if len(claimed.jobs) != BATCH:
            raise RuntimeError(f"claimed {len(claimed.jobs)} of {BATCH}")
        if settling is not None:
            await settling
        settling = asyncio.create_task(_settle(store, claimed))
        done += BATCH
    if settling is not None:
        await settling
    return done / (time.perf_counter() - began)


async def _settle(store: Store, claimed: Claimed) -> None:
    moves = [settle(job, Succeeded(b"null"), RetryPolicy(), SYSTEM.random) for job in claimed.jobs]
    answers = await store.apply(moves)
    if answers != [Applied.APPLIED] * len(moves):
        raise RuntimeError(f"not all settled: {answers}")
    await store.insert([_new() for _ in claimed.jobs])
