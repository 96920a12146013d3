"""The report: one page of Markdown from the results of any number of runs."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tests.chaos.campaign import SERVER_KILLED, WORKERS_KILLED
from tests.chaos.cells import CELLS
from tests.chaos.result import KILLS, Result
from tests.chaos.rig import TTL

RESULTS = "results.jsonl"
RECOVERY_GOAL = TTL + TTL / 3 + 1.0
"""Seconds: a lease, the time between two looks of a keeper, and one second for everything else."""
_CAMPAIGNS = (WORKERS_KILLED, SERVER_KILLED)


def add_result(folder: Path, result: Result) -> None:
    """Append it to the results of that folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / RESULTS).open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def read_results(folder: Path) -> list[Result]:
    """All that were appended there."""
    lines = (folder / RESULTS).read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Result) for line in lines]


def rendered(results: Sequence[Result]) -> str:
    """The report."""
    cells: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        cells[result.cell, result.engine].append(result)
    order = [cell.name for cell in CELLS]
    named = {cell.name: cell for cell in CELLS}
    tables = [(name, engine) for name, engine in cells if name not in _CAMPAIGNS]
    tables.sort(key=lambda key: (order.index(key[0]) if key[0] in order else len(order), key[1]))
    bad = [result for result in results if not result.good]
    lines = [
        "# Faults",
        "",
        f"{len(results)} runs, {sum(result.seconds for result in results) / 60:.0f} minutes. "
        f"{sum(result.accepted for result in results):,} jobs were accepted, "
        f"{sum(result.lost for result in results)} of them lost; "
        f"{sum(len(result.violations) for result in results)} violations of an invariant.",
        "",
        "Every run notes what producers were told, what workers and keepers did, and what handlers did to the world "
        "outside; at the end all of it is judged by `holdfast.testing.history.check`. *Lost*: accepted, and not there "
        "or not ended at the end. *Ran again*: a handler was called once more for a job, by cause; *acted twice*: so "
        "that its effect happened once more. *Late*: settlements of a worker that had lost its lease, all refused. "
        "*Back*: from the death of a worker (or from when a keeper looked, if that is later) until its job is back in "
        "its queue; *claimed*: until somebody has it again. p50 / p99 / max, in seconds.",
        "",
        "## Campaigns",
        "",
        *_table(
            ("campaign", "engine", "processes killed", *_COLUMNS),
            [
                (
                    name.removeprefix("campaign: "),
                    engine,
                    f"{_kills(cells[name, engine]):,}",
                    *_row(cells[name, engine]),
                )
                for name, engine in sorted(key for key in cells if key[0] in _CAMPAIGNS)
            ],
        ),
        "",
        *_judgement(cells),
        "## Cells",
        "",
        *_table(
            ("fault", "cell", "engine", "runs", *_COLUMNS),
            [
                (
                    named[name].faults if name in named else "",
                    name,
                    engine,
                    str(len(cells[name, engine])),
                    *_row(cells[name, engine]),
                )
                for name, engine in tables
            ],
        ),
        "",
        "| cell | what is done |",
        "|---|---|",
        *(f"| {cell.name} | {cell.about} |" for cell in CELLS if any(cell.name == name for name, _ in tables)),
        "",
        "## Violations",
        "",
        *([f"* {one.cell}, {one.engine}: {what}" for one in bad for what in one.violations] or ["None."]),
        "",
        "## How to repeat it",
        "",
        "```sh",
        "python -m tests.chaos --runs 20                       # every cell on every engine",
        "python -m tests.chaos --kills 1000 --server-kills 100 # the campaigns",
        "python -m tests.chaos report build/chaos > report.md  # this page",
        "```",
        "",
    ]
    return "\n".join(lines)


_COLUMNS = (
    "accepted",
    "unknown",
    "lost",
    "dead",
    "ran again",
    "acted twice",
    "late",
    "violations",
    "back",
    "claimed",
    "s",
)


def _row(results: Sequence[Result]) -> tuple[str, ...]:
    return (
        f"{sum(result.accepted for result in results):,}",
        str(sum(result.unknown for result in results)),
        str(sum(result.lost for result in results)),
        str(sum(result.dead for result in results)),
        _causes(result.started_again for result in results),
        _causes(result.duplicated for result in results),
        str(sum(result.stale for result in results)),
        str(sum(len(result.violations) for result in results)),
        _spread(seconds for result in results for seconds in result.back),
        _spread(seconds for result in results for seconds in result.recovery),
        f"{sum(result.seconds for result in results):.0f}",
    )


def _judgement(cells: dict[tuple[str, str], list[Result]]) -> list[str]:
    """What the large numbers say about the goal of recovery."""
    found = []
    for engine in sorted(engine for name, engine in cells if name == WORKERS_KILLED):
        results = cells[WORKERS_KILLED, engine]
        back = sorted(seconds for result in results for seconds in result.back)
        claimed = sorted(seconds for result in results for seconds in result.recovery)
        if claimed:
            p99 = _quantile(claimed, 0.99)
            reached = "reached" if p99 <= RECOVERY_GOAL else "not reached"
            found.append(
                f"* {engine}: 99 % of {len(claimed):,} jobs of killed workers were back in their queues within "
                f"{_quantile(back, 0.99):.2f} s and claimed again within {p99:.2f} s. The goal for the latter is "
                f"{RECOVERY_GOAL:.2f} s (a lease of {TTL:g} s, a keeper's look, 1 s): {reached}."
            )
    return [*found, ""] if found else []


def _kills(results: Iterable[Result]) -> int:
    return sum(
        count
        for result in results
        for kind, count in result.faults.items()
        if kind.startswith(KILLS) or kind == "server killed"
    )


def _causes(counters: Iterable[dict[str, int]]) -> str:
    total: Counter[str] = Counter()
    for counter in counters:
        total.update(counter)
    return ", ".join(f"{cause} {count}" for cause, count in total.most_common()) or "0"


def _spread(seconds: Iterable[float]) -> str:
    ordered = sorted(seconds)
    return " / ".join(f"{_quantile(ordered, q):.2f}" for q in (0.5, 0.99, 1.0)) if ordered else "none"


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[max(0, math.ceil(q * len(ordered)) - 1)]


def _table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(names)} |", "|" + "---|" * len(names), *lines] if lines else ["Not run."]
