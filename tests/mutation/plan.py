"""Which modules are mutated, and which tests judge their mutants. Only tests inside one process, without servers."""

from __future__ import annotations

MODULES: dict[str, tuple[str, ...]] = {
    "holdfast.lifecycle": ("tests/unit/test_lifecycle.py",),
    "holdfast.worker.holding": ("tests/worker/test_holding.py",),
    "holdfast.worker.settler": ("tests/worker/test_settler.py",),
    "holdfast.worker.heart": ("tests/worker/test_heart.py",),
    "holdfast.keepers.watch": ("tests/keepers/test_rescue.py", "tests/keepers/test_rescue_pace.py"),
    "holdfast.keepers.rescue": (
        "tests/keepers/test_rescue.py",
        "tests/keepers/test_rescue_pages.py",
        "tests/keepers/test_rescue_pace.py",
        "tests/keepers/test_rescue_races.py",
    ),
}

LEAST_SCORE = 80
"""Percent of a module's mutants that its tests must notice."""
