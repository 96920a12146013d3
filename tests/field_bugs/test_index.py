"""Each of the 26 field bugs has a test that exists, and that says which bug it is about."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.field_bugs.index import FIELD_BUGS, FieldBug

ROOT = Path(__file__).parents[2]


def test_there_are_26_of_them() -> None:
    assert [bug.number for bug in FIELD_BUGS] == list(range(1, 27))


@pytest.mark.parametrize("bug", FIELD_BUGS, ids=lambda bug: bug.name)
def test_each_has_tests_that_exist_and_one_that_names_it(bug: FieldBug) -> None:
    named = [what for what in map(find, bug.tests) if names(bug, *what)]
    assert named, f"no test of {bug.name} says so in its name or docstring"


def test_every_test_here_is_listed() -> None:
    listed = {test for bug in FIELD_BUGS for test in bug.tests}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for function in functions(path):
            if function.name.startswith("test_b"):
                assert f"{path.relative_to(ROOT)}::{function.name}" in listed


def test_a_test_that_is_gone_would_be_noticed() -> None:
    with pytest.raises(AssertionError):
        find("tests/field_bugs/test_crashes.py::test_b02_nothing_of_the_kind")
    assert not names(FIELD_BUGS[0], "test_b02_somebody_else", "About field bug B2.")


def find(test: str) -> tuple[str, str]:
    """The name and the docstring of a test, which must be there."""
    path, _, name = test.partition("::")
    found = [function for function in functions(ROOT / path) if function.name == name]
    assert len(found) == 1, f"{test} is not there"
    return name, ast.get_docstring(found[0]) or ""


def functions(path: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    tree = ast.parse(path.read_text())
    return [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def names(bug: FieldBug, name: str, docstring: str) -> bool:
    """Whether a test says that it is about the bug."""
    words = docstring.replace(".", " ").replace(",", " ").split()
    return name.startswith(f"test_b{bug.number:02}_") or f"B{bug.number}" in words
