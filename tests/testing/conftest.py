"""The fixtures of the plugin, as a user has them: `jobs` is about the application of `shop.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast import Holdfast
from tests.testing import shop


@pytest.fixture
def holdfast_app() -> Holdfast:
    return shop.app


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    shop.done.clear()
    shop.heard.clear()
