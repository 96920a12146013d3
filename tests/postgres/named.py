"""A store whose connections can be told from all others, and a table that keeps them waiting."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

from holdfast.stores.postgres import PostgresStore
from tests.postgres.helpers import Database, Raw, raw

NAMES = itertools.count()


class Named:
    """A store whose connections can be told from all others."""

    def __init__(self, database: Database, options: str = "", **settings: Any) -> None:
        self.name = f"connections-{next(NAMES)}"
        self._database = database
        url = f"{database.url}?application_name={self.name}{options}"
        self.store = PostgresStore(url, namespace=database.namespace, **settings)
        self.store.open_blocking()

    def pids(self, condition: str = "true") -> list[int]:
        text = f"SELECT pid FROM pg_stat_activity WHERE application_name = %s AND {condition}"
        return [row[0] for row in self._database.sql(text, self.name)]

    def waiting(self) -> list[int]:
        """The connections that wait for a lock."""
        return self.pids("wait_event_type = 'Lock'")

    def terminate(self, pids: list[int] | None = None) -> None:
        for pid in self.pids() if pids is None else pids:
            self._database.sql("SELECT pg_terminate_backend(%s)", pid)


@contextlib.contextmanager
def locked(database: Database, table: str = "waiting") -> Iterator[Raw]:
    """Nobody can read or write the table."""
    with raw(database.url) as connection:
        connection.execute("BEGIN")
        connection.execute(database.text(f"LOCK TABLE {{ns}}_{table} IN ACCESS EXCLUSIVE MODE"))
        yield connection
        connection.execute("ROLLBACK")
