"""What each verb that only reads asks the database. They see one snapshot each and never wait for a writer.

A reader cannot take in what has arrived, so it looks there, too: see the migration of that table. No job is in two
tables of one snapshot.
"""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterable

from holdfast.job import ENDED, Job, JobId, SessionId, State
from holdfast.store import JobQuery, Page, QueueCounts, SessionPage
from holdfast.stores.rows import ENDED_COLUMNS, LIVE_AS_ENDED, SESSION_COLUMNS, job_from_row, session_page
from holdfast.stores.sqlite.database import Database, marks


class Queries:
    """The statements for one namespace."""

    def __init__(self, namespace: str) -> None:
        self._ns = namespace

    def get(self, db: Database, job_id: JobId) -> Job | None:
        """See `Store.get`."""
        row = db.execute(
            f"""SELECT {LIVE_AS_ENDED} FROM {self._ns}_live WHERE id = ?1
                UNION ALL SELECT {ENDED_COLUMNS} FROM {self._ns}_ended WHERE id = ?1
                UNION ALL SELECT {LIVE_AS_ENDED} FROM {self._ns}_arrivals WHERE id = ?1""",
            (job_id,),
        ).fetchone()
        return job_from_row(row) if row else None

    def find(self, db: Database, query: JobQuery) -> Page:
        """See `Store.find`."""
        wanted = set(query.states or State)
        conditions, values = [], []
        for column, value in (
            ("queue =", query.queue),
            ("task =", query.task),
            ("correlation_id =", query.correlation_id),
            ("id <", query.cursor),
        ):
            if value is not None:
                conditions.append(f"{column} ?")
                values.append(value)
        found: list[Job] = []
        for table, columns, states in (
            ("arrivals", LIVE_AS_ENDED, wanted & {State.READY}),
            ("live", LIVE_AS_ENDED, wanted - ENDED),
            ("ended", ENDED_COLUMNS, wanted & ENDED),
        ):
            if states:
                # Spelled out, not bound: SQLite uses a partial index only for a constant that it can see.
                among = " OR ".join(f"state = '{state.value}'" for state in states)
                where = " AND ".join([f"({among})", *conditions])
                # Dead letters are few among the history: left alone, SQLite would walk through all of it.
                index = f"INDEXED BY {self._ns}_dead" if states == {State.FAILED} else ""
                rows = db.execute(
                    f"SELECT {columns} FROM {self._ns}_{table} {index} WHERE {where} ORDER BY id DESC LIMIT ?",
                    (*values, query.limit + 1),
                ).fetchall()
                found += map(job_from_row, rows)
        found.sort(key=lambda job: job.id, reverse=True)
        page = tuple(found[: query.limit])
        return Page(page, page[-1].id if len(found) > query.limit else None)

    def counts(self, db: Database, now: int) -> list[QueueCounts]:
        """See `Store.counts`."""
        tally: dict[str, dict[str, int]] = {queue: {} for queue in self.paused(db)}
        for queue, state, jobs in db.execute(
            f"SELECT queue, state, jobs FROM {self._ns}_totals WHERE jobs > 0"
        ).fetchall():
            tally.setdefault(queue, {})[state] = jobs
        for queue, jobs in db.execute(
            f"SELECT queue, count(*) FROM {self._ns}_live WHERE state = 'in_flight' GROUP BY queue"
        ).fetchall():
            tally.setdefault(queue, {})["in_flight"] = jobs
        for table in ("live", "arrivals"):
            for queue, ready, scheduled in db.execute(
                f"""SELECT queue, count(*) FILTER (WHERE run_at <= ?1), count(*) FILTER (WHERE run_at > ?1)
                    FROM {self._ns}_{table} WHERE state = 'ready' GROUP BY queue""",
                (now,),
            ).fetchall():
                jobs_of = tally.setdefault(queue, {})
                jobs_of["ready"] = jobs_of.get("ready", 0) + ready
                jobs_of["scheduled"] = jobs_of.get("scheduled", 0) + scheduled
        paused = self.paused(db)
        return [QueueCounts(queue=queue, paused=queue in paused, **tally[queue]) for queue in sorted(tally)]

    def checkpoint(self, db: Database, queue: str, name: str) -> str | None:
        """See `Store.checkpoint`."""
        row = db.execute(
            f"SELECT value FROM {self._ns}_checkpoints WHERE queue = ? AND name = ?", (queue, name)
        ).fetchone()
        return row[0] if row else None

    def held(self, db: Database, session_id: SessionId) -> list[Job]:
        """See `Store.held`."""
        rows = db.execute(
            f"""SELECT {LIVE_AS_ENDED} FROM {self._ns}_live INDEXED BY {self._ns}_held
                WHERE state = 'in_flight' AND session_id = ?""",
            (session_id,),
        ).fetchall()
        return [job_from_row(row) for row in rows]

    def sessions(self, db: Database, cursor: str | None, limit: int) -> SessionPage:
        """See `Store.sessions`. A cursor is the last id of the page before."""
        rows = db.execute(
            f"SELECT {SESSION_COLUMNS} FROM {self._ns}_sessions WHERE id > ? ORDER BY id LIMIT ?",
            (cursor or "", limit + 1),
        ).fetchall()
        return session_page(rows, limit)

    def lost(self, db: Database, limit: int, session_id: SessionId | None) -> list[Job]:
        """See `Store.lost`."""
        rows = db.execute(
            f"""SELECT {LIVE_AS_ENDED} FROM {self._ns}_live INDEXED BY {self._ns}_held
                WHERE state = 'in_flight' AND (?1 IS NULL OR session_id = ?1)
                  AND NOT EXISTS (SELECT 1 FROM {self._ns}_sessions s WHERE s.id = session_id AND s.open)
                LIMIT ?2""",
            (session_id, limit),
        ).fetchall()
        return [job_from_row(row) for row in rows]

    def open_among(self, db: Database, session_ids: Iterable[SessionId | None]) -> set[SessionId]:
        """Which of these sessions are open."""
        ids = [session_id for session_id in set(session_ids) if session_id]
        rows = db.execute(
            f"SELECT id FROM {self._ns}_sessions WHERE open AND id IN ({marks(len(ids))})", ids
        ).fetchall()
        return {row[0] for row in rows}

    def paused(self, db: Database) -> set[str]:
        """The queues that nobody may claim from."""
        return {row[0] for row in db.execute(f"SELECT queue FROM {self._ns}_paused").fetchall()}
