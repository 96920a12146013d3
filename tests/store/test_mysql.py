"""The MySQL store passes the conformance suite: on a MariaDB of its own, and on a MySQL whose URL is given."""

from __future__ import annotations

import asyncio
import os

import pytest
from msgspec.structs import replace

from holdfast.lifecycle import Applied, Succeeded
from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness, Rig
from tests.mysql.helpers import empty
from tests.store.harnesses import MysqlHarness

MYSQL = os.environ.get("HOLDFAST_TEST_MYSQL")


@pytest.fixture(params=["mariadb", *(["mysql"] if MYSQL else [])])
def harness(request: pytest.FixtureRequest) -> Harness:
    url = MYSQL or "" if request.param == "mysql" else request.getfixturevalue("mariadb_server").url
    empty(url, "suite")
    return MysqlHarness(url, "suite")


async def test_an_insert_of_another_client_wakes_a_waiter(rig: Rig) -> None:
    """As between processes: the two clients know nothing of each other but the database."""
    async with rig.harness.second() as store:
        wakeups = rig.store.wakeups(["default"])
        heard = asyncio.ensure_future(anext(wakeups))
        await asyncio.sleep(0)
        await store.insert([rig.new()])
        await asyncio.wait_for(heard, 10)
        await wakeups.aclose()  # type: ignore[attr-defined]


async def test_a_job_is_counted_in_its_own_queue_whatever_the_move_says(rig: Rig) -> None:
    """The counts must not go astray by a move that names another queue."""
    await rig.add()
    job = await rig.take(await rig.session())
    assert await rig.store.apply([replace(rig.move(job, Succeeded()), queue="elsewhere")]) == [Applied.APPLIED]
    assert [(counts.queue, counts.succeeded) for counts in await rig.store.counts()] == [("default", 1)]
