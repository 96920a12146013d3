"""When to try again: the formulas at their edges, and callables and numbers that nobody should have written."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import InvalidOption
from holdfast.policy import LONGEST_BACKOFF, Exponential, FullJitter, RetryPolicy, Steps, backoff_seconds
from tests.unit.samples import FixedRandom

LOWEST, HALF, ALMOST_ONE = FixedRandom(0.0), FixedRandom(0.5), FixedRandom(math.nextafter(1, 0))
HUGE = 10**5000
"""An int with more digits than Python is willing to print."""

failure_counts = st.integers(1, 10**9)
seconds = st.floats(0, LONGEST_BACKOFF)


# Full jitter.


@pytest.mark.parametrize(
    ("failures", "highest"),
    [(1, 0.5), (2, 1), (3, 2), (4, 4), (5, 8), (6, 16), (7, 30), (8, 30), (61, 30), (62, 30), (10**9, 30)],
)
def test_full_jitter_is_spread_over_the_whole_range(failures: int, highest: float) -> None:
    default = FullJitter()
    assert default.seconds(failures, LOWEST) == 0
    assert default.seconds(failures, HALF) == highest / 2
    assert default.seconds(failures, FixedRandom(0.25)) == highest / 4
    assert 0.999 * highest < default.seconds(failures, ALMOST_ONE) < highest


def test_full_jitter_throws_the_dice_once() -> None:
    thrown = []

    class Counting:
        def fraction(self) -> float:
            thrown.append(1)
            return 0.5

    FullJitter().seconds(3, Counting())
    assert len(thrown) == 1


@given(failure_counts, seconds, seconds, st.floats(0, 1, exclude_max=True))
def test_full_jitter_stays_within_its_cap(failures: int, base: float, cap: float, fraction: float) -> None:
    wait = FullJitter(base, cap).seconds(failures, FixedRandom(fraction))
    assert 0 <= wait <= cap


# Without jitter.


@pytest.mark.parametrize(("failures", "wait"), [(1, 0.5), (2, 1), (3, 2), (6, 16), (7, 30), (62, 30), (10**9, 30)])
@pytest.mark.parametrize("random", [LOWEST, HALF, ALMOST_ONE])
def test_exponential_has_no_chance_in_it(failures: int, wait: float, random: FixedRandom) -> None:
    assert Exponential().seconds(failures, random) == wait


def test_exponential_with_another_factor() -> None:
    assert [Exponential(2, 3, 100).seconds(n, HALF) for n in (1, 2, 3, 4, 5)] == [2, 6, 18, 54, 100]
    assert [Exponential(2, 1, 100).seconds(n, HALF) for n in (1, 2, 900)] == [2, 2, 2]


@given(failure_counts, seconds, st.floats(1, 100), seconds)
def test_exponential_never_overflows_and_never_shrinks(failures: int, base: float, factor: float, cap: float) -> None:
    policy = Exponential(base, factor, cap)
    wait, next_wait = policy.seconds(failures, HALF), policy.seconds(failures + 1, HALF)
    assert 0 <= wait <= next_wait <= cap


@pytest.mark.parametrize(("failures", "wait"), [(1, 5), (2, 30), (3, 300), (4, 300), (10**9, 300)])
def test_steps_go_on_with_the_last(failures: int, wait: float) -> None:
    assert Steps((5, 30, 300)).seconds(failures, HALF) == wait


@pytest.mark.parametrize("policy", [FullJitter(0, 0), Exponential(0, 100, 0), Steps((0,))])
def test_no_wait_at_all_is_allowed(policy: FullJitter | Exponential | Steps) -> None:
    assert backoff_seconds(policy, 1, ALMOST_ONE) == 0
    assert backoff_seconds(policy, 10**9, ALMOST_ONE) == 0


# Values that cannot work.

BAD_SECONDS = [-1, -1e-9, math.nan, math.inf, -math.inf, LONGEST_BACKOFF + 1, 10**400, HUGE, True, "1", None, [], 1j]


def described(value: object) -> str:
    return f"an int of {value.bit_length()} bits" if type(value) is int and abs(value) > 10**20 else repr(value)


@pytest.mark.parametrize("bad", BAD_SECONDS, ids=described)
@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda bad: FullJitter(base=bad), "base"),
        (lambda bad: FullJitter(max=bad), "max"),
        (lambda bad: Exponential(base=bad), "base"),
        (lambda bad: Exponential(max=bad), "max"),
        (lambda bad: Steps((1, bad)), "each wait"),
    ],
)
def test_bad_seconds_are_refused(make: Callable[[Any], object], named: str, bad: object) -> None:
    with pytest.raises(InvalidOption, match=rf"^{named} must be a number of seconds from 0 to 31622400, not ") as e:
        make(bad)
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("good", [0, 0.0, 1, 1e-9, LONGEST_BACKOFF])
def test_seconds_at_the_edges_are_accepted(good: float) -> None:
    assert FullJitter(good, good) == FullJitter(base=good, max=good)
    assert Exponential(good, 1, good).base == good
    assert Steps((good,)).waits == (good,)


@pytest.mark.parametrize("bad", [0, 0.99, -2, 100.1, math.nan, math.inf, HUGE, True, "2", None], ids=described)
def test_bad_factors_are_refused(bad: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^factor must be a number from 1 to 100, not ") as e:
        Exponential(factor=bad)
    assert len(str(e.value)) < 200


@pytest.mark.parametrize("bad", [(), [], 5, None, "5"])
def test_steps_need_a_tuple_of_waits(bad: Any) -> None:
    with pytest.raises(InvalidOption, match=re.escape("as in Steps((5, 30, 300))")):
        Steps(bad)


@pytest.mark.parametrize("name", ["max_crashes", "max_snoozes"])
@pytest.mark.parametrize("bad", [-1, 1.0, True, None, "3", HUGE], ids=described)
def test_bad_limits_are_refused(name: str, bad: Any) -> None:
    with pytest.raises(InvalidOption, match=rf"^{name} must be a whole number from \d to 1000000, not "):
        RetryPolicy(**{name: bad})


def test_limits_at_the_edges_are_accepted() -> None:
    assert RetryPolicy(max_crashes=1, max_snoozes=0, backoff=float).max_crashes == 1
    assert RetryPolicy(max_crashes=1_000_000, max_snoozes=1_000_000, backoff=Steps((1,))).max_snoozes == 1_000_000
    refused: list[dict[str, Any]] = [{"max_crashes": 0}, {"max_crashes": 1_000_001}, {"max_snoozes": 1_000_001}]
    for too_much in refused:
        with pytest.raises(InvalidOption):
            RetryPolicy(**too_much)


@pytest.mark.parametrize("bad", [5, None, "exponential", (5, 30)])
def test_a_backoff_that_is_none_is_refused(bad: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^backoff must be "):
        RetryPolicy(backoff=bad)


# Callables are foreign code.


def exploding(failures: int) -> float:
    raise ZeroDivisionError(failures)


@pytest.mark.parametrize(
    "backoff",
    [
        exploding,
        lambda n: math.nan,
        lambda n: -math.inf,
        lambda n: -1,
        lambda n: -(10**400),
        lambda n: 10**400,  # float() overflows
        lambda n: None,
        lambda n: "soon",
        lambda n: [1],
        lambda n: 1j,
        lambda: 1,
    ],
)
def test_when_a_callable_fails_the_default_policy_decides(backoff: Any) -> None:
    for failures in (1, 3, 1000):
        for random in (LOWEST, HALF, ALMOST_ONE):
            wait = backoff_seconds(backoff, failures, random)
            assert wait == FullJitter().seconds(failures, random)


@pytest.mark.parametrize("answer", [1e400, math.inf, LONGEST_BACKOFF + 1, 1e308])
def test_a_callable_that_asks_for_too_much_gets_the_longest_backoff(answer: float) -> None:
    assert backoff_seconds(lambda n: answer, 1, HALF) == LONGEST_BACKOFF


@pytest.mark.parametrize(("answer", "wait"), [(0, 0), (-0.0, 0), (0.25, 0.25), (7, 7)])
def test_a_callable_decides(answer: float, wait: float) -> None:
    assert backoff_seconds(lambda n: answer, 1, HALF) == wait


def test_a_callable_hears_how_many_failures_there_were() -> None:
    assert [backoff_seconds(lambda n: n * 10, failures, HALF) for failures in (1, 2, 3)] == [10, 20, 30]


@given(st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans()), failure_counts)
def test_no_answer_of_a_callable_leaves_the_bounds(answer: Any, failures: int) -> None:
    assert 0 <= backoff_seconds(lambda n: answer, failures, ALMOST_ONE) <= LONGEST_BACKOFF


def test_an_exit_asked_for_by_a_callable_is_not_swallowed() -> None:
    def leaving(failures: int) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        backoff_seconds(leaving, 1, HALF)


def test_defaults() -> None:
    assert RetryPolicy() == RetryPolicy(backoff=FullJitter(base=0.5, max=30.0), max_crashes=3, max_snoozes=100)
