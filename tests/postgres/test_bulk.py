"""Many jobs at once: one call to the server for a thousand."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import pytest
from psycopg.errors import SerializationFailure

from holdfast import Holdfast
from holdfast.errors import OutcomeUnknown
from holdfast.store import InsertStatus
from holdfast.stores.postgres import connections
from holdfast.stores.postgres.links import BlockingLink
from tests.postgres.helpers import Database, new_jobs, wait_until
from tests.postgres.named import Named, locked
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


# What an insert waits for can be used.


async def test_the_jobs_are_on_their_way_when_the_caller_goes_on(named: Named, database: Database) -> None:
    """The server has them, and has not answered: here, because it waits for a lock."""
    jobs = new_jobs(1_000, payload=b"x" * 2_000)  # more than fits between the two sockets
    seen: list[int] = []

    def meanwhile() -> None:
        wait_until(named.waiting)
        seen.extend(named.waiting())
        lock.execute("ROLLBACK")

    with locked(database) as lock:
        answers = await asyncio.to_thread(named.store.insert_while, jobs, meanwhile)
    assert len(seen) == 1
    assert [answer.status for answer in answers] == [InsertStatus.CREATED] * 1_000
    assert database.number_of("waiting") == 1_000


def test_the_deadline_of_the_answer_begins_after_it(database: Database) -> None:
    store = database.store(timeout=0.2)
    store.open_blocking()
    [inserted] = store.insert_while(new_jobs(1), partial(time.sleep, 0.5))
    assert inserted.status is InsertStatus.CREATED
    store.close()


def test_a_repetition_has_its_time_however_long_that_took(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another transaction was in the way: what the caller did meanwhile is not taken from the next try."""
    real: Any = BlockingLink.ask
    tries: list[None] = []

    def in_the_way(self: BlockingLink, query: Any) -> Any:
        tries.append(None)
        if len(tries) > 1:
            return real(self, query)
        assert self.meanwhile is not None
        self.meanwhile()
        raise SerializationFailure("somebody else was first")

    store = database.store(timeout=0.2)
    store.open_blocking()
    monkeypatch.setattr(BlockingLink, "ask", in_the_way)
    [inserted] = store.insert_while(new_jobs(1), partial(time.sleep, 0.5))
    assert (inserted.status, len(tries)) == (InsertStatus.CREATED, 2)
    store.close()


def test_half_of_the_connections_are_left_to_others_meanwhile(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how long it takes, and it may need connections itself."""
    monkeypatch.setattr(connections, "_MOST_BLOCKING", 4)
    store = Named(database, timeout=1).store
    depth: list[int] = []

    def meanwhile(level: int) -> None:
        depth.append(level)
        store.insert_while(new_jobs(1), partial(meanwhile, level + 1))

    store.insert_while(new_jobs(1), partial(meanwhile, 1))
    assert depth == [1, 2]
    assert database.number_of("waiting") == 3
    store.close()


def test_who_is_interrupted_meanwhile_leaves_no_connection_behind(named: Named, database: Database) -> None:
    """Nobody else may get the answer that this one did not wait for."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    named.store.insert_blocking(new_jobs(1))
    [before] = named.pids()
    with pytest.raises(KeyboardInterrupt):
        named.store.insert_while(new_jobs(1_000), interrupted)
    wait_until(lambda: before not in named.pids())
    assert [answer.status for answer in named.store.insert_blocking(new_jobs(2))] == [InsertStatus.CREATED] * 2


async def test_a_lost_connection_meanwhile_is_an_unknown_outcome(named: Named, database: Database) -> None:
    jobs = new_jobs(1_000)

    def meanwhile() -> None:
        wait_until(named.waiting)
        named.terminate(named.waiting())
        wait_until(lambda: not named.pids())

    with locked(database), pytest.raises(OutcomeUnknown) as unknown:
        await asyncio.to_thread(named.store.insert_while, jobs, meanwhile)
    assert list(unknown.value.ids) == [job.id for job in jobs]
    assert database.number_of("waiting") == 0
