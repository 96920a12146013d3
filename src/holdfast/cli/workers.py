"""`holdfast workers`: the worker processes that the store knows."""

from __future__ import annotations

from typing import Any

from holdfast.app import Holdfast
from holdfast.cli.options import JsonOption, StoreOption, operate
from holdfast.cli.output import Cell, Column, note, write_json, write_table
from holdfast.cli.wording import ago, moment, span
from holdfast.config import WorkerSettings
from holdfast.ports import microseconds
from holdfast.store import SessionView, all_sessions

SILENT_AFTER = microseconds(2 * WorkerSettings().lease_ttl)
"""After so long without a beat a keeper should have closed the session, unless it has a longer TTL."""

_COLUMNS = (
    Column("SESSION"),
    Column("STATE"),
    Column("HOST"),
    Column("PID", right=True),
    Column("JOBS", right=True),
    Column("UP", right=True),
    Column("LAST BEAT", right=True),
    Column("QUEUES", fit="cut"),
)


def is_silent(view: SessionView, now: int) -> bool:
    """Whether the session is open, though nothing was heard of it for long."""
    return view.open and now - view.beat_at > SILENT_AFTER


def list_workers(store: StoreOption, as_json: JsonOption = False) -> None:
    """List worker processes, open and lately closed."""
    views, held, now = operate(store, _look)
    if as_json:
        for view in views:
            write_json(_record(view, held[view.id]))
        return
    write_table(
        _COLUMNS,
        (
            (
                view.id,
                _state(view, now),
                view.host,
                str(view.pid),
                str(held[view.id]),
                span((now if view.open else view.beat_at) - view.opened_at),
                ago(view.beat_at, now),
                ",".join(view.queues),
            )
            for view in views
        ),
    )
    if not views:
        note("no workers")


async def _look(app: Holdfast) -> tuple[list[SessionView], dict[str, int], int]:
    """The sessions, open ones first, how many jobs each holds, and the store's time."""
    views = sorted(await all_sessions(app.store), key=lambda view: (not view.open, -view.beat_at))
    held = {view.id: len(await app.store.held(view.id)) for view in views}
    return views, held, await app.store.now()


def _state(view: SessionView, now: int) -> Cell:
    if is_silent(view, now):
        return Cell("silent", "yellow")
    return Cell("open", "green") if view.open else Cell("closed", "dim")


def _record(view: SessionView, held: int) -> dict[str, Any]:
    return {
        "id": view.id,
        "open": view.open,
        "host": view.host,
        "pid": view.pid,
        "queues": list(view.queues),
        "held": held,
        "beat": view.beat,
        "opened_at": moment(view.opened_at),
        "beat_at": moment(view.beat_at),
    }
