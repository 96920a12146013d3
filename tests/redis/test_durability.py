"""What an insert waits for beyond the server's answer: a replica, or the disk."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from holdfast.errors import InvalidOption, OutcomeUnknown, UnsafeStore
from holdfast.store import InsertStatus, Session
from holdfast.stores.redis import RedisStore
from tests.postgres.helpers import claim, finish, new_job, new_jobs
from tests.redis.fake import FORWARD, FakeServer, error, numbers, text
from tests.redis.helpers import outside, store_at
from tests.servers import RedisServer, missing_server_policy, wait_for_replica


@pytest.fixture(scope="module")
def primary() -> Iterator[RedisServer]:
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


@pytest.fixture(scope="module")
def replica(primary: RedisServer) -> Iterator[RedisServer]:
    with RedisServer(settings={"replicaof": f"127.0.0.1 {primary.port}"}) as replica:
        wait_for_replica(primary, replica)
        yield replica


@contextmanager
def stopped(server: RedisServer) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.pid, signal.SIGCONT)


def connections(server: RedisServer) -> str:
    return str(server.ask("CLIENT", "LIST"))


def test_a_word_that_is_none() -> None:
    with pytest.raises(InvalidOption, match="durability must be one of server, aof, replicas, not 'disk'"):
        store_at("redis://localhost?durability=disk")


# Replicas.


async def test_no_replica_is_connected() -> None:
    with missing_server_policy():
        server = RedisServer()
    with server:
        store = store_at(f"{server.url}?durability=replicas")
        for _ in range(2):
            with pytest.raises(
                UnsafeStore, match="durability=replicas needs a replica, and a server has none connected"
            ):
                await store.insert([new_job()])
        with pytest.raises(UnsafeStore):
            await asyncio.to_thread(store.open_blocking)
        assert outside(server.url).keys("*jobs*") == []
        store.close()


async def test_an_insert_waits_for_a_replica(primary: RedisServer, replica: RedisServer) -> None:
    primary.ask("FLUSHALL")
    async with store_at(f"{primary.url}?durability=replicas") as store:
        for count in (1, 250):
            jobs = new_jobs(count)
            before = replica.ask("HLEN", "holdfast:{default}:jobs")
            answers = await store.insert(jobs)
            assert replica.ask("HLEN", "holdfast:{default}:jobs") == before + count
            assert {answer.status for answer in answers} == {InsertStatus.CREATED}
            jobs = new_jobs(count)
            await asyncio.to_thread(store.insert_blocking, jobs)
            assert replica.ask("HLEN", "holdfast:{default}:jobs") == before + 2 * count


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_replica_that_does_not_answer(primary: RedisServer, replica: RedisServer, blocking: bool) -> None:
    primary.ask("FLUSHALL")
    wait_for_replica(primary, replica)

    async def insert(store: RedisStore) -> Any:
        if blocking:
            return await asyncio.to_thread(store.insert_blocking, jobs)
        return await store.insert(jobs)

    jobs = new_jobs(2)
    url = f"{primary.url}?durability=replicas&timeout=1.5"
    store = store_at(url)
    await store.open_session(Session(id="s", queues=("default",)))
    with stopped(replica):
        # Repeating it is safe, and no more certain: also over connections that have written nothing.
        for each in (store_at(url),) if blocking else (store, store_at(url)):
            began = time.monotonic()
            with pytest.raises(
                OutcomeUnknown, match=r"it was written to .* but not confirmed: no replica had it"
            ) as caught:
                await insert(each)
            assert 1.1 < time.monotonic() - began < 5
            assert caught.value.ids == [job.id for job in jobs]
            assert primary.ask("HLEN", "holdfast:{default}:jobs") == 2
            if each is not store:
                each.close()
        # Nothing but new jobs waits.
        began = time.monotonic()
        assert (await store.beat("s")).open
        taken = await claim(store, "s")
        assert await finish(store, taken[:1]) == ["applied"]
        assert time.monotonic() - began < 1
    wait_for_replica(primary, replica)
    assert {answer.status for answer in await insert(store)} == {InsertStatus.EXISTING}
    store.close()


async def test_a_repeated_insert_has_something_to_wait_for(primary: RedisServer, replica: RedisServer) -> None:
    """Since 7.2 WAIT and WAITAOF are about what their own connection wrote. So who finds its job there writes too: else
    it would be told at once, over a new connection, that all is safe.
    """
    primary.ask("FLUSHALL")
    job = new_job()
    async with store_at(f"{primary.url}?durability=replicas") as store:
        await store.insert([job])
        for _ in range(2):
            before = int(primary.info("persistence")["rdb_changes_since_last_save"])
            [again] = await store.insert([job])
            assert again.status is InsertStatus.EXISTING
            assert int(primary.info("persistence")["rdb_changes_since_last_save"]) > before
        primary.ask("CONFIG", "SET", "maxmemory", "1")
        [again] = await store.insert([job])
        primary.ask("CONFIG", "SET", "maxmemory", "0")
        assert again.status is InsertStatus.EXISTING


async def test_others_do_not_wait_behind_it(primary: RedisServer, replica: RedisServer) -> None:
    """Calls of the same event loop go on while an insert waits for the replica."""
    primary.ask("FLUSHALL")
    wait_for_replica(primary, replica)
    async with store_at(f"{primary.url}?durability=replicas&timeout=1") as store:
        await store.insert([new_job()])
        with stopped(replica):
            waiting = asyncio.ensure_future(store.insert([new_job()]))
            await asyncio.sleep(0.05)
            began = time.monotonic()
            for _ in range(5):
                await store.counts()
            assert time.monotonic() - began < 0.4
            assert not waiting.done()
        [inserted] = await waiting
        assert inserted.status is InsertStatus.CREATED


# The disk.


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"appendonly": "no"}, "durability=aof needs appendonly yes, and a server has it off"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "has appendfsync everysec: set appendfsync always"),
        ({"appendonly": "yes", "appendfsync": "no"}, "has appendfsync no: set appendfsync always"),
        ({"appendonly": "yes", "appendfsync": "always"}, ""),
        ({"appendonly": "yes", "appendfsync": "always", "user": "default on nopass ~* &* +@all -config"}, "hides its"),
    ],
)
async def test_the_disk_before_there_was_waitaof(settings: dict[str, str], refusal: str) -> None:
    with missing_server_policy():
        server = RedisServer(settings=settings)
    with server:

        def answer(words: list[bytes]) -> Any:
            assert words[0] != b"WAITAOF"
            if words[0] == b"INFO":
                said = f"redis_version:7.0.15\r\naof_enabled:{int(settings['appendonly'] == 'yes')}\r\n"
                return text(said.encode())
            return FORWARD

        with FakeServer(answer, behind=server.port) as fake:
            store = store_at(f"{fake.url}?durability=aof")
            if refusal:
                with pytest.raises(UnsafeStore, match=refusal):
                    await store.insert([new_job()])
                with pytest.raises(UnsafeStore, match=refusal):
                    await asyncio.to_thread(store.open_blocking)
            else:
                [inserted] = await store.insert([new_job()])
                assert inserted.status is InsertStatus.CREATED
            store.close()


@pytest.mark.parametrize("blocking", [False, True])
async def test_the_disk_with_waitaof(primary: RedisServer, blocking: bool) -> None:
    """A server that has it: here one that only says so."""
    primary.ask("FLUSHALL")
    on_disk = 1
    asked: list[list[bytes]] = []

    def answer(words: list[bytes]) -> Any:
        if words[0] == b"INFO":
            return text(b"redis_version:7.2.4\r\naof_enabled:1\r\n")
        if words[0] == b"WAITAOF":
            asked.append(words)
            return numbers(on_disk, 0) if on_disk >= 0 else error("ERR WAITAOF cannot be used when numlocal is set but")
        return FORWARD

    with FakeServer(answer, behind=primary.port) as fake:
        store = store_at(f"{fake.url}?durability=aof&timeout=1")

        async def insert(job: Any) -> Any:
            if blocking:
                await asyncio.to_thread(store.open_blocking)
                return await asyncio.to_thread(store.insert_blocking, [job])
            return await store.insert([job])

        [inserted] = await insert(new_job())
        assert inserted.status is InsertStatus.CREATED
        assert asked == [[b"WAITAOF", b"1", b"0", b"800"]]
        job = new_job()
        for answered, said in ((0, "it was not on disk in time"), (-1, "ERR WAITAOF cannot be used")):
            on_disk = answered
            with pytest.raises(OutcomeUnknown, match=f"it was written to .* but not confirmed: {said}") as caught:
                await insert(job)
            assert caught.value.ids == [job.id]
        on_disk = 1
        [inserted] = await insert(job)
        assert inserted.status is InsertStatus.EXISTING
        store.close()


async def test_a_disk_that_is_never_waited_for(primary: RedisServer) -> None:
    def answer(words: list[bytes]) -> Any:
        if words[0] == b"INFO":
            return text(b"redis_version:7.2.4\r\naof_enabled:1\r\n")
        return b"*2\r\n$11\r\nappendfsync\r\n$2\r\nno\r\n" if words[0] == b"CONFIG" else FORWARD

    with FakeServer(answer, behind=primary.port) as fake:
        store = store_at(f"{fake.url}?durability=aof")
        with pytest.raises(UnsafeStore, match="durability=aof needs appendfsync everysec or always"):
            await store.insert([new_job()])
        store.close()
