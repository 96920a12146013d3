"""What is reported, and what is complained about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutation.mutants import Change
from tests.mutation.report import Report, as_json, as_text
from tests.mutation.survivors import FILE, Known, read_reasons
from tests.mutation.trials import Trial, Verdict

SURVIVOR = Change("some.module", "f", 7, "a < b", "a <= b")
KNOWN = Known("some.module", "f", "a < b", "a <= b")
REASONS = """
[[survivor]]
module = "some.module"
function = "f"
before = "a < b"
after = "a <= b"
reason = "a is never b"
"""


def trials(*, survivors: int, killed: int, timed_out: int = 0) -> list[Trial]:
    other = Change("some.module", "f", 8, "a", "b")
    return [
        *[Trial(SURVIVOR, Verdict.SURVIVED, "")] * survivors,
        *[Trial(other, Verdict.KILLED, "test_a")] * killed,
        *[Trial(other, Verdict.TIMED_OUT, "test_b")] * timed_out,
    ]


def test_a_survivor_with_a_reason_is_no_complaint() -> None:
    report = Report({"some.module": trials(survivors=1, killed=3, timed_out=1)}, {KNOWN: "a is never b"}, 80)
    assert report.complaints() == []
    text = as_text(report)
    assert "some.module:7 f\n  - a < b\n  + a <= b\n  a is never b" in text
    assert [line.split() for line in text.splitlines() if line.startswith("some.module ")] == [
        ["some.module", "5", "3", "1", "1", "80.0", "%"]
    ]


@pytest.mark.parametrize("reasons", [{}, {KNOWN: ""}])
def test_a_survivor_without_a_reason_is_complained_about(reasons: dict[Known, str]) -> None:
    report = Report({"some.module": trials(survivors=1, killed=9)}, reasons, 80)
    [complaint] = report.complaints()
    assert complaint.startswith("some.module:7 f: survived")
    assert complaint in as_text(report)
    assert "NO REASON KNOWN" in as_text(report)


def test_a_low_score_is_complained_about_whatever_the_reasons() -> None:
    report = Report({"some.module": trials(survivors=2, killed=3)}, {KNOWN: "a is never b"}, 80)
    assert report.complaints() == ["some.module: a score of 60.0 % is below 80 %"]


def test_a_reason_for_what_does_not_exist_is_complained_about_if_its_module_was_tried() -> None:
    old = Known("some.module", "f", "gone", "also gone")
    elsewhere = Known("other.module", "f", "gone", "also gone")
    report = Report({"some.module": trials(survivors=0, killed=1)}, {old: "once", elsewhere: "once"}, 80)
    [complaint] = report.complaints()
    assert "does not exist: also gone" in complaint


def test_programs_get_every_trial() -> None:
    found = as_json(Report({"some.module": trials(survivors=1, killed=1)}, {KNOWN: "a is never b"}, 80))
    assert found["complaints"] == ["some.module: a score of 50.0 % is below 80 %"]
    module = found["modules"]["some.module"]
    assert (module["mutants"], module["killed"], module["timed_out"], module["survived"]) == (2, 1, 0, 1)
    assert module["trials"][0]["reason"] == "a is never b"
    assert module["trials"][1]["test"] == "test_a"


def test_reasons_are_read(tmp_path: Path) -> None:
    file = tmp_path / "survivors.toml"
    file.write_text(REASONS)
    assert read_reasons(file) == {KNOWN: "a is never b"}


def test_every_reason_in_the_file_says_something() -> None:
    reasons = read_reasons(FILE)
    assert all(len(reason) > 20 for reason in reasons.values())
