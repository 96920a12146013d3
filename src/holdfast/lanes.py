"""Lanes, and the order in which they are served. Stores find the lanes that have jobs; this page decides the rest.

A lane is a queue, a priority and a share. Lower priorities go first. Every sixteenth turn the order is inverted, so
that the lowest lane never starves. Lanes of equal priority (its shares) take turns and divide what there is.
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
    inverted = turn % INVERTED_EVERY == INVERTED_EVERY - 1
    # Shares rotate by the count of turns in their own direction: by `turn` itself, the share that goes first in an
    # inverted turn would be the same for ever when the number of shares and sixteen have a common factor.
    rotation = turn // INVERTED_EVERY if inverted else turn - turn // INVERTED_EVERY
    by_priority = sorted(lanes, key=attrgetter("priority"), reverse=inverted)
    groups = []
    for _, group in groupby(by_priority, key=attrgetter("priority")):
        shares = sorted(group)
        first = rotation % len(shares)
        groups.append(shares[first:] + shares[:first])
    return groups


def draw(groups: Sequence[Sequence[Lane]], limit: int, pull: Callable[[Lane, int], list[T]]) -> list[T]:
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
