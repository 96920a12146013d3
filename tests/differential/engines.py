"""The five engines, each with an empty store for every workload."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

from holdfast.ports import SYSTEM
from holdfast.store import Store
from holdfast.stores.memory import MemoryStore
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.sqlite import SqliteStore
from tests.mysql.helpers import empty as empty_mysql
from tests.mysql.helpers import store_at as mysql_store_at
from tests.redis.helpers import empty as empty_redis
from tests.redis.helpers import store_at as redis_store_at
from tests.store.harnesses import empty_postgres

NAMESPACE = "differential"

Stores = dict[str, Callable[[], Store]]
"""For each engine, what makes an empty store."""


def five_engines(folder: Path, *, postgres: str, mariadb: str, redis: str) -> Stores:
    """All of them. `folder`: for files; the others are the URLs of servers."""
    numbers = itertools.count(1)

    def on_sqlite() -> Store:
        return SqliteStore(folder / f"jobs-{next(numbers)}.db", durability="relaxed")

    def on_postgres() -> Store:
        empty_postgres(postgres, NAMESPACE)
        return PostgresStore(postgres, namespace=NAMESPACE)

    def on_mariadb() -> Store:
        empty_mysql(mariadb, NAMESPACE)
        return mysql_store_at(mariadb, NAMESPACE)

    def on_redis() -> Store:
        empty_redis(redis, NAMESPACE)
        return redis_store_at(f"{redis}?namespace={NAMESPACE}")

    return {
        "memory": lambda: MemoryStore(ports=SYSTEM),
        "sqlite": on_sqlite,
        "postgres": on_postgres,
        "mariadb": on_mariadb,
        "redis": on_redis,
    }
