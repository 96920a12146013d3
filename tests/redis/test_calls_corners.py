"""Calls on Redis that end late, or that the end of the store overtakes; and workers that wait for each other's jobs."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from holdfast.errors import StoreUnavailable
from holdfast.job import Job, NewJob
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, InsertStatus, Session, Store
from holdfast.stores.redis import RedisStore, wakeups
from holdfast.stores.redis.wire import Line
from holdfast.testing.suite import Rig
from tests.redis.conftest import NAMESPACE
from tests.redis.helpers import outside, store_at
from tests.servers import RedisServer

QUEUES = ("default",)


# Deadlines.


@pytest.fixture
def trickling() -> Iterator[int]:
    """A server that answers byte by byte, for longer than anybody waits."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                for byte in b"$40\r\n%b\r\n" % (b"x" * 40):
                    time.sleep(0.1)
                    connection.sendall(bytes([byte]))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listener:
        yield listener.getsockname()[1]
    thread.join(10)


def test_a_blocking_call_ends_at_its_deadline_although_bytes_keep_coming(trickling: int) -> None:
    store = store_at(f"redis://127.0.0.1:{trickling}/0?timeout=0.5")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        store.insert_blocking([NewJob(id=SYSTEM.ids.job_id(), task="work", payload=b"{}")])
    assert time.monotonic() - began < 2
    store.close()


# The end of a store.


async def test_calls_that_are_under_way_end_before_the_store_does(rig: Rig, redis_server: RedisServer) -> None:
    async with store_at(f"{redis_server.url}?namespace={NAMESPACE}") as store:
        inserts = [asyncio.ensure_future(store.insert([rig.new() for _ in range(1000)])) for _ in range(12)]
        await asyncio.sleep(0.01)
        assert not all(insert.done() for insert in inserts)
    async with asyncio.timeout(10):
        ended = await asyncio.gather(*inserts, return_exceptions=True)
    assert [error for error in ended if isinstance(error, BaseException)] == []
    assert {answer.status for inserted in ended for answer in inserted} == {InsertStatus.CREATED}  # type: ignore[union-attr]
    [counts] = await rig.store.counts()
    assert counts.ready == 12_000


# Waiting.


class _Worker:
    """One that waits for jobs as the claimer does, and claims one unless it is busy. `heard`: how often it is woken."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.session_id = SYSTEM.ids.session_id()
        self.busy = False
        self.heard = 0
        self.jobs: list[Job] = []
        self.woken = asyncio.Event()
        self.on_wakeup: Callable[[], bool] = lambda: True

    async def listen(self) -> None:
        """Until `on_wakeup` says that it stops."""
        wakeups = self.store.wakeups(QUEUES)
        async for _ in wakeups:
            self.heard += 1
            self.woken.set()
            if not self.on_wakeup():
                await wakeups.aclose()  # type: ignore[attr-defined]
                return

    async def work(self) -> None:
        await self.store.open_session(Session(id=self.session_id, queues=QUEUES))
        while not self.jobs:
            self.woken.clear()
            due_in = None if self.busy else await self.claim()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_in is None else due_in / 1e6):
                    await self.woken.wait()

    async def claim(self) -> int | None:
        request = ClaimRequest(session_id=self.session_id, queues=QUEUES, limit=1)
        claimed = await self.store.claim(request)
        self.jobs += claimed.jobs
        return claimed.due_in


async def until(condition: Callable[[], object], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - others change it
            await asyncio.sleep(0.01)


async def test_who_took_the_token_and_stops_passes_it_on_at_once(rig: Rig) -> None:
    async with rig.harness.second() as one, rig.harness.second() as another, asyncio.TaskGroup() as tasks:
        first, second = _Worker(one), _Worker(another)
        stopping = tasks.create_task(first.listen())
        await until(lambda: first.heard, 5)
        await asyncio.sleep(0.2)  # so that it is the first in the line
        listening = tasks.create_task(second.listen())
        await until(lambda: second.heard, 5)
        await asyncio.sleep(0.2)
        before = first.heard, second.heard
        first.on_wakeup = lambda: False
        await rig.add()
        try:
            await until(lambda: second.heard > before[1], 2)
        finally:
            stopping.cancel()
            listening.cancel()
        assert first.heard == before[0] + 1


async def test_a_delayed_job_is_claimed_in_time_although_the_one_that_heard_of_it_is_busy(rig: Rig) -> None:
    async with rig.harness.second() as one, rig.harness.second() as another, asyncio.TaskGroup() as tasks:
        first, second = _Worker(one), _Worker(another)
        running = [tasks.create_task(first.listen()), tasks.create_task(first.work())]
        await until(lambda: first.heard, 5)
        await asyncio.sleep(0.2)
        running += [tasks.create_task(second.listen()), tasks.create_task(second.work())]
        await until(lambda: second.heard, 5)
        await asyncio.sleep(0.2)
        job_id = await rig.add(delay=1_000_000)
        await asyncio.sleep(0.5)
        first.busy = True
        first.woken.set()
        try:
            await until(lambda: second.jobs, 3)
        finally:
            for task in running:
                task.cancel()
        assert [job.id for job in second.jobs] == [job_id]
        assert first.jobs == []


# Who was woken claims first.


async def _claim_when(woken: asyncio.Event, store: Store, request: ClaimRequest) -> None:
    async with asyncio.timeout(5):
        await woken.wait()
    assert len((await store.claim(request)).jobs) == 1


async def sent_when_woken(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the store of a worker sends when a job comes from elsewhere. The worker: one task hears, another claims."""
    store = rig.store
    assert isinstance(store, RedisStore)
    request = ClaimRequest(session_id=await rig.session(), queues=QUEUES, limit=1)
    await store.claim(request)
    claim = store._verbs.scripts["claim"].sha.encode()
    woken, sent = asyncio.Event(), list[str]()
    send = Line.send

    def watched(self: Line, data: bytes, count: int, timeout: float) -> asyncio.Future[list[object]]:
        sent.append("claim" if claim in data else "wait" if b"BLPOP" in data else "other")
        return send(self, data, count, timeout)

    async def listen() -> None:
        async for _ in store.wakeups(QUEUES):
            woken.set()

    listening = asyncio.ensure_future(listen())
    await asyncio.sleep(0.3)
    async with rig.harness.second() as other:
        producer = rig.using(other)
        await producer.add()  # opens its connection
        await _claim_when(woken, store, request)
        await asyncio.sleep(0.3)
        woken.clear()
        monkeypatch.setattr(Line, "send", watched)
        await asyncio.gather(producer.add(), _claim_when(woken, store, request))
        await asyncio.sleep(0.01)
        monkeypatch.setattr(Line, "send", send)
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    return [kind for kind in sent if kind != "other"]


async def test_who_was_woken_claims_before_the_next_wait(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await sent_when_woken(rig, monkeypatch) == ["claim", "wait"]


async def test_without_those_turns_the_wait_would_come_first(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wakeups, "_TURNS_TO_CLAIM", 0)
    assert await sent_when_woken(rig, monkeypatch) == ["wait", "claim"]


async def test_a_token_that_was_taken_when_the_waiting_ended_is_handed_over(
    rig: Rig, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in the turns between a wake-up and the next wait."""
    token = f"{NAMESPACE}:{{default}}:wake"
    monkeypatch.setattr(wakeups, "_TURNS_TO_CLAIM", 1_000_000)
    heard = asyncio.Event()

    async def listen() -> None:
        async for _ in rig.store.wakeups(QUEUES):
            heard.set()

    listening = asyncio.ensure_future(listen())
    await asyncio.sleep(0.3)
    heard.clear()
    async with rig.harness.second() as other:
        await rig.using(other).add()
    async with asyncio.timeout(5):
        await heard.wait()
    assert outside(redis_server.url).llen(token) == 0
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    assert outside(redis_server.url).llen(token) == 1
