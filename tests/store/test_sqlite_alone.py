"""The SQLite store passes the conformance suite with every job enqueued alone that can be: all begin as arrivals."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness, Rig
from tests.sqlite.helpers import arrived_ids
from tests.store.harnesses import AloneSqliteHarness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return AloneSqliteHarness(tmp_path)


async def test_jobs_do_begin_as_arrivals(rig: Rig) -> None:
    assert isinstance(rig.harness, AloneSqliteHarness)
    job_id = await rig.add()
    assert arrived_ids(rig.harness.path) == [job_id]
    await rig.session()
    assert arrived_ids(rig.harness.path) == []
