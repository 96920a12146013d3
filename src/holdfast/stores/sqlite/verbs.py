"""What each verb that writes does inside one open write transaction. No locking, no clocks, no threads here.

A write transaction of SQLite excludes every other writer, so a guard that is read and a row that is then written
belong to one atomic step. The same functions serve the writer's connection and a caller's own.

Whoever opens the transaction calls `take_in` first: the verbs know the live and the ended jobs, not those that have
arrived one by one since (`Inserts.insert_plain`).
"""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.errors import SessionClosed
from holdfast.job import JobId, Lease, SessionId, State
from holdfast.lifecycle import Applied, cancel
from holdfast.store import (
    CLOSED_SESSION_KEPT,
    MOST_PER_CALL,
    Beat,
    CancelAnswer,
    ClaimRequest,
    Session,
)
from holdfast.stores.sqlite.claims import Claims, Taken
from holdfast.stores.sqlite.database import Database, marks
from holdfast.stores.sqlite.inserts import Inserts
from holdfast.stores.sqlite.queries import Queries
from holdfast.stores.sqlite.settlements import Settlements


class Verbs:
    """The statements for one namespace."""

    def __init__(self, namespace: str) -> None:
        self._ns = namespace
        self.queries = Queries(namespace)
        inserts = Inserts(namespace, self.queries)
        self._settlements = Settlements(namespace, self.queries, inserts)
        self._claims = Claims(namespace)
        self.take_in = inserts.take_in
        self.insert = inserts.insert
        self.insert_plain = inserts.insert_plain
        self.apply = self._settlements.apply
        self.apply_prepared = self._settlements.apply_prepared

    # Sessions.

    def open_session(self, db: Database, session: Session, now: int) -> None:
        """See `Store.open_session`."""
        db.execute(
            f"""INSERT INTO {self._ns}_sessions (id, beat, open, opened_at, beat_at, host, pid, queues)
                VALUES (?, 0, 1, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING""",
            (session.id, now, now, session.host, session.pid, ",".join(session.queues)),
        )

    def beat(self, db: Database, session_id: SessionId, now: int) -> Beat:
        """See `Store.beat`."""
        beaten = db.execute(
            f"UPDATE {self._ns}_sessions SET beat = beat + 1, beat_at = ? WHERE id = ? AND open",
            (now, session_id),
        ).rowcount
        if not beaten:
            return Beat(open=False, held=0, cancel=())
        held = db.execute(
            f"""SELECT id, cancel_asked FROM {self._ns}_live INDEXED BY {self._ns}_held
                WHERE state = 'in_flight' AND session_id = ?""",
            (session_id,),
        ).fetchall()
        return Beat(open=True, held=len(held), cancel=tuple(job_id for job_id, cancel_asked in held if cancel_asked))

    def close_session(self, db: Database, session_id: SessionId, if_beat: int | None, now: int) -> bool:
        """See `Store.close_session`."""
        return bool(
            db.execute(
                f"""UPDATE {self._ns}_sessions SET open = 0, beat_at = ?1
                    WHERE id = ?2 AND open AND (?3 IS NULL OR beat = ?3)""",
                (now, session_id, if_beat),
            ).rowcount
        )

    # The life of a claim.

    def claim(self, db: Database, request: ClaimRequest, now: int) -> Taken:
        """See `Store.claim`."""
        if not self.queries.open_among(db, [request.session_id]):
            raise SessionClosed(f"session {request.session_id} is not open; it may not claim jobs")
        return self._claims.claim(db, request, self.queries.paused(db), now)

    def note(self, db: Database, lease: Lease, progress: bytes) -> Applied:
        """See `Store.note`."""
        written = db.execute(
            f"""UPDATE {self._ns}_live SET progress = ?
                WHERE id = ? AND state = 'in_flight' AND session_id = ? AND version = ?
                  AND EXISTS (SELECT 1 FROM {self._ns}_sessions s WHERE s.id = session_id AND s.open)""",
            (progress, lease.job_id, lease.session_id, lease.version),
        ).rowcount
        if written:
            return Applied.APPLIED
        return Applied.STALE if self.queries.get(db, lease.job_id) else Applied.GONE

    # Operators and keepers.

    def request_cancel(self, db: Database, job_ids: Sequence[JobId], now: int) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        answers = []
        for job_id in job_ids:
            job = self.queries.get(db, job_id)
            if job is None:
                answers.append(CancelAnswer.GONE)
            elif job.state is State.READY:
                self._settlements.apply_distinct(db, [cancel(job)], now)
                answers.append(CancelAnswer.CANCELLED)
            elif job.state is State.IN_FLIGHT:
                db.execute(f"UPDATE {self._ns}_live SET cancel_asked = 1 WHERE id = ?", (job_id,))
                answers.append(CancelAnswer.ASKED)
            else:
                answers.append(CancelAnswer.ENDED)
        return answers

    def set_paused(self, db: Database, queue: str, paused: bool) -> None:
        """See `Store.set_paused`."""
        if paused:
            db.execute(f"INSERT INTO {self._ns}_paused (queue) VALUES (?) ON CONFLICT DO NOTHING", (queue,))
        else:
            db.execute(f"DELETE FROM {self._ns}_paused WHERE queue = ?", (queue,))

    def prune(self, db: Database, now: int, limit: int) -> int:
        """See `Store.prune`."""
        ids = db.execute(
            f"""SELECT id FROM {self._ns}_ended INDEXED BY {self._ns}_expiring
                WHERE expires_at IS NOT NULL AND expires_at <= ? LIMIT ?""",
            (now, min(limit, MOST_PER_CALL)),
        ).fetchall()
        pruned = self.forget(db, [row[0] for row in ids])
        for table, keys, over in (
            ("keys", "queue, key", "expires_at <= ?1"),
            (
                "sessions",
                "id",
                f"NOT open AND beat_at <= ?1 - {CLOSED_SESSION_KEPT} AND id NOT IN "
                f"(SELECT session_id FROM {self._ns}_live INDEXED BY {self._ns}_held WHERE state = 'in_flight')",
            ),
        ):
            pruned += db.execute(
                f"""DELETE FROM {self._ns}_{table} WHERE ({keys}) IN
                    (SELECT {keys} FROM {self._ns}_{table} WHERE {over} LIMIT ?2)""",
                (now, limit - pruned),
            ).rowcount
        return pruned

    def forget(self, db: Database, job_ids: Sequence[JobId]) -> int:
        """See `Store.forget`."""
        rows = db.execute(
            f"DELETE FROM {self._ns}_ended WHERE id IN ({marks(len(job_ids))}) RETURNING queue, state",
            job_ids,
        ).fetchall()
        gone = Counter((row[0], row[1]) for row in rows)
        self._settlements.count(db, {place: -jobs for place, jobs in gone.items()})
        return len(rows)
