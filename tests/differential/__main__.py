"""`python -m tests.differential --seeds 300`: so many workloads on five engines, with servers of its own.

Prints what was compared. Exit code 1 at the first workload that ends differently, or breaks an invariant, anywhere.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from holdfast.testing.history.findings import happenings
from tests.differential.engines import five_engines
from tests.differential.running import compare
from tests.differential.workload import workload
from tests.servers import MariaDbServer, PostgresServer, RedisServer

_SHOWN = 20
_TELL_EVERY = 25


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.differential", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many workloads")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    options = parser.parse_args()
    with (
        PostgresServer(settings={"synchronous_commit": "off"}) as postgres,
        MariaDbServer(settings={"innodb-flush-log-at-trx-commit": "2"}) as mariadb,
        RedisServer() as redis,
        tempfile.TemporaryDirectory(prefix="holdfast-differential-") as folder,
    ):
        stores = five_engines(Path(folder), postgres=postgres.url, mariadb=mariadb.url, redis=redis.url)
        began = time.monotonic()
        jobs = 0
        seen: Counter[str] = Counter()
        for seed in range(options.first, options.first + options.seeds):
            ran, found = asyncio.run(compare(workload(seed), stores))
            if found:
                print(f"seed {seed}: {len(found)} violations; again: python -m tests.differential --first {seed}")
                print("\n".join(map(str, found[:_SHOWN])))
                return 1
            jobs += len(ran["memory"].history.ending.jobs)
            for one in ran.values():
                seen += happenings(one.history)
            if (seed + 1 - options.first) % _TELL_EVERY == 0:
                print(f"{seed + 1 - options.first} seeds, {jobs} jobs on each engine", flush=True)
        print(
            f"{options.seeds} seeds from {options.first}, {jobs} jobs on each of {len(stores)} engines: "
            f"the same ends everywhere, no invariant broken, {time.monotonic() - began:.0f} s"
        )
        print(", ".join(f"{what} {count}" for what, count in sorted(seen.items())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
