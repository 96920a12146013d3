"""`python -m tests.chaos`: run cells and campaigns; `python -m tests.chaos report FOLDER`: the report about them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tests.chaos.campaign import server_kills, worker_kills
from tests.chaos.cell import ENGINES, Cell
from tests.chaos.cells import CELLS
from tests.chaos.fleet import Fleet
from tests.chaos.report import add_result, read_results, rendered
from tests.chaos.result import Result
from tests.chaos.run import missing, run_cell

OUT = Path("build/chaos")


def main() -> int:
    """The exit code: 0 if every promise was kept."""
    if sys.argv[1:2] == ["report"]:
        results = read_results(Path(sys.argv[2]) if len(sys.argv) > 2 else OUT)
        sys.stdout.write(rendered(results))
        return 0 if all(result.good for result in results) else 1
    options = _options()
    if options.list:
        for cell in CELLS:
            print(f"{cell.faults:5}{cell.name:45}{', '.join(cell.engines):40}{cell.about}")
        return 0
    good = True
    with Fleet() as fleet:
        for cell, engine in _wanted(options):
            result = _run(cell, engine, fleet, options.out)
            add_result(options.out, result)
            print(msgspec.json.encode(result).decode() if options.json else _told(result), flush=True)
            good = good and result.good
    return 0 if good else 1


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--cells", metavar="A,B", default="", help="cells by name, or by the number of their fault")
    parser.add_argument("--engines", metavar="A,B", default=",".join(ENGINES), help="of sqlite,postgres,mariadb,redis")
    parser.add_argument("--runs", type=int, help="so many runs of each cell (1; 0 with a campaign)")
    parser.add_argument("--kills", type=int, default=0, help="a campaign: so many kills of workers on each engine")
    parser.add_argument("--server-kills", type=int, default=0, help="a campaign: so many kills of each server")
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER", help="where the results are appended")
    parser.add_argument("--list", action="store_true", help="name the cells")
    parser.add_argument("--json", action="store_true", help="for programs: one object per run")
    return parser.parse_args()


def _wanted(options: argparse.Namespace) -> Iterator[tuple[Cell, str]]:
    engines = options.engines.split(",")
    if unknown := set(engines) - set(ENGINES):
        sys.exit(f"no such engine: {', '.join(unknown)}")
    names = {name.strip() for name in options.cells.split(",") if name.strip()}
    if unknown := names - {cell.name for cell in CELLS} - {cell.faults for cell in CELLS}:
        sys.exit(f"no such cell: {', '.join(unknown)}; --list names them all")
    campaign = options.kills or options.server_kills
    runs = options.runs if options.runs is not None else 0 if campaign and not names else 1
    for _ in range(runs):
        for cell in CELLS:
            if names and not names & {cell.name, cell.faults}:
                continue
            if lacking := missing(cell):
                print(f"{cell.name}: left out, {lacking}", file=sys.stderr)
                continue
            yield from ((cell, engine) for engine in engines if engine in cell.engines)
    for engine in engines:
        for cell in (*worker_kills(options.kills), *server_kills(options.server_kills)):
            if engine in cell.engines:
                yield cell, engine


def _run(cell: Cell, engine: str, fleet: Fleet, out: Path) -> Result:
    """A run that does not come to its end is a result, too."""
    began = time.monotonic()
    try:
        return run_cell(cell, engine, fleet, keep=out / "kept")
    except Exception as error:
        told = "\n".join([f"it did not come to its end: {error!r}", *getattr(error, "__notes__", ())])
        print(told, file=sys.stderr)
        return Result(
            cell=cell.name,
            engine=engine,
            seconds=round(time.monotonic() - began, 2),
            faults={},
            accepted=0,
            unknown=0,
            refused=0,
            lost=0,
            dead=0,
            started_again={},
            duplicated={},
            stale=0,
            back=[],
            recovery=[],
            violations=[told.split("\n")[0][:500]],
            finished_at=time.time(),
        )


def _told(result: Result) -> str:
    doubled = sum(result.duplicated.values())
    slowest = f", recovery up to {max(result.recovery):.2f} s" if result.recovery else ""
    told = (
        f"{result.seconds:6.1f} s  {result.engine:9}{result.cell:40} {sum(result.faults.values())} faults, "
        f"{result.accepted} accepted, {result.lost} lost, {doubled} acted twice, {result.stale} late{slowest}"
    )
    return "\n".join([told, *(f"          {violation}" for violation in result.violations)])


if __name__ == "__main__":
    sys.exit(main())
