"""PostgreSQL behaves as the memory store does, whatever is asked of it in whatever order."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import psycopg
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.verbs import Verb
from tests.model.machine import SETTINGS, StoreModel, every_answer_was_seen
from tests.servers import PostgresServer
from tests.store.harnesses import empty_postgres

NAMESPACE = "model"


class SteeredStore(PostgresStore):
    """A store whose server goes by the test's clock: its function of the time reads a table."""

    shown_time = 0

    async def _run[T](self, verb: Verb[T]) -> T:
        ...


class PostgresModel(StoreModel):
    url: ClassVar[str]

    def open_store(self, folder: Path, ports: Ports) -> Store:
        empty_postgres(self.url, NAMESPACE)
        return SteeredStore(self.url, namespace=NAMESPACE, ports=ports)
