"""Claims on Redis from a long backlog, beside the same claims from a short one; each has a server of its own.

First, claims of a hundred jobs from a million ready ones and from a thousand, in one lane. Only the call is timed;
then its jobs are settled and as many new ones enqueued, so that both backlogs keep their length and the claims go on
through the long one. Second, a million scheduled jobs come to the long backlog (half of them in the lane that is worked
on, the rest in other queues), and claim + settle is measured there and in the other store, which has what a round needs
and that thousand: a hundred jobs are claimed while the hundred before them are settled. What was settled stays in both
histories.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.measure import Figures, in_turns, median, quiet_progress, rate, scaled
from holdfast.job import NewJob
from holdfast.lifecycle import Applied, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import MOST_PER_CALL, Claimed, ClaimRequest, Session, Store
from holdfast.stores import open_store
from tests.servers import RedisServer

LONG = scaled(1_000_000, 1_000)
SHORT = 1_000
SCHEDULED = scaled(1_000_000, 1_000)
BATCH = 100
CLAIMS = 25  # of one backlog in one round
CLAIM_ROUNDS = 16
JOBS = scaled(20_000, BATCH)  # claimed and settled in one round
WORK_ROUNDS = 5
PAYLOAD = b'{"n":12345,"s":"abcdefghijklmnopqrstuvwxyzabcdef"}'
HOUR = 3_600_000_000
WEEK = 7 * 24 * HOUR

SCATTER = random.Random(1)
REQUEST = ClaimRequest(session_id="bench", queues=("bench",), limit=BATCH)


def _ready(number: int) -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="noop", payload=PAYLOAD, queue="bench")


def _scheduled(number: int) -> NewJob:
    """Due in the week that begins in an hour: every other one in the lane `bench`, the rest elsewhere."""
    return NewJob(
        id=SYSTEM.ids.job_id(),
        task="noop",
        payload=PAYLOAD,
        queue=("bench", "mail", "bench", "reports")[number % 4],
        share=f"customer-{number % 50}" if number % 4 == 3 else "",
        delay=HOUR + SCATTER.randrange(WEEK),
    )


async def _fill(
    store: Store,
    count: int,
    new_job: Callable[[int], NewJob] = _ready,
    advance: Callable[[int], None] = lambda done: None,
) -> None:
    for first in range(0, count, MOST_PER_CALL):
        last = min(first + MOST_PER_CALL, count)
        await store.insert([new_job(number) for number in range(first, last)])
        advance(last)


async def _settle(store: Store, claimed: Claimed) -> None:
    moves = [settle(job, Succeeded(b"null"), RetryPolicy(), SYSTEM.random) for job in claimed.jobs]
    assert await store.apply(moves) == [Applied.APPLIED] * BATCH


async def _claims(store: Store) -> Figures:
    """The rate of the median claim. Everything else between two claims is the same for both stores and not timed."""
    seconds = []
    for _ in range(CLAIMS):
        started = time.perf_counter()
        claimed = await store.claim(REQUEST)
        seconds.append(time.perf_counter() - started)
        assert len(claimed.jobs) == BATCH
        await _settle(store, claimed)
        await _fill(store, BATCH)
    return {"rate": BATCH / statistics.median(seconds)}


async def _work(store: Store) -> int:
    """Claim and settle: a settlement and the claim after it overlap."""
    settling: asyncio.Task[None] | None = None
    for _ in range(JOBS // BATCH):
        claimed = await store.claim(REQUEST)
        assert len(claimed.jobs) == BATCH
        if settling is not None:
            await settling
        settling = asyncio.create_task(_settle(store, claimed))
    if settling is not None:
        await settling
    return JOBS


def _measured(urls: dict[str, str], progress: Progress) -> dict[str, dict[str, list[Figures]]]:
    stack = AsyncExitStack()
    with asyncio.Runner() as runner:  # one loop for all rounds: a worker keeps its connections, too
        try:
            stores = {
                name: runner.run(stack.enter_async_context(open_store(url, SYSTEM))) for name, url in urls.items()
            }
            for store in stores.values():
                runner.run(store.open_session(Session(id="bench", queues=("bench",))))

            def fill(name: str, what: str, count: int, new_job: Callable[[int], NewJob]) -> None:
                bar = progress.add_task(what, total=count)
                runner.run(
                    _fill(stores[name], count, new_job, lambda done: progress.update(bar, completed=done, refresh=True))
                )

            def claims(store: Store) -> Callable[[], Figures]:
                return lambda: runner.run(_claims(store))

            def work(store: Store) -> Callable[[], Figures]:
                return lambda: {"rate": rate(lambda: runner.run(_work(store)))}

            def before_work(number: int) -> None:
                for store in stores.values():
                    runner.run(_fill(store, JOBS))

            fill("short", "short backlog", SHORT, _ready)
            fill("long", "long backlog", LONG, _ready)
            of_claims = in_turns({name: claims(store) for name, store in stores.items()}, CLAIM_ROUNDS, progress)
            fill("long", "scheduled jobs", SCHEDULED, _scheduled)
            of_work = in_turns(
                {name: work(store) for name, store in stores.items()}, WORK_ROUNDS, progress, before_work
            )
            return {"claims": of_claims, "work": of_work}
        finally:
            runner.run(stack.aclose())


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """Two results: of claims alone, and of claim + settle among scheduled jobs as well."""
    with quiet_progress() as progress, RedisServer() as short, RedisServer() as long:
        seen = _measured({"short": short.url, "long": long.url}, progress)
    for what, title, target in (
        ("claims", f"claim of {BATCH} from {LONG:,} ready / from {SHORT:,}", 0.8),
        ("work", f"claim+settle among {LONG:,} ready, {SCHEDULED:,} scheduled / in an empty store", None),
    ):
        ours, reference = median(seen[what]["long"], "rate"), median(seen[what]["short"], "rate")
        yield {
            "benchmark": f"Redis: {title}",
            "ours": ours,
            "reference": reference,
            "ratio": ours / reference,
            "target": target,
            "unit": "jobs/s",
        }
