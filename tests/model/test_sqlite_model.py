"""SQLite behaves as the memory store does, whatever is asked of it in whatever order."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.lifecycle import Applied
from holdfast.ports import Ports
from holdfast.store import CancelAnswer, InsertStatus, Store
from holdfast.stores.sqlite import SqliteStore
from tests.model.machine import StoreModel

EXAMPLES = 150
STEPS = 50


class SqliteModel(StoreModel):
    def open_store(self, folder: Path, ports: Ports) -> Store:
        return SqliteStore(folder / "jobs.db", durability="relaxed", ports=ports)


def test_sqlite_agrees_with_memory() -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        SqliteModel,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    answers = {f"{type(answer).__name__}.{answer}" for kind in (Applied, InsertStatus, CancelAnswer) for answer in kind}
    refusals = {"SessionClosed", "CheckpointConflict"}
    assert answers | refusals <= SqliteModel.seen.keys(), "the run never saw these answers, so it proves too little"
