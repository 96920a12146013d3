"""Many seeds, in several processes: what they violated, what happened in them, and what never did."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed

import msgspec

from holdfast.testing.simulation.coverage import never_happened
from holdfast.testing.simulation.scenario import simulate
from holdfast.testing.simulation.swarm import Engine

REPEATED_EVERY = 50
"""One seed in so many runs twice, to see that both runs are the same."""
ENOUGH_TO_REACH_ALL = 2000
"""So many seeds must reach every kind of event and fault: if they do not, the generator is at fault."""
_CHUNK = 20


class Found(msgspec.Struct):
    """What a number of seeds showed."""

    seeds: int = 0
    violations: dict[int, list[str]] = msgspec.field(default_factory=dict)
    """By seed."""
    happenings: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, other: Found) -> None:
        """Take in what others showed."""
        self.seeds += other.seeds
        self.violations.update(other.violations)
        self.happenings.update(other.happenings)

    def missing(self, engine: Engine | None) -> list[str]:
        """What should have happened in so many seeds, and did not."""
        return never_happened(self.happenings, engine) if self.seeds >= ENOUGH_TO_REACH_ALL else []


def run_seeds(seeds: range, engine: Engine | None = None) -> Found:
    """Run these, one after the other."""
    found = Found(seeds=len(seeds))
    for seed in seeds:
        try:
            report = simulate(seed, engine)
            violations = report.violations
            found.happenings.update(report.happenings)
            if seed % REPEATED_EVERY == 0:
                found.happenings["repeated"] += 1
                if simulate(seed, engine).fingerprint != report.fingerprint:
                    violations.append("two runs of this seed were not the same")
        except Exception as error:  # of our own code or of the simulation: either way somebody must look
            violations = [f"the run ended with {type(error).__name__}: {error}"]
        if violations:
            found.violations[seed] = violations
    return found


def run_campaign(
    seeds: range,
    *,
    engine: Engine | None = None,
    processes: int = 1,
    progress: Callable[[Found], None] = lambda found: None,
) -> Found:
    """Run all of these; `progress` hears of what was found so far."""
    total = Found()
    for found in _chunks(seeds, engine, processes):
        total.add(found)
        progress(total)
    total.violations = dict(sorted(total.violations.items()))
    return total


def _chunks(seeds: range, engine: Engine | None, processes: int) -> Iterator[Found]:
    parts = [seeds[first : first + _CHUNK] for first in range(0, len(seeds), _CHUNK)]
    if processes == 1:
        for part in parts:
            yield run_seeds(part, engine)
        return
    # Spawned, not forked: a fork of a process with threads is none that anybody should trust.
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        for done in as_completed([pool.submit(run_seeds, part, engine) for part in parts]):
            yield done.result()
