"""Negative controls of the power cut: a store that says it does not survive one loses jobs, and the checker says so.

Which jobs are lost depends on when the system last wrote by itself, so there are a few tries.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.store import Verdict
from holdfast.testing.history import check
from tests.chaos.cell import ENGINES
from tests.chaos.cells_storage import UNSAFE, lose_power
from tests.chaos.fleet import Fleet
from tests.chaos.rig import Rig

_TRIES = 5


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_unsafe_store_loses_in_a_power_cut_is_found(engine: str, tmp_path: Path) -> None:
    for number in range(_TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        with Fleet() as fleet, Rig(engine, folder, fleet) as rig:
            said = lose_power(rig, UNSAFE[engine])
            assert said.verdict is not Verdict.OK, said
            lost = [violation for violation in check(rig.finish()) if violation.invariant == 1]
        if lost:
            print(f"{engine}: {len(lost)} lost; it had said: {said.value}")
            return
    pytest.fail(f"nothing was lost, {_TRIES} times")
