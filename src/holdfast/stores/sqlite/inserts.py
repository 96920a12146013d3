"""How jobs come in, and who holds which key, inside one open write transaction."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.job import JobId, Key, NewJob, due_at
from holdfast.store import Checkpoint, DepthLimit, Inserted, InsertStatus
from holdfast.stores.intake import counts_needed, decide, keys_of
from holdfast.stores.rows import IDENTITY, new_row
from holdfast.stores.sqlite.database import Database, marks
from holdfast.stores.sqlite.queries import Queries
from holdfast.stores.sqlite.sets import padded, pieces, size_for, value_rows

_in_common = attrgetter(
    "key", "task", "task_version", "queue", "share", "priority", "max_retries", "retention", "correlation_id"
)

_LONGEST_ARRIVAL = 2048
"""Bytes of a payload. What arrives is written twice: with longer ones that costs more than arriving saves."""


class _Alone(msgspec.Struct, frozen=True, gc=False):
    """The statements that insert a job alone."""

    fresh: str
    unless_there: str


class Inserts:
    """The statements for one namespace."""

    def __init__(self, namespace: str, queries: Queries) -> None:
        ns = self._ns = namespace
        self._queries = queries
        new_row = f"""
            INSERT INTO {ns}_live ({IDENTITY}, state, reason, run_at, version, attempt, failures, crashes, snoozes,
                                   suspect, cancel_asked, failure_history)
            SELECT ?,?,?,?,?,?,?,?,?,?,?,?,?,?, 'ready', 'enqueued', ?, 0, 0, 0, 0, 0, 0, 0, x''"""
        self._insert_fresh = new_row
        # The same, for jobs that have everything but these three in common. (NULLs are what rows are padded with.)
        self._insert_alike = f"""
            INSERT INTO {ns}_live ({IDENTITY}, state, reason, run_at, version, attempt, failures, crashes, snoozes,
                                   suspect, cancel_asked, failure_history)
            SELECT new.id, ?, new.payload, ?,?,?,?,?,?, NULL, NULL, NULL, ?, ?, 'ready', 'enqueued', new.run_at,
                   0, 0, 0, 0, 0, 0, 0, x''
            FROM new WHERE new.id IS NOT NULL"""
        # A job alone: it has no key, and every parameter costs. Among the arrivals its insert dirties one page.
        given = (
            "id, task, payload, task_version, queue, share, priority, max_retries, retention, correlation_id, "
            "created_at, run_at"
        )
        values = "?1,?2,?3,?4,?5,?6,?7,?8,?9,?10,?11,?12"
        arrive = f"INSERT INTO {ns}_arrived ({given})"
        live = f"""
            INSERT INTO {ns}_live ({given}, state, reason, version, attempt, failures, crashes, snoozes, suspect,
                                   cancel_asked, failure_history)"""
        as_live = f"{values}, 'ready', 'enqueued', 0, 0, 0, 0, 0, 0, 0, x''"
        not_in = (f"NOT EXISTS (SELECT 1 FROM {ns}_{table} WHERE id = ?1)" for table in ("arrived", "live", "ended"))
        unless_there = f"WHERE {' AND '.join(not_in)}"
        self._short = _Alone(
            fresh=f"{arrive} VALUES ({values})",
            unless_there=f"{arrive} SELECT {values} {unless_there}",
        )
        self._long = _Alone(
            fresh=f"{live} VALUES ({as_live}) ON CONFLICT (id) DO NOTHING",
            unless_there=f"{live} SELECT {as_live} {unless_there}",
        )
        self._take_in = f"INSERT INTO {ns}_take_in VALUES ('all')"
        self._hold_key = f"""
            INSERT INTO {ns}_keys (queue, key, key_hash, job_id, expires_at) VALUES (?, ?, ?, ?, ?)
            ON CONFLICT (queue, key) DO UPDATE
            SET key_hash = excluded.key_hash, job_id = excluded.job_id, expires_at = excluded.expires_at"""

    # New jobs.

    def take_in(self, db: Database) -> None:
        """Bring what has arrived among the live jobs. Every other verb that writes relies on it: see `Verbs`."""
        db.execute(self._take_in)

    def insert(
        self,
        db: Database,
        jobs: Sequence[NewJob],
        now: int,
        limits: Mapping[str, DepthLimit],
        checkpoint: Checkpoint | None = None,
    ) -> list[Inserted]:
        """See `Store.insert`."""
        if checkpoint is not None:
            checkpoint.require(jobs, self._queries.checkpoint(db, checkpoint.queue, checkpoint.name))
        answers = self.insert_many(db, jobs, now, limits, all_or_none=checkpoint is not None)
        if checkpoint is not None and not any(answer.status is InsertStatus.FULL for answer in answers):
            db.execute(
                f"""INSERT INTO {self._ns}_checkpoints (queue, name, value) VALUES (?, ?, ?)
                    ON CONFLICT (queue, name) DO UPDATE SET value = excluded.value""",
                (checkpoint.queue, checkpoint.name, checkpoint.now),
            )
        return answers

    def insert_plain(self, job: NewJob, now: int, *, fresh: bool) -> tuple[str, tuple[Any, ...]]:
        """One statement that inserts a job without key or limits, unless its id is there: for a way without detours.

        It works whether or not others have arrived. What is `fresh` is not looked for.
        """
        alone = self._short if len(job.payload) <= _LONGEST_ARRIVAL else self._long
        return alone.fresh if fresh else alone.unless_there, (
            job.id,
            job.task,
            job.payload,
            job.task_version,
            job.queue,
            job.share,
            job.priority,
            job.max_retries,
            job.retention,
            job.correlation_id,
            now,
            due_at(job, now),
        )

    def insert_many(
        self,
        db: Database,
        jobs: Sequence[NewJob],
        now: int,
        limits: Mapping[str, DepthLimit],
        *,
        all_or_none: bool,
    ) -> list[Inserted]:
        """Accept what can be accepted. `all_or_none`: if one would be full, all are."""
        ids = [job.id for job in jobs]
        known = {
            row[0]
            for table in ("live", "ended")
            for row in db.execute(f"SELECT id FROM {self._ns}_{table} WHERE id IN ({marks(len(ids))})", ids).fetchall()
        }
        holders = {place: holder for place in keys_of(jobs) if (holder := self.key_holder(db, *place, now))}
        depths = {queue: self._ready_in(db, queue, enough) for queue, enough in counts_needed(jobs, limits).items()}
        intake = decide(jobs, known=known, holders=holders, depths=depths, limits=limits, all_or_none=all_or_none)
        db.executemany(
            self._hold_key, [self._key_row(job.queue, job.key, job.id, now) for job in intake.jobs if job.key]
        )
        self._write_new(db, intake.jobs, now)
        return intake.answers

    def _write_new(self, db: Database, jobs: Sequence[NewJob], now: int) -> None:
        single: list[NewJob] = []
        for common, run in groupby(jobs, key=_in_common):
            alike = list(run)
            if len(alike) == 1 or alike[0].key is not None:
                single += alike
                continue
            for some in pieces(alike):
                rows = [(job.id, job.payload, due_at(job, now)) for job in some]
                db.execute(
                    f"WITH new (id, payload, run_at) AS (VALUES {value_rows(size_for(len(rows)), 3)}) "
                    f"{self._insert_alike}",
                    [*padded(rows, len(rows), 3), *common[1:], now],
                )
        db.executemany(self._insert_fresh, [new_row(job, now) for job in single])

    def _ready_in(self, db: Database, queue: str, enough: int) -> int:
        """The queue's depth, counted no further than is enough."""
        row = db.execute(
            f"""SELECT count(*) FROM (
                SELECT 1 FROM {self._ns}_live INDEXED BY {self._ns}_lanes WHERE state = 'ready' AND queue = ? LIMIT ?
            )""",
            (queue, enough),
        ).fetchone()
        return int(row[0])

    # Keys.

    def key_holder(self, db: Database, queue: str, key: str, now: int) -> tuple[JobId, str] | None:
        """The job that holds the key, and the hash of its payload."""
        row = db.execute(
            f"SELECT job_id, key_hash FROM {self._ns}_keys WHERE queue = ? AND key = ? AND expires_at > ?",
            (queue, key, now),
        ).fetchone()
        return (row[0], row[1]) if row else None

    def hold_key(self, db: Database, queue: str, key: Key, job_id: JobId, now: int) -> None:
        """Give the key to the job."""
        db.execute(self._hold_key, self._key_row(queue, key, job_id, now))

    @staticmethod
    def _key_row(queue: str, key: Key, job_id: JobId, now: int) -> tuple[Any, ...]:
        return (queue, key.text, key.payload_hash, job_id, now + key.window)

    def free_key(self, db: Database, queue: str, key: str, job_id: JobId) -> None:
        """Take the key from the job, if it holds it."""
        db.execute(f"DELETE FROM {self._ns}_keys WHERE queue = ? AND key = ? AND job_id = ?", (queue, key, job_id))
