"""Claim + settle on PostgreSQL while another connection holds a REPEATABLE READ snapshot, beside the rate before.

While a snapshot is held, the server keeps every row that was deleted since, in the tables and in the indexes: queues
that begin each claim at the head of their index fall to a sixth of their rate within a minute. Constant full load: one
connection claims 500 jobs after the other, another settles them (5 % fail and are retried up to two seconds later), a
third keeps some ten thousand jobs ready, and a fourth enqueues in transactions that commit 0.7 s late. Half-way the
tables are ANALYZEd. The figures are from 20 s before the snapshot and from its last 20 s.
"""

import asyncio
import random
import time

import psycopg

from benchmarks.measuring import Figures
from holdfast.failures import Failure
from holdfast.job import Job, NewJob
from holdfast.lifecycle import Failed, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.postgres import PostgresStore

MEASURED, SETTLES = 20.0, 5.0
BATCH = 500
READY = 10_000
PAYLOAD = b'{"n":12345,"s":"abcdefghijklmnopqrstuvwxyzabcdef"}'
BOOM = Failure(at=0, attempt=1, type="Boom", message="it went wrong")


class Load:
    """The load, and what it counts."""

    def __init__(self, store: PostgresStore, url: str) -> None:
        self.store = store
        self.url = url
        self.done: list[tuple[float, int]] = []
        self.ready = 0
        self.late: dict[str, float] = {}
        self.late_waits: list[float] = []
        self.claims: list[tuple[float, float]] = []
        self.ending = False

    async def run(self, seconds: float) -> None:
        await self.store.open_session(Session(id="bench"))
        claimed: asyncio.Queue[tuple[Job, ...]] = asyncio.Queue(2)
        tasks = [
            asyncio.ensure_future(loop)
            for loop in (self._produce(), self._produce_late(), self._claim(claimed), self._settle(claimed))
        ]
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
        self.ending = True
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome

    async def _produce(self) -> None:
        while not self.ending:
            if self.ready < READY:
                await self.store.insert([_new() for _ in range(1_000)])
                self.ready += 1_000
            else:
                await asyncio.sleep(0.002)

    async def _produce_late(self) -> None:
        async with await psycopg.AsyncConnection.connect(self.url) as connection:
            while not self.ending:
                jobs = [_new() for _ in range(20)]
                await self.store.ainsert_on(connection, jobs)
                await asyncio.sleep(0.7)
                await connection.commit()
                self.late.update((job.id, time.monotonic()) for job in jobs)

    async def _claim(self, claimed: "asyncio.Queue[tuple[Job, ...]]") -> None:
        turn = 0
        while not self.ending:
            begun = time.monotonic()
            got = await self.store.claim(ClaimRequest(session_id="bench", queues=("default",), limit=BATCH, turn=turn))
            now = time.monotonic()
            self.claims.append((now, now - begun))
            turn += 1
            self.ready -= len(got.jobs)
            for job in got.jobs:
                if (committed := self.late.pop(job.id, None)) is not None:
                    self.late_waits.append(now - committed)
            if got.jobs:
                await claimed.put(got.jobs)

    async def _settle(self, claimed: "asyncio.Queue[tuple[Job, ...]]") -> None:
        policy = RetryPolicy()
        while not self.ending:
            jobs = await claimed.get()
            moves = []
            for job in jobs:
                again = random.random() < 0.05
                outcome = Failed(BOOM, retry_after=2 * random.random()) if again else Succeeded(b"null")
                self.ready += again
                moves.append(settle(job, outcome, policy, SYSTEM.random))
            await self.store.apply(moves)
            self.done.append((time.monotonic(), len(jobs)))

    def rate(self, since: float, until: float) -> float:
        return sum(jobs for at, jobs in self.done if since <= at < until) / (until - since)

    def slowest_claim(self, since: float, until: float) -> float:
        return max((took for at, took in self.claims if since <= at < until), default=0.0)


def _new() -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="noop", payload=PAYLOAD, max_retries=1_000)


async def _measure(url: str, held_seconds: float) -> Figures:
    measured = min(MEASURED, held_seconds / 2)
    before_seconds = measured + SETTLES
    async with PostgresStore(url) as store:
        load = Load(store, url)
        began = time.monotonic()
        end = before_seconds + held_seconds
        running = asyncio.ensure_future(load.run(end + 2))

        async def until(seconds: float) -> None:
            left = began + seconds - time.monotonic()
            await asyncio.wait([running], timeout=max(0.0, left))

        await until(before_seconds)
        before = load.rate(began + before_seconds - measured, began + before_seconds)
        async with await psycopg.AsyncConnection.connect(url) as holder:
            await holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            await holder.execute("SELECT count(*) FROM holdfast_waiting")
            await until(before_seconds + held_seconds / 2)
            async with await psycopg.AsyncConnection.connect(url, autocommit=True) as other:
                await other.execute("ANALYZE")
            await until(end)
            held = load.rate(began + end - measured, began + end)
            slowest = load.slowest_claim(began + end - measured, began + end)
        await running
    return {
        "snapshot": held / before,
        "snapshot_before": before,
        "snapshot_held": held,
        "snapshot_slowest_claim_ms": 1000 * slowest,
        "snapshot_late_wait_ms": 1000 * max(load.late_waits, default=0.0),
    }


def held_snapshot(url: str, held_seconds: float) -> Figures:
    """The rate in the last seconds of a held snapshot beside that before it (`snapshot`), and what is behind it.

    That is the two rates, the slowest claim, and how long a job that was committed late had to wait.
    """
    return asyncio.run(_measure(url, held_seconds))
