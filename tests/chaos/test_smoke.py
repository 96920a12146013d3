"""Every cell on every engine, once. The same cells run often, and for the report, with `python -m tests.chaos`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.chaos.cell import Cell
from tests.chaos.cells import CELLS
from tests.chaos.fleet import Fleet
from tests.chaos.run import missing, run_cell
from tests.servers import missing_server_policy

IN_CI = os.environ.get("CI", "") not in ("", "0", "false")
RUNS = [(cell, engine) for cell in CELLS if cell.smoke for engine in cell.engines]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.mark.parametrize(("cell", "engine"), [pytest.param(*run, id=f"{run[0].name}-{run[1]}") for run in RUNS])
def test_every_promise_is_kept(cell: Cell, engine: str, fleet: Fleet) -> None:
    if (lacking := missing(cell)) and not IN_CI:
        pytest.skip(f"{cell.name}: {lacking}")
    if engine != "sqlite":
        with missing_server_policy():
            fleet.server(engine)
    result = run_cell(cell, engine, fleet)
    print(result)
    assert result.violations == []
    assert result.lost == 0
    assert result.accepted


def test_no_two_cells_have_the_same_name() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
