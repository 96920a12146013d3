"""Interleaved measuring: every contestant runs in every round, so that noise hits all alike; the median counts.

HOLDFAST_BENCH_SCALE=0.05 makes the benchmarks that use `scaled` twenty times smaller: for a try, not for figures.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import Progress

ROUNDS = 9
SCALE = float(os.environ.get("HOLDFAST_BENCH_SCALE", "1"))

Figures = Mapping[str, float]
"""What one contestant showed in one round."""


def scaled(count: int, step: int = 1) -> int:
    """So many, in whole steps, or a part of it if a smaller scale is asked for."""
    return max(1, round(count * SCALE / step)) * step


def quiet_progress() -> Progress:
    """A bar on stderr that is only drawn between measurements, by `refresh`: no thread of its own beside them."""
    return Progress(console=Console(stderr=True), transient=True, auto_refresh=False)


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


def in_turns(
    contestants: Mapping[str, Callable[[], Figures]],
    rounds: int,
    progress: Progress,
    before_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[Figures]]:
    """What each contestant showed, round by round. Every round begins with the next of them, so that none is always the
    first. `before_round` prepares a round, by its number from 0.
    """
    seen: dict[str, list[Figures]] = {name: [] for name in contestants}
    bar = progress.add_task("measuring", total=rounds * len(contestants))
    for number in range(rounds):
        progress.update(bar, description=f"preparing round {number + 1}", refresh=True)
        before_round(number)
        names = list(contestants)
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            progress.update(bar, description=f"round {number + 1}: {name}", refresh=True)
            seen[name].append(contestants[name]())
            progress.update(bar, advance=1, refresh=True)
    return seen


def median(seen: Sequence[Figures], figure: str) -> float:
    """The median of one figure over the rounds."""
    return statistics.median(figures[figure] for figures in seen)
