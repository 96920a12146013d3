"""Verbs as plans: generators that yield statements and receive what the server answered.

A plan knows nothing of drivers, threads or event loops. `steps.py` makes a transaction of it, `drive.py` carries it
out, blocking or not, on a connection of the store's or of a caller's.

Statements are complete texts: values are rendered here, not by the drivers, whose quoting depends on the session's
`sql_mode` and character set. Every text is plain ASCII.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MOST_BYTES_PER_STATEMENT = 2 * 1024 * 1024
"""Where lists of rows are cut: packets must stay below the smallest usual `max_allowed_packet`."""

Value = str | bytes | int | None

_PLAIN = re.compile(r"[A-Za-z0-9_.,:-]*").fullmatch
_NOT_PLAIN = re.compile(r"[^A-Za-z0-9_.,:-]")


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What the server said to one statement: its rows, or how many it changed, and the number that it wrote down
    with `LAST_INSERT_ID(…)`.
    """

    rows: Sequence[tuple[Any, ...]]
    changed: int
    number: int = 0


class Batch(msgspec.Struct, frozen=True, gc=False):
    """Statements that may travel together. `last`: the verb needs nothing after them, so the commit may go along."""

    statements: Sequence[str]
    last: bool = False


Plan = Generator[Batch, Sequence[Answer], T]


class Again(Exception):
    """Somebody else was faster: what this plan has read is no longer true. Roll back and run it again."""


def literal(value: Value) -> str:
    """The value as SQL, in any `sql_mode`. Text that is more than a name goes as its bytes."""
    if value is None:
        return "NULL"
    if isinstance(value, str):
        return f"'{value}'" if _PLAIN(value) else f"_utf8mb4 x'{value.encode().hex()}'"
    if isinstance(value, bytes):
        return f"x'{value.hex()}'"
    return str(int(value))


def name(text: str) -> str:
    """A name or an id as SQL, to compare an ASCII column with. What no name can have in it matches nothing."""
    return f"'{text}'" if _PLAIN(text) else f"'{_NOT_PLAIN.sub('?', text)}'"


def names(texts: Iterable[str]) -> str:
    """Names or ids as a list after IN, never empty, in one order: everybody locks in it."""
    distinct = sorted(set(texts))
    if distinct and _PLAIN(",".join(distinct)):  # looked at together, as they nearly always may be
        return "('" + "','".join(distinct) + "')"
    return f"({','.join(map(name, distinct)) or 'NULL'})"


def text_of(value: bytes | str | None) -> str | None:
    """Text from a binary column."""
    return value.decode() if isinstance(value, bytes) else value


def row(values: Iterable[Value]) -> str:
    """The values as a row constructor."""
    return f"({','.join(map(literal, values))})"


def among(values: Iterable[Value]) -> str:
    """The values as a list after IN, never empty."""
    return f"({','.join(map(literal, values)) or 'NULL'})"


def cut(texts: Iterable[str]) -> Iterator[list[str]]:
    """The texts in pieces that are not too long for one statement."""
    piece: list[str] = []
    length = 0
    for text in texts:
        if piece and length + len(text) > MOST_BYTES_PER_STATEMENT:
            yield piece
            piece, length = [], 0
        piece.append(text)
        length += len(text)
    if piece:
        yield piece


def one(statement: str) -> Generator[Batch, Sequence[Answer], Answer]:
    """The answer to a single statement."""
    [answer] = yield Batch([statement])
    return answer
