"""What `holdfast demo` says at its end: what became of every kind of job, and whether any was lost."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from holdfast.cli.demo_ledger import Latency, Tally
from holdfast.cli.demo_view import latency_record, milliseconds
from holdfast.cli.output import (
    Cell,
    Column,
    in_terminal,
    write_fields,
    write_json,
    write_line,
    write_styled,
    write_table,
)
from holdfast.cli.wording import counted

_COLUMNS = (
    Column("KIND OF JOB"),
    Column("ACCEPTED", right=True),
    Column("SUCCEEDED", right=True),
    Column("FAILED", right=True),
    Column("CANCELLED", right=True),
    Column("ATTEMPTS", right=True),
)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The end of a demo. `seconds`: from the first job that was accepted to the last that ended. `store`: its URL as
    people may see it, `kept` if it is still there. `stopped`: before all jobs had ended.
    """

    tallies: Mapping[str, Tally]
    seconds: float
    latency: Latency
    processes_died: int
    store: str
    kept: bool
    stopped: bool

    @property
    def total(self) -> Tally:
        """All kinds together."""
        return sum(self.tallies.values(), Tally())

    @property
    def rate(self) -> float:
        """Jobs that ended, per second."""
        return self.total.ended / self.seconds if self.seconds > 0 else 0.0


def write_summary(summary: Summary, *, as_json: bool) -> None:
    """Say it as the reader wants it."""
    if as_json:
        _write_json(summary)
        return
    tallies = {label: tally for label, tally in summary.tallies.items() if tally.accepted}
    write_table(_COLUMNS, [_row(label, tally) for label, tally in tallies.items()])
    write_line("")
    write_fields(_fields(summary))
    if in_terminal():
        write_line("")
        for hint in _hints(summary):
            write_styled((hint, "dim"))


def _write_json(summary: Summary) -> None:
    write_json(
        {
            **msgspec.structs.asdict(summary.total),
            "processes_died": summary.processes_died,
            "seconds": round(summary.seconds, 3),
            "jobs_per_second": round(summary.rate, 1),
            **latency_record(summary.latency),
            **({"store": summary.store} if summary.kept else {}),
        }
    )


def _row(label: str, tally: Tally) -> Sequence[Cell | str]:
    return (
        label,
        str(tally.accepted),
        _number(tally.succeeded, "green"),
        _number(tally.failed, "red"),
        _number(tally.cancelled, "yellow"),
        str(tally.attempts),
    )


def _number(number: int, style: str) -> Cell:
    return Cell(str(number), style if number else "dim")


def _fields(summary: Summary) -> list[tuple[str, Cell | str]]:
    total, latency = summary.total, summary.latency
    crashed = f", {total.crashed} by crashes" if total.crashed else ""
    stopped = ", with those that had not ended when the demo was stopped" if summary.stopped and total.cancelled else ""
    lost = (
        Cell(f"{total.lost}: the store has an end for every single job", "bold green")
        if not total.lost
        else Cell(f"{total.lost}: they were accepted, and the store has no end for them", "bold red")
    )
    return [
        ("accepted", str(total.accepted)),
        ("succeeded", str(total.succeeded)),
        ("failed", f"{counted(total.failed, 'dead letter')}{crashed}"),
        ("cancelled", f"{total.cancelled}{stopped}"),
        ("retried", f"{counted(total.retried, 'job')} took more than one attempt"),
        ("crashes", f"{summary.processes_died} {'process' if summary.processes_died == 1 else 'processes'} died"),
        ("lost", lost),
        ("jobs/s", f"{summary.rate:.0f}, in {summary.seconds:.1f} s"),
        ("latency", f"p50 {milliseconds(latency.p50)}, p99 {milliseconds(latency.p99)}, from due to start"),
        *([("store", summary.store)] if summary.kept else []),
    ]


def _hints(summary: Summary) -> list[str]:
    tasks = Path(__file__).with_name("demo_tasks.py")
    with contextlib.suppress(ValueError):
        tasks = tasks.relative_to(Path.cwd())
    hints = [
        ("holdfast demo --jobs 500 --keep", "the same, and the store stays"),
        ("holdfast worker MODULE:APP", "workers for an application of your own"),
        (str(tasks), "the tasks of this demo"),
    ]
    look = [f"  holdfast {what} list --store {summary.store}" for what in ("jobs", "dead")]
    width = max(len(what) for what, _ in hints)
    told = [f"  {what:<{width}}  {why}" for what, why in (hints[1:] if summary.kept else hints)]
    return ["What next:", *(look if summary.kept else []), *told]
