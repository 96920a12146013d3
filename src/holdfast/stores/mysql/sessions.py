"""Sessions: who is alive. A session is open as long as its row among the gates is there."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterable

from holdfast.job import SessionId
from holdfast.store import Beat, Session
from holdfast.stores.mysql.sql import Batch, Plan, literal, name, names, row
from holdfast.stores.mysql.tables import Tables


class Sessions:
    """The verbs about sessions."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._ns = tables.ns

    def keep_open(self, session_ids: Iterable[SessionId]) -> str:
        """The statement that answers which of these sessions are open, and keeps them so until the commit."""
        return f"SELECT id FROM {self._ns}_gates WHERE id IN {names(session_ids)} LOCK IN SHARE MODE"

    def open(self, session: Session) -> Plan[None]:
        """See `Store.open_session`."""
        now = self._tables.clock()
        session_id = name(session.id)
        known = yield Batch([f"SELECT 1 FROM {self._ns}_sessions WHERE id = {session_id}"])
        if known[0].rows:
            return
        rest = row((session.host[:255], session.pid, ",".join(session.queues)))
        yield Batch(
            [
                f"INSERT INTO {self._ns}_sessions (id, beat, open, opened_at, beat_at, host, pid, queues) "
                f"VALUES ({session_id}, 0, 1, {now}, {now}, {rest[1:]}",
                f"INSERT INTO {self._ns}_gates (id) VALUES ({session_id})",
            ],
            last=True,
        )

    def beat(self, session_id: SessionId) -> Plan[Beat]:
        """See `Store.beat`. It touches no row that a claim or a settlement locks, and is nearly always one statement.

        What it finds comes back as the statement's number: twice the jobs held, and one if any is to be cancelled. An
        UPDATE under READ COMMITTED reads other tables without a lock.
        """
        own = f"FROM {self._ns}_in_flight FORCE INDEX (held) WHERE session_id = {name(session_id)}"
        [beaten] = yield Batch(
            [
                f"UPDATE {self._ns}_sessions SET beat = beat + 1, beat_at = {self._tables.clock()} "
                f"+ 0 * LAST_INSERT_ID((SELECT 2 * COUNT(*) + COALESCE(MAX(cancel_asked), 0) {own})) "
                f"WHERE id = {name(session_id)} AND open = 1"
            ]
        )
        if not beaten.changed:
            return Beat(open=False, held=0, cancel=())
        held, any_to_cancel = divmod(beaten.number, 2)
        if not any_to_cancel:
            return Beat(open=True, held=held, cancel=())
        [asked] = yield Batch([f"SELECT id {own} AND cancel_asked = 1"])
        return Beat(open=True, held=held, cancel=tuple(row[0] for row in asked.rows))

    def close(self, session_id: SessionId, if_beat: int | None) -> Plan[bool]:
        """See `Store.close_session`. It waits for claims and settlements first: beats go on meanwhile, and count."""
        mine = f"id = {name(session_id)}"
        expected = "" if if_beat is None else f" AND beat = {literal(if_beat)}"
        _, closed = yield Batch(
            [
                f"SELECT id FROM {self._ns}_gates WHERE {mine} FOR UPDATE",
                f"UPDATE {self._ns}_sessions SET open = 0, beat_at = {self._tables.clock()} "
                f"WHERE {mine} AND open = 1{expected}",
            ]
        )
        if not closed.changed:
            return False
        yield Batch([f"DELETE FROM {self._ns}_gates WHERE {mine}"], last=True)
        return True
