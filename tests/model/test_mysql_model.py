"""MySQL behaves as the memory store does, whatever is asked of it in whatever order.

Both take their time from the test: instead of the server's clock, statements get the manual clock's number.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from msgspec.structs import replace

import holdfast.stores.mysql.settlements
from holdfast.lifecycle import Applied, Move, Standing, judge
from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.stores.mysql.inserts import Keys
from holdfast.stores.mysql.sessions import Sessions
from holdfast.stores.mysql.tables import Tables
from holdfast.stores.mysql.verbs import Verbs
from tests.model.machine import StoreModel, agrees_with_memory, search_for_a_fault
from tests.mysql.helpers import empty, store_at
from tests.servers import MariaDbServer

EXAMPLES = 40


class MysqlModel(StoreModel):
    url: ClassVar[str]

    def open_store(self, folder: Path, ports: Ports) -> Store:
        empty(self.url, "model")
        store = store_at(self.url, "model")  # real deadlines: only the store's clock is ours
        store._verbs = Verbs(Tables("model", clock=lambda: str(ports.clock.now())))
        return store


@pytest.fixture(autouse=True)
def url(mariadb_server: MariaDbServer) -> None:
    MysqlModel.url = mariadb_server.url


def test_mysql_agrees_with_memory() -> None:
    agrees_with_memory(MysqlModel, examples=EXAMPLES)


# Negative controls: with a guard of MySQL switched off, the comparison fails.


def no_token(patch: pytest.MonkeyPatch) -> None:
    def blind(move: Move, standing: Standing | None) -> Applied:
        version = standing.version if standing else move.version
        return judge(replace(move, version=version, session_id=None, session_open=None), standing)

    patch.setattr(holdfast.stores.mysql.settlements, "judge", blind)


def keys_are_never_freed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Keys, "drop", lambda *args: [])  # nor removed when their time is over


def closed_sessions_may_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sessions, "keep_open", lambda *args: "SELECT 's'")


@pytest.mark.parametrize("sabotage", [no_token, keys_are_never_freed, closed_sessions_may_claim])
def test_the_comparison_notices(
    monkeypatch: pytest.MonkeyPatch, sabotage: Callable[[pytest.MonkeyPatch], None]
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, ExceptionGroup)):
        search_for_a_fault(MysqlModel, examples=200)
