"""What operators and keepers do: cancel, pause, prune, forget."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from holdfast.job import JobId
from holdfast.lifecycle import cancel
from holdfast.store import CLOSED_SESSION_KEPT, MOST_PER_CALL, CancelAnswer
from holdfast.stores.mysql.inserts import Keys
from holdfast.stores.mysql.settlements import Settlements
from holdfast.stores.mysql.sql import Again, Batch, Plan, among, literal, name, names, one, text_of
from holdfast.stores.mysql.tables import Tables, selected
from holdfast.stores.rows import job_from_row

_TOTALS_AT_ONCE = 5_000
_TOTALS_LEFT = 100
"""Rows that could be others' in the totals: so few are read with the rest, and a transaction for them costs more."""
_MOST_ROUNDS = 20


class Tending:
    """The verbs of operators and keepers."""

    def __init__(self, tables: Tables, keys: Keys, settlements: Settlements) -> None:
        self._tables = tables
        self._ns = tables.ns
        self._keys = keys
        self._settlements = settlements

    def request_cancel(self, job_ids: Sequence[JobId]) -> Plan[list[CancelAnswer]]:
        """See `Store.request_cancel`."""
        wanted = names(job_ids)
        running, waiting, over, anywhere = yield Batch(
            [
                f"SELECT id FROM {self._tables.by_id('in_flight')} WHERE id IN {wanted} ORDER BY id FOR UPDATE",
                f"SELECT {selected('ready')} FROM {self._tables.by_id('ready')} WHERE id IN {wanted} "
                f"ORDER BY id FOR UPDATE",
                f"SELECT id FROM {self._tables.by_id('ended')} WHERE id IN {wanted}",
                self._tables.anywhere(sorted(set(job_ids)), "ready", "in_flight", "ended"),
            ]
        )
        asked = [row[0] for row in running.rows]
        ready = [job_from_row(row) for row in waiting.rows]
        found = {**dict.fromkeys(asked, CancelAnswer.ASKED), **{job.id: CancelAnswer.CANCELLED for job in ready}}
        found |= dict.fromkeys((row[0] for row in over.rows), CancelAnswer.ENDED)
        if any(row[0] not in found for row in anywhere.rows):
            raise Again  # it went from one table to another between our looks
        if asked:
            yield Batch(
                [f"UPDATE {self._ns}_in_flight SET cancel_asked = 1 WHERE id IN {names(asked)}"], last=not ready
            )
        if ready:
            yield from self._settlements.apply_run([cancel(job) for job in ready], last=True)
        answers = []
        for job_id in job_ids:
            answers.append(found.get(job_id, CancelAnswer.GONE))
            if answers[-1] is CancelAnswer.CANCELLED:
                found[job_id] = CancelAnswer.ENDED  # for those that are named twice
        return answers

    def set_paused(self, queue: str, paused: bool) -> Plan[None]:
        """See `Store.set_paused`."""
        change = (
            f"INSERT INTO {self._ns}_paused (queue) VALUES ({literal(queue)}) ON DUPLICATE KEY UPDATE queue = queue"
            if paused
            else f"DELETE FROM {self._ns}_paused WHERE queue = {name(queue)}"
        )
        yield Batch([change], last=True)

    def anything_to_prune(self) -> Plan[bool]:
        """A read that tells whether `prune` is worth its while: mostly it is not."""
        now = self._tables.clock()
        answer = yield from one(
            "SELECT "
            f"EXISTS (SELECT 1 FROM {self._ns}_ended FORCE INDEX (expiring) WHERE expires_at <= {now}) "
            f"OR EXISTS (SELECT 1 FROM {self._ns}_keys FORCE INDEX (expiring) WHERE expires_at <= {now}) "
            f"OR EXISTS (SELECT 1 FROM {self._ns}_sessions "
            f"WHERE open = 0 AND beat_at <= {now} - {CLOSED_SESSION_KEPT}), "
            f"(SELECT COUNT(*) - COUNT(DISTINCT queue, state) "
            f"FROM (SELECT queue, state FROM {self._ns}_totals ORDER BY id LIMIT {_TOTALS_AT_ONCE}) total)"
        )
        [(over, surplus)] = answer.rows
        return bool(over) or surplus > _TOTALS_LEFT

    def prune(self, limit: int) -> Plan[int]:
        """See `Store.prune`. What somebody else has locked is left for the next time."""
        clock, expired = yield Batch(
            [
                self._tables.now(),
                f"SELECT id FROM {self._ns}_ended FORCE INDEX (expiring) WHERE expires_at <= {self._tables.clock()} "
                f"ORDER BY expires_at LIMIT {min(limit, MOST_PER_CALL)} FOR UPDATE SKIP LOCKED",
            ]
        )
        now = int(clock.rows[0][0])
        pruned = 0
        if expired.rows:
            pruned = yield from self.forget([row[0] for row in expired.rows], last=False)
        if pruned < limit:
            pruned += yield from self._prune_keys(now, min(limit - pruned, MOST_PER_CALL))
        if pruned < limit:
            pruned += yield from self._prune_sessions(now, limit - pruned)
        yield from self._sum_up()
        return pruned

    def _prune_keys(self, now: int, limit: int) -> Plan[int]:
        [over] = yield Batch(
            [
                f"SELECT queue, `key` FROM {self._ns}_keys FORCE INDEX (expiring) WHERE expires_at <= {now} "
                f"ORDER BY expires_at LIMIT {limit} FOR UPDATE SKIP LOCKED"
            ]
        )
        if over.rows:
            yield Batch(self._keys.drop([(queue, text_of(key) or "") for queue, key in over.rows]))
        return len(over.rows)

    def _prune_sessions(self, now: int, limit: int) -> Plan[int]:
        [over] = yield Batch(
            [
                f"SELECT s.id FROM {self._ns}_sessions s WHERE s.open = 0 AND s.beat_at <= {now - CLOSED_SESSION_KEPT} "
                f"AND NOT EXISTS (SELECT 1 FROM {self._ns}_in_flight f FORCE INDEX (held) WHERE f.session_id = s.id) "
                f"LIMIT {limit}"
            ]
        )
        if not over.rows:
            return 0
        ids = names(row[0] for row in over.rows)
        [gone] = yield Batch([f"DELETE FROM {self._ns}_sessions WHERE id IN {ids} AND open = 0"])
        return gone.changed

    def _sum_up(self) -> Plan[None]:
        """Make few rows of many in the totals, so many that no settling is faster."""
        sums: Counter[tuple[str, str]] = Counter()
        for _ in range(_MOST_ROUNDS):
            [rows] = yield Batch(
                [
                    f"SELECT id, queue, state, jobs FROM {self._ns}_totals ORDER BY id LIMIT {_TOTALS_AT_ONCE} "
                    f"FOR UPDATE SKIP LOCKED"
                ]
            )
            if len(rows.rows) == len({(queue, state) for _, queue, state, _ in rows.rows}):
                break  # each stands for itself
            for _, queue, state, jobs in rows.rows:
                sums[queue, state] += jobs
            yield Batch([f"DELETE FROM {self._ns}_totals WHERE id IN {among(row[0] for row in rows.rows)}"])
            if len(rows.rows) < _TOTALS_AT_ONCE:
                break
        if statements := self._tables.count(sums):
            yield Batch(statements, last=True)

    def forget(self, job_ids: Sequence[JobId], *, last: bool = True) -> Plan[int]:
        """See `Store.forget`."""
        [ended] = yield Batch(
            [
                f"SELECT id, queue, state FROM {self._tables.by_id('ended')} WHERE id IN {names(job_ids)} "
                f"ORDER BY id FOR UPDATE"
            ]
        )
        if not ended.rows:
            return 0
        gone = Counter((queue, state) for _, queue, state in ended.rows)
        counted = self._tables.count({place: -jobs for place, jobs in gone.items()})
        yield Batch([self._tables.drop("ended", names(row[0] for row in ended.rows)), *counted], last=last)
        return len(ended.rows)
