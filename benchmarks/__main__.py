"""`python -m benchmarks run | report | study`: measure Holdfast beside its peers, say what came out, or look closer.

`run` writes one JSON line per measurement; `report` judges them by the targets and writes the documentation's tables
and plots; `study` runs single benchmarks behind decision records.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.contestants import Contestant, peers_of
from benchmarks.figures import MEASURED
from benchmarks.report import print_report, write_docs
from benchmarks.results import Results
from benchmarks.running import Plan, run
from benchmarks.servers import BACKENDS
from benchmarks.studies import (
    postgres_backlog,
    postgres_designs,
    postgres_drivers,
    redis_backlog,
    redis_designs,
    redis_memory,
    sqlite_backlog,
    sqlite_enqueue,
)
from tests.servers import ServerMissingError

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "build" / "bench" / "results.jsonl"

STUDIES: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    "sqlite-enqueue": sqlite_enqueue.run,
    "sqlite-backlog": sqlite_backlog.run,
    "postgres-backlog": postgres_backlog.run,
    "postgres-drivers": postgres_drivers.run,
    "postgres-designs": postgres_designs.run,
    "redis-backlog": redis_backlog.run,
    "redis-memory": redis_memory.run,
    "redis-designs": redis_designs.run,
}


def main() -> int:
    """Exit code 1 if a target is missed, or something could not be measured for want of a server."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    _add_run(commands.add_parser("run", help="measure"))
    _add_report(commands.add_parser("report", help="judge the last run by the targets"))
    _add_study(commands.add_parser("study", help="run single benchmarks"))
    options = parser.parse_args()
    code: int = options.work(options)
    return code


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _add_run(parser: argparse.ArgumentParser) -> None:
    engines = ",".join(BACKENDS)
    parser.add_argument("--engine", type=_names, metavar="A,B", help=f"of {engines}; rabbitmq: with all peers only")
    parser.add_argument("--peers", default="best", help="best (a few per engine), all, none, or names: bullmq,huey")
    parser.add_argument("--runs", type=int, default=3, help="rounds; the median counts")
    parser.add_argument("--scale", type=float, default=1.0, help="0.05: for a try, not for figures")
    parser.add_argument(
        "--figures", type=_names, default=list(MEASURED), metavar="A,B", help=f"of {','.join(MEASURED)}"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="what ran into it before stays, but for the same")
    parser.set_defaults(work=_run)


def _run(options: argparse.Namespace) -> int:
    engines = options.engine or [name for name in BACKENDS if name != "rabbitmq" or options.peers == "all"]
    for what, given, known in (("engine", engines, BACKENDS), ("figure", options.figures, MEASURED)):
        if unknown := set(given) - set(known):
            raise SystemExit(f"there is no {what} {', '.join(sorted(unknown))}: there are {', '.join(known)}")
    plans = []
    for engine in engines:
        peers: Sequence[Contestant]
        peers, missing = peers_of(engine, options.peers)
        groups = [group for group in MEASURED if group in options.figures]
        plans.append(Plan(engine, peers, missing, options.runs, options.scale, groups))
    try:
        run(plans, options.out)
    except ServerMissingError as error:
        raise SystemExit(str(error)) from error
    print_report(Results.read(options.out))
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--docs", action="store_true", help="write docs/benchmarks.md, its plots and the README's table"
    )
    parser.set_defaults(work=_report)


def _report(options: argparse.Namespace) -> int:
    results = Results.read(options.results)
    if options.docs:
        write_docs(results, ROOT)
    return 0 if print_report(results) else 1


def _add_study(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="NAME", choices=list(STUDIES), help=", ".join(STUDIES))
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    parser.set_defaults(work=_study)


def _study(options: argparse.Namespace) -> int:
    found: list[dict[str, Any]] = []
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            for result in STUDIES[name](Path(folder)):
                found.append(result)
                if options.json:
                    print(json.dumps(result), flush=True)
    if not options.json:
        _print_studies(found)
    return 0 if all(_reached(result) for result in found) else 1


def _reached(result: dict[str, Any]) -> bool:
    return result["target"] is None or result["ratio"] >= result["target"]


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _print_studies(found: list[dict[str, Any]]) -> None:
    table = Table("study", "Holdfast", "reference", "ratio", "target")
    for result in found:
        table.add_row(
            result["benchmark"],
            f"{_shown(result['ours'])} {result['unit']}",
            f"{_shown(result['reference'])} {result['unit']}",
            f"[{'green' if _reached(result) else 'red'}]{result['ratio']:.2f}",
            "" if result["target"] is None else f"≥ {result['target']}",
        )
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
