"""`python -m holdfast.testing.simulation --seed 7` replays a seed; `--seeds 500` runs many and counts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import msgspec

from holdfast.testing.history.events import AnyEvent
from holdfast.testing.simulation.campaign import Found, run_campaign
from holdfast.testing.simulation.scenario import Report, simulate
from holdfast.testing.simulation.swarm import Engine

_COMMAND = "python -m holdfast.testing.simulation"


def main() -> int:
    """Exit code 1 if any seed violates an invariant, or if enough seeds did not reach everything."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed and print its history")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run (default 200)")
    parser.add_argument("--from", type=int, default=0, dest="first", metavar="SEED", help="the first (default 0)")
    parser.add_argument("--processes", type=int, default=1, help="in how many processes (default 1)")
    parser.add_argument("--store", choices=[engine.value for engine in Engine], help="instead of the seed's own choice")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    engine = Engine(options.store) if options.store else None
    if options.seed is not None:
        return _replay(options.seed, engine, as_json=options.json)
    seeds = range(options.first, options.first + options.seeds)
    found = run_campaign(seeds, engine=engine, processes=options.processes, progress=_progress(len(seeds)))
    return _conclude(found, engine, as_json=options.json)


def _replay(seed: int, engine: Engine | None, *, as_json: bool) -> int:
    report = simulate(seed, engine)
    if as_json:
        print(msgspec.json.encode(report).decode())  # noqa: T201
    else:
        print(*_lines(report), sep="\n")  # noqa: T201
    return 1 if report.violations else 0


def _lines(report: Report) -> list[str]:
    lines = [_line(event) for event in report.history.events]
    lines += ["", *(f"violation: {violation}" for violation in report.violations)]
    found = f"{len(report.violations)} violations" if report.violations else "no violations"
    lines.append(
        f"seed {report.seed} on {report.engine}, {report.virtual_seconds:.1f} virtual seconds, "
        f"fingerprint {report.fingerprint}: {found}"
    )
    return lines


def _line(event: AnyEvent) -> str:
    """An event for people: when, where, what, and whatever is not as usual."""
    defaults = dict(
        zip(event.__struct_fields__[-len(event.__struct_defaults__) :], event.__struct_defaults__, strict=True)
    )
    said = [
        f"{name}={getattr(event, name)}"
        for name in event.__struct_fields__
        if name not in ("at", "host", "began", "digest") and getattr(event, name) != defaults.get(name)
    ]
    return f"{event.at:9.3f}  {event.host:<12}  {type(event).__name__.lower():<12}  {' '.join(said)}"


def _progress(seeds: int) -> Callable[[Found], None]:
    """On a terminal, a line that says how far it is."""
    if not sys.stderr.isatty():
        return lambda found: None

    def show(found: Found) -> None:
        end = "\n" if found.seeds == seeds else ""
        told = f"\r{found.seeds} of {seeds} seeds, {len(found.violations)} with violations"
        print(told, end=end, file=sys.stderr, flush=True)  # noqa: T201

    return show


def _conclude(found: Found, engine: Engine | None, *, as_json: bool) -> int:
    missing = found.missing(engine)
    if as_json:
        print(  # noqa: T201
            msgspec.json.encode(
                {
                    "seeds": found.seeds,
                    "violations": found.violations,
                    "never_happened": missing,
                    "happenings": dict(sorted(found.happenings.items())),
                }
            ).decode()
        )
        return 1 if found.violations or missing else 0
    for what, count in sorted(found.happenings.items()):
        print(f"{count:8}  {what}")  # noqa: T201
    store = f" --store {engine}" if engine else ""
    for seed, violations in found.violations.items():
        print(f"\nseed {seed} (replay: {_COMMAND} --seed {seed}{store})")  # noqa: T201
        for violation in violations:
            print(f"  {violation}")  # noqa: T201
    for what in missing:
        print(f"never happened: {what}")  # noqa: T201
    print(f"{found.seeds} seeds, {len(found.violations)} with violations")  # noqa: T201
    return 1 if found.violations or missing else 0


if __name__ == "__main__":
    sys.exit(main())
