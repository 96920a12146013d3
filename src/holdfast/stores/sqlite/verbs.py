"""What each verb that writes does inside one open write transaction. No locking, no clocks, no threads here.

A write transaction of SQLite excludes every other writer, so a guard that is read and a row that is then written
belong to one atomic step. The same functions serve the writer's connection and a caller's own.
"""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import SessionClosed
from holdfast.job import ENDED, Job, JobId, Key, Lease, NewJob, SessionId, State
from holdfast.lanes import Lane, draw, serving_order
from holdfast.lifecycle import Applied, KeyChange, Move, Standing, cancel, judge
from holdfast.store import (
    CLOSED_SESSION_KEPT,
    MOST_PER_CALL,
    Beat,
    CancelAnswer,
    Checkpoint,
    Claimed,
    ClaimRequest,
    DepthLimit,
    Inserted,
    InsertStatus,
    Session,
)
from holdfast.stores.intake import counts_needed, decide, keys_of
from holdfast.stores.rows import IDENTITY, LIVE_AS_ENDED, job_from_row, new_row, reason_of, state_of
from holdfast.stores.runs import runs_of_distinct_jobs
from holdfast.stores.sqlite.database import Database, marks
from holdfast.stores.sqlite.queries import Queries


class Verbs:
    """The statements for one namespace."""

    def __init__(self, namespace: str) -> None:
        ns = self._ns = namespace
        self.queries = Queries(namespace)
        new_row = f"""
            INSERT INTO {ns}_live ({IDENTITY}, state, reason, run_at, version, attempt, failures, crashes, snoozes,
                                   suspect, cancel_asked, failure_history)
            SELECT ?,?,?,?,?,?,?,?,?,?,?,?,?,?, 'ready', 'enqueued', ?, 0, 0, 0, 0, 0, 0, 0, x''"""
        self._insert_fresh = new_row
        self._insert_unless_there = f"""{new_row}
            WHERE NOT EXISTS (SELECT 1 FROM {ns}_ended WHERE id = ?1) ON CONFLICT (id) DO NOTHING"""
        # INDEXED BY, here and below: without statistics, or with old ones, SQLite may prefer to walk through the table.
        lane = f"FROM {ns}_live INDEXED BY {ns}_lanes WHERE state = 'ready' AND queue = ?"
        first = "ORDER BY priority, share, run_at LIMIT 1"
        self._first_lane = f"SELECT priority, share, run_at {lane} {first}"
        # Two hops: for (priority, share) > (?, ?) SQLite would read every job of the priority.
        self._next_share = f"SELECT priority, share, run_at {lane} AND priority = ? AND share > ? {first}"
        self._next_priority = f"SELECT priority, share, run_at {lane} AND priority > ? {first}"
        self._lane_head = f"SELECT run_at {lane} AND priority = ? AND share = ? ORDER BY run_at LIMIT 1"
        self._claim_from_lane = f"""
            UPDATE {ns}_live SET state = 'in_flight', reason = 'claimed', session_id = ?, version = version + 1,
                                 claimed_at = ?, progress = NULL
            WHERE id IN (SELECT id {lane} AND priority = ? AND share = ? AND run_at <= ? ORDER BY run_at, id LIMIT ?)
            RETURNING {LIVE_AS_ENDED}"""
        self._to_ready = f"""
            UPDATE {ns}_live SET state = 'ready', reason = ?, run_at = coalesce(?, run_at), attempt = ?, failures = ?,
                                 crashes = ?, snoozes = ?, suspect = ?, failure_history = ?, cancel_asked = 0,
                                 version = version + ?
            WHERE id = ?"""
        self._to_ended = f"""
            INSERT INTO {ns}_ended ({IDENTITY}, state, reason, run_at, version, session_id, attempt, failures,
                                    crashes, snoozes, suspect, cancel_asked, claimed_at, failure_history, progress,
                                    ended_at, expires_at, result)
            SELECT {IDENTITY}, ?2, ?3, run_at, version + ?4, session_id, ?5, ?6, ?7, ?8, ?9, cancel_asked,
                   claimed_at, ?10, progress, ?11, iif(?2 = 'failed', NULL, ?11 + retention), ?12
            FROM {ns}_live WHERE id = ?1"""
        self._back_to_live = f"""
            INSERT INTO {ns}_live ({IDENTITY}, state, reason, run_at, version, session_id, attempt, failures, crashes,
                                   snoozes, suspect, cancel_asked, claimed_at, failure_history, progress)
            SELECT {IDENTITY}, 'ready', ?2, coalesce(?3, run_at), version + ?4, session_id, ?5, ?6, ?7, ?8, ?9, 0,
                   claimed_at, ?10, progress
            FROM {ns}_ended WHERE id = ?1"""
        self._drop_live = f"DELETE FROM {ns}_live WHERE id = ?"
        self._drop_ended = f"DELETE FROM {ns}_ended WHERE id = ?"
        self._add_to_total = f"""
            INSERT INTO {ns}_totals (queue, state, jobs) VALUES (?, ?, ?)
            ON CONFLICT (queue, state) DO UPDATE SET jobs = jobs + excluded.jobs"""
        self._hold_key = f"""
            INSERT INTO {ns}_keys (queue, key, key_hash, job_id, expires_at) VALUES (?, ?, ?, ?, ?)
            ON CONFLICT (queue, key) DO UPDATE
            SET key_hash = excluded.key_hash, job_id = excluded.job_id, expires_at = excluded.expires_at"""

    # New jobs.

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
            checkpoint.require(jobs, self.queries.checkpoint(db, checkpoint.queue, checkpoint.name))
        answers = self._insert_many(db, jobs, now, limits, all_or_none=checkpoint is not None)
        if checkpoint is not None and not any(answer.status is InsertStatus.FULL for answer in answers):
            db.execute(
                f"""INSERT INTO {self._ns}_checkpoints (queue, name, value) VALUES (?, ?, ?)
                    ON CONFLICT (queue, name) DO UPDATE SET value = excluded.value""",
                (checkpoint.queue, checkpoint.name, checkpoint.now),
            )
        return answers

    def insert_plain(self, job: NewJob, now: int) -> tuple[str, tuple[Any, ...]]:
        """One statement that inserts a job without key or limits, unless its id is there: for a way without detours."""
        return self._insert_unless_there, new_row(job, now)

    def _insert_many(
        self,
        db: Database,
        jobs: Sequence[NewJob],
        now: int,
        limits: Mapping[str, DepthLimit],
        *,
        all_or_none: bool,
    ) -> list[Inserted]:
        ids = [job.id for job in jobs]
        known = {
            row[0]
            for table in ("live", "ended")
            for row in db.execute(f"SELECT id FROM {self._ns}_{table} WHERE id IN ({marks(len(ids))})", ids).fetchall()
        }
        holders = {place: holder for place in keys_of(jobs) if (holder := self._key_holder(db, *place, now))}
        depths = {queue: self._ready_in(db, queue, enough) for queue, enough in counts_needed(jobs, limits).items()}
        intake = decide(jobs, known=known, holders=holders, depths=depths, limits=limits, all_or_none=all_or_none)
        db.executemany(
            self._hold_key, [self._key_row(job.queue, job.key, job.id, now) for job in intake.jobs if job.key]
        )
        db.executemany(self._insert_fresh, [new_row(job, now) for job in intake.jobs])
        return intake.answers

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

    def _key_holder(self, db: Database, queue: str, key: str, now: int) -> tuple[JobId, str] | None:
        """The job that holds the key, and the hash of its payload."""
        row = db.execute(
            f"SELECT job_id, key_hash FROM {self._ns}_keys WHERE queue = ? AND key = ? AND expires_at > ?",
            (queue, key, now),
        ).fetchone()
        return (row[0], row[1]) if row else None

    @staticmethod
    def _key_row(queue: str, key: Key, job_id: JobId, now: int) -> tuple[Any, ...]:
        return (queue, key.text, key.payload_hash, job_id, now + key.window)

    def _free_key(self, db: Database, queue: str, key: str, job_id: JobId) -> None:
        db.execute(f"DELETE FROM {self._ns}_keys WHERE queue = ? AND key = ? AND job_id = ?", (queue, key, job_id))

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

    def _open_among(self, db: Database, session_ids: Iterable[SessionId | None]) -> set[SessionId]:
        ids = [session_id for session_id in set(session_ids) if session_id]
        rows = db.execute(
            f"SELECT id FROM {self._ns}_sessions WHERE open AND id IN ({marks(len(ids))})", ids
        ).fetchall()
        return {row[0] for row in rows}

    # The life of a claim.

    def claim(self, db: Database, request: ClaimRequest, now: int) -> Claimed:
        """See `Store.claim`."""
        if not self._open_among(db, [request.session_id]):
            raise SessionClosed(f"session {request.session_id} is not open; it may not claim jobs")
        paused = self.queries.paused(db)

        def pull(lane: Lane, most: int) -> list[Job]:
            rows = db.execute(
                self._claim_from_lane,
                (request.session_id, now, lane.queue, lane.priority, lane.share, now, most),
            ).fetchall()
            # RETURNING promises no order.
            return sorted(map(job_from_row, rows), key=lambda job: (job.run_at, job.id))

        jobs: list[Job] = []
        heads: list[int] = []
        for queue in request.queues:
            if queue not in paused and len(jobs) < request.limit:
                lanes = dict(self._lanes(db, queue))
                due = [lane for lane, head in lanes.items() if head <= now]
                jobs += draw(serving_order(due, request.turn), request.limit - len(jobs), pull)
                heads += [head for head in lanes.values() if head > now]
                if len(jobs) < request.limit:
                    heads += self._heads(db, due)  # what is due there is taken: who is next?
        due_in = 0 if len(jobs) == request.limit else min((head - now for head in heads), default=None)
        return Claimed(tuple(jobs), now, due_in)

    def _heads(self, db: Database, lanes: Iterable[Lane]) -> list[int]:
        rows = (db.execute(self._lane_head, (lane.queue, lane.priority, lane.share)).fetchone() for lane in lanes)
        return [row[0] for row in rows if row]

    def _lanes(self, db: Database, queue: str) -> Iterator[tuple[Lane, int]]:
        """The lanes that have jobs, each with its first due time, by hopping from one to the next in the index."""
        row = db.execute(self._first_lane, (queue,)).fetchone()
        while row:
            yield Lane(queue, row[0], row[1]), row[2]
            row = (
                db.execute(self._next_share, (queue, row[0], row[1])).fetchone()
                or db.execute(self._next_priority, (queue, row[0])).fetchone()
            )

    def apply(self, db: Database, moves: Sequence[Move], now: int) -> list[Applied]:
        """See `Store.apply`."""
        return [answer for run in runs_of_distinct_jobs(moves) for answer in self._apply_distinct(db, run, now)]

    def _apply_distinct(self, db: Database, moves: Sequence[Move], now: int) -> list[Applied]:
        found = self._standings(db, [move.job_id for move in moves])
        answers: list[Applied] = []
        to_ready, to_ended, back_to_live = [], [], []
        totals: Counter[tuple[str, State]] = Counter()
        following: list[NewJob] = []
        for move in moves:
            standing, queue, key = found.get(move.job_id, (None, "", None))
            verdict = judge(move, standing)
            if verdict is Applied.APPLIED and key and not self._change_key(db, move, queue, key, now):
                verdict = Applied.KEY_TAKEN
            answers.append(verdict)
            if standing is None or verdict is not Applied.APPLIED:
                continue
            following += move.then
            run_at = None if move.delay is None else now + move.delay
            fields = (
                move.attempt,
                move.failures,
                move.crashes,
                move.snoozes,
                move.suspect,
                move.failure_history,
            )
            if move.to in ENDED:
                row = (move.job_id, move.to, move.reason, move.raise_version, *fields, now, move.result)
                to_ended.append(row)
                totals[queue, move.to] += 1
            elif standing.state in ENDED:
                back_to_live.append((move.job_id, move.reason, run_at, move.raise_version, *fields))
                totals[queue, standing.state] -= 1
            else:
                to_ready.append((move.reason, run_at, *fields, move.raise_version, move.job_id))
        self._write(db, to_ready, to_ended, back_to_live, totals)
        if following:
            self._insert_many(db, following, now, {}, all_or_none=False)
        return answers

    def _write(
        self,
        db: Database,
        to_ready: Sequence[tuple[Any, ...]],
        to_ended: Sequence[tuple[Any, ...]],
        back_to_live: Sequence[tuple[Any, ...]],
        totals: Mapping[tuple[str, State], int],
    ) -> None:
        if to_ready:
            db.executemany(self._to_ready, to_ready)
        if to_ended:
            db.executemany(self._to_ended, to_ended)
            db.executemany(self._drop_live, [row[:1] for row in to_ended])
        if back_to_live:
            db.executemany(self._back_to_live, back_to_live)
            db.executemany(self._drop_ended, [row[:1] for row in back_to_live])
        if totals:
            db.executemany(self._add_to_total, [(queue, state, change) for (queue, state), change in totals.items()])

    def _standings(self, db: Database, ids: Sequence[JobId]) -> dict[JobId, tuple[Standing, str, Key | None]]:
        """The present situation of each job that exists, with its queue and its key."""
        rows = []
        missing: Sequence[JobId] = ids
        for table in ("live", "ended"):
            if missing:
                rows += db.execute(
                    f"""SELECT id, state, reason, version, session_id, cancel_asked, queue, key, key_hash, key_window
                        FROM {self._ns}_{table} WHERE id IN ({marks(len(missing))})""",
                    missing,
                ).fetchall()
                there = {row[0] for row in rows}
                missing = [job_id for job_id in ids if job_id not in there]
        sessions = self._open_among(db, (row[4] for row in rows))
        return {
            row[0]: (
                Standing(
                    state=state_of(row[1]),
                    reason=reason_of(row[2]),
                    version=row[3],
                    session_id=row[4],
                    session_open=row[4] in sessions,
                    cancel_asked=bool(row[5]),
                ),
                row[6],
                None if row[7] is None else Key(row[7], row[8], row[9]),
            )
            for row in rows
        }

    def _change_key(self, db: Database, move: Move, queue: str, key: Key, now: int) -> bool:
        """Do what the move says about the job's key. False if another job holds it."""
        if move.key_change is KeyChange.FREE:
            self._free_key(db, queue, key.text, move.job_id)
        elif move.key_change is KeyChange.TAKE:
            holder = self._key_holder(db, queue, key.text, now)
            if holder and holder[0] != move.job_id:
                return False
            db.execute(self._hold_key, self._key_row(queue, key, move.job_id, now))
        return True

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
                self._apply_distinct(db, [cancel(job)], now)
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
        db.executemany(self._add_to_total, [(queue, state, -jobs) for (queue, state), jobs in gone.items()])
        return len(rows)
