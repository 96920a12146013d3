"""Two thousand seeds, and those that once failed: none violates an invariant, and together they reach everything."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing.simulation import Engine, simulate
from holdfast.testing.simulation.campaign import ENOUGH_TO_REACH_ALL, Found

SEEDS = 2000
SLICE = 400
"""So many in one test: a tenth of a minute on an idle machine, and far from five minutes on a busy one."""
DEADLINE = 280
"""Seconds, a little less than any test may take."""


def recorded_seeds() -> list[tuple[int, Engine | None]]:
    """The lines of `seeds.txt`: a seed, the store it ran on if it was not its own choice, and what it once showed."""
    lines = Path(__file__).with_name("seeds.txt").read_text().splitlines()
    seeds: list[tuple[int, Engine | None]] = []
    for line in lines:
        if line and not line.startswith("#"):
            number, store, *_ = line.split(maxsplit=2)
            seeds.append((int(number), None if store == "any" else Engine(store)))
    return seeds


@cache
def campaign(first: int) -> Found:
    """What the command line found in a slice of them, on both processors."""
    command = [sys.executable, "-m", "holdfast.testing.simulation", "--from", str(first), "--seeds", str(SLICE)]
    command += ["--processes", "2", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert finished.stdout, finished.stderr
    told: dict[str, Any] = json.loads(finished.stdout)
    assert finished.returncode == (1 if told["violations"] else 0)
    violations = {int(seed): found for seed, found in told["violations"].items()}
    return Found(told["seeds"], violations, Counter(told["happenings"]))


@pytest.mark.parametrize("first", range(0, SEEDS, SLICE))
def test_no_seed_violates_an_invariant(first: int) -> None:
    found = campaign(first)
    assert found.seeds == SLICE
    assert found.violations == {}


def test_the_seeds_reach_every_kind_of_event_and_fault() -> None:
    """A run that never loses a reply or never rescues proves nothing: then the generator is at fault."""
    total = Found()
    for first in range(0, SEEDS, SLICE):
        total.add(campaign(first))
    assert total.seeds == SEEDS >= ENOUGH_TO_REACH_ALL
    assert total.missing(None) == []


@pytest.mark.parametrize(("seed", "store"), recorded_seeds())
def test_seeds_that_once_failed(seed: int, store: Engine | None) -> None:
    assert simulate(seed, store).violations == []
