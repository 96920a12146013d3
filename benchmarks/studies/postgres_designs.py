"""Three ways to keep jobs in PostgreSQL, each with every index that the features need. The SQL is in `designs/`.

- moved: ours. A claim moves the row from the table of waiting jobs to that of jobs in flight, a settlement moves it on
  to the history, a ring of partitions that are truncated, or to the dead letters.
- one table: a claim and a settlement update the row in place; ended jobs stay where they are, to be deleted one by one.
- live table: a claim updates the row in place, a settlement moves it to the same history as ours.

All have the columns of the real tables and the same verbs, each one function with the shapes and settings that fix its
plan: insert (no id twice in a job's whole life), claim (the session is open), settle (the session is open and holds the
job in this version; the job ends, is retried, or is a dead letter), with the tallies of ended jobs. One client. Each
design starts with some hundred thousand ended jobs. Of the jobs measured, two in a hundred are retried later and one
fails for good. The tables are ANALYZEd before the second round.

Not in the figures: keys, which are the same everywhere; and the removal of what has expired, which costs one table one
more dead row for each job, and the others none.
"""

import json
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.measure import Figures, in_turns, median, quiet_progress, rate, scaled
from benchmarks.studies.postgres_backlog import HOUR, PAYLOAD, UUID7, WEEK, Connection, fill_finished, store_time
from holdfast.job import DEFAULT_MAX_RETRIES, DEFAULT_PRIORITY, DEFAULT_RETENTION
from holdfast.ports import SYSTEM
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.rows import IDENTITY
from tests.servers import PostgresServer

BATCHES = (100, 500)
JOBS = scaled(20_000, 500)
ENDED = scaled(200_000, 1_000)
ROUNDS = 3

# The names are those of the tables, too, and of a namespace with the store's own tables.
OURS = "moved"
DESIGNS = {
    OURS: ("among_ended.sql", "moved.sql"),
    "one_table": ("one_table.sql", "in_place.sql"),
    "live_table": ("live_table.sql", "in_place.sql", "among_ended.sql"),
}
FRAGMENTS = {
    "{identity}": IDENTITY,
    "{settings}": """LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan
        SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
        SET jit = off""",
    # As the store's own tables have it; with some room for the new version of a row on the page of the old one.
    "{hot}": """fillfactor = 80, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_cost_delay = 1, autovacuum_analyze_scale_factor = 0.2, autovacuum_analyze_threshold = 1000""",
}


def _prepare(connection: Connection, url: str) -> None:
    """The tables and functions of every design, an open session, and a history of half a week."""
    connection.execute(UUID7)
    for name, files in DESIGNS.items():
        store = PostgresStore(url, namespace=name)
        store.open_blocking()
        store.close()
        for file in files:
            text = (Path(__file__).parent / "designs" / file).read_text()
            for mark, meaning in {"{ns}": name, **FRAGMENTS}.items():
                text = text.replace(mark, meaning)
            connection.execute(text.encode())
        connection.execute(
            f"""INSERT INTO {name}_sessions (id, opened_at, beat_at, host, pid, queues)
                VALUES ('bench', {name}_now(), {name}_now(), '', 0, '')""".encode()
        )
        first = store_time(connection, name) - WEEK // 2
        fill_finished(connection, name, first, ENDED, WEEK // 2 // ENDED, retention=DEFAULT_RETENTION)
    columns = (
        f"{IDENTITY}, reason, run_at, version, session_id, attempt, failures, crashes, snoozes, suspect, claimed_at, "
        "failure_history, progress, cancel_asked, state, ended_at, expires_at, result"
    )
    connection.execute(f"INSERT INTO one_table_rows ({columns}) SELECT {columns} FROM one_table_history".encode())
    connection.execute("TRUNCATE one_table_history")


class Client:
    """The one client of a design."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._insert = f"SELECT {name}_put(%s::json, %s::uuid, %s::uuid)"
        self._claim = f"SELECT * FROM {name}_take('bench', 'bench', {DEFAULT_PRIORITY}::smallint, '', %s::int)"
        self._settle = f"SELECT {name}_end('bench', %s::json)"
        self.jobs = 0
        """How many it has brought to their end, or to a retry."""

    def measure(self, batch: int) -> Figures:
        # All begin alike: nothing is left to be written for others, and a page is logged as a whole when first touched.
        self._ask("CHECKPOINT")
        before = self._logged()
        inserted = rate(lambda: self._insert_all(batch))
        settled = rate(lambda: self._claim_and_settle_all(batch))
        self.jobs += JOBS
        return {"insert": inserted, "claim+settle": settled, "log": (self._logged() - before) / JOBS}

    def _ask(self, text: str, *values: object) -> list[Any]:
        cursor = self._connection.execute(text.encode(), values, binary=True)
        return cursor.fetchall() if cursor.description else []

    def _logged(self) -> int:
        [(logged,)] = self._ask("SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint")
        return int(logged)

    def _insert_all(self, batch: int) -> int:
        same = {
            "task": "noop",
            "payload": b64encode(PAYLOAD).decode(),
            "task_version": "1",
            "queue": "bench",
            "share": "",
            "priority": DEFAULT_PRIORITY,
            "max_retries": DEFAULT_MAX_RETRIES,
            "retention": DEFAULT_RETENTION,
        }
        for _ in range(JOBS // batch):
            ids = [SYSTEM.ids.job_id() for _ in range(batch)]
            jobs = json.dumps([{"id": job_id, **same} for job_id in ids])
            assert self._ask(self._insert, jobs, min(ids), max(ids)) == [(batch,)]
        return JOBS

    def _claim_and_settle_all(self, batch: int) -> int:
        for _ in range(JOBS // batch):
            rows = self._ask(self._claim, batch)
            assert len(rows) == batch
            moves = json.dumps([_move(row, place % 100) for place, row in enumerate(rows)])
            assert self._ask(self._settle, moves) == [(batch,)]
        return JOBS


def _move(row: tuple[Any, ...], place: int) -> dict[str, Any]:
    """The first of a hundred fails for good, the next two are retried, the others succeed."""
    to, why = {0: ("failed", "exhausted"), 1: ("ready", "retried"), 2: ("ready", "retried")}.get(
        place, ("succeeded", "succeeded")
    )
    return {
        "job_id": str(row[0]),
        "at_version": row[17],
        "to": to,
        "why": why,
        "attempts": row[19] + 1,
        "failed": row[20] + (to != "succeeded"),
        "delay": HOUR,
        "outcome": b64encode(b"null").decode() if to == "succeeded" else None,
    }


def _dead_rows(connection: Connection, name: str) -> int:
    """How many rows the design has updated or deleted: each has left a dead one, even if it was vacuumed since."""
    [dead] = connection.execute(
        "SELECT sum(n_tup_upd + n_tup_del) FROM pg_stat_user_tables WHERE starts_with(relname, %s::text)",
        (f"{name}_",),
    ).fetchone() or [0]
    return int(dead)


def _measured(url: str) -> tuple[dict[str, list[Figures]], dict[str, float]]:
    """The figures of every design and batch, and how many dead rows a job leaves in each design."""

    def contestant(client: Client, batch: int) -> Callable[[], Figures]:
        return lambda: client.measure(batch)

    with psycopg.connect(url, autocommit=True) as connection:
        with quiet_progress() as progress, ExitStack() as connections:
            bar = progress.add_task("preparing the tables", total=None)
            progress.refresh()
            _prepare(connection, url)
            progress.remove_task(bar)
            clients = {
                name: Client(
                    connections.enter_context(psycopg.connect(url, autocommit=True, prepare_threshold=None)), name
                )
                for name in DESIGNS
            }
            contestants = {
                f"{name}, {batch}": contestant(client, batch) for batch in BATCHES for name, client in clients.items()
            }

            def before_round(number: int) -> None:
                if number == 1:
                    connection.execute("ANALYZE")

            seen = in_turns(contestants, ROUNDS, progress, before_round)
        time.sleep(1)  # the server counts what a connection did when that ends; before PostgreSQL 15, a little later
        return seen, {name: _dead_rows(connection, name) / client.jobs for name, client in clients.items()}


def run(folder: Path) -> Iterator[dict[str, Any]]:
    """Ours beside each of the others: rates, and what a job leaves in the log and in the tables."""
    with PostgresServer() as server:
        seen, dead = _measured(server.url)
    for rival in DESIGNS:
        if rival == OURS:
            continue
        results = [
            (
                f"{what}, batches of {batch}",
                unit,
                median(seen[f"{OURS}, {batch}"], figure),
                median(seen[f"{rival}, {batch}"], figure),
            )
            for batch in BATCHES
            for figure, what, unit in (
                ("claim+settle", "claim+settle", "rows/s"),
                ("insert", "insert", "rows/s"),
                ("log", "WAL from insert to end", "bytes/job"),
            )
        ]
        results.append(("dead rows from insert to end", "rows/job", dead[OURS], dead[rival]))
        for what, unit, ours, reference in results:
            yield {
                "benchmark": f"PostgreSQL: {what}, {OURS} / {rival.replace('_', ' ')}",
                "ours": ours,
                "reference": reference,
                "ratio": ours / reference,
                "target": None,
                "unit": unit,
            }
