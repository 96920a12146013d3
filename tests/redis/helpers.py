"""Reaching a Redis server from outside the store, and stores whose server goes by a clock of the tests."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import redis

from holdfast.config import Settings
from holdfast.ports import SYSTEM, Ports
from holdfast.stores import open_store
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.scripts import SERVER_CLOCK, load_scripts

T = TypeVar("T")


@cache
def outside(url: str) -> Any:
    """A client of another make: one for the whole run."""
    if url.startswith("redis+cluster://"):
        return redis.RedisCluster.from_url("redis://" + url.removeprefix("redis+cluster://").split(",", maxsplit=1)[0])
    return redis.Redis.from_url(url)


def store_at(url: str, *, ports: Ports = SYSTEM, settings: Settings | None = None) -> RedisStore:
    """The store at a URL."""
    store = open_store(url, ports, settings=settings)
    assert isinstance(store, RedisStore)
    return store


def with_clock(store: RedisStore, clock: str) -> RedisStore:
    """The same store, its scripts with that clock: Lua that sets `now`."""
    store._verbs.scripts.update(load_scripts(clock))  # type: ignore[attr-defined]
    return store


def later_by(store: RedisStore, microseconds: int) -> RedisStore:
    """The same store, on a server that is so much later."""
    return with_clock(store, f"{SERVER_CLOCK}now = now + {microseconds}\n")


def empty(url: str, namespace: str) -> None:
    """Remove every key of the namespace."""
    client = outside(url)
    for key in client.scan_iter(match=f"{namespace}:*", count=1000):
        client.delete(key)
