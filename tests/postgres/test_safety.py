"""What must not happen: unsafe databases, leaks with every event loop, half-done verbs called undone."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from holdfast.errors import InvalidOption, OutcomeUnknown, StoreUnavailable, UnsafeStore
from holdfast.job import Job, Key, NewJob
from holdfast.lifecycle import Applied, replay
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, InsertStatus, JobQuery, Session
from holdfast.stores.postgres import PostgresStore
from holdfast.stores.postgres.listener import Listener
from holdfast.stores.wakeups import WakeupHub
from tests.servers import PostgresServer
from tests.store.harnesses import empty_postgres

NAMESPACE = "safety"


@pytest.fixture
def store(postgres_server: PostgresServer) -> Iterator[PostgresStore]:
    empty_postgres(postgres_server.url, NAMESPACE)
    store = PostgresStore(postgres_server.url, namespace=NAMESPACE)
    store.open_blocking()
    yield store
    store.close()


def new(**fields: Any) -> NewJob:
    return NewJob(**{"id": SYSTEM.ids.job_id(), "task": "t", "payload": b"{}", **fields})


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[str]:
    """The URL of a database that a test may spoil; its name is the last part."""
    yield postgres_server.url.replace("/postgres", "/spoiled")
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("DROP DATABASE IF EXISTS spoiled WITH (FORCE)")


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "EUC_JP"])
def test_a_database_that_is_not_utf8_is_refused(postgres_server: PostgresServer, database: str, encoding: str) -> None:
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE spoiled ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0".encode())
    with pytest.raises(UnsafeStore, match=f"has the encoding {encoding}"):
        PostgresStore(database).open_blocking()


def test_repeatable_read_by_default_is_refused(postgres_server: PostgresServer, database: str) -> None:
    with psycopg.connect(postgres_server.url, autocommit=True) as connection:
        connection.execute("CREATE DATABASE spoiled")
        connection.execute("ALTER DATABASE spoiled SET default_transaction_isolation = 'repeatable read'")
    with pytest.raises(UnsafeStore, match="repeatable read by default"):
        PostgresStore(database).open_blocking()


async def test_opening_has_a_deadline(store: PostgresStore, postgres_server: PostgresServer) -> None:
    late = PostgresStore(postgres_server.url, namespace=NAMESPACE, timeout=0.5)
    with psycopg.connect(postgres_server.url) as holder:
        holder.execute(f"LOCK {NAMESPACE}_schema".encode())
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await late.now()
        assert time.monotonic() - began < 5
    assert await late.now() > 0
    late.close()


def test_event_loops_leave_no_connections_behind(store: PostgresStore, postgres_server: PostgresServer) -> None:
    """Also those in which more calls waited than there are connections: their semaphore knows its loop."""

    async def many_calls() -> None:
        await asyncio.gather(*(store.now() for _ in range(12)))

    for _ in range(10):
        asyncio.run(many_calls())
    assert _connections_of(postgres_server, store) <= 4


def _connections_of(server: PostgresServer, store: PostgresStore) -> int:
    with psycopg.connect(server.url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'holdfast' AND query LIKE %s",
            (f"%{NAMESPACE}_now%",),
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_the_same_keys_in_another_order_do_not_deadlock(store: PostgresStore) -> None:
    """Four producers with the same hundreds of keys, half of them backwards: each key is taken once, nobody fails."""
    keys = [Key(f"k{n}", "h", 3_600_000_000) for n in range(300)]
    created: list[int] = []
    failures: list[BaseException] = []

    def produce(step: int) -> None:
        try:
            answers = store.insert_blocking([new(key=key) for key in keys[::step]])
            created.append(sum(answer.status is InsertStatus.CREATED for answer in answers))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=produce, args=(step,)) for step in (1, -1, 1, -1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sum(created) == len(keys)


async def test_answers_come_in_the_order_of_the_jobs(store: PostgresStore) -> None:
    """Though the server got them in the order of their keys."""
    held = new(key=Key("b", "h", 3_600_000_000))
    await store.insert([held])
    batch = [new(key=Key(text, "h", 3_600_000_000)) for text in ("c", "b", "a", "c")]
    first, second, third, fourth = await store.insert(batch)
    assert (first.status, first.job_id) == (InsertStatus.CREATED, batch[0].id)
    assert (second.status, second.job_id) == (InsertStatus.EXISTING, held.id)
    assert (third.status, third.job_id) == (InsertStatus.CREATED, batch[2].id)
    assert (fourth.status, fourth.job_id) == (InsertStatus.EXISTING, batch[0].id)


async def _dead_letter(store: PostgresStore) -> Job:
    job = new(retention=0)
    await store.insert([job])
    await store.request_cancel([job.id])
    found = await store.get(job.id)
    assert found is not None
    return found


async def test_what_was_partly_done_is_not_called_undone(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two jobs come back; the read that would explain why the third does not fails."""
    jobs = [await _dead_letter(store) for _ in range(3)]
    await store.forget([jobs[2].id])
    execute = store._connections._execute

    async def no_reads(query: Any) -> Any:
        if not query.writes:
            raise StoreUnavailable("the network is gone. Nothing was written")
        return await execute(query)

    monkeypatch.setattr(store._connections, "_execute", no_reads)
    with pytest.raises(OutcomeUnknown, match="a part of it was done"):
        await store.apply([replay(job) for job in jobs])
    monkeypatch.undo()
    assert await store.apply([replay(job) for job in jobs]) == [Applied.ALREADY, Applied.ALREADY, Applied.GONE]


async def test_a_claim_that_has_jobs_returns_them(store: PostgresStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the look for more of them fails."""
    request = ClaimRequest(session_id="s", queues=("default",), limit=5)
    await store.open_session(Session(id="s"))
    await store.insert([new() for _ in range(7)])
    assert len((await store.claim(request)).jobs) == 5  # a full batch: the next claim goes on from there
    execute = store._connections._execute
    claims = []

    async def second_fails(query: Any) -> Any:
        claims.append(query)
        if len(claims) == 2:
            raise OutcomeUnknown("the reply was lost")
        return await execute(query)

    monkeypatch.setattr(store._connections, "_execute", second_fails)
    assert len((await store.claim(request)).jobs) == 2
    assert len(claims) == 2


async def test_texts_that_no_store_can_keep(store: PostgresStore) -> None:
    with pytest.raises(InvalidOption, match="cursor 'abc' is not the `next` of a page"):
        await store.find(JobQuery(cursor="abc"))
    with pytest.raises(InvalidOption, match="a text cannot be stored"):
        await store.find(JobQuery(queue="\ud800"))
    with pytest.raises(StoreUnavailable, match="nothing was sent"):
        await store.set_paused("a\0b", True)


async def test_a_listener_does_not_wait_for_a_silent_server(store: PostgresStore) -> None:
    """Somebody accepts the connection and never says a word: it gives up, and tries again."""
    silent: list[asyncio.StreamWriter] = []
    tried = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        silent.append(writer)
        if len(silent) > 1:
            tried.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    deaf = PostgresStore(f"postgresql://holdfast@127.0.0.1:{port}/postgres", timeout=0.3)
    listening = asyncio.ensure_future(Listener(deaf.server, NAMESPACE, WakeupHub(), lambda _: None).run())
    async with asyncio.timeout(15):
        await tried.wait()
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    for writer in silent:
        writer.close()
    server.close()
