"""What a worker does all the time, whether there are jobs or not, is one command each on a single server."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from holdfast.errors import StoreReplaced
from holdfast.store import Session
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.dispatch import Batch, Verb
from tests.postgres.helpers import claim, new_job
from tests.redis.conftest import NAMESPACE
from tests.redis.helpers import empty, outside, store_at
from tests.servers import RedisServer


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[RedisStore]:
    empty(redis_server.url, NAMESPACE)
    async with store_at(f"{redis_server.url}?namespace={NAMESPACE}") as store:
        await store.open_session(Session(id="s", queues=("a", "b")))
        yield store


@contextmanager
def counted(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The first word of each command, the name of the script if it runs one."""
    run, sent = store._connections.run, list[str]()

    def watched(verb: Verb[object]) -> Verb[object]:
        replies = None
        while True:
            try:
                batch: Batch = verb.send(replies) if replies is not None else next(verb)
            except StopIteration as end:
                return end.value
            sent.extend(call.script.name if call.script else str(call.command[0]) for call in batch.calls)
            replies = yield batch

    with monkeypatch.context() as patch:
        patch.setattr(store._connections, "run", lambda verb: run(watched(verb)))
        yield sent


async def test_a_beat_is_one_command_from_the_second_on(store: RedisStore, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (await store.beat("s")).open
    await store.insert([new_job(queue="b")])
    [job] = await claim(store, "s", 1, "b")
    await store.request_cancel([job.id])
    with counted(store, monkeypatch) as sent:
        beat = await store.beat("s")
    assert sent == ["pulse"]
    assert (beat.open, beat.held, beat.cancel) == (True, 1, (job.id,))
    [view] = (await store.sessions()).sessions
    assert view.beat == 2


async def test_a_queue_that_joined_since_has_its_part_in_the_beat(
    store: RedisStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.beat("s")
    await store.insert([new_job(queue="0"), new_job(queue="late")])
    assert len(await claim(store, "s", 1, "0")) == len(await claim(store, "s", 1, "late")) == 1
    with counted(store, monkeypatch) as sent:
        assert (await store.beat("s")).held == 2
        assert (await store.beat("s")).held == 2
    assert sent == ["pulse", "beat", "beat", "pulse"]
    assert outside(redis_server.url).get(f"{NAMESPACE}:{{late}}:heartbeat:s") == b"holds 1 jobs"


async def test_a_beat_in_one_command_notices_that_it_is_closed(store: RedisStore) -> None:
    await store.beat("s")
    assert await store.close_session("s")
    assert not (await store.beat("s")).open


@pytest.mark.parametrize("what", ["epoch", "part"])
async def test_a_beat_in_one_command_notices_what_became_of(
    store: RedisStore, redis_server: RedisServer, what: str
) -> None:
    await store.beat("s")
    await store.beat("s")
    client = outside(redis_server.url)
    if what == "part":
        client.hset(f"{NAMESPACE}:{{b}}:parts", "s", "0")
        assert not (await store.beat("s")).open
    else:
        client.hset(f"{NAMESPACE}:epoch", "count", "1")
        with pytest.raises(StoreReplaced):
            await store.beat("s")
        assert not (await store.beat("s")).open


async def test_a_page_of_sessions_is_one_command(
    store: RedisStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.open_session(Session(id="t", queues=("a",), host="here", pid=7))
    outside(redis_server.url).sadd(f"{NAMESPACE}:sessions", "without a root")
    with counted(store, monkeypatch) as sent:
        page = await store.sessions()
    assert sent == ["page"]
    assert page.next is None
    assert {(view.id, view.host, view.pid, view.queues) for view in page.sessions} == {
        ("s", "", 0, ("a", "b")),
        ("t", "here", 7, ("a",)),
    }


async def test_where_nobody_holds_anything_a_search_for_lost_jobs_is_one_command(
    store: RedisStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.insert([new_job(queue="a"), new_job(queue="b")])
    with counted(store, monkeypatch) as sent:
        assert await store.lost(100) == []
    assert sent == ["astray"]
    [job] = await claim(store, "s", 1, "b")
    assert await store.lost(100) == []
    await store.close_session("s")
    assert [lost.id for lost in await store.lost(100)] == [job.id]


async def test_more_parts_than_one_command_may_look_at_are_searched_page_by_page(
    store: RedisStore, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half-closed one among them is found."""
    client = outside(redis_server.url)
    client.hset(f"{NAMESPACE}:{{a}}:parts", mapping={f"old{number}": "0" for number in range(300)})
    client.hset(f"{NAMESPACE}:session:s", "open", "0")
    with counted(store, monkeypatch) as sent:
        assert await store.lost(100) == []
    assert sent[0] == "astray"
    assert "HSCAN" in sent
    for queue in ("a", "b"):
        assert client.hget(f"{NAMESPACE}:{{{queue}}}:parts", "s") == b"0"


async def test_a_pass_of_retention_asks_for_the_time_only_if_a_session_is_closed(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(store, monkeypatch) as sent:
        assert await store.prune(100) == 0
    assert sent == ["SMEMBERS", "EXISTS", "EXISTS", "prune", "prune", "page"]
    await store.open_session(Session(id="t"))
    await store.close_session("t")
    with counted(store, monkeypatch) as sent:
        assert await store.prune(100) == 0
    assert sent[-2:] == ["page", "now"]
