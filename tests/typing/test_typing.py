"""mypy knows a task's arguments, options and result: the samples beside this file, checked line by line.

In a sample, `# E:` at the end of a line is the beginning of an error that mypy must report there, `# R:` the type that
`reveal_type` must show, without modules. Lines without either must be silent.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAMPLES = sorted((Path(__file__).parent / "samples").glob("*.py"))
_REPORT = re.compile(r"(?P<file>[^:]+):(?P<line>\d+): (?P<kind>error|note): (?P<text>.*)")
_EXPECTED = re.compile(r"# (?P<kind>[ER]): (?P<text>.*)$")
_REVEALED = re.compile(r'Revealed type is "(?P<type>.*)"')
_MODULE = re.compile(r"\b(?:\w+\.)+(?=\w)")

Findings = dict[tuple[str, int], tuple[str, str]]


@pytest.fixture(scope="module")
def reported() -> Findings:
    """What mypy says about all samples: the first error, or the revealed type, of every line."""
    run = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--no-error-summary"),
            *("--hide-error-codes", *map(str, SAMPLES)),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stdout + run.stderr  # errors were found, and mypy itself was well
    return dict(reversed(list(_findings(run.stdout))))


def _findings(report: str) -> Iterator[tuple[tuple[str, int], tuple[str, str]]]:
    for line in report.splitlines():
        match = _REPORT.fullmatch(line)
        assert match, line
        place = (Path(match["file"]).name, int(match["line"]))
        if match["kind"] == "error":
            yield place, ("E", match["text"])
        elif revealed := _REVEALED.fullmatch(match["text"]):
            yield place, ("R", _MODULE.sub("", revealed["type"]))


def _expected(sample: Path) -> Findings:
    return {
        (sample.name, number): (match["kind"], match["text"])
        for number, line in enumerate(sample.read_text().splitlines(), 1)
        if (match := _EXPECTED.search(line))
    }


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.stem)
def test_sample(sample: Path, reported: Findings) -> None:
    expected = _expected(sample)
    found = {place: finding for place, finding in reported.items() if place[0] == sample.name}
    assert found.keys() == expected.keys(), [found[place] for place in found.keys() - expected.keys()]
    for place, (kind, text) in expected.items():
        found_kind, found_text = found[place]
        assert found_kind == kind, place
        if kind == "E":
            assert found_text.startswith(text), place
        else:
            assert found_text == text, place


def test_the_samples_are_there() -> None:
    assert [sample.stem for sample in SAMPLES] == ["arguments", "options", "results"]
    assert sum(len(_expected(sample)) for sample in SAMPLES) > 50
