"""Every cell there is: those of all modules here whose names begin with `cells_`."""

from __future__ import annotations

import importlib
import pkgutil

import tests.chaos
from tests.chaos.cell import Cell


def _gathered() -> tuple[Cell, ...]:
    names = sorted(module.name for module in pkgutil.iter_modules(tests.chaos.__path__, "tests.chaos."))
    modules = [importlib.import_module(name) for name in names if name.startswith("tests.chaos.cells_")]
    return tuple(cell for module in modules for cell in module.CELLS)


CELLS: tuple[Cell, ...] = _gathered()
