"""`scripts/run_tests`, on folders of made-up tests: what it runs again, what it does not, and what it says."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "run_tests"
SETTINGS = """
[tool.pytest.ini_options]
testpaths = ["tests"]
addopts = ["--import-mode=importlib", "-p", "no:cacheprovider"]
faulthandler_timeout = {seconds}
faulthandler_exit_on_timeout = true
"""
PASSES = "def test_passes(): pass\n"
FAILS = "def test_fails(): assert 1 == 2\n"
FLAKY = """
from pathlib import Path
def test_flaky():
    been = Path(__file__).with_suffix(".been")
    assert been.exists() or been.write_text("") is None
"""
HANGS_ONCE = """
import time
from pathlib import Path
def test_hangs():
    been = Path(__file__).with_suffix(".been")
    if not been.exists():
        been.touch()
        time.sleep(600)
def test_after_it(): pass
"""
HANGS = "import time\ndef test_hangs(): time.sleep(600)\n"
SKIPPED = """
import pytest
@pytest.mark.skip
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
"""
BROKEN_TEARDOWN = """
import pytest
@pytest.fixture
def broken():
    yield
    assert False
def test_broken(broken): pass
"""

Run = Callable[..., tuple[int, list[str]]]


def load() -> ModuleType:
    loader = SourceFileLoader("run_tests", str(SCRIPT))
    spec = spec_from_loader("run_tests", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run these files of tests, by their paths under `tests`. The exit code, and the lines that were said."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_TESTRUNUID", "PYTEST_CURRENT_TEST", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def run(files: dict[str, str], *, seconds: float = 60.0, limit: float = 60.0) -> tuple[int, list[str]]:
        (tmp_path / "pyproject.toml").write_text(SETTINGS.format(seconds=seconds))
        for name, text in files.items():
            path = tmp_path / "tests" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        code = load().main(limit=limit, limit_of_one=limit)
        out, err = capfd.readouterr()
        sys.stdout.write(out + err)
        return code, out.splitlines()

    return run


def closing(lines: list[str]) -> str:
    """What the last line counts, if it is a summary as pytest writes it."""
    found = re.fullmatch(r"=+ (.*) in [\d.]+s.* =+", lines[-1])
    assert found is not None, lines[-1]
    return found[1]


def ours(lines: list[str]) -> list[str]:
    return [line.removeprefix("run_tests: ") for line in lines if line.startswith("run_tests: ")]


def test_what_passes_is_left_to_pytest(run: Run) -> None:
    code, lines = run({"worker/test_a.py": PASSES, "unit/test_b.py": PASSES + SKIPPED})
    assert code == 0
    assert ours(lines) == []
    assert closing(lines) == "2 passed, 1 skipped, 1 xfailed"


def test_what_is_flaky_passes_alone_and_is_named(run: Run) -> None:
    code, lines = run({"worker/test_a.py": FLAKY, "unit/test_b.py": PASSES + SKIPPED})
    assert code == 0
    name = "tests/worker/test_a.py::test_flaky"
    assert ours(lines)[0].startswith(f"once more, alone: {name} (")
    assert ours(lines)[1:] == [f"the first time it failed, alone it passed: {name}"]
    assert closing(lines) == "2 passed, 1 skipped, 1 xfailed"


@pytest.mark.parametrize("broken", [FAILS, BROKEN_TEARDOWN])
def test_what_fails_twice_has_failed(run: Run, broken: str) -> None:
    code, lines = run({"worker/test_a.py": broken, "worker/test_b.py": FLAKY + PASSES})
    assert code == 1
    assert [line for line in ours(lines) if line.startswith("the first time it failed, alone it failed: tests/worker")]
    assert closing(lines) == "1 failed, 2 passed"


def test_what_no_clock_can_hurt_is_not_run_again_nor_is_anything_beside_it(run: Run) -> None:
    code, lines = run({"unit/test_a.py": FLAKY, "worker/test_b.py": FLAKY})
    assert code == 1
    assert ours(lines) == ["nothing is run again: no clock can hurt tests/unit/test_a.py::test_flaky"]
    assert closing(lines) == "2 failed"


def test_more_than_five_are_not_run_again(run: Run) -> None:
    code, lines = run({f"worker/test_{number}.py": FLAKY for number in range(6)})
    assert code == 1
    assert ours(lines) == [
        "nothing is run again: 6 tests failed or did not end, and at most 5 are run again",
    ]
    assert closing(lines) == "6 failed"


def test_tests_that_cannot_be_read_fail_the_run(run: Run) -> None:
    code, lines = run({"worker/test_a.py": "import nothing_of_that_name\n", "worker/test_b.py": PASSES})
    assert code == 1
    assert len(ours(lines)) == 1
    assert closing(lines)


def test_what_stands_still_shows_where_is_ended_and_run_again(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = run({"worker/test_a.py": HANGS_ONCE, "worker/test_b.py": PASSES}, seconds=2.0)
    assert code == 0
    assert "the first time it failed, alone it passed: tests/worker/test_a.py::test_hangs" in ours(lines)
    assert closing(lines) == "3 passed"
    shown = capfd.readouterr().out
    assert "in test_hangs" in shown  # the traceback


def test_what_stands_still_twice_has_failed(run: Run) -> None:
    code, lines = run({"worker/test_a.py": HANGS, "worker/test_b.py": PASSES}, seconds=2.0)
    assert code == 1
    assert closing(lines) == "1 passed, 1 error"


def test_a_run_that_takes_too_long_is_ended_and_what_is_left_is_run_alone(run: Run) -> None:
    code, lines = run({"worker/test_a.py": HANGS_ONCE, "worker/test_b.py": PASSES}, limit=12.0)
    assert code == 0
    assert [line for line in ours(lines) if line.startswith("not over after")]
    assert "the first time it did not end, alone it passed: tests/worker/test_a.py::test_hangs" in ours(lines)
    assert "the first time it did not end, alone it passed: tests/worker/test_a.py::test_after_it" in ours(lines)
    assert closing(lines) == "3 passed"


def test_with_arguments_it_is_pytest(tmp_path: Path, run: Run) -> None:
    run({"worker/test_a.py": PASSES})
    command = [sys.executable, str(SCRIPT), "-q", "-k", "nothing"]
    finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert "1 deselected" in finished.stdout.splitlines()[-1]
