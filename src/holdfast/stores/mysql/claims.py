"""How a session gets its jobs."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.errors import SessionClosed
from holdfast.job import Job, SessionId
from holdfast.lanes import Lane, draw, serving_order
from holdfast.store import Claimed, ClaimRequest
from holdfast.stores.mysql.sessions import Sessions
from holdfast.stores.mysql.sql import Answer, Batch, Plan, literal, name, names, one, text_of
from holdfast.stores.mysql.tables import LIVE, Tables, quoted, selected
from holdfast.stores.rows import jobs_from_rows

_MOST_REMEMBERED = 64
"""Lanes of a queue to ask for at once, because they had jobs the last time."""

_Hop = tuple[str, Lane | None]
"""From where to look for the next lane of a queue: a lane, or its beginning."""


class _Wanted(Exception):
    """A lane must be asked before the drawing can go on."""

    def __init__(self, lane: Lane, most: int) -> None:
        self.lane = lane
        self.most = most


class Claims:
    """The verb `claim`."""

    def __init__(self, tables: Tables, sessions: Sessions) -> None:
        self._tables = tables
        self._ns = tables.ns
        self._sessions = sessions
        self._remembered: dict[str, tuple[Lane, ...]] = {}

    def claim(self, request: ClaimRequest) -> Plan[Claimed]:
        """See `Store.claim`."""
        hops = [hop for queue in request.queues for hop in self._likely_hops(queue)]
        clock, gate, paused, *found = yield Batch(
            [
                self._tables.now(),
                self._sessions.keep_open([request.session_id]),
                f"SELECT queue FROM {self._ns}_paused",
                *map(self._hop, hops),
            ]
        )
        if not gate.rows:
            raise SessionClosed(f"session {request.session_id} is not open; it may not claim jobs")
        now = int(clock.rows[0][0])
        closed = {row[0] for row in paused.rows}
        heads = yield from self._lanes([queue for queue in request.queues if queue not in closed], hops, found)
        jobs: list[Job] = []
        for lanes in heads.values():
            if len(jobs) < request.limit:
                due = [lane for lane, head in lanes.items() if head <= now]
                jobs += yield from self._draw(due, request, request.limit - len(jobs), now)
        full = len(jobs) == request.limit
        waiting = [] if full else [lane for lanes in heads.values() for lane, head in lanes.items() if head <= now]
        statements = self._hand_over(jobs, request.session_id, now) if jobs else []
        answers: Sequence[Answer] = ()
        if statements or waiting:
            answers = yield Batch([*statements, *(self._later(lane, now) for lane in waiting)], last=True)
        later = [head for lanes in heads.values() for head in lanes.values() if head > now]
        later += [row[0] for answer in answers[len(statements) :] for row in answer.rows]
        due_in = 0 if full else min((head - now for head in later), default=None)
        return Claimed(tuple(jobs), now, due_in)

    def look(self, request: ClaimRequest) -> Plan[Claimed | None]:
        """The claim that finds nothing, as one statement that writes and locks nothing; None if there is more to do."""
        hops = [hop for queue in request.queues for hop in self._likely_hops(queue)]
        parts = [
            f"(SELECT 'clock' AS kind, 0 AS place, x'' AS text, {self._tables.clock()} AS at)",
            f"(SELECT 'gate', 0, x'', 0 FROM {self._ns}_gates WHERE id = {name(request.session_id)})",
            f"(SELECT 'paused', 0, CAST(queue AS BINARY), 0 FROM {self._ns}_paused)",
        ]
        for number, hop in enumerate(hops):
            parts += [f"({select})" for select in self._heads(hop, f"'{number}', ")]
        answer = yield from one(" UNION ALL ".join(parts))
        rows: dict[str, list[tuple[int, bytes, int]]] = {}
        for kind, place, text, at in answer.rows:
            rows.setdefault(text_of(kind) or "", []).append((place, text, at))
        if "gate" not in rows:
            return None
        now = int(rows["clock"][0][2])
        paused = {text_of(text) for _, text, _ in rows.get("paused", ())}
        known = {
            hop: _first(hop[0], rows.get(str(number), ())) for number, hop in enumerate(hops) if hop[0] not in paused
        }
        later: list[int] = []
        for queue in request.queues:
            if queue not in paused:
                lanes, unknown = _walk(queue, known)
                if unknown is not None or any(head <= now for head in lanes.values()):
                    return None
                later += lanes.values()
        return Claimed((), now, min((head - now for head in later), default=None))

    # Lanes: found by hopping from one to the next in the index.

    def _likely_hops(self, queue: str) -> Iterator[_Hop]:
        yield queue, None
        for lane in self._remembered.get(queue, ()):
            yield queue, lane

    def _hop(self, hop: _Hop) -> str:
        return " UNION ALL ".join(f"({select})" for select in self._heads(hop))

    def _heads(self, hop: _Hop, before: str = "") -> list[str]:
        """The looks whose first answer is the next lane; `before` are columns to go before its own."""
        queue, lane = hop
        head = (
            f"SELECT {before}priority, share, run_at FROM {self._ns}_ready FORCE INDEX (PRIMARY) "
            f"WHERE queue = {name(queue)}"
        )
        if lane is None:
            return [f"{head} ORDER BY priority, share, run_at LIMIT 1"]
        # Two looks: for (priority, share) > (?, ?) the server would read every job of the priority.
        return [
            f"{head} AND priority = {lane.priority} AND share > {literal(lane.share)} ORDER BY share, run_at LIMIT 1",
            f"{head} AND priority > {lane.priority} ORDER BY priority, share, run_at LIMIT 1",
        ]

    def _lanes(
        self, queues: Sequence[str], hops: Sequence[_Hop], found: Sequence[Answer]
    ) -> Plan[dict[str, dict[Lane, int]]]:
        """The lanes of each queue that have jobs, each with its first due time. Mostly the first look found all."""
        known: dict[_Hop, tuple[Lane, int] | None] = {}
        while True:
            known.update((hop, _first(hop[0], answer.rows)) for hop, answer in zip(hops, found, strict=True))
            lanes: dict[str, dict[Lane, int]] = {}
            hops = []
            for queue in queues:
                lanes[queue], unknown = _walk(queue, known)
                if unknown is not None:
                    hops.append(unknown)
                self._remembered[queue] = tuple(lanes[queue])[:_MOST_REMEMBERED]
            if not hops:
                return lanes
            found = yield Batch([*map(self._hop, hops)])

    # Jobs.

    def _draw(self, lanes: Sequence[Lane], request: ClaimRequest, limit: int, now: int) -> Plan[list[Job]]:
        """What `lanes.draw` takes from these lanes. It calls, we yield: so it is run again after each answer."""
        groups = serving_order(lanes, request.turn)
        answered: list[list[Job]] = []
        taken: dict[Lane, Job] = {}
        while True:
            replayed = iter(answered)

            def pull(lane: Lane, most: int, replayed: Iterator[list[Job]] = replayed) -> list[Job]:
                for jobs in replayed:
                    return jobs
                raise _Wanted(lane, most)

            try:
                return draw(groups, limit, pull)
            except _Wanted as wanted:
                lane, last = wanted.lane, taken.get(wanted.lane)
                [answer] = yield Batch([self._pull(lane, last, wanted.most, request.session_id, now)])
                answered.append(jobs_from_rows(answer.rows))
                if answer.rows:
                    taken[lane] = answered[-1][-1]

    def _pull(self, lane: Lane, last: Job | None, most: int, session_id: SessionId, now: int) -> str:
        """The next jobs of a lane, behind the last that was taken: our own locks keep nobody out but others."""
        columns = selected("in_flight", **self._handed_over(session_id, now))
        behind = (
            "" if last is None else f" AND run_at >= {last.run_at} AND (run_at > {last.run_at} OR id > '{last.id}')"
        )
        return (
            f"SELECT {columns} FROM {self._ns}_ready FORCE INDEX (PRIMARY) WHERE {_in_lane(lane)} "
            f"AND run_at <= {now}{behind} ORDER BY run_at, id LIMIT {most} FOR UPDATE SKIP LOCKED"
        )

    @staticmethod
    def _handed_over(session_id: SessionId, now: int) -> dict[str, str]:
        """What a claim changes."""
        return {
            "reason": "'claimed'",
            "version": "version + 1",
            "session_id": name(session_id),
            "claimed_at": str(now),
            "progress": "NULL",
        }

    def _hand_over(self, jobs: Sequence[Job], session_id: SessionId, now: int) -> list[str]:
        changed = self._handed_over(session_id, now)
        wanted = names(job.id for job in jobs)
        return [
            f"INSERT INTO {self._ns}_in_flight ({quoted(LIVE)}) "
            f"SELECT {', '.join(changed.get(column, f'`{column}`') for column in LIVE)} "
            f"FROM {self._tables.by_id('ready')} WHERE id IN {wanted}",
            self._tables.drop("ready", wanted),
        ]

    def _later(self, lane: Lane, now: int) -> str:
        """The next due time in a lane out of which everything due was taken, by us or by somebody else."""
        return (
            f"SELECT run_at FROM {self._ns}_ready FORCE INDEX (PRIMARY) WHERE {_in_lane(lane)} AND run_at > {now} "
            f"ORDER BY run_at LIMIT 1"
        )


def _first(queue: str, rows: Iterable[tuple[Any, ...]]) -> tuple[Lane, int] | None:
    """The lane that a hop arrives at, with its first due time."""
    lanes = [(Lane(queue, priority, text_of(share) or ""), head) for priority, share, head in rows]
    return min(lanes, default=None)


def _walk(queue: str, known: Mapping[_Hop, tuple[Lane, int] | None]) -> tuple[dict[Lane, int], _Hop | None]:
    """The lanes of a queue as far as they are known, each with its first due time, and the hop that is not known."""
    lanes: dict[Lane, int] = {}
    hop: _Hop = (queue, None)
    while (step := known.get(hop)) is not None:
        lane, lanes[step[0]] = step
        hop = (queue, lane)
    return lanes, None if hop in known else hop


def _in_lane(lane: Lane) -> str:
    return f"queue = {name(lane.queue)} AND priority = {lane.priority} AND share = {literal(lane.share)}"
