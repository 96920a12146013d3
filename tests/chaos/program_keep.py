"""`holdfast keep`, on a store whose answers are noted: `python -m tests.chaos.program_keep keep --store URL ...`."""

from __future__ import annotations

from typing import Any
from unittest import mock

from holdfast.cli import main, options
from holdfast.ports import Ports
from holdfast.store import Store
from tests.chaos.program import noted_store


def _noted(url: str, ports: Ports, **choices: Any) -> Store:
    return noted_store(url)


if __name__ == "__main__":
    with mock.patch.object(options, "open_store", _noted):
        main()
