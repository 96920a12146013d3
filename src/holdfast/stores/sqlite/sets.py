"""Many rows as parameters of one statement.

`executemany` is a statement per row: it binds, steps and takes Python's lock anew for each, which costs more than the
row itself and keeps the event loop's thread waiting. One statement for all of them leaves Python alone meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from holdfast.store import MOST_PER_CALL

T = TypeVar("T")


def size_for(count: int) -> int:
    """How many rows a statement for so many has: a power of two, so that few texts have to be prepared and kept."""
    return 1 << (count - 1).bit_length() if count else 0


@lru_cache(maxsize=128)
def value_rows(count: int, width: int) -> str:
    """Question marks for so many rows after VALUES."""
    return ",".join([f"({','.join('?' * width)})"] * count)


def padded(rows: Iterable[Sequence[Any]], count: int, width: int) -> list[Any]:
    """The rows as one list of parameters for `value_rows(size_for(count), width)`.

    What is left over is NULL: it equals nothing, so a join drops it.
    """
    flat = [value for row in rows for value in row]
    flat += [None] * ((size_for(count) - count) * width)
    return flat


def pieces(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """What goes into one statement: SQLite has a limit for parameters."""
    return (items[first : first + MOST_PER_CALL] for first in range(0, len(items), MOST_PER_CALL))
