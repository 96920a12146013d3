"""Trials end as they must: a mutant that a test notices is killed, one that none can notice survives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[2]

SAMPLE = """
LIMIT = 3
UNUSED = 10


class Gate:
    def lets_in(self, number: int) -> bool:
        return number < LIMIT


def count_down(number: int) -> int:
    while number > 0:
        number -= 1
    return number


def open_door(door: object) -> None:
    door.set()


def never_called() -> str:
    return "nobody knows"
"""

TESTS = """
import threading

from sample import Gate, count_down, open_door


def test_of_the_gate():
    assert Gate().lets_in(2)
    assert not Gate().lets_in(3)


def test_of_counting():
    assert count_down(5) == 0


def test_of_the_door():
    door = threading.Event()
    open_door(door)
    door.wait()
"""

RUN = """
import json, sys
from pathlib import Path
from tests.mutation import trials

trials.BUSY_LIMIT = 0.3
trials.STILL_LIMIT = 2.0
try:
    found = trials.try_module("sample", ["test_sample.py"])
    answer = [[trial.change.function, trial.change.after, trial.verdict, trial.test] for trial in found]
except trials.BrokenBaseline as error:
    answer = str(error)
Path("answer.json").write_text(json.dumps(answer))
"""


def run(folder: Path, tests: str) -> object:
    """The trials of the sample, in a process that has imported nothing yet."""
    (folder / "sample.py").write_text(SAMPLE)
    (folder / "test_sample.py").write_text(dedent(tests))
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    # The installed package is found by its own path; the folder of the sample comes first.
    path = {"PYTHONPATH": f"{folder}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", RUN], cwd=folder, env=path, check=True, timeout=600)
    return json.loads((folder / "answer.json").read_text())


def test_every_mutant_ends_as_it_must(tmp_path: Path) -> None:
    answer = run(tmp_path, TESTS)
    assert isinstance(answer, list)
    gate, counting = "test_sample.py::test_of_the_gate", "test_sample.py::test_of_counting"
    assert {(function, after): (verdict, test) for function, after, verdict, test in answer} == {
        ("", "LIMIT = 4"): ("killed", gate),
        ("", "LIMIT = 2"): ("killed", gate),
        ("", "UNUSED = 11"): ("survived", ""),
        ("", "UNUSED = 9"): ("survived", ""),
        ("Gate.lets_in", "return number <= LIMIT"): ("killed", gate),
        ("Gate.lets_in", "return not number < LIMIT"): ("killed", gate),
        ("count_down", "while not number > 0:"): ("killed", counting),
        ("count_down", "while number >= 0:"): ("killed", counting),
        ("count_down", "while number > 1:"): ("killed", counting),
        ("count_down", "while number > -1:"): ("killed", counting),
        ("count_down", "pass"): ("timed out", counting),
        ("count_down", "number = 1"): ("timed out", counting),
        ("count_down", "number += 1"): ("timed out", counting),
        ("count_down", "number -= 2"): ("killed", counting),
        ("count_down", "number -= 0"): ("timed out", counting),
        ("count_down", "return None"): ("killed", counting),
        ("open_door", "pass"): ("timed out", "test_sample.py::test_of_the_door"),
        ("never_called", "return 'nobody knows?'"): ("survived", ""),
    }


@pytest.mark.parametrize(
    ("tests", "blamed"),
    [
        ("def test_that_fails(): assert False", "test_sample.py::test_that_fails"),
        ("import nothing_of_that_name", "the collection of the tests"),
    ],
)
def test_tests_that_fail_without_a_mutant_prove_nothing(tmp_path: Path, tests: str, blamed: str) -> None:
    assert run(tmp_path, tests) == f"without any mutant: {blamed} fails or takes too long"
