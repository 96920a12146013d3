"""What tests need: jobs that are kept, run and asserted in memory; a clock moved by hand; the suite for stores.

Names are imported when they are used: pytest loads the plugin of this package in every run.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.testing.clock import ManualClock
    from holdfast.testing.jobs import (
        Jobs,
        adrain,
        assert_enqueued,
        assert_not_enqueued,
        drain,
        enqueued,
        inline,
        isolated,
    )

__all__ = [
    "Jobs",
    "ManualClock",
    "adrain",
    "assert_enqueued",
    "assert_not_enqueued",
    "drain",
    "enqueued",
    "inline",
    "isolated",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "clock" if name == "ManualClock" else "jobs"
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
