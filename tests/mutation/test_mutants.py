"""What the mutants of a piece of code are, and what is left alone."""

from __future__ import annotations

import ast
from textwrap import dedent

import pytest

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.plan import MODULES
from tests.mutation.trials import path_of


def mutants(source: str) -> list[Mutant]:
    return list(mutants_of(dedent(source), "sample"))


def changes(source: str) -> set[str]:
    """What the code can become."""
    return {mutant.change.after for mutant in mutants(source)}


def in_function(statement: str, *, returns: str = "int") -> set[str]:
    """What a statement of a function can become."""
    return changes(f"def f(a, b) -> {returns}:\n    {statement}")


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("return a < b", {"return a <= b", "return None"}),
        ("return a >= b", {"return a > b", "return None"}),
        ("return a == b", {"return a != b", "return None"}),
        ("return a is not b", {"return a is b", "return None"}),
        ("return a in b", {"return a not in b", "return None"}),
        ("return not a", {"return a", "return None"}),
        ("return -a", {"return a", "return None"}),
        ("return a + b", {"return a - b", "return None"}),
        ("return a * b", {"return a / b", "return None"}),
        ("return a | b", {"return None"}),
        ("return a and b", {"return a or b", "return a", "return b", "return None"}),
        (
            "return a if b else 1",
            {"return a", "return 1", "return a if b else 2", "return a if b else 0", "return None"},
        ),
        ("return f(a, key=b)", {"return f(a)", "return None"}),
        ("return [x for x in a if x]", {"return [x for x in a]", "return None"}),
        ("return 7", {"return 8", "return 6"}),
        ("return 0.5", {"return 1.0", "return 0.25"}),
        ("return True", {"return False"}),
        ("return 'text'", {"return 'text?'"}),
        ("return", {"pass"}),
        ("a.b = b", {"pass"}),
        ("c = b", set()),
        ("c = a; c = b", {"pass"}),
        ("c += b", {"pass", "c = b", "c -= b"}),
        ("del a[b]", {"pass"}),
        ("raise a", {"pass"}),
        ("await a.sleep()", {"pass"}),
        ("a: int = 'text'", {"a: int = 'text?'"}),
        ("'docstring'", set()),
        ("return f'{a} text'", {"return None"}),
    ],
)
def test_statements(statement: str, expected: set[str]) -> None:
    is_async = "async " if "await" in statement else ""
    assert changes(f"{is_async}def f(a, b) -> int:\n    {statement}") == expected


def test_what_answers_yes_or_no_answers_the_opposite() -> None:
    assert in_function("return bool(a)", returns="bool") == {"return not bool(a)"}
    assert in_function("return a == b", returns="bool") == {"return a != b"}


def test_blocks() -> None:
    assert in_function("while a: a.b()") == {"while not a:", "pass"}
    assert in_function("while True: break") == {"while False:", "continue"}
    assert in_function("for x in a: continue") == {"break"}
    assert in_function("with a: a.b()") == {"if True:", "pass"}
    assert changes(
        """
        def f(a):
            try:
                a()
            except ValueError:
                return False
        """
    ) == {"pass", "except ValueError: raise", "return True"}


def test_what_takes_effect_on_import_belongs_to_no_function() -> None:
    found = mutants(
        """
        LIMIT = 3

        class A:
            size: int = 4

            def method(self, most=5):
                return most + 1

        @decorated
        def decorated(): return 6
        """
    )
    by_function = {(mutant.change.function, mutant.change.before) for mutant in found}
    assert by_function == {
        ("", "LIMIT = 3"),
        ("", "size: int = 4"),
        ("", "def method(self, most=5):"),
        ("A.method", "return most + 1"),
        ("", "return 6"),
    }


def test_enums_annotations_and_imports_are_left_alone() -> None:
    assert changes("from a import b\nclass C(Enum):\n    ONE = 1\ndef f(a: Literal[1]) -> Literal[2]: ...") == set()


def test_a_change_says_where_it_is_and_leaves_the_rest_as_it_was() -> None:
    source = "def f(a):\n    if a > 1:\n        return [x for x in a if x]\n    return 3\n"
    found = mutants(source)
    assert {mutant.change.line for mutant in found} == {2, 3, 4}
    for mutant in found:
        namespace: dict[str, object] = {}
        exec(mutant.code, namespace)
        assert callable(namespace["f"])
    # each is one change to the same original
    assert {mutant.change.before for mutant in found} <= set(
        map(str.strip, ast.unparse(ast.parse(source)).splitlines())
    )


def test_a_long_statement_is_shown_by_the_piece_that_fits_into_a_line() -> None:
    arguments = ", ".join(f"argument_{number}=a" for number in range(20))
    found = mutants(f"def f(a):\n    return call({arguments}, b=1 + a)")
    assert {mutant.change.before for mutant in found if "argument" not in mutant.change.before} == {"b=1 + a"}


@pytest.mark.parametrize("module", MODULES)
def test_the_modules_of_the_plan_have_mutants_and_are_judged_by_tests_that_exist(module: str) -> None:
    assert next(mutants_of(path_of(module).read_text(), module)).change.module == module
    root = path_of("tests.mutation.plan").parents[2]
    assert all((root / test).is_file() for test in MODULES[module])
