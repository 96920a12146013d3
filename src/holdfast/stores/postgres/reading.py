"""The verbs that only look: one job, a page of jobs, counts, a checkpoint, the time. No I/O here (`verbs.py`)."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from holdfast.errors import InvalidOption, shown
from holdfast.job import ENDED, Job, JobId, State, is_job_id
from holdfast.store import JobQuery, Page, QueueCounts
from holdfast.stores.postgres.query import COLUMNS, Query, Verb
from holdfast.stores.rows import job_from_row

_LISTED = {
    "waiting_jobs": {State.READY},
    "held_jobs": {State.IN_FLIGHT},
    "kept_jobs": ENDED,
    "past_jobs": ENDED - {State.FAILED},
}
"""The views that `find` reads, and the states of the jobs in each."""


class Reading:
    """The questions for one namespace."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._get = f"SELECT {COLUMNS} FROM {namespace}_get(%s::uuid)"

    def get(self, job_id: JobId) -> Verb[Job | None]:
        """See `Store.get`."""
        if not is_job_id(job_id):
            return None
        rows = yield Query(self._get, (job_id,), writes=False)
        return job_from_row(rows[0]) if rows else None

    def find(self, query: JobQuery) -> Verb[Page]:
        """See `Store.find`. Each table gives its newest."""
        if query.cursor is not None and not is_job_id(query.cursor):
            raise InvalidOption(f"cursor {shown(query.cursor)} is not the `next` of a page")
        conditions, values = ["true"], []
        for condition, value in (
            ("state = ANY (%s::text[])", list(query.states) or None),
            ("queue = %s::text", query.queue),
            ("task = %s::text", query.task),
            ("correlation_id = %s::text", query.correlation_id),
            ("id < %s::uuid", query.cursor),
        ):
            if value is not None:
                conditions.append(condition)
                values.append(value)
        tables = [table for table, states in _LISTED.items() if not query.states or states & {*query.states}]
        newest = " UNION ALL ".join(
            f"""(SELECT {COLUMNS} FROM {self.namespace}_{table} j WHERE {" AND ".join(conditions)}
                 ORDER BY j.id DESC LIMIT %s::int)"""
            for table in tables
        )
        rows = yield Query(
            f'SELECT * FROM ({newest}) j ORDER BY id COLLATE "C" DESC LIMIT %s::int',
            (*(*values, query.limit + 1) * len(tables), query.limit + 1),
            writes=False,
        )
        page = tuple(job_from_row(row) for row in rows[: query.limit])
        return Page(page, page[-1].id if len(rows) > query.limit else None)

    def counts(self) -> Verb[list[QueueCounts]]:
        """See `Store.counts`."""
        ns = self.namespace
        rows = yield Query(
            f"""SELECT queue, CASE WHEN run_at <= {ns}_now() THEN 'ready' ELSE 'scheduled' END, count(*)
                    FROM {ns}_waiting GROUP BY 1, 2
                UNION ALL SELECT queue, 'in_flight', count(*) FROM {ns}_in_flight GROUP BY 1
                UNION ALL SELECT queue, state, sum(jobs)::bigint FROM {ns}_tallies GROUP BY 1, 2 HAVING sum(jobs) > 0
                UNION ALL SELECT queue, 'paused', 1 FROM {ns}_paused""",
            writes=False,
        )
        tally: dict[str, dict[str, int]] = {}
        for queue, state, jobs in rows:
            tally.setdefault(queue, {})[state] = jobs
        return [
            QueueCounts(queue=queue, paused=bool(counts.pop("paused", 0)), **counts)
            for queue, counts in sorted(tally.items())
        ]

    def checkpoint(self, queue: str, name: str) -> Verb[str | None]:
        """See `Store.checkpoint`."""
        text = f"SELECT value FROM {self.namespace}_checkpoints WHERE queue = %s::text AND name = %s::text"
        rows = yield Query(text, (queue, name), writes=False)
        return rows[0][0] if rows else None

    def now(self) -> Verb[int]:
        """See `Store.now`."""
        [(now,)] = yield Query(f"SELECT {self.namespace}_now()", writes=False)
        return int(now)
