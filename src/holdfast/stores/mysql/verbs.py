"""Every verb of one namespace, as plans."""

from __future__ import annotations

from holdfast.stores.mysql.claims import Claims
from holdfast.stores.mysql.inserts import Inserts, Keys
from holdfast.stores.mysql.queries import Queries
from holdfast.stores.mysql.sessions import Sessions
from holdfast.stores.mysql.settlements import Settlements
from holdfast.stores.mysql.tables import Tables
from holdfast.stores.mysql.tending import Tending


class Verbs:
    """The rooms of the engine, put together."""

    def __init__(self, tables: Tables) -> None:
        keys = Keys(tables)
        self.tables = tables
        self.sessions = Sessions(tables)
        self.inserts = Inserts(tables, keys)
        self.claims = Claims(tables, self.sessions)
        self.settlements = Settlements(tables, self.sessions, keys, self.inserts)
        self.tending = Tending(tables, keys, self.settlements)
        self.queries = Queries(tables)
