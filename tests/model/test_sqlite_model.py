"""SQLite behaves as the memory store does, whatever is asked of it in whatever order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

import holdfast.stores.sqlite.verbs
from holdfast.lifecycle import Applied, Move, Standing, judge
from holdfast.ports import Ports
from holdfast.store import CancelAnswer, InsertStatus, Store
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.queries import Queries
from holdfast.stores.sqlite.verbs import Verbs
from tests.model.machine import StoreModel

MOST_ROUNDS = 6
"""Chance may leave out a rare answer in one round, hardly in six."""

SETTINGS = settings(
    max_examples=160,
    stateful_step_count=50,
    deadline=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


class SqliteModel(StoreModel):
    def open_store(self, folder: Path, ports: Ports) -> Store:
        return SqliteStore(folder / "jobs.db", durability="relaxed", ports=ports)


def test_sqlite_agrees_with_memory() -> None:
    SqliteModel.seen.clear()
    wanted = {f"{type(answer).__name__}.{answer}" for kind in (Applied, InsertStatus, CancelAnswer) for answer in kind}
    wanted |= {"SessionClosed", "CheckpointConflict"}
    for _ in range(MOST_ROUNDS):
        run_state_machine_as_test(SqliteModel, settings=SETTINGS)
        if wanted <= SqliteModel.seen.keys():
            return
    # A run that never saw an answer proves nothing about it: then the rules are at fault, not the store.
    assert wanted - SqliteModel.seen.keys() == set()


# Negative controls: with a guard of SQLite switched off, the comparison fails.


def no_token(patch: pytest.MonkeyPatch) -> None:
    def blind(move: Move, standing: Standing | None) -> Applied:
        version = standing.version if standing else move.version
        return judge(replace(move, version=version, session_id=None, session_open=None), standing)

    patch.setattr(holdfast.stores.sqlite.verbs, "judge", blind)


def keys_are_never_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Verbs, "_free_key", lambda *args: None)


def pauses_are_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queries, "paused", lambda *args: set())


@pytest.mark.parametrize("sabotage", [no_token, keys_are_never_freed, pauses_are_ignored])
def test_the_comparison_notices(
    monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    sabotage(monkeypatch)
    # Finding the fault is enough: nobody needs the shortest way to it, or its record for the next run.
    only_search = settings(SETTINGS, phases=[Phase.generate], database=None, report_multiple_bugs=False)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(SqliteModel, settings=only_search)
