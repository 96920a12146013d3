"""What becomes of claims: moves are judged against locked rows, and the jobs change tables."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from holdfast.job import ENDED, JobId, Key, Lease
from holdfast.lifecycle import Applied, KeyChange, Move, Standing, judge
from holdfast.stores.intake import Holder, Place
from holdfast.stores.mysql.inserts import Inserts, Keys
from holdfast.stores.mysql.sessions import Sessions
from holdfast.stores.mysql.sql import Again, Answer, Batch, Plan, literal, name, names, text_of
from holdfast.stores.mysql.tables import Tables
from holdfast.stores.rows import reason_of, state_of
from holdfast.stores.runs import ends_well, runs_of_distinct_jobs


class _Found(msgspec.Struct, frozen=True):
    """A job where it is at present, its row locked."""

    table: str
    standing: Standing
    queue: str
    key: Key | None


class _Decided(msgspec.Struct):
    """What the moves of one run come to."""

    answers: list[Applied] = []
    applied: list[tuple[Move, _Found]] = []
    freed: list[tuple[Place, JobId]] = []
    taken: list[tuple[str, Key, JobId]] = []
    cleared: list[Place] = []

    def places_taken(self) -> list[tuple[Place, JobId]]:
        """Which keys go to which jobs."""
        return [((queue, key.text), job_id) for queue, key, job_id in self.taken]


class Settlements:
    """The verbs `apply` and `note`."""

    def __init__(self, tables: Tables, sessions: Sessions, keys: Keys, inserts: Inserts) -> None:
        self._tables = tables
        self._ns = tables.ns
        self._sessions = sessions
        self._keys = keys
        self._inserts = inserts

    def apply(self, moves: Sequence[Move]) -> Plan[list[Applied]]:
        """See `Store.apply`."""
        answers: list[Applied] = []
        runs = list(runs_of_distinct_jobs(moves))
        now: int | None = None
        for number, run in enumerate(runs, start=1):
            settled, now = yield from self.apply_run(run, now, last=number == len(runs))
            answers += settled
        return answers

    def apply_run(
        self, moves: Sequence[Move], now: int | None = None, *, last: bool
    ) -> Plan[tuple[list[Applied], int]]:
        """Carry out moves of distinct jobs. `last`: nothing follows.

        Nearly always, nearly all are jobs that ended well: those are settled together, if every lease holds.
        """
        plain = [move for move in moves if ends_well(move)]
        if not plain:
            return (yield from self._apply_judged(moves, now, last=last))
        wanted = names(move.job_id for move in plain)
        hold, now = yield from self._all_hold(plain, wanted, now)
        if not hold:
            return (yield from self._apply_judged(moves, now, last=last))
        others = [] if len(plain) == len(moves) else [move for move in moves if not ends_well(move)]
        totals = Counter((move.queue, move.to.value) for move in plain)
        yield Batch([*self._tables.end_well(plain, wanted, now), *self._tables.count(totals)], last=last and not others)
        if not others:
            return [Applied.APPLIED] * len(plain), now
        judged, now = yield from self._apply_judged(others, now, last=last)
        answers = iter(judged)
        return [Applied.APPLIED if ends_well(move) else next(answers) for move in moves], now

    def _all_hold(self, moves: Sequence[Move], wanted: str, now: int | None) -> Plan[tuple[bool, int]]:
        """Whether each of these jobs is held by its move's session, which is open: then `judge` would say `APPLIED`.

        It locks what it finds as `_standings` does. `wanted` is what `names` makes of the jobs.
        """
        sessions = {move.session_id for move in moves if move.session_id}
        leases: dict[tuple[str, int, str], list[JobId]] = {}
        for move in moves:
            leases.setdefault((move.session_id or "", move.version, move.queue), []).append(move.job_id)
        statements = [self._sessions.keep_open(sessions)]
        statements += [
            f"SELECT COUNT(*) FROM {self._tables.by_id('in_flight')} WHERE id IN "
            f"{wanted if len(leases) == 1 else names(ids)} "
            f"AND session_id = {name(session_id)} AND version = {version} AND queue = {name(queue)} FOR UPDATE"
            for (session_id, version, queue), ids in leases.items()
        ]
        answers = list((yield Batch(statements if now is not None else [*statements, self._tables.now()])))
        if now is None:
            now = int(answers.pop().rows[0][0])
        held = sum(int(answer.rows[0][0]) for answer in answers[1:])
        return {row[0] for row in answers[0].rows} == sessions and held == len(moves), now

    def _apply_judged(self, moves: Sequence[Move], now: int | None, *, last: bool) -> Plan[tuple[list[Applied], int]]:
        found, now = yield from self._standings(moves, now)
        held: Mapping[Place, Holder] = {}
        over: Sequence[Place] = ()
        if takes := sorted(self._places_to_take(moves, found)):
            held, over = self._keys.holders((yield Batch(self._keys.lock(takes))), now)
        decided = _decide(moves, found, held)
        # Only what we saw in our way is removed: a key that somebody takes meanwhile makes `hold` fail.
        decided.cleared = [
            place for place, job_id in decided.places_taken() if place in over or held.get(place, ("",))[0] == job_id
        ]
        following = [new for move, _ in decided.applied for new in move.then]
        if statements := self._writes(decided, now):
            yield Batch(statements, last=last and not following)
        if following:
            yield from self._inserts.take_in(following, {}, now=now)
        return decided.answers, now

    # Reading.

    def _standings(self, moves: Sequence[Move], now: int | None) -> Plan[tuple[dict[JobId, _Found], int]]:
        """The present situation of each job that exists, locked: first the sessions, then the jobs by id."""
        ids = {move.job_id for move in moves}
        statements = [
            self._sessions.keep_open({move.session_id for move in moves if move.session_id}),
            self._look("in_flight", ids),
        ]
        answers = list((yield Batch(statements if now is not None else [*statements, self._tables.now()])))
        if now is None:
            now = int(answers.pop().rows[0][0])
        open_sessions = {row[0] for row in answers[0].rows}
        found = _found("in_flight", answers[1], open_sessions)
        if missing := ids - found.keys():
            ready, ended = yield Batch([self._look("ready", missing), self._look("ended", missing)])
            found |= _found("ready", ready, open_sessions) | _found("ended", ended, open_sessions)
        if missing := ids - found.keys():
            # One statement sees one moment. A job that it finds went from one table to another between our looks.
            [anywhere] = yield Batch([self._tables.anywhere(sorted(missing), "ready", "in_flight", "ended")])
            if anywhere.rows:
                raise Again
        return found, now

    def _look(self, table: str, ids: set[JobId]) -> str:
        state = "state" if table == "ended" else f"'{table}'"
        return (
            f"SELECT id, {state}, reason, version, session_id, cancel_asked, queue, `key`, key_hash, key_window "
            f"FROM {self._tables.by_id(table)} WHERE id IN {names(ids)} ORDER BY id FOR UPDATE"
        )

    @staticmethod
    def _places_to_take(moves: Sequence[Move], found: Mapping[JobId, _Found]) -> set[Place]:
        return {
            (job.queue, job.key.text)
            for move in moves
            if move.key_change is KeyChange.TAKE and (job := found.get(move.job_id)) and job.key
        }

    # Writing.

    def _writes(self, decided: _Decided, now: int) -> list[str]:
        by_way: dict[tuple[str, str], list[Move]] = {}
        totals: Counter[tuple[str, str]] = Counter()
        for move, job in decided.applied:
            by_way.setdefault((job.table, "ended" if move.to in ENDED else "ready"), []).append(move)
            if move.to in ENDED:
                totals[job.queue, move.to.value] += 1
            if job.standing.state in ENDED:
                totals[job.queue, job.standing.state.value] -= 1
        statements = [
            statement
            for (source, target), moves in sorted(by_way.items())
            for statement in self._tables.transfer(source, target, moves, now)
        ]
        statements += self._tables.count(totals)
        statements += self._keys.drop((place for place, _ in decided.freed), [job_id for _, job_id in decided.freed])
        statements += self._keys.drop(decided.cleared)
        statements += self._keys.hold(decided.taken, now)
        return statements

    def note(self, lease: Lease, progress: bytes) -> Plan[Applied]:
        """See `Store.note`."""
        gates, held, anywhere = yield Batch(
            [
                self._sessions.keep_open([lease.session_id]),
                f"SELECT session_id, version FROM {self._ns}_in_flight WHERE id = {name(lease.job_id)} FOR UPDATE",
                self._tables.anywhere([lease.job_id], "ready", "in_flight", "ended"),
            ]
        )
        if not gates.rows or list(held.rows) != [(lease.session_id, lease.version)]:
            return Applied.STALE if anywhere.rows else Applied.GONE
        yield Batch(
            [f"UPDATE {self._ns}_in_flight SET progress = {literal(progress)} WHERE id = {name(lease.job_id)}"],
            last=True,
        )
        return Applied.APPLIED


def _found(table: str, answer: Answer, open_sessions: set[str]) -> dict[JobId, _Found]:
    found = {}
    for job_id, state, reason, version, session_id, cancel_asked, queue, key, key_hash, key_window in answer.rows:
        standing = Standing(
            state=state_of(state),
            reason=reason_of(reason),
            version=version,
            session_id=session_id,
            session_open=session_id in open_sessions,
            cancel_asked=bool(cancel_asked),
        )
        own_key = None if key is None else Key(text_of(key) or "", text_of(key_hash) or "", key_window)
        found[job_id] = _Found(table, standing, queue, own_key)
    return found


def _decide(moves: Sequence[Move], found: Mapping[JobId, _Found], held: Mapping[Place, Holder]) -> _Decided:
    """Judge each move in turn; a key that one of them frees or takes is free or taken for those after it."""
    decided = _Decided()
    holders = dict(held)
    for move in moves:
        job = found.get(move.job_id)
        verdict = judge(move, job.standing if job else None)
        if job and job.key and verdict is Applied.APPLIED and move.key_change is not KeyChange.KEEP:
            place = (job.queue, job.key.text)
            holder = holders.get(place)
            if move.key_change is KeyChange.FREE:
                decided.freed.append((place, move.job_id))
                if holder and holder[0] == move.job_id:
                    del holders[place]
            elif holder and holder[0] != move.job_id:
                verdict = Applied.KEY_TAKEN
            else:
                decided.taken.append((job.queue, job.key, move.job_id))
                holders[place] = (move.job_id, job.key.payload_hash)
        decided.answers.append(verdict)
        if job and verdict is Applied.APPLIED:
            decided.applied.append((move, job))
    return decided
