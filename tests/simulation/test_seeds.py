"""Two thousand seeds, and those that once failed: none violates an invariant, and together they reach everything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing.simulation import Engine, simulate

SEEDS = 2000
DEADLINE = 1500
"""Seconds: a minute is enough on an idle machine."""


def recorded_seeds() -> list[tuple[int, Engine | None]]:
    """The lines of `seeds.txt`: a seed, the store it ran on if it was not its own choice, and what it once showed."""
    lines = Path(__file__).with_name("seeds.txt").read_text().splitlines()
    seeds: list[tuple[int, Engine | None]] = []
    for line in lines:
        if line and not line.startswith("#"):
            number, store, *_ = line.split(maxsplit=2)
            seeds.append((int(number), None if store == "any" else Engine(store)))
    return seeds


@pytest.fixture(scope="module")
def campaign() -> dict[str, Any]:
    """What the command line found in all of them, on both processors."""
    command = [sys.executable, "-m", "holdfast.testing.simulation", "--seeds", str(SEEDS), "--processes", "2", "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert finished.stdout, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    found["exit code"] = finished.returncode
    return found


def test_no_seed_violates_an_invariant(campaign: dict[str, Any]) -> None:
    assert campaign["seeds"] == SEEDS
    assert campaign["violations"] == {}


def test_the_seeds_reach_every_kind_of_event_and_fault(campaign: dict[str, Any]) -> None:
    """A run that never loses a reply or never rescues proves nothing: then the generator is at fault."""
    assert campaign["never_happened"] == []
    assert campaign["exit code"] == 0


@pytest.mark.parametrize(("seed", "store"), recorded_seeds())
def test_seeds_that_once_failed(seed: int, store: Engine | None) -> None:
    assert simulate(seed, store).violations == []
