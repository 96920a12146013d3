"""`python -m benchmarks [--json] [NAME ...]`: run the benchmarks and print one table, or JSON lines."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import (
    postgres_backlog,
    postgres_designs,
    postgres_drivers,
    postgres_snapshot,
    redis_backlog,
    redis_designs,
    redis_memory,
    sqlite_backlog,
    sqlite_enqueue,
    sqlite_worker,
)
from tests.servers import ServerMissingError

BENCHMARKS: dict[str, Callable[[Path], Iterator[dict[str, Any]]]] = {
    "sqlite-enqueue": sqlite_enqueue.run,
    "sqlite-backlog": sqlite_backlog.run,
    "sqlite-worker": sqlite_worker.run,
    "postgres-backlog": postgres_backlog.run,
    "postgres-snapshot": postgres_snapshot.run,
    "postgres-drivers": postgres_drivers.run,
    "postgres-designs": postgres_designs.run,
    "redis-backlog": redis_backlog.run,
    "redis-memory": redis_memory.run,
    "redis-designs": redis_designs.run,
}


def main() -> int:
    """Exit code 1 if a ratio misses its target, or a server is missing."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which ones: {', '.join(BENCHMARKS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    options = parser.parse_args()
    unknown = set(options.names) - set(BENCHMARKS)
    if unknown:
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; known are {', '.join(BENCHMARKS)}")
    results: list[dict[str, Any]] = []
    all_ran = True
    for name in options.names or BENCHMARKS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                for result in BENCHMARKS[name](Path(folder)):
                    results.append(result)
                    if options.json:
                        print(json.dumps(result), flush=True)
            except ServerMissingError as error:
                print(f"{name} did not run: {error}", file=sys.stderr)
                all_ran = False
    if not options.json:
        _print_table(results)
    return 0 if all_ran and all(_reached(result) for result in results) else 1


def _reached(result: dict[str, Any]) -> bool:
    return result["target"] is None or result["ratio"] >= result["target"]


def _shown(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def _print_table(results: list[dict[str, Any]]) -> None:
    table = Table("benchmark", "Holdfast", "reference", "ratio", "target")
    for result in results:
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
