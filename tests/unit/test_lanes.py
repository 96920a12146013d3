"""The order in which lanes are served."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.lanes import INVERTED_EVERY, Lane, draw, serving_order

Backlog = dict[Lane, int]


def lane(priority: int, share: str = "") -> Lane:
    return Lane("q", priority, share)


def priorities(groups: Sequence[Sequence[Lane]]) -> list[int]:
    return [group[0].priority for group in groups]


def from_(backlog: Backlog) -> Callable[[Lane, int], list[Lane]]:
    """A `pull` that takes from a backlog of so many jobs per lane, and checks what it is asked."""
    left = dict(backlog)

    def pull(lane: Lane, most: int) -> list[Lane]:
        assert most > 0
        taken = min(left[lane], most)
        left[lane] -= taken
        return [lane] * taken

    return pull


def taken(backlog: Backlog, limit: int, turn: int = 0) -> Counter[str]:
    """How many jobs each share gets."""
    got = draw(serving_order(backlog, turn), limit, from_(backlog))
    return Counter(lane.share for lane in got)


# Order.


def test_lower_priorities_go_first_whatever_the_order_they_come_in() -> None:
    for lanes in ([lane(5), lane(-3), lane(0)], [lane(0), lane(5), lane(-3)]):
        assert priorities(serving_order(lanes, 0)) == [-3, 0, 5]


def test_no_lanes() -> None:
    assert serving_order([], 0) == []
    assert serving_order([], 15) == []
    assert draw([], 5, from_({})) == []


def test_every_sixteenth_turn_is_inverted() -> None:
    lanes = [lane(0), lane(5), lane(10)]
    inverted = [turn for turn in range(64) if priorities(serving_order(lanes, turn)) in ([10, 5, 0], [5, 0, 10])]
    upright = [turn for turn in range(64) if priorities(serving_order(lanes, turn)) == [0, 5, 10]]
    assert inverted == [15, 31, 47, 63]
    assert len(upright) == 60
    assert INVERTED_EVERY == 16


def test_shares_of_a_priority_take_turns() -> None:
    lanes = [lane(0, "b"), lane(0, "a"), lane(0, "c")]
    orders = ["".join(lane.share for lane in serving_order(lanes, turn)[0]) for turn in range(4)]
    assert orders == ["abc", "bca", "cab", "abc"]


@given(st.sets(st.builds(lane, st.integers(-3, 3), st.sampled_from("abcdef"))), st.integers(0, 10**6))
def test_every_lane_is_served_exactly_once_in_groups_of_equal_priority(lanes: set[Lane], turn: int) -> None:
    groups = serving_order(lanes, turn)
    assert sorted(lane for group in groups for lane in group) == sorted(lanes)
    assert all(len({lane.priority for lane in group}) == 1 for group in groups)
    assert len(set(priorities(groups))) == len(groups)


# Nobody starves. One job per turn, and every lane has more than enough: the worst case.


def served_alone(lanes: Sequence[Lane], turns: int) -> Counter[Lane]:
    """How often each lane got the one job of a turn."""
    endless = dict.fromkeys(lanes, 10**9)
    return Counter(draw(serving_order(lanes, turn), 1, from_(endless))[0] for turn in range(turns))


@pytest.mark.parametrize("shares", range(1, 20))
@pytest.mark.parametrize("priority", [0, 5, 10])
@pytest.mark.parametrize("others", [{0, 10}, {0, 5, 10}, {0, 1, 5, 9, 10}])
def test_no_share_starves_whatever_their_number(priority: int, others: set[int], shares: int) -> None:
    """The number of shares may divide sixteen: turns and inverted turns must not fall into step."""
    lanes = [lane(priority, f"s{number:02}") for number in range(shares)]
    lanes += [lane(other) for other in sorted(others - {priority})]
    served = served_alone(lanes, turns=INVERTED_EVERY * 4 * shares)
    counts = {served[lane] for lane in lanes if lane.priority == priority}
    assert min(counts) > 0
    assert max(counts) - min(counts) <= 1


def test_the_lowest_priority_gets_one_turn_in_sixteen() -> None:
    served = served_alone([lane(0), lane(10)], turns=1600)
    assert served == {lane(0): 1500, lane(10): 100}


def test_no_priority_in_between_starves() -> None:
    served = served_alone([lane(0), lane(5), lane(10)], turns=1600)
    assert served[lane(5)] > 0


# Drawing.


def test_a_group_is_divided_evenly() -> None:
    backlog = dict.fromkeys((lane(0, share) for share in "abc"), 100)
    assert taken(backlog, 9) == {"a": 3, "b": 3, "c": 3}
    assert taken(backlog, 10) == {"a": 4, "b": 4, "c": 2}
    assert taken(backlog, 2, turn=2) == {"c": 1, "a": 1}


def test_what_an_empty_lane_leaves_goes_to_the_others_of_its_group() -> None:
    assert taken({lane(0, "a"): 1, lane(0, "b"): 100, lane(0, "c"): 0}, 10) == {"a": 1, "b": 9}


def test_a_flooding_share_cannot_crowd_out_another() -> None:
    assert taken({lane(0, "flood"): 10**6, lane(0, "z"): 5}, 10) == {"flood": 5, "z": 5}


def test_the_next_priority_gets_what_is_left() -> None:
    backlog = {lane(0, "high"): 3, lane(5, "mid"): 100, lane(9, "low"): 100}
    assert taken(backlog, 10) == {"high": 3, "mid": 7}
    assert taken(backlog, 10, turn=15) == {"low": 10}


@pytest.mark.parametrize("limit", [0, -1])
def test_nothing_is_drawn_without_room(limit: int) -> None:
    def pull(lane: Lane, most: int) -> list[Lane]:
        raise AssertionError("asked for jobs that nobody wants")

    assert draw([[lane(0)]], limit, pull) == []


def test_a_lane_that_gave_less_is_not_asked_again() -> None:
    asked: list[Lane] = []

    def pull(lane: Lane, most: int) -> list[Lane]:
        asked.append(lane)
        return []

    assert draw([[lane(0, "a"), lane(0, "b")], [lane(5)]], 10, pull) == []
    assert asked == [lane(0, "a"), lane(0, "b"), lane(5)]


backlogs = st.dictionaries(
    st.builds(lane, st.integers(-2, 2), st.sampled_from("abcd")), st.integers(0, 40), max_size=12
)


@given(backlogs, st.integers(0, 100), st.integers(0, 40))
def test_draw_takes_everything_there_is_up_to_the_limit(backlog: Backlog, limit: int, turn: int) -> None:
    got = draw(serving_order(backlog, turn), limit, from_(backlog))
    assert len(got) == min(limit, sum(backlog.values()))
    assert all(count <= backlog[lane] for lane, count in Counter(got).items())


@given(backlogs, st.integers(1, 100), st.integers(0, 40))
def test_a_lane_is_left_behind_only_for_lanes_that_go_first(backlog: Backlog, limit: int, turn: int) -> None:
    """If a priority got anything, those before it were emptied; within one, nobody got far more than the others."""
    groups = serving_order(backlog, turn)
    got = Counter(draw(groups, limit, from_(backlog)))
    for earlier, later in pairwise(groups):
        if any(got[lane] for lane in later):
            assert all(got[lane] == backlog[lane] for lane in earlier)
    for group in groups:
        hungry = [lane for lane in group if got[lane] < backlog[lane]]
        fair = max((got[lane] for lane in group), default=0)
        for waiting in hungry:
            assert fair - got[waiting] <= math.ceil(limit / len(group))


@given(backlogs, st.integers(1, 100))
def test_pulls_are_few(backlog: Backlog, limit: int) -> None:
    """A pull is a query: about one per lane, plus one round for what empty lanes left over."""
    pulls = 0
    pull = from_(backlog)

    def counting(lane: Lane, most: int) -> list[Lane]:
        nonlocal pulls
        pulls += 1
        return pull(lane, most)

    groups = serving_order(backlog, 0)
    draw(groups, limit, counting)
    assert pulls <= sum(len(group) * (len(group) + 1) for group in groups)
