"""The Redis store passes the conformance suite on a cluster of three masters."""

from __future__ import annotations

import pytest

from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness
from holdfast.testing.suite.waiting import *  # noqa: F403
from tests.redis.helpers import empty
from tests.servers import RedisCluster
from tests.store.harnesses import RedisHarness

NAMESPACE = "suite"


@pytest.fixture
def harness(redis_cluster: RedisCluster) -> Harness:
    empty(redis_cluster.url, NAMESPACE)
    return RedisHarness(redis_cluster.url, NAMESPACE, direct=redis_cluster.url)
