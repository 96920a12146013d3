"""A worker that nobody supervises: `python -m tests.worker.program_alone APP SETTINGS`, as a script would run it."""

from __future__ import annotations

import sys

import msgspec

from holdfast.config import WorkerSettings
from holdfast.entry.loading import load_app
from holdfast.observe.logging import configure


def main() -> None:
    """Work until told to stop. Exit code 0 if everything ended within the grace period."""
    app = load_app(sys.argv[1])
    logs = configure(format="json")
    app.listener = logs.listener
    clean = app.run_worker(msgspec.json.decode(sys.argv[2], type=WorkerSettings))
    logs.close()
    sys.exit(0 if clean else 1)


if __name__ == "__main__":
    main()
