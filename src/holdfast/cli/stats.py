"""`holdfast stats`: the whole store in one table, once or again and again."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.cli.options import JsonOption, StoreOption, operate
from holdfast.cli.output import Row, in_terminal, rich_table, write_json, write_line, write_table
from holdfast.cli.queues import COUNTED, QUEUE_COLUMNS, queue_record, queue_row
from holdfast.cli.wording import moment
from holdfast.cli.workers import is_silent
from holdfast.ports import SYSTEM
from holdfast.store import QueueCounts, all_sessions


class Stats(msgspec.Struct, frozen=True, kw_only=True):
    """The store at one moment."""

    at: int
    queues: list[QueueCounts]
    open: int
    silent: int

    @property
    def total(self) -> QueueCounts:
        """All queues together."""
        sums = {name: sum(getattr(counts, name) for counts in self.queues) for name in COUNTED}
        return QueueCounts(queue="total", **sums)

    @property
    def rows(self) -> list[Row]:
        """A line for each queue and one for all."""
        return [*map(queue_row, self.queues), queue_row(self.total)]

    @property
    def workers(self) -> str:
        """The line about the workers."""
        return f"workers: {self.open} open" + (f", {self.silent} of them silent" if self.silent else "")


def show_stats(
    store: StoreOption,
    watch: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=0.1, help="Again every so many seconds, until Ctrl-C.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show every queue in one table, and the workers."""
    write = _write_json if as_json else _write

    async def look(app: Holdfast) -> None:
        if watch is None:
            write(await _stats(app))
            return
        with _screen() if in_terminal() and not as_json else contextlib.nullcontext(write) as show:
            while True:
                show(await _stats(app))
                sys.stdout.flush()
                await SYSTEM.clock.sleep(watch)

    operate(store, look)


async def _stats(app: Holdfast) -> Stats:
    now = await app.store.now()
    views = await all_sessions(app.store)
    return Stats(
        at=now,
        queues=await app.acounts(),
        open=sum(view.open for view in views),
        silent=sum(is_silent(view, now) for view in views),
    )


def _write_json(stats: Stats) -> None:
    total: dict[str, Any] = queue_record(stats.total)
    write_json(
        {
            "at": moment(stats.at),
            "queues": [queue_record(counts) for counts in stats.queues],
            "total": {name: total[name] for name in COUNTED},
            "workers": {"open": stats.open, "silent": stats.silent},
        }
    )


def _write(stats: Stats) -> None:
    write_table(QUEUE_COLUMNS, stats.rows)
    write_line(stats.workers)


@contextlib.contextmanager
def _screen() -> Iterator[Callable[[Stats], None]]:
    """A place in the terminal that shows the latest stats."""
    from rich.console import Console, Group
    from rich.live import Live

    with Live(console=Console(highlight=False), auto_refresh=False, transient=False) as live:

        def show(stats: Stats) -> None:
            live.update(
                Group(rich_table(QUEUE_COLUMNS, stats.rows), f"{stats.workers}    {moment(stats.at)}"), refresh=True
            )

        yield show
