"""Every cell there is: those of all modules here whose names begin with `cells_`, by the number of their fault."""

from __future__ import annotations

import importlib
import pkgutil

import tests.chaos
from tests.chaos.cell import Cell


def _gathered() -> tuple[Cell, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(tests.chaos.__path__, "tests.chaos."))
    modules = [importlib.import_module(name) for name in names if name.startswith("tests.chaos.cells_")]
    cells: list[Cell] = [cell for module in modules for cell in module.CELLS]
    return tuple(sorted(cells, key=lambda cell: int(cell.faults.removeprefix("F"))))


CELLS: tuple[Cell, ...] = _gathered()
