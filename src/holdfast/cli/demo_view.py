"""What `holdfast demo` shows while it runs: a live view in a terminal, a line each second in a pipe, or JSON lines."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.cli.demo_ledger import Latency, Tally
from holdfast.cli.output import Row, in_terminal, rich_table, write_json, write_line
from holdfast.cli.queues import QUEUE_COLUMNS, queue_row
from holdfast.cli.wording import counted, span, visible
from holdfast.store import QueueCounts

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_LEAST_NEWS, _MOST_NEWS = 3, 10
_MOST_WORKERS = 4
_MOST_TASKS = 4


class News(msgspec.Struct, frozen=True):
    """Something that happened, `seconds` after the beginning. They are numbered from 1."""

    number: int
    seconds: float
    text: str
    style: str = ""


class WorkerView(msgspec.Struct, frozen=True):
    """A worker process: since when it is up (microseconds), and how many jobs of which task it holds."""

    pid: int
    up: int
    held: Counter[str]


class Moment(msgspec.Struct, frozen=True, kw_only=True):
    """The demo at one moment. `rates`: jobs that ended, second by second. `latency`: of the last seconds."""

    store: str
    status: str
    seconds: float
    wanted: int | None
    processes: int
    tally: Tally
    processes_died: int
    rates: Sequence[int]
    rate: float
    latency: Latency
    queues: Sequence[QueueCounts]
    workers: Sequence[WorkerView]
    news: Sequence[News]
    """The latest last."""

    @property
    def waiting(self) -> int:
        """Jobs that are due or will be."""
        return sum(counts.ready + counts.scheduled for counts in self.queues)

    @property
    def running(self) -> int:
        """Jobs that a worker holds."""
        return sum(counts.in_flight for counts in self.queues)


class View(msgspec.Struct, frozen=True):
    """How to show a moment, and how often (seconds). `live`: it stays until the next one is shown."""

    show: Callable[[Moment], None]
    every: float
    live: bool = False


@contextmanager
def view(*, as_json: bool) -> Iterator[View]:
    """The view that suits whoever reads the output."""
    if as_json:
        yield View(_write_json, 1.0)
    elif in_terminal():
        with _screen() as show:
            yield View(show, 0.2, live=True)
    else:
        yield View(_Lines().show, 1.0)


# For programs and pipes.


def milliseconds(seconds: float | None) -> str:
    """ "0.8 ms", "41 ms", "2.50 s"."""
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1000:.0f} ms" if seconds >= 0.01 else f"{seconds * 1000:.1f} ms"


def latency_record(latency: Latency) -> dict[str, Any]:
    """The fields of `--json`."""
    return {
        f"latency_{name}_ms": None if seconds is None else round(seconds * 1000, 3)
        for name, seconds in (("p50", latency.p50), ("p99", latency.p99))
    }


def _write_json(moment: Moment) -> None:
    write_json(
        {
            "seconds": round(moment.seconds, 3),
            **msgspec.structs.asdict(moment.tally),
            "waiting": moment.waiting,
            "running": moment.running,
            "processes_died": moment.processes_died,
            "jobs_per_second": round(moment.rate, 1),
            **latency_record(moment.latency),
        }
    )
    sys.stdout.flush()


class _Lines:
    """One line each time, and one for each piece of news since the last."""

    def __init__(self) -> None:
        self._told = 0

    def show(self, moment: Moment) -> None:
        for news in moment.news:
            if news.number > self._told:
                write_line(f"{news.seconds:5.1f} s  {visible(news.text)}")
                self._told = news.number
        tally, latency = moment.tally, moment.latency
        if not tally.accepted:
            write_line(f"{moment.seconds:5.1f} s  {moment.status}")
            return
        write_line(
            f"{moment.seconds:5.1f} s  {moment.rate:.0f} jobs/s: {tally.accepted} accepted, {tally.succeeded} "
            f"succeeded, {tally.failed} failed, {tally.cancelled} cancelled, {tally.retried} retried, "
            f"{moment.waiting} waiting, {moment.running} running; "
            f"latency p50 {milliseconds(latency.p50)}, p99 {milliseconds(latency.p99)}"
        )
        sys.stdout.flush()


# For people.


@contextmanager
def _screen() -> Iterator[Callable[[Moment], None]]:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        bars = _BARS if "utf" in console.encoding.lower() else ""
        yield lambda moment: live.update(_drawn(moment, console.height, bars), refresh=True)


def _drawn(moment: Moment, height: int, bars: str) -> RenderableType:
    from rich.console import Group

    above = [_title(moment), *_progress(moment), _line(), *_figures(moment, bars), _line()]
    queues = rich_table(QUEUE_COLUMNS[:-1], map(_queue_row, moment.queues))
    below = [_line(), *_workers(moment), _line()]
    end = [_line(), *_last_lines(moment)]
    # One line stays free: a view as high as the terminal would leave its first line behind when it is removed.
    room = height - 1 - len(above) - (len(moment.queues) + 2) - len(below) - len(end)
    news = [_news(each) for each in moment.news[-max(_LEAST_NEWS, min(_MOST_NEWS, room)) :]]
    return Group(*above, queues, *below, *news, *end)


def _news(news: News) -> Text:
    return _line((f"{news.seconds:6.1f} s  ", "dim"), (visible(news.text), news.style))


def _queue_row(counts: QueueCounts) -> Row:
    return queue_row(counts)[:-1]


def _line(*parts: tuple[str, str]) -> Text:
    from rich.text import Text

    text = Text.assemble(*parts)
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _title(moment: Moment) -> Text:
    return _line(("holdfast demo", "bold"), (f"  {moment.seconds:.0f} s  ", ""), (moment.status, "cyan"))


def _progress(moment: Moment) -> list[RenderableType]:
    from rich.progress_bar import ProgressBar

    return [] if moment.wanted is None else [ProgressBar(moment.wanted, moment.tally.ended, width=71)]


def _figures(moment: Moment, bars: str) -> list[Text]:
    tally, latency = moment.tally, moment.latency
    return [
        _line(
            (f"{moment.rate:6,.0f}", "bold green"),
            (" jobs/s  ", ""),
            (_sparkline(moment.rates, bars), "green"),
            ("   latency p50 ", ""),
            (milliseconds(latency.p50), "bold"),
            (", p99 ", ""),
            (milliseconds(latency.p99), "bold"),
        ),
        _line(
            (f"{tally.accepted:6,}", "bold"),
            (" accepted: ", ""),
            (f"{tally.succeeded:,}", "bold green"),
            (" succeeded, ", ""),
            (f"{tally.failed:,}", "bold red" if tally.failed else "bold"),
            (f" {'dead letter' if tally.failed == 1 else 'dead letters'}, ", ""),
            (f"{tally.cancelled:,} cancelled, {tally.retried:,} retried", ""),
        ),
        _line(
            (f"{moment.processes_died:6,}", "bold red" if moment.processes_died else "bold"),
            (f" {'process' if moment.processes_died == 1 else 'processes'} crashed, ", ""),
            (f"{tally.lost:,}", "bold red" if tally.lost else "bold green"),
            (f" {'job' if tally.lost == 1 else 'jobs'} lost", ""),
        ),
    ]


def _sparkline(rates: Sequence[int], bars: str) -> str:
    most = max(rates, default=0) or 1
    return "".join(bars[(len(bars) - 1) * rate // most] for rate in rates) if bars else ""


def _workers(moment: Moment) -> list[Text]:
    lines = []
    for worker in moment.workers[:_MOST_WORKERS]:
        tasks = ", ".join(f"{count} {task}" for task, count in worker.held.most_common(_MOST_TASKS))
        rest = ", …" if len(worker.held) > _MOST_TASKS else ""
        holds = f"holds {counted(worker.held.total(), 'job')}: {tasks}{rest}" if tasks else "idle"
        lines.append(
            _line(
                ("worker ", "bold"),
                (f"{worker.pid:<8}", "bold cyan"),
                (f"up {span(worker.up)}, ", ""),
                (holds, "" if tasks else "dim"),
            )
        )
    # A worker that died keeps its line until there is another: the view does not jump.
    missing = min(moment.processes, _MOST_WORKERS) - len(lines)
    lines += [_line(("worker ", "bold"), ("-       starting", "dim"))] * missing
    more = len(moment.workers) - _MOST_WORKERS
    return [*lines, _line((f"and {counted(more, 'worker')} more", "dim"))] if more > 0 else lines


def _last_lines(moment: Moment) -> list[Text]:
    if not moment.workers:
        return [_line(("Ctrl-C ends it.", "dim")), _line()]
    kill = f"kill -9 {moment.workers[0].pid}"
    return [
        _line((f"Ctrl-C ends it. In another terminal: {kill}, or look into the store:", "dim")),
        _line((f"holdfast stats --store {moment.store}", "dim")),
    ]
