"""Every cell, once, on all its engines at the same time: most of a cell is waiting.

The same cells run one by one, and often, with `python -m tests.chaos`. HOLDFAST_CHAOS_OUT names a folder to which these
runs are added, for the same report.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.chaos.cell import SERVERS, Cell
from tests.chaos.cells import CELLS
from tests.chaos.fleet import Fleet
from tests.chaos.report import add_result
from tests.chaos.run import missing, run_cell
from tests.servers import missing_server_policy

OUT = os.environ.get("HOLDFAST_CHAOS_OUT", "")
IN_CI = os.environ.get("CI", "") not in ("", "0", "false")


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        for engine in SERVERS:
            with missing_server_policy():
                fleet.server(engine)
        yield fleet


@pytest.mark.parametrize("cell", [pytest.param(cell, id=cell.name) for cell in CELLS if cell.smoke])
def test_every_promise_is_kept(cell: Cell, fleet: Fleet) -> None:
    if (lacking := missing(cell)) and not IN_CI:
        pytest.skip(f"{cell.name}: {lacking}")
    with ThreadPoolExecutor(len(cell.engines)) as pool:
        runs = {engine: pool.submit(run_cell, cell, engine, fleet) for engine in cell.engines}
    for engine, run in runs.items():
        if (error := run.exception()) is not None:
            error.add_note(f"--- on {engine}")
            raise error
        result = run.result()
        if OUT:
            add_result(Path(OUT), result)
        assert result.violations == [], engine
        assert result.lost == 0, engine
        assert result.accepted, engine


def test_no_two_cells_have_the_same_name() -> None:
    assert len({cell.name for cell in CELLS}) == len(CELLS)
