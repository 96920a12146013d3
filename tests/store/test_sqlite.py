"""The SQLite store passes the conformance suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from tests.store.harnesses import SqliteHarness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return SqliteHarness(tmp_path)
