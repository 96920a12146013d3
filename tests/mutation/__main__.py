"""`python -m tests.mutation`: how many mutants the tests notice, and which they do not.

Ends with 1 if a module has a score below 80 %, if a survivor has no reason in `survivors.toml`, or if a reason there is
for a mutant that no longer exists.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from concurrent.futures import Future, ProcessPoolExecutor, as_completed

from tests.mutation.plan import LEAST_SCORE, MODULES
from tests.mutation.report import Report, as_json, as_text
from tests.mutation.survivors import read_reasons
from tests.mutation.trials import Trial, try_module


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m tests.mutation", description="Mutation testing.")
    options.add_argument("modules", nargs="*", help="part of a module's name; all modules if there is none")
    options.add_argument("--jobs", type=int, default=2, help="how many modules at a time (2)")
    options.add_argument("--json", action="store_true", help="every trial, for programs")
    asked = options.parse_args()
    chosen = {
        name: tests
        for name, tests in MODULES.items()
        if not asked.modules or any(part in name for part in asked.modules)
    }
    if not chosen:
        options.error(f"no module of {', '.join(MODULES)} is called {' or '.join(asked.modules)}")

    trials: dict[str, list[Trial]] = {}
    with ProcessPoolExecutor(asked.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        under_way: dict[Future[list[Trial]], str] = {
            processes.submit(try_module, module, tests): module for module, tests in chosen.items()
        }
        for done in as_completed(under_way):
            module = under_way[done]
            trials[module] = done.result()
            print(f"{module}: {len(trials[module])} mutants", file=sys.stderr, flush=True)
    report = Report({module: trials[module] for module in chosen}, read_reasons(), LEAST_SCORE)
    print(json.dumps(as_json(report), indent=2) if asked.json else as_text(report))
    return 1 if report.complaints() else 0


if __name__ == "__main__":
    sys.exit(main())
