"""How claims end, inside one open write transaction."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.job import ENDED, JobId, Key, NewJob, State
from holdfast.lifecycle import Applied, KeyChange, Move, Standing, judge
from holdfast.stores.rows import IDENTITY, reason_of, state_of
from holdfast.stores.runs import ends_well, runs_of_distinct_jobs
from holdfast.stores.sqlite.database import Database, marks
from holdfast.stores.sqlite.inserts import Inserts
from holdfast.stores.sqlite.queries import Queries
from holdfast.stores.sqlite.sets import padded, pieces, size_for, value_rows

_written = attrgetter("to", "reason", "attempt", "failures", "crashes", "snoozes", "suspect", "failure_history")
_all_but_job_and_result = attrgetter(
    *(name for name in Move.__struct_fields__ if name not in ("job_id", "result", "delay"))
)


def _alike(moves: Sequence[Move]) -> Collection[Sequence[Move]]:
    """The moves in groups that differ in their jobs, results and delays at most."""
    groups: dict[tuple[Any, ...], list[Move]] = {}
    for move in moves:
        groups.setdefault(_all_but_job_and_result(move), []).append(move)
    return groups.values()


def _may_be_one_run(moves: Sequence[Move], alike: Iterable[Sequence[Move]]) -> bool:
    """Whether no move has to see what another one did, as can be told at a glance."""
    return len({move.job_id for move in moves}) == len(moves) and not any(
        group[0].then or group[0].key_change is not KeyChange.KEEP for group in alike
    )


def _filled_up(ids: Sequence[JobId]) -> list[JobId | None]:
    return [*ids, *[None] * (size_for(len(ids)) - len(ids))]


class _Copies(msgspec.Struct, frozen=True, gc=False):
    """Moves of one statement that copies jobs to the ended ones: they differ in their jobs and results alone."""

    first: Move
    count: int
    rows: str
    values: list[Any]


class _Run(msgspec.Struct, frozen=True, gc=False):
    """Moves of distinct jobs, and those among them that are to be settled together."""

    moves: Sequence[Move]
    plain: int
    copies: Sequence[_Copies]
    ids: Sequence[list[JobId | None]]


Prepared = Sequence[_Run]
"""Moves as `apply_prepared` takes them."""


def prepare(moves: Sequence[Move]) -> Prepared:
    """All that can be done for moves before the transaction, in which everybody else waits."""
    alike = _alike(moves)
    if _may_be_one_run(moves, alike):
        return [_prepare_run(moves, alike)]
    return [_prepare_run(run, _alike(run)) for run in runs_of_distinct_jobs(moves)]


def _prepare_run(moves: Sequence[Move], alike: Iterable[Sequence[Move]]) -> _Run:
    plain = [group for group in alike if ends_well(group[0])]
    ids = [move.job_id for group in plain for move in group]
    return _Run(
        moves,
        len(ids),
        [_prepare_copies(piece) for group in plain for piece in pieces(group)],
        [_filled_up(some) for some in pieces(ids)],
    )


def _prepare_copies(moves: Sequence[Move]) -> _Copies:
    rows = [(move.job_id, move.result) for move in moves]
    return _Copies(moves[0], len(rows), value_rows(size_for(len(rows)), 2), padded(rows, len(rows), 2))


class Settlements:
    """The statements for one namespace."""

    def __init__(self, namespace: str, queries: Queries, inserts: Inserts) -> None:
        ns = self._ns = namespace
        self._queries = queries
        self._inserts = inserts
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
        # CROSS JOIN: SQLite keeps the order in which the tables are named. A plus keeps it from another index.
        # INSERT comes first: sqlite3 counts rows only for statements that begin with it.
        self._end_alike = (
            f"""
            INSERT INTO {ns}_ended ({IDENTITY}, state, reason, attempt, failures, crashes, snoozes, suspect,
                                    failure_history, run_at, version, session_id, cancel_asked, claimed_at, progress,
                                    ended_at, expires_at, result)
            WITH settled (id, result) AS (VALUES """,
            f""")
            SELECT job.{IDENTITY.replace(", ", ", job.")}, ?,?,?,?,?,?,?,?, run_at, version, session_id, cancel_asked,
                   claimed_at, progress, ?, ? + retention, settled.result
            FROM settled CROSS JOIN {ns}_live job
            WHERE job.id = settled.id AND job.state = 'in_flight' AND job.version = ? AND +job.session_id = ?
              AND job.queue = ?""",
        )
        self._drop_live = f"DELETE FROM {ns}_live WHERE id = ?"
        self._drop_ended = f"DELETE FROM {ns}_ended WHERE id = ?"
        self._add_to_total = f"""
            INSERT INTO {ns}_totals (queue, state, jobs) VALUES (?, ?, ?)
            ON CONFLICT (queue, state) DO UPDATE SET jobs = jobs + excluded.jobs"""

    def apply(self, db: Database, moves: Sequence[Move], now: int) -> list[Applied]:
        """See `Store.apply`."""
        return self.apply_prepared(db, prepare(moves), now)

    def apply_prepared(self, db: Database, prepared: Prepared, now: int) -> list[Applied]:
        """See `Store.apply`."""
        if len(prepared) == 1:
            return self._apply_run(db, prepared[0], now)
        return [answer for run in prepared for answer in self._apply_run(db, run, now)]

    def _apply_run(self, db: Database, run: _Run, now: int) -> list[Applied]:
        """Nearly always, nearly all are jobs that ended well: those are settled together, if every guard holds."""
        if not run.plain or not self._end(db, run, now):
            return self.apply_distinct(db, run.moves, now)
        if run.plain == len(run.moves):
            return [Applied.APPLIED] * run.plain
        answers = iter(self.apply_distinct(db, [move for move in run.moves if not ends_well(move)], now))
        return [Applied.APPLIED if ends_well(move) else next(answers) for move in run.moves]

    def _end(self, db: Database, run: _Run, now: int) -> bool:
        """End these jobs, each group alike, if each is held by its move's session, which is open: then `judge` would
        say `APPLIED`. Else nothing is changed (False).

        They are copied as their guards are compared, in one step over the rows. What a guard keeps back is missing in
        the number of the copies, and then those are taken away again.
        """
        sessions = {copies.first.session_id for copies in run.copies}
        if self._queries.open_among(db, sessions) != sessions:
            return False
        if any(self._copy(db, copies, now) != copies.count for copies in run.copies):
            self._take_back(db, run)
            return False
        for ids in run.ids:
            db.execute(f"DELETE FROM {self._ns}_live WHERE id IN ({marks(len(ids))})", ids)
        totals: Counter[tuple[str, State]] = Counter()
        for copies in run.copies:
            totals[copies.first.queue, copies.first.to] += copies.count
        self.count(db, totals)
        return True

    def _copy(self, db: Database, copies: _Copies, now: int) -> int:
        """Copy those of these jobs to the ended ones whose guards hold. How many."""
        first = copies.first
        into, copied = self._end_alike
        return db.execute(
            f"{into}{copies.rows}{copied}",
            [*copies.values, *_written(first), now, now, first.version, first.session_id, first.queue],
        ).rowcount

    def _take_back(self, db: Database, run: _Run) -> None:
        """Remove the copies of jobs that are still live. One that had ended before has no live row, and stays."""
        for ids in run.ids:
            db.execute(
                f"""DELETE FROM {self._ns}_ended WHERE id IN ({marks(len(ids))})
                    AND EXISTS (SELECT 1 FROM {self._ns}_live job WHERE job.id = {self._ns}_ended.id)""",
                ids,
            )

    def apply_distinct(self, db: Database, moves: Sequence[Move], now: int) -> list[Applied]:
        """Carry out moves of distinct jobs, each judged by itself."""
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
            self._inserts.insert_many(db, following, now, {}, all_or_none=False)
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
        self.count(db, totals)

    def count(self, db: Database, totals: Mapping[tuple[str, State], int]) -> None:
        """Add to the numbers of ended jobs."""
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
        sessions = self._queries.open_among(db, (row[4] for row in rows))
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
            self._inserts.free_key(db, queue, key.text, move.job_id)
        elif move.key_change is KeyChange.TAKE:
            holder = self._inserts.key_holder(db, queue, key.text, now)
            if holder and holder[0] != move.job_id:
                return False
            self._inserts.hold_key(db, queue, key, move.job_id, now)
        return True
