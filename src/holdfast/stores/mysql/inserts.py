"""How jobs come in."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, groupby

from holdfast.job import JobId, Key, NewJob
from holdfast.store import Checkpoint, DepthLimit, Inserted, InsertStatus
from holdfast.stores.intake import Holder, Place, counts_needed, decide, keys_of
from holdfast.stores.mysql.sql import Again, Answer, Batch, Plan, among, cut, literal, name, names, row, text_of
from holdfast.stores.mysql.tables import INSERTED, Tables
from holdfast.stores.rows import new_row


class Keys:
    """The statements about idempotency keys. Whoever reads the holders holds their rows until the commit."""

    def __init__(self, tables: Tables) -> None:
        self._table = f"{tables.ns}_keys"

    def lock(self, places: Sequence[Place]) -> list[str]:
        """What answers with the rows of these keys, expired or not. `places` are sorted: everybody locks in order."""
        return [
            f"SELECT queue, `key`, job_id, key_hash, expires_at FROM {self._table} FORCE INDEX (PRIMARY) "
            f"WHERE queue = {name(queue)} AND `key` IN {among(key for _, key in own)} ORDER BY `key` FOR UPDATE"
            for queue, own in groupby(places, key=lambda place: place[0])
        ]

    @staticmethod
    def holders(answers: Iterable[Answer], now: int) -> tuple[dict[Place, Holder], list[Place]]:
        """Who holds which key, and the keys whose time is over."""
        held: dict[Place, Holder] = {}
        over: list[Place] = []
        for answer in answers:
            for queue, key, job_id, key_hash, expires_at in answer.rows:
                place = (queue, text_of(key) or "")
                if expires_at > now:
                    held[place] = (job_id, text_of(key_hash) or "")
                else:
                    over.append(place)
        return held, over

    def drop(self, places: Iterable[Place], jobs: Iterable[JobId] | None = None) -> list[str]:
        """What removes these keys; with `jobs` only if one of them holds it."""
        mine = "" if jobs is None else f" AND job_id IN {names(jobs)}"
        return [
            f"DELETE FROM {self._table} WHERE queue = {name(queue)} AND `key` IN {among(key for _, key in own)}{mine}"
            for queue, own in groupby(sorted(places), key=lambda place: place[0])
        ]

    def hold(self, held: Iterable[tuple[str, Key, JobId]], now: int) -> list[str]:
        """What gives keys to jobs. Whoever else did so at the same time makes it fail: then the verb is run again."""
        rows = [row((queue, key.text, key.payload_hash, job_id, now + key.window)) for queue, key, job_id in held]
        return [
            f"INSERT INTO {self._table} (queue, `key`, key_hash, job_id, expires_at) VALUES {','.join(piece)}"
            for piece in cut(sorted(rows))
        ]


class Inserts:
    """`insert` in all its forms."""

    def __init__(self, tables: Tables, keys: Keys) -> None:
        self._tables = tables
        self._ns = tables.ns
        self._keys = keys

    def insert_from_source(
        self, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit], checkpoint: Checkpoint
    ) -> Plan[list[Inserted]]:
        """See `Store.insert`, with a checkpoint."""
        place = f"queue = {name(checkpoint.queue)} AND name = {literal(checkpoint.name)}"
        [found] = yield Batch([f"SELECT value FROM {self._ns}_checkpoints WHERE {place} FOR UPDATE"])
        checkpoint.require(jobs, text_of(found.rows[0][0]) if found.rows else None)
        answers = yield from self.take_in(jobs, limits, all_or_none=True)
        if not any(answer.status is InsertStatus.FULL for answer in answers):
            value = literal(checkpoint.now)
            yield Batch(
                [
                    f"UPDATE {self._ns}_checkpoints SET value = {value} WHERE {place}"
                    if found.rows
                    else f"INSERT INTO {self._ns}_checkpoints (queue, name, value) VALUES "
                    f"{row((checkpoint.queue, checkpoint.name, checkpoint.now))}"
                ],
                last=True,
            )
        return answers

    def planner(self, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit]) -> Callable[[], Plan[list[Inserted]]]:
        """What makes the plan for each try of an insert. A single plain job is most likely new: one trip fewer."""
        tries = count(0 if len(jobs) == 1 and jobs[0].key is None and not limits else 1)
        return lambda: self._insert_new(jobs[0]) if next(tries) == 0 else self.take_in(jobs, limits)

    def _insert_new(self, new: NewJob) -> Plan[list[Inserted]]:
        """A job whose id is not known. If it is, this fails with a duplicate, or `Again`."""
        now = self._tables.clock()
        values = new_row(new, 0)
        due = f"{now} + {new.delay}" if new.run_at is None else f"GREATEST({new.run_at}, {now})"
        texts = [*map(literal, values[:-2]), now, due]
        [_, elsewhere] = yield Batch(
            [
                f"INSERT INTO {self._ns}_ready ({INSERTED}) VALUES ({','.join(texts)})",
                self._tables.anywhere([new.id], "in_flight", "ended"),
            ]
        )
        if elsewhere.rows:
            raise Again
        return [Inserted(new.id, InsertStatus.CREATED)]

    def take_in(
        self,
        jobs: Sequence[NewJob],
        limits: Mapping[str, DepthLimit],
        *,
        now: int | None = None,
        all_or_none: bool = False,
    ) -> Plan[list[Inserted]]:
        """Accept what can be accepted. `now` None: ask for the time."""
        ids = {job.id for job in jobs}
        counts = counts_needed(jobs, limits)
        places = keys_of(jobs)
        statements = [self._tables.now()] if now is None else []
        statements.append(self._tables.anywhere(sorted(ids), "ready", "in_flight", "ended"))
        statements += [self._depth(queue, enough) for queue, enough in counts.items()]
        answers = list((yield Batch(statements + self._keys.lock(places))))
        if now is None:
            now = int(answers.pop(0).rows[0][0])
        known = {found[0] for found in answers[0].rows}
        depths = {queue: int(answer.rows[0][0]) for queue, answer in zip(counts, answers[1:], strict=False)}
        held, over = self._keys.holders(answers[1 + len(counts) :], now)
        intake = decide(jobs, known=known, holders=held, depths=depths, limits=limits, all_or_none=all_or_none)
        if intake.jobs:
            yield from self._write(intake.jobs, over, now)
        return intake.answers

    def _write(self, jobs: Sequence[NewJob], over: Sequence[Place], now: int) -> Plan[None]:
        wanted = {(job.queue, job.key.text) for job in jobs if job.key}
        statements = self._keys.drop(place for place in over if place in wanted)
        statements += self._keys.hold([(job.queue, job.key, job.id) for job in jobs if job.key], now)
        statements += [
            f"INSERT INTO {self._ns}_ready ({INSERTED}) VALUES {','.join(piece)}"
            for piece in cut(row(new_row(job, now)) for job in jobs)
        ]
        # Once more, now that our rows keep everybody else from bringing in, or back, a job with one of these ids: one
        # that was claimed between the first look and the insert would be there twice.
        statements.append(self._tables.anywhere([job.id for job in jobs], "in_flight", "ended"))
        if (yield Batch(statements))[-1].rows:
            raise Again

    def _depth(self, queue: str, enough: int) -> str:
        """The queue's depth, counted no further than is enough."""
        return (
            f"SELECT COUNT(*) FROM (SELECT 1 FROM {self._ns}_ready FORCE INDEX (PRIMARY) "
            f"WHERE queue = {name(queue)} LIMIT {enough}) AS counted"
        )
