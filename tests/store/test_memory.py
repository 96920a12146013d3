"""The memory store passes the conformance suite."""

from __future__ import annotations

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from tests.store.harnesses import MemoryHarness


@pytest.fixture
def harness() -> Harness:
    return MemoryHarness()
