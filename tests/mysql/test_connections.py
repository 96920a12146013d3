"""The store's own connections: how many, lost ones, deadlines, cancelled calls, threads, loops, forks, passwords."""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import subprocess
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import InvalidOption, OutcomeUnknown, StoreUnavailable
from holdfast.lifecycle import Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import JobQuery
from holdfast.stores import open_store
from holdfast.stores.mysql import MysqlStore
from holdfast.stores.mysql.pool import MOST_CONNECTIONS
from holdfast.worker.event_loop import run_to_end
from tests.mysql.conftest import NAMESPACE
from tests.mysql.helpers import claim, connect, done, new_job, new_jobs, open_session, sql, store_at
from tests.mysql.proxy import Proxy
from tests.servers import MariaDbServer


def sessions_of(url: str) -> list[int]:
    """The ids of everybody's connections but this one's."""
    rows = sql(
        url,
        "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID() "
        "AND command <> 'Daemon'",
    )
    return [row[0] for row in rows]


def kill_all(url: str) -> None:
    for session in sessions_of(url):
        sql(url, f"KILL {session}")


# How many.


async def test_many_calls_at_once_share_a_few_connections(store: MysqlStore, url: str) -> None:
    before = set(sessions_of(url))
    await asyncio.gather(*(store.insert([new_job()]) for _ in range(50)))
    assert len(set(sessions_of(url)) | before) <= MOST_CONNECTIONS
    assert sum(count.ready for count in await store.counts()) == 50


async def test_closing_the_store_closes_them_all(url: str) -> None:
    before = len(sessions_of(url))
    async with store_at(url, NAMESPACE) as store:
        await asyncio.gather(*(store.counts() for _ in range(8)))
        await asyncio.to_thread(store.insert_blocking, [new_job()])
        assert len(sessions_of(url)) > before
    for _ in range(100):
        if len(sessions_of(url)) <= before:
            break
        await asyncio.sleep(0.02)
    assert len(sessions_of(url)) <= before


@pytest.mark.parametrize("run", [asyncio.run, run_to_end])  # the second, as workers do: on uvloop, if that is there
def test_an_event_loop_that_ends_closes_its_connections(url: str, run: Callable[[Awaitable[None]], None]) -> None:
    store = store_at(url, NAMESPACE)
    before = set(sessions_of(url))
    run(_counts(store))
    left: set[int] = set()
    for _ in range(100):
        if not (left := set(sessions_of(url)) - before):
            break
        time.sleep(0.02)
    assert not left
    run(_counts(store))  # the next loop gets its own
    store.close()


async def test_a_store_that_was_closed_opens_again(url: str) -> None:
    store = store_at(url, NAMESPACE)
    for _ in range(2):
        async with store:
            await store.counts()
    store.insert_blocking([new_job()])
    store.close()


async def test_a_store_beside_has_its_own(store: MysqlStore) -> None:
    beside = store.beside()
    assert await beside.counts() == await store.counts()
    assert beside._pool is not store._pool
    beside.close()


async def test_every_session_is_set_up(store: MysqlStore) -> None:
    def ask() -> Any:
        from holdfast.stores.mysql.sql import one

        answer = yield from one("SELECT @@sql_mode, @@time_zone, @@autocommit")
        return answer.rows[0]

    mode, zone, autocommit = await store._read(ask)
    assert "STRICT_ALL_TABLES" in mode
    assert (zone, autocommit) == ("+00:00", 1)
    for session in (store._on_thread, None):
        if session:
            assert session(ask, begin=(), commit=(), undo=())[1] == "+00:00"


# Lost.


async def test_killed_idle_connections_are_replaced_unnoticed(store: MysqlStore, url: str) -> None:
    await asyncio.gather(*(store.counts() for _ in range(8)))
    store.insert_blocking([new_job()])
    kill_all(url)
    assert len(await store.counts()) == 1
    await store.insert([new_job()])
    await open_session(store)
    assert len(await claim(store)) == 2
    kill_all(url)
    store.insert_blocking([new_job()])
    kill_all(url)
    assert (await store.beat("s")).held == 2


@pytest.mark.parametrize("verb", ["insert", "insert_blocking", "apply"])
async def test_lost_during_the_commit_is_unknown(url: str, store: MysqlStore, verb: str) -> None:
    """The server has committed, and the answer never came: nobody may say that it failed."""
    async with Proxy(url).running() as proxy:
        await store.insert([new_job()])
        await open_session(store)
        [claimed] = await claim(store)
        there = store_at(proxy.url, NAMESPACE)
        await there.counts()
        await asyncio.to_thread(there.insert_blocking, [new_job()])
        job = new_job()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "insert": lambda: there.insert([job]),
            "insert_blocking": lambda: asyncio.to_thread(there.insert_blocking, [job]),
            "apply": lambda: there.apply(done([claimed])),
        }
        proxy.cut_at = b"COMMIT"
        with pytest.raises(OutcomeUnknown) as unknown:
            await calls[verb]()
        assert proxy.cuts == 1
        proxy.cut_at = None
        assert list(unknown.value.ids) == [claimed.id if verb == "apply" else job.id]
        # Repeating it is safe, on the same store, which connects again.
        if verb == "apply":
            assert await there.apply(done([claimed])) == ["already"]
        else:
            [again] = await there.insert([job])
            assert again.status == "existing"
        there.close()


async def test_lost_before_the_commit_is_tried_again(url: str, store: MysqlStore) -> None:
    async with Proxy(url).running() as proxy:
        there = store_at(proxy.url, NAMESPACE)
        await there.counts()
        proxy.cut_at = b"_ready"
        job = new_job()
        inserting = asyncio.create_task(there.insert([job]))
        await proxy.cut.wait()
        proxy.cut_at = None
        [inserted] = await inserting
        assert inserted.status == "created"
        assert await store.get(job.id) is not None
        there.close()


async def test_a_connection_to_what_became_a_replica_is_given_up(url: str, store: MysqlStore) -> None:
    """After a failover the same name leads elsewhere: only a new connection gets there."""
    sql(url, "CREATE OR REPLACE USER writer@127.0.0.1")
    sql(url, "GRANT SELECT, INSERT, UPDATE, DELETE ON test.* TO writer@127.0.0.1")
    async with Proxy(url.replace("holdfast@", "writer@")).running() as proxy:
        there = store_at(proxy.url, NAMESPACE)
        await there.insert([new_job()])
        connections = proxy.connections
        sql(url, "SET GLOBAL read_only = 1")
        try:
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="read-only"):
                    await there.insert([new_job()])
        finally:
            sql(url, "SET GLOBAL read_only = 0")
        assert proxy.connections == connections + 1  # the second try came by a new one
        await there.insert([new_job()])
        assert sum(count.ready for count in await store.counts()) == 2
        there.close()


async def test_a_server_that_is_killed_and_comes_back() -> None:
    """What was accepted is there, nothing hangs, and the same store goes on."""
    with MariaDbServer() as server:
        store = store_at(server.url)
        accepted = new_jobs(20)
        await store.insert(accepted[:10])
        await asyncio.to_thread(store.insert_blocking, accepted[10:])
        await open_session(store)
        claimed = await claim(store, limit=5)
        server.kill()
        with pytest.raises(StoreUnavailable):
            await store.insert([new_job()])
        with pytest.raises(StoreUnavailable):
            await asyncio.to_thread(store.insert_blocking, [new_job()])
        with pytest.raises(StoreUnavailable):
            await store.beat("s")
        await asyncio.to_thread(server.start)
        assert (await store.beat("s")).held == 5
        assert await store.apply(done(claimed)) == ["applied"] * 5
        assert len(await claim(store)) == 15
        await asyncio.to_thread(store.insert_blocking, [new_job()])
        store.close()


async def test_nobody_listens(url: str) -> None:
    store = store_at("mysql://root@127.0.0.1:1/test")
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/test"):
        await store.counts()
    with pytest.raises(StoreUnavailable, match=r"127\.0\.0\.1:1/test"):
        store.insert_blocking([new_job()])
    store.close()


async def test_a_server_that_never_answers_does_not_hold_anybody(url: str) -> None:
    async with Proxy(url).running() as proxy:
        store = store_at(proxy.url, NAMESPACE, timeout=0.5)
        await store.counts()
        await asyncio.to_thread(store.insert_blocking, [new_job()])
        proxy.deaf = True
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await store.insert([new_job()])
        with pytest.raises(StoreUnavailable):
            await asyncio.to_thread(store.insert_blocking, [new_job()])
        with pytest.raises(StoreUnavailable):  # while connecting
            await store.counts()
        assert time.monotonic() - started < 5
        proxy.deaf = False
        assert await store.counts() != []
        store.close()


async def test_a_lock_that_is_never_given_back_ends_with_the_deadline(url: str, store: MysqlStore) -> None:
    await store.insert(new_jobs(2))
    await open_session(store)
    jobs = await claim(store)
    hurried = store_at(url, NAMESPACE, timeout=1.5)
    with connect(url, autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT id FROM {NAMESPACE}_in_flight FOR UPDATE")
        started = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await hurried.apply(done(jobs))
        assert time.monotonic() - started < 4
    assert await hurried.apply(done(jobs)) == ["applied", "applied"]
    hurried.close()


async def test_a_payload_that_no_packet_can_hold_is_refused(url: str, store: MysqlStore) -> None:
    """Not unknown, and not tried for ever."""
    huge = new_job(payload=b"x" * 20_000_000)
    async with store_at(url, NAMESPACE, timeout=60) as patient:  # it is long, on a busy machine
        with pytest.raises(StoreUnavailable, match="packet"):
            await patient.insert([huge])
        with pytest.raises(StoreUnavailable, match="packet"):
            patient.insert_blocking([huge])
    assert await store.get(huge.id) is None


async def test_a_batch_of_many_megabytes_is_cut(store: MysqlStore) -> None:
    jobs = new_jobs(16, payload=b"x" * 500_000)
    assert [answer.status for answer in await store.insert(jobs)] == ["created"] * 16
    await open_session(store)
    claimed = await claim(store)
    assert sorted(job.id for job in claimed) == sorted(job.id for job in jobs)
    moves = [settle(job, Succeeded(b"y" * 400_000), RetryPolicy(), SYSTEM.random) for job in claimed]
    assert await store.apply(moves) == ["applied"] * 16
    ended = await store.get(jobs[7].id)
    assert ended is not None
    assert ended.result == b"y" * 400_000


@pytest.mark.parametrize("name", ["größe", "a'b\\\\", "%s", "x y ", "\N{SNOWMAN}"])
async def test_names_that_cannot_be_there_are_not_found(store: MysqlStore, name: str) -> None:
    assert await store.get(name) is None
    assert (await store.find(JobQuery(queue=name, task=name, correlation_id=name, cursor=name))).jobs == ()
    assert await store.request_cancel([name]) == ["gone"]
    assert await store.forget([name]) == 0
    assert await store.checkpoint(name, name) is None
    assert not (await store.beat(name)).open
    assert await store.held(name) == []


# Cancelled.


async def test_a_cancelled_call_leaves_no_answer_for_the_next_one(store: MysqlStore) -> None:
    jobs = new_jobs(60)
    await store.insert(jobs)
    for number in range(60):
        call = asyncio.create_task(store.get(jobs[number].id))
        for _ in range(number % 7):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        other = jobs[(number + 1) % 60].id
        found = await store.get(other)
        assert found is not None
        assert found.id == other


async def test_a_cancelled_write_leaves_no_lock_behind(store: MysqlStore) -> None:
    await store.insert(new_jobs(50))
    await open_session(store)
    for number in range(20):
        call = asyncio.create_task(claim(store, limit=1))
        await asyncio.sleep(number * 0.0002)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    for _ in range(100):  # until the server has noticed the last of them
        held = await store.held("s")
        rest = await claim(store)
        if len(held) + len(rest) == 50:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("some jobs are still locked")


# Threads, event loops, forks.


def test_several_event_loops_and_threads(url: str) -> None:
    store = store_at(url, NAMESPACE)
    errors: list[BaseException] = []

    def work() -> None:
        async def calls() -> None:
            for _ in range(10):
                await store.insert([new_job()])
                await store.counts()

        try:
            asyncio.run(calls())
            store.insert_blocking([new_job()])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    asyncio.run(_counts(store))  # the loops of before are gone, and their connections with them
    store.close()
    gc.collect()
    assert errors == []


async def _counts(store: MysqlStore) -> None:
    await store.counts()


def _in_child(store: MysqlStore, pipe: Any) -> None:
    store.insert_blocking([new_job(queue="child")])
    pipe.send(asyncio.run(_queues(store)))


async def _queues(store: MysqlStore) -> list[str]:
    return [count.queue for count in await store.counts()]


def test_a_fork_gets_connections_of_its_own(url: str) -> None:
    from tests.mysql.helpers import empty

    empty(url, NAMESPACE)
    store = store_at(url, NAMESPACE)
    store.insert_blocking([new_job(queue="parent")])
    asyncio.run(_counts(store))
    forked = multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe()
    child = forked.Process(target=_in_child, args=(store, theirs))
    child.start()
    assert ours.poll(30)
    assert ours.recv() == ["child", "parent"]
    child.join(30)
    assert child.exitcode == 0
    store.insert_blocking([new_job(queue="parent")])
    assert asyncio.run(_queues(store)) == ["child", "parent"]
    store.close()
    gc.collect()


# The URL.


@pytest.mark.parametrize("scheme", ["mysql", "mariadb"])
def test_the_password_is_never_shown(url: str, scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    address = url.split("@")[1]
    store = open_store(f"{scheme}://holdfast:s3cret%40@{address}", SYSTEM)
    assert isinstance(store, MysqlStore)
    with pytest.raises(StoreUnavailable) as refused:
        store.insert_blocking([new_job()])
    with pytest.raises(StoreUnavailable) as also_refused:
        asyncio.run(_counts(store))
    shown = [repr(store), repr(store._server), str(refused.value), repr(also_refused.value), caplog.text]
    assert store._server.password == "s3cret@"
    assert "Access denied" in shown[2]
    assert not any("s3cret" in text for text in shown)
    store.close()


@pytest.mark.parametrize(
    "bad",
    [
        "mysql://localhost",
        "mysql://localhost/",
        "mysql://localhost:0/app",
        "mysql://localhost:http/app",
        "mysql://localhost/app?namespace=Bad-Name",
        "mysql://localhost/app?timeout=0",
        "mysql://localhost/app?timeout=soon",
        "mysql://localhost/app?sslmode=on",
        "mysql://localhost/app?ssl=maybe",
        "mysql://localhost/app?ssl_ca=/nowhere/at.all",
    ],
)
def test_a_bad_url_is_refused(bad: str) -> None:
    with pytest.raises(InvalidOption):
        open_store(bad, SYSTEM)


@pytest.fixture(scope="module")
def encrypted_server() -> Iterator[tuple[MariaDbServer, Path]]:
    # Not among pytest's own folders, which are nobody else's business: the server runs as somebody else.
    with tempfile.TemporaryDirectory(prefix="holdfast-certificates-") as name:
        folder = Path(name)
        folder.chmod(0o755)
        yield from _encrypted_server(folder)


def _encrypted_server(folder: Path) -> Iterator[tuple[MariaDbServer, Path]]:
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run(
        [*command.split(), "-keyout", folder / "key", "-out", folder / "cert"], check=True, capture_output=True
    )
    for name in ("key", "cert"):
        (folder / name).chmod(0o644)
    settings = {"ssl-cert": str(folder / "cert"), "ssl-key": str(folder / "key"), "require-secure-transport": "ON"}
    with MariaDbServer(settings=settings) as server:
        yield server, folder / "cert"


async def test_encrypted(encrypted_server: tuple[MariaDbServer, Path]) -> None:
    server, certificate = encrypted_server
    plain = server.url.replace("127.0.0.1", "localhost")
    for options, works in (
        ("ssl=on", True),
        (f"ssl_ca={certificate}", True),
        ("ssl=off", False),
        ("ssl=verify", False),
    ):
        store = open_store(f"{plain}?{options}", SYSTEM)
        assert isinstance(store, MysqlStore)
        if works:
            store.insert_blocking([new_job()])
            beside = store.beside()
            assert await store.counts() == await beside.counts() != []
            beside.close()
        else:
            with pytest.raises(StoreUnavailable):
                await store.counts()
            with pytest.raises(StoreUnavailable):
                store.insert_blocking([new_job()])
        store.close()


async def test_by_unix_socket(mariadb_server: Any) -> None:
    store = open_store(f"mysql://holdfast@localhost/test?unix_socket={mariadb_server.socket}", SYSTEM)
    assert isinstance(store, MysqlStore)
    await store.counts()
    store.insert_blocking([new_job()])
    assert str(mariadb_server.socket) in repr(store)
    store.close()
