"""`python -m holdfast.testing.simulation --seed 7` replays a seed; `--seeds 500` runs many and counts."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from holdfast.testing.simulation import simulate


def main() -> int:
    """Exit code 1 if any seed violates an invariant."""
    parser = argparse.ArgumentParser(prog="python -m holdfast.testing.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="replay one seed and print its history")
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run, from 0 (default 200)")
    options = parser.parse_args()
    if options.seed is not None:
        report = simulate(options.seed)
        for line in report.history:
            print(f"{line.at:9.3f}  {line.host:<10}  {line.what:<24}  {line.job_id} v{line.version}")  # noqa: T201
        print(f"fingerprint {report.fingerprint}; violations: {report.violations or 'none'}")  # noqa: T201
        return 1 if report.violations else 0
    happenings: Counter[str] = Counter()
    bad = []
    for seed in range(options.seeds):
        report = simulate(seed)
        happenings.update(report.happenings)
        if report.violations:
            bad.append(seed)
            print(f"seed {seed}: {report.violations[0]}")  # noqa: T201
    for what, count in sorted(happenings.items()):
        print(f"{count:8}  {what}")  # noqa: T201
    print(f"{options.seeds} seeds, {len(bad)} with violations")  # noqa: T201
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
