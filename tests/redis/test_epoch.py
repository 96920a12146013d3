"""A store that was emptied or rolled back under those who use it: they notice, once, and find their way in it."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterator

import pytest

from holdfast.config import RedisSettings, Settings
from holdfast.errors import StoreReplaced
from holdfast.ports import SYSTEM
from holdfast.store import JobQuery, Session
from holdfast.stores import open_store
from holdfast.stores.redis import RedisStore
from tests.postgres.helpers import claim, finish, new_job, new_jobs
from tests.redis.helpers import store_at
from tests.servers import RedisServer, missing_server_policy


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


@pytest.fixture
async def store(server: RedisServer) -> AsyncIterator[RedisStore]:
    server.ask("FLUSHALL")
    async with store_at(server.url) as store:
        await store.open_session(Session(id="s", queues=("default",)))
        yield store


class Past:
    """The server's data as they were."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        server.ask("SAVE")
        self._kept = server.folder / "kept.rdb"
        shutil.copy(server.folder / "dump.rdb", self._kept)

    def put_back(self) -> None:
        self._server.kill()
        shutil.copy(self._kept, self._server.folder / "dump.rdb")
        self._server.start()


async def alarmed_once(store: RedisStore, session_id: str) -> None:
    with pytest.raises(StoreReplaced, match=rf"was emptied or rolled back .*Session {session_id} was closed"):
        await store.beat(session_id)
    for _ in range(3):
        assert not (await store.beat(session_id)).open


async def works(store: RedisStore, session_id: str) -> None:
    """A new session has jobs, and is not alarmed."""
    await store.open_session(Session(id=session_id, queues=("default",)))
    await store.insert([new_job()])
    assert (await store.beat(session_id)).open
    jobs = await claim(store, session_id, 100)
    assert jobs
    assert set(await finish(store, jobs)) == {"applied"}
    assert (await store.beat(session_id)).open


async def test_a_store_that_was_emptied(server: RedisServer, store: RedisStore) -> None:
    await store.insert(new_jobs(3))
    taken = await claim(store, "s")
    assert (await store.beat("s")).held == 3
    layout = server.ask("GET", "holdfast:layout")
    server.ask("FLUSHALL")
    await alarmed_once(store, "s")
    assert await finish(store, taken) == ["gone"] * 3
    await works(store, "new")
    assert server.ask("GET", "holdfast:layout") == layout
    found = open_store(server.url, SYSTEM, existing=True)
    assert [counts.succeeded for counts in await found.counts()] == [1]
    await found.__aexit__()


async def test_a_store_that_was_emptied_while_it_was_claimed_from(server: RedisServer, store: RedisStore) -> None:
    """A claim notices it too, before another session is opened."""
    server.ask("FLUSHALL")
    with pytest.raises(StoreReplaced):
        await claim(store, "s")
    assert not (await store.beat("s")).open
    await works(store, "new")


async def test_a_store_that_was_rolled_back(server: RedisServer, store: RedisStore) -> None:
    """What the session holds by a lease of then must not be mixed up with what is claimed from now on."""
    await store.insert([new_job()])
    for _ in range(3):
        await store.beat("s")
    past = Past(server)
    for _ in range(3):
        await store.beat("s")
    taken = await claim(store, "s")
    past.put_back()
    store.close()  # its connections are gone with the server
    await alarmed_once(store, "s")
    assert await finish(store, taken) == ["stale"]
    await works(store, "new")


async def test_a_rollback_of_a_store_without_beats_in_between_is_none(server: RedisServer, store: RedisStore) -> None:
    """What was lost cannot be told from what never was: nothing that a session knew is missing."""
    await store.beat("s")
    past = Past(server)
    past.put_back()
    store.close()
    for _ in range(3):
        assert (await store.beat("s")).open


async def test_everybody_notices_whoever_is_first(server: RedisServer, store: RedisStore) -> None:
    """The counter may have risen above what another has seen of it before that one looks: so there is a new id."""
    other = store_at(server.url)
    await other.open_session(Session(id="o", queues=("default",)))
    past = Past(server)
    for _ in range(5):
        await store.beat("s")
    await other.beat("o")
    past.put_back()
    store.close()
    await alarmed_once(store, "s")
    await store.open_session(Session(id="again", queues=("default",)))
    for _ in range(20):
        assert (await store.beat("again")).open
    other.close()
    await alarmed_once(other, "o")
    await works(other, "third")
    assert (await store.beat("again")).open
    other.close()


async def test_nobody_is_alarmed_without_a_reason(server: RedisServer, store: RedisStore) -> None:
    beside = store.beside()
    assert isinstance(beside, RedisStore)
    other = store_at(server.url)
    await beside.open_session(Session(id="b", queues=("default",)))
    await other.open_session(Session(id="o", queues=("default",)))
    for _ in range(20):
        beats = await asyncio.gather(
            *(store.beat("s") for _ in range(3)), *(beside.beat("b") for _ in range(3)), other.beat("o")
        )
        assert all(beat.open for beat in beats)
    # One that has not looked for long, and one that has just been opened.
    late = store_at(server.url)
    await late.open_session(Session(id="l", queues=("default",)))
    for _ in range(5):
        await other.beat("o")
    assert (await late.beat("l")).open
    assert (await store.beat("s")).open
    # One that somebody closed, or that never was.
    await other.close_session("s")
    assert not (await store.beat("s")).open
    assert not (await store.beat("never")).open
    for each in (beside, other, late):
        each.close()


async def test_a_heart_beside_its_worker_notices_once(server: RedisServer, store: RedisStore) -> None:
    """As a worker does it: one store claims, another beats for the same session."""
    heart = store.beside()
    await heart.beat("s")
    server.ask("FLUSHALL")
    with pytest.raises(StoreReplaced):
        await heart.beat("s")
    assert not (await heart.beat("s")).open
    assert not (await store.beat("s")).open
    await store.open_session(Session(id="next", queues=("default",)))
    assert (await heart.beat("next")).open
    await works(store, "other")
    heart.close()


@pytest.mark.parametrize("blocking", [False, True])
async def test_a_producer_goes_on(server: RedisServer, store: RedisStore, blocking: bool) -> None:
    """It has no session and never beats. What it inserts is found by all who look at every queue."""
    names = Settings(redis=RedisSettings(completed_list="done:{queue}"))
    server.ask("FLUSHALL")
    producer = store_at(server.url, settings=names)
    await producer.insert([new_job(queue="a"), new_job(queue="b")])
    layout = server.ask("GET", "holdfast:layout")
    assert "done:" in layout
    server.ask("FLUSHALL")
    jobs = [new_job(queue="a"), new_job(queue="a"), new_job(queue="b", delay=1_000_000_000)]
    if blocking:
        await asyncio.to_thread(producer.insert_blocking, jobs)
    else:
        await producer.insert(jobs)
    async with store_at(server.url) as other:
        assert [(each.queue, each.ready, each.scheduled) for each in await other.counts()] == [("a", 2, 0), ("b", 0, 1)]
        assert await other.get(jobs[0].id) is not None
        assert {job.id for job in (await other.find(JobQuery())).jobs} == {job.id for job in jobs}
        assert server.ask("GET", "holdfast:layout") == layout
    producer.close()


async def test_an_operator_goes_on(server: RedisServer, store: RedisStore) -> None:
    await store.set_paused("a", True)
    server.ask("FLUSHALL")
    await store.set_paused("a", True)
    assert [(counts.queue, counts.paused) for counts in await store.counts()] == [("a", True)]


async def test_without_the_epoch_nobody_would_notice(
    server: RedisServer, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""

    async def blind(self: RedisStore, session_id: str, *, went_back: bool = False) -> None: ...

    monkeypatch.setattr(RedisStore, "_compare_epoch", blind)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        await test_a_store_that_was_rolled_back(server, store)
