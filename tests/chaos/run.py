"""How a cell is run: on a rig of its own, and its history is judged."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from tests.chaos.cell import Cell
from tests.chaos.fleet import Fleet
from tests.chaos.result import Result, judged
from tests.chaos.rig import Rig


def run_cell(cell: Cell, engine: str, fleet: Fleet, *, keep: Path | None = None) -> Result:
    """One run. `keep`: where the histories of a run go that was not good."""
    with _folder() as folder:
        began = time.monotonic()
        try:
            with Rig(engine, folder, fleet) as rig:
                cell.run(rig)
                history = rig.finish()
        except BaseException:
            _keep(folder, keep, f"{cell.name} {engine}")
            raise
        result = judged(cell.name, engine, time.monotonic() - began, history)
        if not result.good:
            _keep(folder, keep, f"{cell.name} {engine}")
        return replace(result, finished_at=time.time())


def missing(cell: Cell) -> str:
    """What this machine lacks for the cell, in words; empty if nothing."""
    if cell.needs_root and os.geteuid() != 0:
        return "it needs root"
    absent = [program for program in cell.programs if shutil.which(program) is None]
    return f"not installed: {', '.join(absent)}" if absent else cell.lacks()


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="holdfast-chaos-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _keep(folder: Path, keep: Path | None, name: str) -> None:
    if keep is not None:
        target = keep / f"{name} {int(time.time())}".replace(" ", "-")
        shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.db*"))
