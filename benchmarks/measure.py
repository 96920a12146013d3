"""Interleaved measuring: every contestant runs in every round, so that noise hits all alike; the median counts."""

import statistics
import time
from collections.abc import Callable, Mapping

ROUNDS = 9


def rate(work: Callable[[], int]) -> float:
    """Items a second for work that returns how many it did."""
    started = time.perf_counter()
    done = work()
    return done / (time.perf_counter() - started)


def interleaved(contestants: Mapping[str, Callable[[], int]], rounds: int = ROUNDS) -> dict[str, float]:
    """The median rate of each contestant over the rounds."""
    rates: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            rates[name].append(rate(work))
    return {name: statistics.median(seen) for name, seen in rates.items()}
