"""A worker that nobody supervises, of an application with several modules: `python -m tests.worker.modules.alone`."""

from __future__ import annotations

import os
import sys

from holdfast.config import WorkerSettings
from holdfast.observe.logging import configure
from tests.worker.modules.everything import app

if "HOLDFAST_TEST_NO_UVLOOP" in os.environ:
    sys.modules["uvloop"] = None  # type: ignore[assignment]  # as if it were not installed

if __name__ == "__main__":
    logs = configure(format="json")
    app.listener = logs.listener
    clean = app.run_worker(WorkerSettings(concurrency=10, lease_ttl=1.0))
    logs.close()
    sys.exit(0 if clean else 1)
