"""The columns of the tables, and how a job goes from one table to another."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from holdfast.job import JobId
from holdfast.lifecycle import Move
from holdfast.stores.mysql.sql import Value, cut, literal, names, row
from holdfast.stores.rows import IDENTITY

CLOCK = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
"""The server's clock in microseconds. It depends neither on the session's time zone nor on a 32-bit time."""

_BINARY_TEXT = frozenset({"share", "key", "key_hash", "correlation_id"})
"""Text that may be anything. It is kept as bytes: every other collation ignores something, if only trailing spaces."""

_IDENTITY = tuple(IDENTITY.split(", "))
_LIFE = ("run_at", "version", "session_id", "attempt", "failures", "crashes", "snoozes", "suspect", "cancel_asked")
_REST = ("claimed_at", "failure_history", "progress")


def quoted(columns: Sequence[str], alias: str = "") -> str:
    """A list of columns; `key` is a word of SQL."""
    prefix = f"{alias}." if alias else ""
    return ", ".join(f"{prefix}`{column}`" for column in columns)


LIVE = (*_IDENTITY, "reason", *_LIFE, *_REST)
"""The columns of a ready job and of one in flight, which are the same."""
ENDED = (*LIVE, "state", "ended_at", "expires_at", "result")

INSERTED = quoted((*_IDENTITY, "run_at"))
"""What `rows.new_row` has, in its order."""


def selected(table: str, **changed: str) -> str:
    """What a SELECT names so that `rows.job_from_row` understands the row; `changed` columns as something else."""
    state = "state" if table == "ended" else f"'{table}'"
    columns = [changed.get(name, _readable(name)) for name in (*_IDENTITY, "state", "reason", *_LIFE, *_REST)]
    columns[len(_IDENTITY)] = state
    return ", ".join([*columns, *(("ended_at", "result") if table == "ended" else ("NULL", "NULL"))])


def _readable(column: str) -> str:
    if column in _BINARY_TEXT:
        return f"CONVERT(`{column}` USING utf8mb4)"
    return f"COALESCE({column}, x'')" if column == "failure_history" else f"`{column}`"


# Between tables.

_MOVE_COLUMNS = """'$[*]' COLUMNS (
    id CHAR(36) CHARACTER SET ascii COLLATE ascii_bin PATH '$[0]',
    state VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin PATH '$[1]',
    reason VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin PATH '$[2]',
    raised INT PATH '$[3]', delay BIGINT PATH '$[4]',
    attempt INT PATH '$[5]', failures INT PATH '$[6]', crashes INT PATH '$[7]', snoozes INT PATH '$[8]',
    suspect INT PATH '$[9]', failure_history LONGTEXT CHARACTER SET ascii PATH '$[10]',
    result LONGTEXT CHARACTER SET ascii PATH '$[11]')"""
_CHANGED = {
    "reason": "m.reason",
    "version": "s.version + m.raised",
    "attempt": "m.attempt",
    "failures": "m.failures",
    "crashes": "m.crashes",
    "snoozes": "m.snoozes",
    "suspect": "m.suspect",
    "failure_history": "UNHEX(m.failure_history)",
}
_TO_ENDED = {
    **_CHANGED,
    "state": "m.state",
    "ended_at": "{now}",
    "expires_at": "IF(m.state = 'failed', NULL, {now} + s.retention)",
    "result": "UNHEX(m.result)",
}
_TO_READY = {**_CHANGED, "run_at": "IF(m.delay IS NULL, s.run_at, {now} + m.delay)", "cancel_asked": "0"}

_written = attrgetter("to", "reason", "attempt", "failures", "crashes", "snoozes", "suspect", "failure_history")


def _server_clock() -> str:
    return CLOCK


class Tables(msgspec.Struct, frozen=True):
    """The statements for one namespace that more than one verb needs. Only tests give another clock."""

    ns: str
    clock: Callable[[], str] = _server_clock

    def now(self) -> str:
        """The statement that asks for the time."""
        return f"SELECT {self.clock()}"

    def anywhere(self, ids: Sequence[JobId], *tables: str) -> str:
        """The statement that finds which of these jobs are in these tables, at one moment."""
        wanted = names(ids)
        return " UNION ALL ".join(f"SELECT id FROM {self.by_id(table)} WHERE id IN {wanted}" for table in tables)

    def by_id(self, table: str, alias: str = "") -> str:
        """The table, to be read by job ids. The index is named: old statistics must not lead to a walk through it."""
        return f"{self.ns}_{table} {alias} FORCE INDEX ({'by_id' if table == 'ready' else 'PRIMARY'})"

    def drop(self, table: str, wanted: str) -> str:
        """The statement that takes jobs out of a table: those of a list that `names` made."""
        return f"DELETE j FROM {self.by_id(table, 'j')} WHERE j.id IN {wanted}"

    def transfer(self, source: str, target: str, moves: Sequence[Move], now: int) -> Iterator[str]:
        """The statements that carry out moves of jobs from one table to another, each at most so long."""
        yield from self._copy(source, target, moves, now)
        yield self.drop(source, names(move.job_id for move in moves))

    def _copy(self, source: str, target: str, moves: Sequence[Move], now: int) -> Iterator[str]:
        changes = _TO_ENDED if target == "ended" else _TO_READY
        columns = ENDED if target == "ended" else LIVE
        values = ", ".join(changes.get(column, f"s.`{column}`").format(now=now) for column in columns)
        for documents in cut(_move_document(move) for move in sorted(moves, key=lambda move: move.job_id)):
            yield (
                f"INSERT INTO {self.ns}_{target} ({quoted(columns)}) SELECT STRAIGHT_JOIN {values} "
                f"FROM JSON_TABLE('[{','.join(documents)}]', {_MOVE_COLUMNS}) AS m "
                f"JOIN {self.by_id(source, 's')} ON s.id = m.id"
            )

    def end_well(self, moves: Sequence[Move], wanted: str, now: int) -> Iterator[str]:
        """The statements that end jobs in flight whose leases were compared, those that are alike in one go.

        `wanted` is what `names` makes of them.
        """
        by_kind: dict[tuple[Any, ...], list[Move]] = {}
        for move in moves:
            by_kind.setdefault(_written(move), []).append(move)
        for alike in by_kind.values():
            if len({move.result for move in alike}) == 1:
                some = wanted if len(by_kind) == 1 else names(move.job_id for move in alike)
                yield self._end_alike(alike[0], some, now)
            else:
                yield from self._copy("in_flight", "ended", alike, now)
        yield self.drop("in_flight", wanted)

    def _end_alike(self, one: Move, wanted: str, now: int) -> str:
        written: dict[str, Value] = {
            "state": one.to.value,
            "reason": one.reason.value,
            "attempt": one.attempt,
            "failures": one.failures,
            "crashes": one.crashes,
            "snoozes": one.snoozes,
            "suspect": one.suspect,
            "failure_history": one.failure_history,
            "ended_at": now,
            "result": one.result,
        }
        values = {column: literal(value) for column, value in written.items()}
        values["expires_at"] = f"{now} + s.retention"
        return (
            f"INSERT INTO {self.ns}_ended ({quoted(ENDED)}) "
            f"SELECT {', '.join(values.get(column, f's.`{column}`') for column in ENDED)} "
            f"FROM {self.by_id('in_flight', 's')} WHERE s.id IN {wanted}"
        )

    def count(self, changes: Mapping[tuple[str, str], int]) -> list[str]:
        """The statements that count ended jobs by queue and state.

        Rows are only ever added: settlers never wait for each other. `prune` sums them up.
        """
        rows = [row((queue, str(state), change)) for (queue, state), change in sorted(changes.items()) if change]
        return [f"INSERT INTO {self.ns}_totals (queue, state, jobs) VALUES {','.join(rows)}"] if rows else []


def _move_document(move: Move) -> str:
    # JSON whose every text is a name or hexadecimal: it needs no escape, neither as JSON nor as SQL.
    delay = "null" if move.delay is None else str(move.delay)
    result = "null" if move.result is None else f'"{move.result.hex()}"'
    return (
        f'["{move.job_id}","{move.to.value}","{move.reason.value}",{int(move.raise_version)},{delay},{move.attempt},'
        f"{move.failures},{move.crashes},{move.snoozes},{int(move.suspect)},"
        f'"{move.failure_history.hex()}",{result}]'
    )
