"""SQLite behaves as the memory store does, whatever is asked of it in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import holdfast.stores.sqlite.settlements
from holdfast.lifecycle import Applied, Move, Standing, judge
from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.inserts import Inserts
from holdfast.stores.sqlite.queries import Queries
from tests.model.machine import StoreModel, agrees_with_memory, search_for_a_fault

EXAMPLES = 160


class SqliteModel(StoreModel):
    def open_store(self, folder: Path, ports: Ports) -> Store:
        return SqliteStore(folder / "jobs.db", durability="relaxed", ports=ports)


def test_sqlite_agrees_with_memory() -> None:
    agrees_with_memory(SqliteModel, examples=EXAMPLES)


# Negative controls: with a guard of SQLite switched off, the comparison fails.


def no_token(patch: pytest.MonkeyPatch) -> None:
    def blind(move: Move, standing: Standing | None) -> Applied:
        version = standing.version if standing else move.version
        return judge(replace(move, version=version, session_id=None, session_open=None), standing)

    patch.setattr(holdfast.stores.sqlite.settlements, "judge", blind)


def keys_are_never_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inserts, "free_key", lambda *args: None)


def pauses_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queries, "paused", lambda *args: set())


def nothing_is_taken_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inserts, "take_in", lambda *args: None)


@pytest.mark.parametrize("sabotage", [no_token, keys_are_never_freed, pauses_are_ignored, nothing_is_taken_in])
def test_the_comparison_notices(
    monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    sabotage(monkeypatch)
    with pytest.raises(AssertionError):
        search_for_a_fault(SqliteModel, examples=EXAMPLES)
