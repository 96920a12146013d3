"""A store for the command line to work on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    """An empty store in a file that exists."""
    shop = Shop(tmp_path / "jobs.db")
    shop.add(0)
    return shop
