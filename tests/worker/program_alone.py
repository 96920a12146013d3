"""A worker that nobody supervises: `python -m tests.worker.program_alone SETTINGS`, as a script of an application."""

from __future__ import annotations

import sys

import msgspec

from holdfast.config import WorkerSettings
from holdfast.observe.logging import configure
from tests.worker.program import app


def main() -> None:
    """Work until told to stop. Exit code 0 if everything ended within the grace period."""
    logs = configure(format="json")
    app.listener = logs.listener
    clean = app.run_worker(msgspec.json.decode(sys.argv[1], type=WorkerSettings))
    logs.close()
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
