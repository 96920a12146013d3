"""`python -m benchmarks.peers list|install|smoke [NAME ...]`: what peers there are, install them, try them out.

`smoke` installs the peers and tries every verb of each with tiny numbers, on servers that the environment names:
BENCH_REDIS_URL, BENCH_POSTGRES_URL, BENCH_RABBITMQ_URL, BENCH_SQLITE_PATH. It EMPTIES what these name. A peer whose
server is not named is left out. A NAME may say the engine too: `huey@sqlite`.
"""

import argparse
import signal
import sys

from rich.console import Console
from rich.table import Table

from benchmarks.peers.catalogue import named
from benchmarks.peers.install import install
from benchmarks.peers.smoke import VERBS, Trial, try_out

NOT_INSTALLABLE = "not installable"


def main() -> int:
    """Exit code 1 if a peer that was asked for cannot be installed, or does not work."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("action", choices=("list", "install", "smoke"))
    parser.add_argument("names", nargs="*", metavar="NAME", help="which ones (default: all)")
    options = parser.parse_args()
    try:
        entries = named(options.names)
    except KeyError as error:
        parser.error(error.args[0])
    if options.action == "list":
        table = Table("engine", "peer", "language", "made of", "default")
        for entry in entries:
            made_of = " ".join(entry.requirements)
            table.add_row(entry.engine, entry.name, entry.language, made_of, "yes" if entry.is_default else "")
        Console().print(table)
        return 0
    outcomes = install(options.names)
    if options.action == "install":
        return 0 if all(outcome.is_installed for outcome in outcomes) else 1
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # no worker outlives this process
    trials = []
    for outcome in outcomes:
        if outcome.is_installed:
            print(f"trying {outcome.entry.name} on {outcome.entry.engine}", file=sys.stderr, flush=True)
            trials.append(try_out(outcome.entry))
        else:
            trials.append(Trial(outcome.entry, "", {"info": f"{NOT_INSTALLABLE}: {outcome.reason}"}))
    _print_trials(trials)
    return 0 if all(trial.is_good for trial in trials) else 1


def _shown(word: str) -> str:
    if word in {"ok", "none", ""}:
        return word
    return "[yellow]absent" if word.startswith(NOT_INSTALLABLE) else "[red]failed"


def _print_trials(trials: list[Trial]) -> None:
    table = Table("engine", "peer", "version", *VERBS)
    for trial in trials:
        said = {verb: trial.verbs.get(verb, "") for verb in VERBS}
        shown = [_shown(word) for word in said.values()]
        table.add_row(trial.entry.engine, trial.entry.name, trial.version, *shown)
    Console(width=160).print(table)
    for trial in trials:
        for verb, word in trial.verbs.items():
            if word not in {"ok", "none"}:
                print(f"{trial.entry.name} on {trial.entry.engine}: {verb}: {word}")


if __name__ == "__main__":
    sys.exit(main())
