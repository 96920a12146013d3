"""Many jobs at once: the next thousand are read while the server has this one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast.store import InsertStatus
from holdfast.stores.redis import RedisStore
from holdfast.testing.suite import Rig
from tests.redis.conftest import NAMESPACE
from tests.redis.fake import FORWARD, FakeServer, error
from tests.redis.helpers import store_at
from tests.servers import RedisServer


@pytest.fixture
def impatient(rig: Rig, redis_server: RedisServer) -> Iterator[RedisStore]:
    store = store_at(f"{redis_server.url}?namespace={NAMESPACE}&timeout=0.3")
    store.open_blocking()
    yield store
    store.close()


def test_the_deadline_of_the_answer_begins_after_it(rig: Rig, impatient: RedisStore) -> None:
    slept: list[None] = []
    answers = impatient.insert_while([rig.new(), rig.new()], lambda: slept.append(time.sleep(0.6)))  # type: ignore[func-returns-value]
    assert [answer.status for answer in answers] == [InsertStatus.CREATED] * 2
    assert slept


def test_a_repetition_has_its_time_however_long_that_took(rig: Rig, redis_server: RedisServer) -> None:
    """The server is busy with something: what the caller did meanwhile is not taken from the next try."""
    refusals: list[bytes] = []

    def busy(words: list[bytes]) -> Any:
        if words[0] != b"EVALSHA" or b"refuse me" not in b"".join(words) or refusals:
            return FORWARD
        refusals.append(words[0])
        return error("LOADING Redis is loading the dataset in memory")

    with FakeServer(busy, behind=redis_server.port) as fake:
        store = store_at(f"{fake.url}?namespace={NAMESPACE}&timeout=0.3")
        store.open_blocking()
        jobs = [rig.new(payload=b'"refuse me"') for _ in range(2)]
        answers = store.insert_while(jobs, partial(time.sleep, 0.6))
        store.close()
    assert [answer.status for answer in answers] == [InsertStatus.CREATED] * 2
    assert refusals


@pytest.mark.parametrize(("pool_size", "deepest"), [(1, 0), (4, 2)])
def test_half_of_the_connections_are_left_to_others_meanwhile(
    rig: Rig, redis_server: RedisServer, pool_size: int, deepest: int
) -> None:
    """Nobody knows how long it takes, and it may need connections itself."""
    plain = store_at(f"{redis_server.url}?namespace={NAMESPACE}")
    options: dict[str, Any] = {**plain._options, "tuning": replace(plain._tuning, pool_size=pool_size)}
    store = RedisStore(*plain._arguments, **options)
    depth = [0]

    def meanwhile(level: int) -> None:
        depth.append(level)
        store.insert_while([rig.new(), rig.new()], partial(meanwhile, level + 1))

    store.insert_while([rig.new(), rig.new()], partial(meanwhile, 1))
    assert max(depth) == deepest
    store.close()
