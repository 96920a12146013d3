"""What the tests of the Redis store share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from holdfast.testing.suite import Rig, rig_on
from tests.redis.helpers import empty
from tests.servers import RedisServer
from tests.store.harnesses import RedisHarness

NAMESPACE = "redis-tests"


@pytest.fixture
async def rig(redis_server: RedisServer) -> AsyncIterator[Rig]:
    """The verbs of the conformance suite on an empty namespace."""
    empty(redis_server.url, NAMESPACE)
    async with rig_on(RedisHarness(redis_server.url, NAMESPACE, direct=redis_server.url)) as rig:
        yield rig
