"""What only reads: one statement each, so that each sees one moment and waits for nobody."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from holdfast.job import ENDED, Job, JobId, SessionId, State
from holdfast.store import JobQuery, Page, QueueCounts, SessionPage
from holdfast.stores.mysql.sql import Plan, literal, name, one, text_of
from holdfast.stores.mysql.tables import Tables, selected
from holdfast.stores.rows import SESSION_COLUMNS, job_from_row, session_page


class Queries:
    """The verbs that read."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._ns = tables.ns

    def get(self, job_id: JobId) -> Plan[Job | None]:
        """See `Store.get`."""
        answer = yield from one(
            " UNION ALL ".join(
                f"SELECT {selected(table)} FROM {self._tables.by_id(table)} WHERE id = {name(job_id)}"
                for table in ("ready", "in_flight", "ended")
            )
        )
        return job_from_row(answer.rows[0]) if answer.rows else None

    def find(self, query: JobQuery) -> Plan[Page]:
        """See `Store.find`."""
        wanted = set(query.states or State)
        conditions = [
            f"{column} {literal(value) if column == 'correlation_id =' else name(value)}"
            for column, value in (
                ("queue =", query.queue),
                ("task =", query.task),
                ("correlation_id =", query.correlation_id),
                ("id <", query.cursor),
            )
            if value is not None
        ]
        tables = [table for table in ("ready", "in_flight") if State(table) in wanted]
        parts = [(table, self._tables.by_id(table), conditions) for table in tables]
        if ended := wanted & ENDED:
            place, own = self._tables.by_id("ended"), conditions
            if ended == {State.FAILED}:
                # Dead letters are few among the history: they are what never expires.
                place, own = f"{self._ns}_ended FORCE INDEX (expiring)", ["expires_at IS NULL", *conditions]
            elif ended != ENDED:
                own = [f"state IN ({', '.join(sorted(literal(state.value) for state in ended))})", *conditions]
            parts.append(("ended", place, own))
        answer = yield from one(
            " UNION ALL ".join(
                f"(SELECT {selected(table)} FROM {place} WHERE {' AND '.join(own) or '1 = 1'} "
                f"ORDER BY id DESC LIMIT {query.limit + 1})"
                for table, place, own in parts
            )
        )
        found = sorted(map(job_from_row, answer.rows), key=lambda job: job.id, reverse=True)
        page = tuple(found[: query.limit])
        return Page(page, page[-1].id if len(found) > query.limit else None)

    def counts(self) -> Plan[list[QueueCounts]]:
        """See `Store.counts`."""
        now = self._tables.clock()
        answer = yield from one(
            f"SELECT queue, 'paused', 1 FROM {self._ns}_paused "
            f"UNION ALL SELECT queue, state, SUM(jobs) FROM {self._ns}_totals GROUP BY queue, state "
            f"UNION ALL SELECT queue, 'in_flight', COUNT(*) FROM {self._ns}_in_flight GROUP BY queue "
            f"UNION ALL SELECT queue, IF(run_at <= {now}, 'ready', 'scheduled') AS kind, COUNT(*) "
            f"FROM {self._tables.by_id('ready')} GROUP BY queue, kind"
        )
        tally: dict[str, dict[str, int]] = {}
        paused = set()
        for queue, kind, jobs in answer.rows:
            if kind == "paused":
                paused.add(queue)
                tally.setdefault(queue, {})
            elif jobs > 0:
                tally.setdefault(queue, {})[kind] = int(jobs)
        return [QueueCounts(queue=queue, paused=queue in paused, **tally[queue]) for queue in sorted(tally)]

    def checkpoint(self, queue: str, cursor: str) -> Plan[str | None]:
        """See `Store.checkpoint`."""
        answer = yield from one(
            f"SELECT value FROM {self._ns}_checkpoints WHERE queue = {name(queue)} AND name = {literal(cursor)}"
        )
        return text_of(answer.rows[0][0]) if answer.rows else None

    def held(self, session_id: SessionId) -> Plan[list[Job]]:
        """See `Store.held`."""
        answer = yield from one(
            f"SELECT {selected('in_flight')} FROM {self._ns}_in_flight FORCE INDEX (held) "
            f"WHERE session_id = {name(session_id)}"
        )
        return [job_from_row(row) for row in answer.rows]

    def lost(self, limit: int, session_id: SessionId | None) -> Plan[list[Job]]:
        """See `Store.lost`."""
        own = "" if session_id is None else f" AND f.session_id = {name(session_id)}"
        # First their ids, out of the index alone: the rows of all that are not lost need not be read.
        answer = yield from one(
            f"SELECT {selected('in_flight')} FROM "
            f"(SELECT f.id AS lost_id FROM {self._ns}_in_flight f FORCE INDEX (held) "
            f"WHERE NOT EXISTS (SELECT 1 FROM {self._ns}_gates g WHERE g.id = f.session_id){own} LIMIT {int(limit)}) "
            f"AS lost STRAIGHT_JOIN {self._tables.by_id('in_flight')} ON id = lost_id"
        )
        return [job_from_row(row) for row in answer.rows]

    def sessions(self, cursor: str | None, limit: int) -> Plan[SessionPage]:
        """See `Store.sessions`. A cursor is the last id of the page before."""
        answer = yield from one(
            f"SELECT {SESSION_COLUMNS} FROM {self._ns}_sessions FORCE INDEX (PRIMARY) "
            f"WHERE id > {name(cursor or '')} ORDER BY id LIMIT {int(limit) + 1}"
        )
        return session_page(answer.rows, limit)

    def now(self) -> Plan[int]:
        """See `Store.now`."""
        answer = yield from one(self._tables.now())
        return int(answer.rows[0][0])
