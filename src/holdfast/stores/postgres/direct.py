"""One call of a function with one value as its answer, by the driver's shortest way: values are bytes already, and no
cursor is made. It is prepared on connections that are used often, and have no pooler behind them.

Behind a pooler in transaction mode, what was prepared stays on whichever connection of its own it was. That is noticed
before anything is prepared, as the process that answers is not the one that the server named at the beginning. A pooler
that hides even that does no harm: a statement is known by a name that says its text, so it cannot be another one; and
one that is not there does nothing but say so, and is sent as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from hashlib import sha256

import msgspec
from psycopg import generators
from psycopg.abc import PQGen
from psycopg.errors import error_from_result
from psycopg.pq import DiagnosticField, ExecStatus
from psycopg.pq.abc import PGconn, PGresult

_PREPARED_FROM = 3
"""Calls on one connection: one that is used less often is not worth two round trips."""
_ROWS = ExecStatus.TUPLES_OK
_ALREADY_THERE = "42P05"
_NOT_THERE = frozenset({"26000", "0A000"})
"""The prepared statement is gone, or the function answers with another type than when it was prepared."""


class Statement:
    """The text of a call, with $1, $2, ... and their types. `formats`: 1 for values in the server's binary form, 0 for
    text. `refusals`: the errors that count as the answer None, as SQLSTATE.
    """

    def __init__(self, text: str, formats: list[int], refusals: Collection[str]) -> None:
        self.text = text.encode()
        self.name = b"holdfast_" + sha256(self.text).hexdigest()[:32].encode()
        self.formats = formats
        self.refusals = refusals


class Direct(msgspec.Struct, frozen=True, gc=False):
    """One call, complete with its values. `writes`: as that of a `Query`."""

    statement: Statement
    values: tuple[bytes | None, ...]
    writes: bool = True


class Prepared:
    """What one connection has prepared."""

    def __init__(self) -> None:
        self.calls = 0
        self.may = True
        self.names: set[bytes] = set()


def answer(pgconn: PGconn, prepared: Prepared, direct: Direct) -> PQGen[bytes | None]:
    """Make the call on a connection in autocommit mode. To be waited for as the driver waits for its own."""
    statement = direct.statement
    if prepared.may and statement.name not in prepared.names:
        prepared.calls += 1
        if prepared.calls >= _PREPARED_FROM:
            yield from _prepare(pgconn, prepared, statement)
    if prepared.may and statement.name in prepared.names:
        pgconn.send_query_prepared(statement.name, direct.values, statement.formats)
        [result] = yield from generators.execute(pgconn)
        if result.status == _ROWS or _sqlstate(result) not in _NOT_THERE:
            return _value(result, statement)
        prepared.may = False
    pgconn.send_query_params(statement.text, direct.values, None, statement.formats)
    [result] = yield from generators.execute(pgconn)
    return _value(result, statement)


def _prepare(pgconn: PGconn, prepared: Prepared, statement: Statement) -> PQGen[None]:
    pgconn.send_query_params(b"SELECT pg_backend_pid()", None)
    [result] = yield from generators.execute(pgconn)
    if result.status != _ROWS:
        raise error_from_result(result)
    if _is_pooled(pgconn, result.get_value(0, 0)):
        prepared.may = False
        return
    pgconn.send_prepare(statement.name, statement.text)
    [result] = yield from generators.execute(pgconn)
    if result.status == ExecStatus.FATAL_ERROR and _sqlstate(result) != _ALREADY_THERE:
        raise error_from_result(result)
    prepared.names.add(statement.name)


def _is_pooled(pgconn: PGconn, pid: bytes | None) -> bool:
    """Whether it was not the server's process of this connection that answered."""
    return pid != b"%d" % pgconn.backend_pid


def _sqlstate(result: PGresult) -> str:
    return (result.error_field(DiagnosticField.SQLSTATE) or b"").decode()


def _value(result: PGresult, statement: Statement) -> bytes | None:
    if result.status == _ROWS:
        value: bytes | None = result.get_value(0, 0)
        return value
    if _sqlstate(result) in statement.refusals:
        return None
    raise error_from_result(result)
