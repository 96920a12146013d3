"""How a session gets its jobs, inside one open write transaction."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter

import msgspec
from msgspec.structs import replace

from holdfast.job import Job, JobId, Key, Reason, SessionId, State
from holdfast.lanes import Lane, draw, serving_order
from holdfast.store import Claimed, ClaimRequest
from holdfast.stores.sqlite.database import Database, marks

_LONGEST_INLINE = 4096
"""Bytes of a payload that travels within the one text that a lane's jobs come as; longer ones are fetched."""

_Common = tuple[
    str,  # task
    str,  # task_version
    int,  # max_retries
    int,  # retention
    str | None,  # key
    str | None,  # key_hash
    int | None,  # key_window
    str | None,  # correlation_id
    int,  # version
    int,  # attempt
    int,  # failures
    int,  # crashes
    int,  # snoozes
    int,  # suspect
    int,  # cancel_asked
]
"""What nearly all jobs of a lane have in common."""
_COMMON = (
    "task, task_version, max_retries, retention, key, key_hash, key_window, correlation_id, "
    "version, attempt, failures, crashes, snoozes, suspect, cancel_asked"
)
_NOTHING: _Common = ("", "", 0, 0, None, None, None, None, 0, 0, 0, 0, 0, 0, 0)
_Row = tuple[
    str,  # id
    int,  # run_at
    int,  # created_at
    str | None,  # payload, in hexadecimal; None: it and the failure history are to be fetched
    _Common | None,  # None: the one that was expected
]
_rows = msgspec.json.Decoder(list[_Row])
_in_order = itemgetter(1, 0)


class _Pulled(msgspec.Struct, frozen=True, gc=False):
    """The first jobs of a lane, as they were read."""

    lane: Lane
    rows: Sequence[_Row]
    expected: _Common
    long: Mapping[JobId, tuple[bytes, bytes]]


class Taken(msgspec.Struct, frozen=True, gc=False):
    """What a claim took. The jobs are made of it after the transaction, by whoever asked: nobody need wait for that."""

    session_id: SessionId
    now: int
    due_in: int | None
    pulled: Sequence[_Pulled]

    def claimed(self) -> Claimed:
        """The answer to the claim."""
        jobs = [job for pulled in self.pulled for job in _jobs(pulled, self.session_id, self.now)]
        return Claimed(tuple(jobs), self.now, self.due_in)


class Claims:
    """The statements for one namespace."""

    def __init__(self, namespace: str) -> None:
        ns = self._ns = namespace
        # INDEXED BY: without statistics, or with old ones, SQLite may prefer to walk through the table.
        lane = f"FROM {ns}_live INDEXED BY {ns}_lanes WHERE state = 'ready' AND queue = ?"
        first = "ORDER BY priority, share, run_at LIMIT 1"
        self._first_lane = f"SELECT priority, share, run_at {lane} {first}"
        # Two hops: for (priority, share) > (?, ?) SQLite would read every job of the priority.
        self._next_share = f"SELECT priority, share, run_at {lane} AND priority = ? AND share > ? {first}"
        self._next_priority = f"SELECT priority, share, run_at {lane} AND priority > ? {first}"
        self._lane_head = f"SELECT run_at {lane} AND priority = ? AND share = ? ORDER BY run_at LIMIT 1"
        head = f"{lane} AND priority = ? AND share = ? AND run_at <= ? ORDER BY run_at, id LIMIT ?"
        # One text instead of a row for each job: sqlite3 takes Python's lock for every row that it hands over. What a
        # job has in common with the last one that was claimed is compared, which takes less than writing it down.
        as_expected = " AND ".join(f"{column} IS ?" for column in _COMMON.split(", "))
        self._read_head = f"""
            SELECT json_group_array(json_array(
                id, run_at, created_at,
                iif(length(payload) <= {_LONGEST_INLINE} AND length(failure_history) = 0, hex(payload), NULL),
                iif({as_expected}, NULL, json_array({_COMMON}))))
            FROM (SELECT * {head})"""
        self._last = _NOTHING
        self._take_head = f"""
            UPDATE {ns}_live SET state = 'in_flight', reason = 'claimed', session_id = ?, version = version + 1,
                                 claimed_at = ?, progress = NULL
            WHERE id IN (SELECT id {head})"""

    def claim(self, db: Database, request: ClaimRequest, paused: set[str], now: int) -> Taken:
        """See `Store.claim`. The session is open."""
        jobs: list[_Row] = []
        pulled: list[_Pulled] = []

        def pull(lane: Lane, most: int) -> Sequence[_Row]:
            pulled.append(self._pull(db, lane, most, request.session_id, now))
            return pulled[-1].rows

        heads: list[int] = []
        for queue in request.queues:
            if queue not in paused and len(jobs) < request.limit:
                lanes = dict(self._lanes(db, queue))
                due = [lane for lane, head in lanes.items() if head <= now]
                jobs += draw(
                    serving_order(due, request.turn),
                    request.limit - len(jobs),
                    pull,
                )
                heads += [head for head in lanes.values() if head > now]
                if len(jobs) < request.limit:
                    heads += self._heads(db, due)  # what is due there is taken: who is next?
        due_in = 0 if len(jobs) == request.limit else min((head - now for head in heads), default=None)
        return Taken(request.session_id, now, due_in, pulled)

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

    def _pull(self, db: Database, lane: Lane, most: int, session_id: SessionId, now: int) -> _Pulled:
        """Give the first jobs of the lane to the session. Nobody else writes between the two statements."""
        place = (lane.queue, lane.priority, lane.share, now, most)
        expected = self._last
        rows = _rows.decode(db.execute(self._read_head, (*expected, *place)).fetchone()[0])
        db.execute(self._take_head, (session_id, now, *place))
        rows.sort(key=_in_order)  # an aggregate promises no order
        self._last = (rows[-1][4] if rows else None) or expected
        return _Pulled(lane, rows, expected, self._fetch(db, [row[0] for row in rows if row[3] is None]))

    def _fetch(self, db: Database, ids: list[JobId]) -> dict[JobId, tuple[bytes, bytes]]:
        if not ids:
            return {}
        found = db.execute(
            f"SELECT id, payload, failure_history FROM {self._ns}_live WHERE id IN ({marks(len(ids))})", ids
        )
        return {row[0]: (row[1], row[2]) for row in found.fetchall()}


def _jobs(pulled: _Pulled, session_id: SessionId, now: int) -> Iterator[Job]:
    """The jobs of a lane. A copy with four fields of its own takes a tenth of the time of a job made field by field."""
    templates: dict[_Common, Job] = {}
    expected = _template(pulled.expected, pulled.lane, session_id, now)
    for job_id, run_at, created_at, inline, common in pulled.rows:
        if common is None:
            template = expected
        elif (known := templates.get(common)) is not None:
            template = known
        else:
            template = templates[common] = _template(common, pulled.lane, session_id, now)
        if inline is None:
            payload, failure_history = pulled.long[job_id]
            template = replace(template, failure_history=failure_history)
        else:
            payload = bytes.fromhex(inline)
        yield replace(template, id=job_id, run_at=run_at, created_at=created_at, payload=payload)


def _template(common: _Common, lane: Lane, session_id: SessionId, now: int) -> Job:
    """A claimed job of the lane without what is its own."""
    (
        task,
        task_version,
        max_retries,
        retention,
        key,
        key_hash,
        key_window,
        correlation_id,
        version,
        attempt,
        failures,
        crashes,
        snoozes,
        suspect,
        cancel_asked,
    ) = common
    return Job(
        id="",
        task=task,
        payload=b"",
        task_version=task_version,
        queue=lane.queue,
        share=lane.share,
        priority=lane.priority,
        state=State.IN_FLIGHT,
        reason=Reason.CLAIMED,
        run_at=0,
        created_at=0,
        version=version + 1,
        session_id=session_id,
        attempt=attempt,
        failures=failures,
        crashes=crashes,
        snoozes=snoozes,
        suspect=bool(suspect),
        cancel_asked=bool(cancel_asked),
        max_retries=max_retries,
        retention=retention,
        key=None if key is None else Key(key, key_hash or "", key_window or 0),
        correlation_id=correlation_id,
        claimed_at=now,
        ended_at=None,
        failure_history=b"",
        result=None,
        progress=None,
    )
