"""Lanes, and the order in which they are served. Stores find the lanes that have due jobs; this page decides
the rest.

A lane is a queue, a priority and a share. Lower priorities go first. Every sixteenth turn the order is inverted,
beginning with another priority each time, so that none starves. Lanes of equal priority (its shares) take turns and
divide what there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

import msgspec

T = TypeVar("T")

INVERTED_EVERY = 16


class Lane(msgspec.Struct, frozen=True, gc=False, order=True):
    """One ordered line of jobs."""

    queue: str
    priority: int
    share: str


def serving_order(lanes: Iterable[Lane], turn: int) -> list[list[Lane]]:
    """The lanes of one queue in groups of equal priority, in the order in which turn number `turn` serves them."""
    round_number, place = divmod(turn, INVERTED_EVERY)
    inverted = place == INVERTED_EVERY - 1
    by_priority = sorted(lanes, key=attrgetter("priority"), reverse=inverted)
    groups = [sorted(group) for _, group in groupby(by_priority, key=attrgetter("priority"))]
    # Inverted turns begin with each priority but the highest in turn: those in between must not starve either.
    beginners = max(1, len(groups) - 1)
    first = round_number % beginners if inverted else 0
    # Shares rotate by the turns that their own priority began, so that the two rotations cannot fall into step.
    rotation = round_number // beginners if inverted else turn - round_number
    return [_rotated(shares, rotation) for shares in _rotated(groups, first)]


def _rotated(items: Sequence[T], by: int) -> list[T]:
    first = by % len(items) if items else 0
    return [*items[first:], *items[:first]]


def draw(groups: Sequence[Sequence[Lane]], limit: int, pull: Callable[[Lane, int], Sequence[T]]) -> list[T]:
    """Up to `limit` items by `pull(lane, most)`: group after group, each group divided evenly among its lanes.

    A lane that gives less than it was asked for is empty; what it left over goes to the others of its group.
    """
    taken: list[T] = []
    for group in groups:
        lanes = list(group)
        while lanes and len(taken) < limit:
            quota = -(-(limit - len(taken)) // len(lanes))
            not_empty = []
            for lane in lanes:
                asked = min(quota, limit - len(taken))
                if asked == 0:
                    return taken
                got = pull(lane, asked)
                taken += got
                if len(got) == asked:
                    not_empty.append(lane)
            lanes = not_empty
    return taken
