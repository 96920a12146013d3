"""The conformance suite: what every store must do, unchanged on every engine.

A test module for a store imports everything from here and says how to reach the engine:

    from holdfast.testing.suite import *  # noqa: F403

    @pytest.fixture
    def harness() -> Harness:
        return MyHarness()

One whose claims can wait (`holdfast.patience`) imports `holdfast.testing.suite.waiting` in the same way, one that is
`Overlapping` imports `holdfast.testing.suite.overlapping`.

Needs pytest with pytest-asyncio in its `auto` mode.
"""

# ruff: noqa: E402, F403

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

_MODULES = (
    "harness",
    "enqueue",
    "alone",
    "order",
    "sessions",
    "transitions",
    "fencing",
    "retries",
    "rescue",
    "keys",
    "cancel",
    "operators",
    "reading",
    "races",
    "waiting",
    "overlapping",
)
pytest.register_assert_rewrite(*(f"{__name__}.{module}" for module in _MODULES))

from holdfast.testing.suite.alone import *
from holdfast.testing.suite.cancel import *
from holdfast.testing.suite.enqueue import *
from holdfast.testing.suite.fencing import *
from holdfast.testing.suite.harness import Harness, Rig, rig_on
from holdfast.testing.suite.keys import *
from holdfast.testing.suite.operators import *
from holdfast.testing.suite.order import *
from holdfast.testing.suite.races import *
from holdfast.testing.suite.reading import *
from holdfast.testing.suite.rescue import *
from holdfast.testing.suite.retries import *
from holdfast.testing.suite.sessions import *
from holdfast.testing.suite.transitions import *


@pytest.fixture
async def rig(harness: Harness) -> AsyncIterator[Rig]:
    """The store under test, opened, with the verbs of the suite."""
    async with rig_on(harness) as opened:
        yield opened


__all__ = ["Harness", "Rig", "rig", "rig_on"]
__all__ += [name for name in dir() if name.startswith("test_")]
