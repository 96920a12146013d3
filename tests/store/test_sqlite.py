"""The SQLite store passes the conformance suite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness, Rig
from tests.store.harnesses import SqliteHarness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return SqliteHarness(tmp_path)


async def test_an_insert_of_another_client_wakes_a_waiter(rig: Rig) -> None:
    """As between processes: the two clients know nothing of each other but the file."""
    async with rig.harness.second() as store:
        wakeups = rig.store.wakeups(["default"])
        heard = asyncio.ensure_future(anext(wakeups))
        await asyncio.sleep(0)
        await store.insert([rig.new()])
        await asyncio.wait_for(heard, 10)
        await wakeups.aclose()  # type: ignore[attr-defined]
