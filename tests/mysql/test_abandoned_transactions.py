"""A client that vanishes in the middle of a transaction, and the server does not hear of it: its machine has lost its
power, or the network swallows everything. Its locks must not keep jobs from everybody else for hours.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from holdfast.job import Job
from holdfast.ports import SYSTEM
from holdfast.stores.mysql import MysqlStore
from holdfast.stores.mysql.server import Server
from tests.mysql.conftest import NAMESPACE
from tests.mysql.helpers import claim, new_jobs, open_session, sql
from tests.worker.programs import DEADLINE


def impatient_server(url: str) -> Server:
    """The server as a store with a timeout of a second connects to it."""
    parts = urlsplit(url)
    return Server(
        host=parts.hostname or "",
        port=parts.port or 3306,
        user=parts.username or "",
        password=parts.password or "",
        database=parts.path.strip("/"),
        unix_socket=None,
        tls=None,
        timeout=1.0,
        ports=SYSTEM,
    )


async def test_jobs_locked_by_a_client_that_vanished_are_soon_free_again(store: MysqlStore, url: str) -> None:
    if "MariaDB" not in sql(url, "SELECT VERSION()")[0][0]:
        pytest.skip("MySQL cannot end a transaction that is idle without ending every connection that is")
    await open_session(store)
    await store.insert(new_jobs(3))
    server = impatient_server(url)
    vanished = server.connect(server.deadline())
    try:
        with vanished.cursor() as cursor:
            cursor.execute("START TRANSACTION")
            cursor.execute(f"SELECT id FROM {NAMESPACE}_ready FOR UPDATE")
        # From here on it says nothing more, and its connection stays.
        assert await claim(store) == []
        claimed: list[Job] = []
        deadline = SYSTEM.clock.monotonic() + DEADLINE
        while len(claimed) < 3 and SYSTEM.clock.monotonic() < deadline:
            claimed += await claim(store)
        assert len(claimed) == 3
    finally:
        vanished._force_close()  # type: ignore[attr-defined]
