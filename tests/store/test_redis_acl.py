"""The Redis store passes the conformance suite as a user that may do no more than docs/reference/redis.md lists."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from holdfast.testing.suite.waiting import *  # noqa: F403
from tests.redis.acl import add_users, url_of
from tests.redis.helpers import empty
from tests.servers import RedisServer, missing_server_policy
from tests.store.harnesses import RedisHarness

NAMESPACE = "holdfast"


@pytest.fixture(scope="module")
def guarded() -> Iterator[RedisServer]:
    with missing_server_policy():
        server = RedisServer()
    with server:
        add_users(server)
        yield server


@pytest.fixture
def harness(guarded: RedisServer) -> Harness:
    empty(guarded.url, NAMESPACE)
    return RedisHarness(url_of(guarded, "holdfast-worker"), NAMESPACE, direct=guarded.url)
