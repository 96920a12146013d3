"""How often a worker process looks for cycles."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from holdfast.entry.child import collect_less_often


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


def test_a_worker_process_collects_less_often_and_leaves_what_is_loaded_alone() -> None:
    gc.set_threshold(700, 10, 10)
    collect_less_often()
    assert gc.get_threshold() == (10_000, 10, 10)
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0


def test_an_application_that_has_chosen_its_own_thresholds_keeps_them() -> None:
    gc.set_threshold(50, 5, 5)
    collect_less_often()
    assert gc.get_threshold() == (50, 5, 5)
    assert gc.get_freeze_count() == 0
