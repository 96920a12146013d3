"""The plans of what functions in the server do, as it carries them out, and a namespace with a lot in it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

from holdfast.job import NewJob
from holdfast.store import Inserted
from holdfast.stores.driving import drive
from holdfast.stores.postgres.direct import Prepared, answer
from holdfast.stores.postgres.query import Query, Verb
from holdfast.stores.postgres.verbs import Verbs
from tests.postgres.helpers import Database, Raw, raw

WAITING, IN_FLIGHT, HISTORY, KEPT = 200_000, 50_000, 100_000, 20_000
BIG = ("waiting", "in_flight", "kept", "keys", *(f"history_{slot}" for slot in range(18)))
"""The tables that may be large."""

_FILL = f"""
ALTER TABLE {{ns}}_waiting SET (autovacuum_enabled = off);
ALTER TABLE {{ns}}_in_flight SET (autovacuum_enabled = off);
ALTER TABLE {{ns}}_kept SET (autovacuum_enabled = off);
ALTER TABLE {{ns}}_keys SET (autovacuum_enabled = off);
ALTER TABLE {{ns}}_tallies SET (autovacuum_enabled = off);
ALTER TABLE {{ns}}_sessions SET (autovacuum_enabled = off);
DO $$ BEGIN FOR slot IN 0..17 LOOP
    EXECUTE format('ALTER TABLE {{ns}}_history_%s SET (autovacuum_enabled = off)', slot);
END LOOP; END $$;
INSERT INTO {{ns}}_sessions (id, open, opened_at, beat_at, host, pid, queues)
SELECT to_char(n, 'FM000'), n >= 10, 0, {{ns}}_now(), 'host', n, 'default' FROM generate_series(0, 99) n;
INSERT INTO {{ns}}_waiting (id, task, payload, task_version, queue, share, priority, max_retries, retention, created_at,
    run_at)
SELECT gen_random_uuid(), 'work', '{{}}', '1', CASE WHEN n % 4 = 0 THEN 'mail' ELSE 'default' END,
       CASE WHEN n % 3 = 0 THEN 'acme' ELSE '' END, n % 2 * 5, 3, 3600000000, 0,
       {{ns}}_now() - (50000000 - n * 300)
FROM generate_series(1, {WAITING}) n;
INSERT INTO {{ns}}_in_flight (id, task, payload, task_version, queue, share, priority, max_retries, retention,
    created_at, run_at, version, session_id, claimed_at)
SELECT gen_random_uuid(), 'work', '{{}}', '1', 'default', '', 5, 3, 3600000000, 0, 0, 1, to_char(n % 100, 'FM000'),
       {{ns}}_now() - n
FROM generate_series(1, {IN_FLIGHT}) n;
INSERT INTO {{ns}}_history (id, task, payload, task_version, queue, share, priority, max_retries, retention, created_at,
    run_at, state, ended_at, expires_at, slot)
SELECT gen_random_uuid(), 'work', '{{}}', '1', 'default', '', 5, 3, 3600000000, 0, 0, 'succeeded', 1,
       {{ns}}_now() + (n - {HISTORY // 2})::bigint * 1000000, n % 18
FROM generate_series(1, {HISTORY}) n;
INSERT INTO {{ns}}_kept (id, task, payload, task_version, queue, share, priority, max_retries, retention, created_at,
    run_at, state, ended_at, expires_at)
SELECT gen_random_uuid(), 'work', '{{}}', '1', 'default', '', 5, 3, 0, 0, 0,
       CASE WHEN n % 2 = 0 THEN 'failed' ELSE 'succeeded' END, 1, CASE WHEN n % 2 = 1 THEN {{ns}}_now() + n * 1000 END
FROM generate_series(1, {KEPT}) n;
INSERT INTO {{ns}}_keys (queue, key, key_hash, job_id, expires_at)
SELECT 'default', 'key' || n, 'h', gen_random_uuid(), {{ns}}_now() + (n - 1000)::bigint * 1000000
FROM generate_series(1, 20000) n;
INSERT INTO {{ns}}_tallies (slot, queue, state, jobs)
SELECT n % 18, 'default', 'succeeded', 1 FROM generate_series(1, 2000) n;
"""


def fill(database: Database) -> None:
    """Hundreds of thousands of jobs in every state. Nothing analyses them by itself."""
    database.sql(_FILL)


class Node(dict[str, Any]):
    """A step of a plan."""

    def walk(self) -> Iterator[Node]:
        """It, and all below."""
        yield self
        for below in self.get("Plans", ()):
            yield from Node(below).walk()

    @property
    def rows_read(self) -> int:
        """How many rows it has looked at, over all its repetitions."""
        per_loop = self.get("Actual Rows", 0) + sum(self[name] for name in self if name.startswith("Rows Removed by"))
        return int(per_loop * self.get("Actual Loops", 1))


class Plan:
    """A statement, and how the server carried it out."""

    def __init__(self, text: str, top: Node) -> None:
        self.text = " ".join(text.split())
        self.nodes = list(top.walk())

    def scans(self, table: str) -> list[Node]:
        """Where it reads that table."""
        return [node for node in self.nodes if node.get("Relation Name") == table]

    def __repr__(self) -> str:
        steps = [
            " ".join(str(node[name]) for name in ("Node Type", "Relation Name", "Index Name") if name in node)
            for node in self.nodes
        ]
        return f"{self.text[:150]}: {steps}"


class Recorder:
    """A connection on which verbs run, and which keeps the plan of every statement, those inside functions included."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.namespace = database.namespace
        self.verbs = Verbs(database.namespace)
        self.plans: list[Plan] = []
        self._prepared = Prepared()
        self.connection: Raw = raw(database.url)
        self.connection.add_notice_handler(self._note)
        for statement in (
            "LOAD 'auto_explain'",
            "SET auto_explain.log_nested_statements = on",
            "SET auto_explain.log_min_duration = 0",
            "SET auto_explain.log_format = json",
            "SET auto_explain.log_analyze = on",
            "SET auto_explain.log_timing = off",
            "SET client_min_messages = log",
            "BEGIN",
        ):
            self.connection.execute(statement.encode())

    def _note(self, notice: psycopg.errors.Diagnostic) -> None:
        _, found, explained = (notice.message_primary or "").partition("plan:\n")
        if found:
            plan = json.loads(explained)
            self.plans.append(Plan(plan["Query Text"], Node(plan["Plan"])))

    def run(self, verb: Verb[Any]) -> Any:
        """Carry out a verb, in a transaction that will be rolled back."""
        answer = drive(verb, self._execute)
        self.connection.execute("SELECT 1")  # a statement is over, and explained, when the next one begins
        return answer

    def insert_fresh(self, job: NewJob, tell: Sequence[str] = ()) -> Inserted:
        """Insert a fresh job by the store's own call."""
        direct = self.verbs.single([job], None, tell)
        assert direct is not None
        now = self.connection.wait(answer(self.connection.pgconn, self._prepared, direct))
        self.connection.execute("SELECT 1")
        inserted = self.verbs.inserted([job], now)
        assert inserted is not None
        return inserted[0]

    def sql(self, text: str, *values: Any) -> list[tuple[Any, ...]]:
        """A statement of the test's own."""
        rows = self._execute(Query(self.database.text(text).decode(), values))
        self.connection.execute("SELECT 1")
        return rows

    def _execute(self, query: Query) -> list[tuple[Any, ...]]:
        cursor = self.connection.execute(query.text.encode(), query.values)
        return cursor.fetchall() if cursor.description else []

    def of(self, *words: str) -> Plan:
        """The plan of the only statement in which all these words stand."""
        found = [
            plan for plan in self.plans if all(word.replace("{ns}", self.namespace) in plan.text for word in words)
        ]
        assert len(found) == 1, f"{words}: {found or self.plans}"
        return found[0]

    def require_frugal(self, most: int) -> None:
        """No statement reads a large table from end to end, nor more than so many rows of it."""
        assert self.plans
        for plan in self.plans:
            for table in BIG:
                for node in plan.scans(f"{self.namespace}_{table}"):
                    assert node["Node Type"] != "Seq Scan", plan
                    assert node.rows_read <= most, (node.rows_read, plan)

    def close(self) -> None:
        """Undo everything."""
        self.connection.rollback()
        self.connection.close()
