"""A part of the store port on PostgreSQL, to try the port before it sets. Not a store: no keys, limits, pauses, pools.

Three tables of one shape: a job is in exactly one of them. READ COMMITTED; one statement per verb. Two things follow:

* A statement that has waited for a lock still looks at other tables as they were before. So the guarded write answers
  only `applied`, and what it refused is judged by a second statement with a new snapshot.
* Rows in flight change in place (a cancel is asked), so they are deleted by id. By ctid, a row that changed while the
  statement waited would be found by its lock and missed by its delete.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import psycopg
from msgspec.structs import asdict
from psycopg.rows import TupleRow

from holdfast.errors import SessionClosed
from holdfast.job import Job, JobId, NewJob, Reason, SessionId, State
from holdfast.lanes import Lane, serving_order
from holdfast.lifecycle import Applied, Move, Standing, judge
from holdfast.store import Beat, Claimed, ClaimRequest, Inserted, InsertStatus, Session

Connection = psycopg.AsyncConnection[TupleRow]

# In the order of `Job`, so that a row of any of the tables is a job.
COLUMNS = [field for field in Job.__struct_fields__ if field != "key"]
ALL = ", ".join(COLUMNS)

SCHEMA = """
CREATE TABLE ready (
    id text COLLATE "C" NOT NULL UNIQUE, task text NOT NULL, payload bytea NOT NULL,
    task_version text NOT NULL DEFAULT '1', queue text COLLATE "C" NOT NULL DEFAULT 'default',
    share text COLLATE "C" NOT NULL DEFAULT '', priority smallint NOT NULL DEFAULT 5,
    state text NOT NULL DEFAULT 'ready', reason text NOT NULL DEFAULT 'enqueued', run_at bigint NOT NULL,
    created_at bigint NOT NULL, version int NOT NULL DEFAULT 0,
    session_id text, attempt int NOT NULL DEFAULT 0, failures int NOT NULL DEFAULT 0, crashes int NOT NULL DEFAULT 0,
    snoozes int NOT NULL DEFAULT 0, suspect bool NOT NULL DEFAULT false, cancel_asked bool NOT NULL DEFAULT false,
    max_retries int NOT NULL, retention bigint NOT NULL, correlation_id text, claimed_at bigint, ended_at bigint,
    failure_history bytea NOT NULL DEFAULT '', result bytea, progress bytea,
    PRIMARY KEY (queue, priority, share, run_at, id)
);
CREATE TABLE in_flight (LIKE ready, PRIMARY KEY (id));
CREATE INDEX ON in_flight (session_id);
CREATE TABLE ended (LIKE ready, PRIMARY KEY (id));
CREATE TABLE sessions (id text PRIMARY KEY, beat bigint NOT NULL DEFAULT 0, open bool NOT NULL DEFAULT true);
"""

NOW = "(extract(epoch FROM statement_timestamp()) * 1000000)::bigint"


def _records(json: str, types: Mapping[str, str], alias: str) -> str:
    """Structs that travel as one JSON parameter, as rows. One parameter costs a tenth of one array per field."""
    columns = ", ".join(f'"{name}" {"text" if kind == "bytea" else kind}' for name, kind in types.items())
    return f"ROWS FROM (json_to_recordset({json}) AS ({columns})) WITH ORDINALITY AS {alias}"


def _moved(**changed: str) -> str:
    """The column list of a row that goes to another table with some of its columns changed."""
    return ", ".join(changed.get(column, f"d.{column}") for column in COLUMNS)


NEW_TYPES = {
    "id": "text",
    "payload": "bytea",
    "priority": "smallint",
    "max_retries": "int",
    **dict.fromkeys(("task", "task_version", "queue", "share", "correlation_id"), "text"),
    **dict.fromkeys(("delay", "run_at", "retention"), "bigint"),
}
INSERT = f"""
    INSERT INTO ready (id, task, payload, task_version, queue, share, priority, run_at, created_at, max_retries,
                       retention, correlation_id)
    SELECT n.id, n.task, decode(n.payload, 'base64'), n.task_version, n.queue, n.share, n.priority,
           CASE WHEN n.run_at IS NULL THEN {NOW} + n.delay ELSE greatest(n.run_at, {NOW}) END, {NOW}, n.max_retries,
           n.retention, n.correlation_id
    FROM {{source}}
    WHERE NOT EXISTS (SELECT FROM in_flight x WHERE x.id = n.id) AND NOT EXISTS (SELECT FROM ended x WHERE x.id = n.id)
    ORDER BY {{order}} ON CONFLICT (id) DO NOTHING RETURNING id"""
INSERT_JOBS = f"""
    WITH i AS ({INSERT.format(source=_records("%(jobs)s::json", NEW_TYPES, "n"), order="n.ordinality")})
    SELECT id FROM i"""

LANE_TYPES = {"queue": "text", "priority": "smallint", "share": "text", "skip": "int", "most": "int"}
_LANES = _records("%(plan)s::json", LANE_TYPES, "l")
_CLAIMED = _moved(
    state="'in_flight'",
    reason="'claimed'",
    version="d.version + 1",
    session_id="%(session_id)s",
    claimed_at=NOW,
    progress="NULL",
)
# `known`: every lane with jobs, by hopping through the index. If one that has a job due is not among the lanes asked
# for (`l`), nothing is claimed and the answer is the list of lanes: the order of service is decided in Python.
CLAIM = f"""
    WITH RECURSIVE s AS MATERIALIZED (
        SELECT id FROM sessions WHERE id = %(session_id)s AND open FOR KEY SHARE
    ), known AS (
        SELECT h.* FROM unnest(%(queues)s::text[]) q CROSS JOIN LATERAL (
            SELECT queue, priority, share, run_at FROM ready WHERE queue = q ORDER BY priority, share, run_at LIMIT 1) h
        UNION ALL
        SELECT h.* FROM known CROSS JOIN LATERAL (
            SELECT r.queue, r.priority, r.share, r.run_at FROM ready r
            WHERE r.queue = known.queue AND (r.priority, r.share) > (known.priority, known.share)
            ORDER BY r.priority, r.share, r.run_at LIMIT 1) h
    ), surprise AS MATERIALIZED (
        SELECT queue, priority, share FROM known WHERE run_at <= {NOW}
        EXCEPT SELECT l.queue, l.priority, l.share FROM {_LANES}
    ), picked AS MATERIALIZED (
        SELECT l.ordinality AS o, x.id, x.row FROM {_LANES} CROSS JOIN LATERAL (
            SELECT r.id, r.ctid AS row FROM ready r
            WHERE r.queue = l.queue AND r.priority = l.priority AND r.share = l.share AND r.run_at <= {NOW}
              AND EXISTS (SELECT FROM s) AND NOT EXISTS (SELECT FROM surprise)
            ORDER BY r.run_at, r.id LIMIT l.most OFFSET l.skip FOR UPDATE SKIP LOCKED) x
        LIMIT %(limit)s
    ), d AS (
        DELETE FROM ready WHERE ctid = ANY (ARRAY(SELECT row FROM picked)) RETURNING *
    ), c AS (
        INSERT INTO in_flight ({ALL})
        SELECT {_CLAIMED} FROM d RETURNING *
    )
    SELECT {NOW},
           (SELECT min(x.run_at) - {NOW} FROM known CROSS JOIN LATERAL (
                SELECT r.run_at FROM ready r
                WHERE r.queue = known.queue AND r.priority = known.priority AND r.share = known.share
                  AND r.run_at > {NOW} ORDER BY r.run_at LIMIT 1) x),
           CASE WHEN NOT EXISTS (SELECT FROM picked) THEN
               (SELECT json_agg(json_build_array(queue, priority, share)) FROM known) END,
           {", ".join(f"c.{column}" for column in COLUMNS)}
    FROM s LEFT JOIN (c JOIN picked ON picked.id = c.id) ON true ORDER BY picked.o, c.run_at, c.id"""

MOVE_TYPES = {
    "delay": "bigint",
    **dict.fromkeys(("job_id", "session_id", "to", "reason"), "text"),
    **dict.fromkeys(("version", "attempt", "failures", "crashes", "snoozes"), "int"),
    **dict.fromkeys(("session_open", "despite_cancel", "suspect", "raise_version"), "bool"),
    **dict.fromkeys(("failure_history", "result"), "bytea"),
    "then": "json",
}
_WRITTEN = {
    **{name: f"m.{name}" for name in ("reason", "attempt", "failures", "crashes", "snoozes", "suspect")},
    **{name: f"decode(m.{name}, 'base64')" for name in ("failure_history", "result")},
    "state": 'm."to"',
    "version": "d.version + m.raise_version::int",
}
_READY = _moved(**_WRITTEN, run_at=f"coalesce({NOW} + m.delay, d.run_at)", cancel_asked="false")
# Locks are taken in the order of ids, so that two batches with jobs in common cannot wait for each other.
APPLY = f"""
    WITH m AS MATERIALIZED (
        SELECT * FROM {_records("%(moves)s::json", MOVE_TYPES, "m")} ORDER BY job_id
    ), s AS MATERIALIZED (
        SELECT id FROM sessions WHERE open AND id = ANY (ARRAY(SELECT DISTINCT session_id FROM m)) FOR KEY SHARE
    ), k AS MATERIALIZED (
        SELECT x.id FROM m CROSS JOIN LATERAL (
            SELECT f.id FROM in_flight f
            WHERE f.id = m.job_id AND f.version = m.version AND f.session_id IS NOT DISTINCT FROM m.session_id
              AND (m.despite_cancel OR NOT f.cancel_asked) AND m.session_open = (m.session_id IN (SELECT id FROM s))
            OFFSET 0 FOR UPDATE) x
    ), d AS (
        DELETE FROM in_flight WHERE id = ANY (ARRAY(SELECT id FROM k)) RETURNING *
    ), e AS (
        INSERT INTO ended ({ALL}) SELECT {_moved(**_WRITTEN, ended_at=NOW)}
        FROM d JOIN m ON m.job_id = d.id WHERE m."to" <> 'ready'
    ), r AS (
        INSERT INTO ready ({ALL}) SELECT {_READY} FROM d JOIN m ON m.job_id = d.id WHERE m."to" = 'ready'
    ){{then}} SELECT id FROM d"""
APPLY_ONLY = APPLY.format(then="")
_FOLLOWING = f"d JOIN m ON m.job_id = d.id CROSS JOIN LATERAL {_records('m.then', NEW_TYPES, 'n')}"
APPLY_THEN = APPLY.format(then=f", t AS ({INSERT.format(source=_FOLLOWING, order='m.ordinality, n.ordinality')})")
STANDINGS = " UNION ALL ".join(
    f"""SELECT j.id, j.state, j.reason, j.version, j.session_id, coalesce(s.open, false), j.cancel_asked
        FROM {table} j LEFT JOIN sessions s ON s.id = j.session_id WHERE j.id = ANY (%(ids)s::text[])"""
    for table in ("ready", "in_flight", "ended")
)

# The count is of the statement's snapshot: a claim that is under way is not in it yet.
BEAT = """
    WITH b AS (UPDATE sessions SET beat = beat + 1 WHERE id = %(id)s AND open RETURNING id)
    SELECT EXISTS (SELECT FROM b), count(*), coalesce(array_agg(id) FILTER (WHERE cancel_asked), '{}')
    FROM in_flight WHERE session_id = %(id)s"""
# FOR UPDATE, unlike the UPDATE of a beat, waits for the KEY SHARE of claims and moves, and makes theirs wait.
CLOSE = """
    WITH k AS MATERIALIZED (
        SELECT id FROM sessions WHERE id = %(id)s AND open AND (%(beat)s::bigint IS NULL OR beat = %(beat)s) FOR UPDATE)
    UPDATE sessions s SET open = false FROM k WHERE s.id = k.id RETURNING s.id"""
LOST = f"""
    SELECT {ALL} FROM in_flight f
    WHERE NOT EXISTS (SELECT FROM sessions s WHERE s.id = f.session_id AND s.open)
      AND (%(id)s::text IS NULL OR f.session_id = %(id)s) LIMIT %(limit)s"""


def passes(lanes: Sequence[Lane], queues: Sequence[str], turn: int, limit: int) -> list[dict[str, Any]]:
    """`serving_order` as one list: every lane's even part first, then what the others of its group left."""
    plan: list[dict[str, Any]] = []
    for queue in queues:
        for group in serving_order([lane for lane in lanes if lane.queue == queue], turn):
            part = -(-limit // len(group))
            for skip, most in ((0, part), (part, limit - part)):
                plan += [asdict(lane) | {"skip": skip, "most": most} for lane in group if most]
    return plan


def _json(structs: Sequence[Any]) -> str:
    return msgspec.json.encode(structs).decode()


def _job(row: Sequence[Any]) -> Job:
    return Job(**dict(zip(COLUMNS, row, strict=True)) | {"state": State(row[7]), "reason": Reason(row[8])}, key=None)


class PostgresSpike:
    """Some verbs of the port on one connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.round_trips = 0
        self._lanes: dict[tuple[str, ...], list[Lane]] = {}

    async def _run(self, sql: str, **values: Any) -> list[TupleRow]:
        self.round_trips += 1
        cursor = await self.connection.execute(sql, values, prepare=True, binary=True)
        return await cursor.fetchall()

    async def insert(self, jobs: Sequence[NewJob]) -> list[Inserted]:
        rows = await self._run(INSERT_JOBS, jobs=_json(jobs))
        made = {row[0] for row in rows}
        return [Inserted(j.id, InsertStatus.CREATED if j.id in made else InsertStatus.EXISTING) for j in jobs]

    async def open_session(self, session: Session) -> None:
        sql = "INSERT INTO sessions (id) VALUES (%(id)s) ON CONFLICT (id) DO NOTHING RETURNING id"
        await self._run(sql, id=session.id)

    async def beat(self, session_id: SessionId) -> Beat:
        ((is_open, held, cancel),) = await self._run(BEAT, id=session_id)
        return Beat(is_open, held if is_open else 0, tuple(cancel) if is_open else ())

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        return bool(await self._run(CLOSE, id=session_id, beat=if_beat))

    async def claim(self, request: ClaimRequest) -> Claimed:
        while True:
            lanes = self._lanes.get(request.queues, [])
            plan = _json(passes(lanes, request.queues, request.turn, request.limit))
            values = {"session_id": request.session_id, "queues": list(request.queues), "limit": request.limit}
            rows = await self._run(CLAIM, **values, plan=plan)
            if not rows:
                raise SessionClosed(f"session {request.session_id} is not open; it may not claim jobs")
            now, due_in, known, *first = rows[0]
            if first[0] is not None:
                # A full batch says nothing about what it left: there may be more that is due.
                more = 0 if len(rows) == request.limit else due_in
                return Claimed(tuple(_job(row[3:]) for row in rows), now, more)
            self._lanes[request.queues] = found = [Lane(*lane) for lane in known or []]
            if set(found) <= set(lanes):
                return Claimed((), now, due_in)

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """Only moves of jobs in flight, at most one per job, without keys."""
        sql = APPLY_THEN if any(move.then for move in moves) else APPLY_ONLY
        rows = await self._run(sql, moves=_json(moves))
        done = {row[0] for row in rows}
        refused = [move.job_id for move in moves if move.job_id not in done]
        found = await self._standings(refused) if refused else {}
        return [
            Applied.APPLIED if move.job_id in done else self._refusal(move, found.get(move.job_id)) for move in moves
        ]

    @staticmethod
    def _refusal(move: Move, standing: Standing | None) -> Applied:
        verdict = judge(move, standing)
        # The guard failed a moment ago and holds now: its session was closed in between. The next pass gets it.
        return Applied.STALE if verdict is Applied.APPLIED else verdict

    async def _standings(self, ids: list[JobId]) -> dict[JobId, Standing]:
        rows = await self._run(STANDINGS, ids=ids)
        return {row[0]: Standing(State(row[1]), Reason(row[2]), *row[3:]) for row in rows}

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        return [_job(row) for row in await self._run(LOST, id=session_id, limit=limit)]

    async def ask_to_cancel(self, job_id: JobId) -> None:
        await self._run("UPDATE in_flight SET cancel_asked = true WHERE id = %(id)s RETURNING id", id=job_id)
