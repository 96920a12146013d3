"""What our statements ask of a connection: sqlite3's own, or a caller's behind an adapter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class Cursor(Protocol):
    """What a statement gives back."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Database(Protocol):
    """A connection with an open transaction: sqlite3's own, or a caller's behind an adapter."""

    def execute(self, sql: str, parameters: Sequence[Any] = ..., /) -> Cursor: ...
    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> Cursor: ...


def marks(count: int) -> str:
    """So many question marks, for an IN list."""
    return ",".join("?" * count)
