"""Many jobs at once: one call to the server for a thousand."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Holdfast
from holdfast.stores.postgres.links import BlockingLink
from tests.servers import PostgresServer


@pytest.mark.parametrize("keyed", [False, True])
def test_a_thousand_jobs_are_one_statement(
    postgres_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, keyed: bool
) -> None:
    app = Holdfast(f"{postgres_server.url}?namespace=bulk")

    @app.task
    def task(n: int) -> None: ...

    app.open()
    statements: list[object] = []
    execute: Any = BlockingLink.execute

    def counted(self: BlockingLink, query: object, *args: object, **named: object) -> object:
        statements.append(query)
        return execute(self, query, *args, **named)

    monkeypatch.setattr(BlockingLink, "execute", counted)
    calls = [task.options(key=f"{n}").job(n) if keyed else task.job(n) for n in range(1_000)]
    assert len(app.enqueue_many(calls)) == 1_000
    assert len(statements) == 1
    app.close()
