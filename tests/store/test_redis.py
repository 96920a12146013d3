"""The Redis store passes the conformance suite on one server. Time passes by setting the clock of its scripts."""

from __future__ import annotations

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from holdfast.testing.suite.overlapping import *  # noqa: F403
from holdfast.testing.suite.waiting import *  # noqa: F403
from tests.redis.helpers import empty
from tests.servers import RedisServer
from tests.store.harnesses import RedisHarness

NAMESPACE = "suite"


@pytest.fixture
def harness(redis_server: RedisServer) -> Harness:
    empty(redis_server.url, NAMESPACE)
    return RedisHarness(redis_server.url, NAMESPACE, direct=redis_server.url)
