"""Claim + settle on PostgreSQL in a crowded store, beside the same work in an empty one on the same server.

Crowded: a million scheduled jobs (half of them behind the ready ones in the lane that is worked on, the rest in other
queues), a million finished ones in the history (a week's, and some of the last hour), and half a million ready ones in
one lane. The empty store has what a round needs. In both, a hundred jobs are claimed while the hundred before them are
settled, on two connections. In the first round the server has no statistics, unless its autovacuum has been there; the
tables are ANALYZEd before the second.
"""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from rich.progress import Progress

from benchmarks.measure import Figures, in_turns, median, quiet_progress, rate, scaled
from holdfast.job import DEFAULT_MAX_RETRIES, DEFAULT_PRIORITY, DEFAULT_RETENTION
from holdfast.lifecycle import Applied, Move, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.postgres import PostgresStore
from tests.servers import PostgresServer

SCHEDULED = scaled(1_000_000, 1_000)
FINISHED = scaled(1_000_000, 1_000)
READY = scaled(500_000, 1_000)
BATCH = 100
JOBS = scaled(40_000, BATCH)
ROUNDS = 3
CHUNK = 50_000
PAYLOAD = b'{"n":12345,"s":"abcdefghijklmnopqrstuvwxyzabcdef"}'
HOUR = 3_600_000_000
WEEK = 7 * 24 * HOUR

Connection = psycopg.Connection[Any]

# As clients make them: the time in milliseconds, the rest random.
UUID7 = """
    CREATE OR REPLACE FUNCTION bench_uuid7(made_at bigint) RETURNS uuid LANGUAGE sql VOLATILE
    AS $$ SELECT (lpad(to_hex(made_at / 1000), 12, '0') || '-7' || substr(gen_random_uuid()::text, 16))::uuid $$"""


def _new_jobs(namespace: str) -> str:
    """Rows as `insert` writes them: what it does not name has its default. The rest of the statement says which."""
    return f"""
        INSERT INTO {namespace}_waiting (id, task, payload, task_version, queue, share, priority, max_retries,
                                         retention, created_at, run_at)
        SELECT bench_uuid7(made_at), 'noop', %(payload)s, '1', queue, share, priority, {DEFAULT_MAX_RETRIES},
               {DEFAULT_RETENTION}, made_at, run_at"""


def fill_ready(connection: Connection, namespace: str, first: int, count: int, step: int) -> None:
    """That many ready jobs in the lane `bench`, enqueued at `first` and every `step` microseconds after it."""
    connection.execute(
        f"""{_new_jobs(namespace)}
            FROM generate_series(0, %(count)s::bigint - 1) n
            CROSS JOIN LATERAL (
                SELECT at AS made_at, at AS run_at, 'bench' AS queue, '' AS share, {DEFAULT_PRIORITY} AS priority
                FROM (VALUES (%(first)s::bigint + n * %(step)s::bigint)) v (at)) x""".encode(),
        {"payload": PAYLOAD, "first": first, "step": step, "count": count},
    )


def fill_just_enqueued(connection: Connection, namespace: str, count: int) -> None:
    """That many ready jobs, behind all that were there before: a microsecond apart and until now."""
    now = store_time(connection, namespace)
    for done in range(0, count, CHUNK):
        fill_ready(connection, namespace, now - count + done, min(CHUNK, count - done), 1)


def store_time(connection: Connection, namespace: str) -> int:
    [now] = connection.execute(f"SELECT {namespace}_now()".encode()).fetchone() or [0]
    return int(now)


def _fill_scheduled(connection: Connection, namespace: str, first: int, count: int, step: int) -> None:
    """Jobs that are due in the week that begins in an hour: every other one in the lane `bench`, the rest elsewhere."""
    connection.execute(
        f"""{_new_jobs(namespace)}
            FROM (SELECT %(first)s::bigint + n * %(step)s::bigint AS made_at,
                         {namespace}_now() + {HOUR} + (random() * {WEEK})::bigint AS run_at,
                         (ARRAY['bench', 'mail', 'bench', 'reports'])[1 + n %% 4] AS queue,
                         CASE WHEN n %% 4 = 3 THEN 'customer-' || n %% 50 ELSE '' END AS share,
                         (ARRAY[{DEFAULT_PRIORITY}, 0, {DEFAULT_PRIORITY}, 10])[1 + n %% 4] AS priority
                  FROM generate_series(0, %(count)s::bigint - 1) n) x""".encode(),
        {"payload": PAYLOAD, "first": first, "step": step, "count": count},
    )


def fill_finished(connection: Connection, namespace: str, first: int, count: int, step: int, *, retention: int) -> None:
    """Jobs that have succeeded, the first at `first`, as `settle` writes them, and their tallies."""
    connection.execute(
        f"""WITH made AS (
                INSERT INTO {namespace}_history (id, task, payload, task_version, queue, share, priority, max_retries,
                    retention, created_at, reason, run_at, version, session_id, attempt, claimed_at, state, ended_at,
                    expires_at, result, slot)
                SELECT bench_uuid7(ended_at - 1000000), 'noop', %(payload)s, '1', queue, '', {DEFAULT_PRIORITY},
                       {DEFAULT_MAX_RETRIES}, %(retention)s, ended_at - 1000000, 'succeeded', ended_at - 1000000, 1,
                       'earlier', 1, ended_at - 10000, 'succeeded', ended_at, ended_at + %(retention)s::bigint,
                       'null'::bytea, {namespace}_slot(%(retention)s::bigint, ended_at)
                FROM (SELECT %(first)s::bigint + n * %(step)s::bigint AS ended_at,
                             (ARRAY['bench', 'mail', 'bench', 'reports'])[1 + n %% 4] AS queue
                      FROM generate_series(0, %(count)s::bigint - 1) n) x
                RETURNING slot, queue, state
            )
            INSERT INTO {namespace}_tallies (slot, queue, state, jobs)
            SELECT slot, queue, state, count(*) FROM made GROUP BY slot, queue, state""".encode(),
        {"payload": PAYLOAD, "first": first, "step": step, "count": count, "retention": retention},
    )


def _crowd(connection: Connection, namespace: str, progress: Progress) -> None:
    """Everything in the order of time: the week's history, the hour's, then what waits, enqueued in the last hour."""
    now = store_time(connection, namespace)

    def fill(what: str, count: int, since: int, insert: Callable[[int, int, int], None]) -> None:
        bar = progress.add_task(what, total=count)
        step = since // count
        for done in range(0, count, CHUNK):
            progress.update(bar, completed=done, refresh=True)
            insert(now - since + done * step, min(CHUNK, count - done), step)
        progress.update(bar, completed=count, refresh=True)

    of_the_hour = FINISHED // 5
    fill(
        "finished jobs, kept for a week",
        FINISHED - of_the_hour,
        WEEK - HOUR,  # none of them expires while we measure
        lambda *part: fill_finished(connection, namespace, *part, retention=DEFAULT_RETENTION),
    )
    fill(
        "finished jobs, kept for an hour",
        of_the_hour,
        HOUR * 3 // 4,
        lambda *part: fill_finished(connection, namespace, *part, retention=HOUR),
    )
    fill("scheduled jobs", SCHEDULED, HOUR, lambda *part: _fill_scheduled(connection, namespace, *part))
    fill("ready jobs", READY, HOUR, lambda *part: fill_ready(connection, namespace, *part))


async def _work(store: PostgresStore) -> int:
    """Claim and settle on two connections: a settlement and the claim after it overlap."""
    request = ClaimRequest(session_id="bench", queues=("bench",), limit=BATCH)
    settling: asyncio.Task[None] | None = None
    for _ in range(JOBS // BATCH):
        claimed = await store.claim(request)
        assert len(claimed.jobs) == BATCH
        moves = [settle(job, Succeeded(b"null"), RetryPolicy(), SYSTEM.random) for job in claimed.jobs]
        if settling is not None:
            await settling
        settling = asyncio.create_task(_settle(store, moves))
    if settling is not None:
        await settling
    return JOBS


async def _settle(store: PostgresStore, moves: list[Move]) -> None:
    assert await store.apply(moves) == [Applied.APPLIED] * BATCH


def _measured(url: str, progress: Progress) -> dict[str, list[Figures]]:
    with (
        psycopg.connect(url, autocommit=True) as connection,
        asyncio.Runner() as runner,  # one loop for all rounds: a worker keeps its connections, too
    ):
        connection.execute(UUID7)
        stores = {name: PostgresStore(url, namespace=name) for name in ("empty", "crowded")}
        for store in stores.values():
            runner.run(store.open_session(Session(id="bench")))
        _crowd(connection, "crowded", progress)
        connection.execute("CHECKPOINT")  # what the filling left to write is none of the first round's business

        def before_round(number: int) -> None:
            fill_just_enqueued(connection, "empty", JOBS)
            if number == 1:
                connection.execute("ANALYZE")

        def contestant(store: PostgresStore) -> Callable[[], Figures]:
            return lambda: {"rate": rate(lambda: runner.run(_work(store)))}

        try:
            contestants = {name: contestant(store) for name, store in stores.items()}
            return in_turns(contestants, ROUNDS, progress, before_round)
        finally:
            for store in stores.values():
                store.close()


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """Two results: of all rounds, and of the first alone."""
    with quiet_progress() as progress, PostgresServer() as server:
        seen = _measured(server.url, progress)
    crowd = f"{SCHEDULED:,} scheduled, {FINISHED:,} finished, {READY:,} ready"
    for which, rounds, target in (("", slice(None), 0.8), (" (before ANALYZE)", slice(1), None)):
        ours, reference = median(seen["crowded"][rounds], "rate"), median(seen["empty"][rounds], "rate")
        yield {
            "benchmark": f"PostgreSQL: claim+settle among {crowd} / in an empty store{which}",
            "ours": ours,
            "reference": reference,
            "ratio": ours / reference,
            "target": target,
            "unit": "jobs/s",
        }
