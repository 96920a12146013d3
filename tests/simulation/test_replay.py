"""A seed replays the same run, wherever and however often; and the command line says what it found."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter

import pytest

from holdfast.testing.simulation import Engine, Found, campaign, simulate
from holdfast.testing.simulation.__main__ import main
from holdfast.testing.simulation.campaign import ENOUGH_TO_REACH_ALL, run_campaign, run_seeds
from holdfast.testing.simulation.coverage import MUST_HAPPEN, never_happened
from holdfast.testing.simulation.scenario import Report, engine_of

ON_MEMORY, ON_SQLITE = 6, 7


@pytest.mark.parametrize("seed", [ON_MEMORY, ON_SQLITE])
def test_a_seed_replays_the_same_run_whatever_the_hash_seed(seed: int) -> None:
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        finished = subprocess.run(
            [sys.executable, "-m", "holdfast.testing.simulation", "--seed", str(seed)],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        outputs.add(finished.stdout)
    assert len(outputs) == 1
    assert re.search(r"fingerprint [0-9a-f]{16}: no violations", outputs.pop())


def test_seeds_and_stores_make_different_runs() -> None:
    assert engine_of(ON_MEMORY) is Engine.MEMORY
    assert engine_of(ON_SQLITE) is Engine.SQLITE
    assert simulate(ON_MEMORY).fingerprint == simulate(ON_MEMORY, Engine.MEMORY).fingerprint
    assert simulate(ON_MEMORY).fingerprint != simulate(ON_SQLITE).fingerprint
    forced = simulate(ON_MEMORY, Engine.SQLITE)
    assert (forced.engine, forced.violations) == (Engine.SQLITE, [])


def test_several_processes_find_what_one_does() -> None:
    """Sixty seeds, the first and the fiftieth of them twice."""
    seeds = range(60)
    alone, together = run_campaign(seeds), run_campaign(seeds, processes=2)
    assert alone == together
    assert alone.happenings["repeated"] == 2


# The command line.


def run_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["simulation", *arguments])
    return main()


def spoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third seed violates something, and the second run of a seed is another one."""
    runs: Counter[int] = Counter()

    def spoilt(seed: int, engine: Engine | None = None) -> Report:
        report = simulate(seed, engine)
        runs[seed] += 1
        report.fingerprint += str(runs[seed])
        if seed % 3 == 1:
            report.violations.append("made up")
        return report

    monkeypatch.setattr(campaign, "simulate", spoilt)


def test_many_seeds_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "--seeds", "3", "--from", "8") == 0
    printed = capsys.readouterr()
    assert re.search(r"^ +\d+  succeeded applied$", printed.out, re.MULTILINE)
    assert printed.out.endswith("3 seeds, 0 with violations\n")
    assert printed.err == "", "no progress line unless on a terminal"


def test_violations_come_with_their_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch)
    assert run_main(monkeypatch, "--seeds", "2", "--store", "memory") == 1
    printed = capsys.readouterr().out
    assert "seed 1 (replay: python -m holdfast.testing.simulation --seed 1 --store memory)\n  made up\n" in printed
    assert "seed 0 (" in printed, "two runs of it were not the same"
    assert "two runs of this seed were not the same" in printed


def test_the_same_for_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spoil(monkeypatch)
    assert run_main(monkeypatch, "--seeds", "1", "--from", "4", "--json") == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["seeds"], printed["violations"], printed["never_happened"]) == (1, {"4": ["made up"]}, [])
    assert printed["happenings"]["run on memory"] == 1


def test_one_seed_for_machines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(monkeypatch, "--seed", "5", "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["seed"], printed["violations"]) == (5, [])
    assert printed["history"]["exact"]


def test_a_run_that_breaks_is_found_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(seed: int, engine: Engine | None = None) -> Report:
        raise RuntimeError("stuck")

    monkeypatch.setattr(campaign, "simulate", broken)
    assert run_seeds(range(3, 5)).violations == {
        3: ["the run ended with RuntimeError: stuck"],
        4: ["the run ended with RuntimeError: stuck"],
    }


def test_enough_seeds_that_do_not_reach_everything_fail() -> None:
    assert Found(seeds=ENOUGH_TO_REACH_ALL - 1).missing(None) == []
    assert Found(seeds=ENOUGH_TO_REACH_ALL).missing(None) == [*MUST_HAPPEN, "run on memory", "run on sqlite"]
    everything = Counter(dict.fromkeys((*MUST_HAPPEN, "run on sqlite"), 1))
    assert never_happened(everything, Engine.SQLITE) == []
    assert never_happened(everything) == ["run on memory"]
