"""The lifecycle page says what the code does."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.job import Reason, State
from holdfast.lifecycle import TRANSITIONS, Applied
from scripts.lifecycle_diagram import BEGIN, END, PAGE, NoMarkers, diagram, main, updated

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "lifecycle_diagram.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copy(PAGE, tmp_path / "page.md"))


def test_the_page_is_up_to_date() -> None:
    checked = run("--check")
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("marker", ["ready --> in_flight", "| `ready` | `in_flight` |"])
def test_a_page_that_was_edited_by_hand_is_noticed_and_put_right(copied: Path, marker: str) -> None:
    right = copied.read_text()
    assert marker in right
    copied.write_text(right.replace(marker, marker.replace("ready", "succeeded")))
    wrong = copied.read_text()

    checked = run("--check", str(copied))
    assert checked.returncode == 1
    assert "out of date" in checked.stderr
    assert copied.read_text() == wrong, "--check must not write"

    assert main([str(copied)]) == 0
    assert copied.read_text() == right
    assert main(["--check", str(copied)]) == 0


def test_a_transition_that_is_missing_on_the_page_is_noticed() -> None:
    page = PAGE.read_text()
    for missing in range(len(TRANSITIONS)):
        fewer = TRANSITIONS[:missing] + TRANSITIONS[missing + 1 :]
        assert updated(page, fewer) != page


def test_text_around_the_generated_part_is_left_alone() -> None:
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    new = updated(page)
    assert new.startswith(f"before\n{BEGIN}\n")
    assert new.endswith(f"{END}\nafter\n")
    assert "old" not in new
    assert updated(new) == new


@pytest.mark.parametrize("page", ["", BEGIN, END, END + BEGIN, BEGIN + END + BEGIN + END])
def test_a_page_without_its_markers_is_refused(page: str, tmp_path: Path) -> None:
    with pytest.raises(NoMarkers):
        updated(page)
    path = tmp_path / "page.md"
    path.write_text(page)
    assert main([str(path)]) == 1
    assert path.read_text() == page


def test_the_diagram_can_be_parsed() -> None:
    """Mermaid ends a label at a line break or semicolon and its statements have one colon."""
    for line in diagram(TRANSITIONS).splitlines()[2:-1]:
        assert line.count(":") == 1
        assert line.count("-->") == 1
        assert ";" not in line
        assert "#" not in line


def test_the_page_explains_every_word() -> None:
    page = PAGE.read_text()
    for word in [*State, *Reason, *Applied]:
        assert f"`{word}`" in page, word
    states, answers = page.index("## States"), page.index("## What became of a write")
    assert all(f"| `{state}` |" in page[states : page.index("## Transitions")] for state in State)
    assert all(f"| `{answer}` |" in page[answers : page.index("## Idempotency keys")] for answer in Applied)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("max_retries", "more than `max_retries` (default 3, so four attempts)"),
        ("max_crashes", "`max_crashes` (default 3)"),
        ("max_snoozes", "more than `max_snoozes` (default 100)"),
        ("longest backoff", "never longer than 366 days"),
    ],
)
def test_numbers_on_the_page_are_those_of_the_code(name: str, sentence: str) -> None:
    from holdfast.job import DEFAULT_MAX_RETRIES
    from holdfast.policy import LONGEST_BACKOFF, RetryPolicy

    policy = RetryPolicy()
    assert (DEFAULT_MAX_RETRIES, policy.max_crashes, policy.max_snoozes) == (3, 3, 100)
    assert LONGEST_BACKOFF == 366 * 86400
    assert sentence in PAGE.read_text(), name
