"""Corners of the Redis store: ids that are none, sessions half opened or half closed, queues that come and go."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from holdfast.errors import OutcomeUnknown, SessionClosed, StoreUnavailable
from holdfast.job import SessionId
from holdfast.lifecycle import Applied
from holdfast.ports import SYSTEM
from holdfast.store import CancelAnswer, Checkpoint, Session
from holdfast.stores.redis import RedisStore
from holdfast.stores.redis.dispatch import Batch
from holdfast.testing.suite import Rig
from tests.redis.conftest import NAMESPACE
from tests.redis.helpers import outside
from tests.servers import RedisServer

NO_IDS = ("\udcff", "a\ud800b", "", "no id", "a\tb\n", "\x00", "x" * 100_000)
"""What a URL or a command line may give for an id."""


@pytest.fixture
def client(redis_server: RedisServer) -> Any:
    return outside(redis_server.url)


def part(client: Any, queue: str, session_id: SessionId) -> bytes | None:
    found: bytes | None = client.hget(f"{NAMESPACE}:{{{queue}}}:parts", session_id)
    return found


def registered(client: Any) -> set[str]:
    return {name.decode() for name in client.smembers(f"{NAMESPACE}:queues")}


async def session_in(rig: Rig, *queues: str) -> SessionId:
    session_id = SYSTEM.ids.session_id()
    await rig.store.open_session(Session(id=session_id, queues=queues))
    return session_id


# Ids that are none.


async def test_what_is_no_id_is_answered_as_an_unknown_one(rig: Rig) -> None:
    job_id, *others = await rig.add_many(3)
    async with asyncio.timeout(5):
        for no_id in NO_IDS:
            assert await rig.store.get(no_id) is None
            assert await rig.store.forget([no_id]) == 0
            assert await rig.store.request_cancel([no_id]) == [CancelAnswer.GONE]
        answers = await rig.store.request_cancel([*NO_IDS, job_id, *NO_IDS])
        gone = [CancelAnswer.GONE] * len(NO_IDS)
        assert answers == [*gone, CancelAnswer.CANCELLED, *gone]
        assert await rig.store.forget([*NO_IDS, job_id, *NO_IDS]) == 1
        assert await rig.claim_ids(await rig.session()) == others


async def test_what_cannot_be_sent_does_not_shift_the_replies_to_others(rig: Rig) -> None:
    names = ("x", "y", "z")
    for name in names:
        await rig.store.insert([], checkpoint=Checkpoint("default", name, None, f"value of {name}"))
    async with asyncio.timeout(5):
        for _ in range(2):
            with suppress(ValueError):
                await rig.store.checkpoint("default", "\udcff")
            with suppress(ValueError):
                await rig.store.held("\udcff")
        found = await asyncio.gather(*(rig.store.checkpoint("default", name) for name in names))
    assert found == [f"value of {name}" for name in names]


# Sessions.


async def test_a_session_that_was_opened_again_with_one_more_queue_is_closed_there_too(rig: Rig) -> None:
    session_id = await session_in(rig, "a")
    await rig.store.open_session(Session(id=session_id, queues=("a", "b")))
    await rig.add_many(2, queue="b")
    job = await rig.take(session_id, queue="b")
    assert await rig.store.close_session(session_id)
    assert await rig.ack(job) is Applied.STALE
    with pytest.raises(SessionClosed):
        await rig.claim(session_id, queues=["b"])
    assert await rig.rescue() == [job.id]


async def test_lost_completes_the_close_of_a_session_that_holds_nothing(rig: Rig, client: Any) -> None:
    session_id = await session_in(rig, "a", "b")
    await rig.add(queue="a")
    client.hset(f"{NAMESPACE}:session:{session_id}", "open", "0")  # it was cut off after that
    assert part(client, "a", session_id) == part(client, "b", session_id) == b"1"
    assert await rig.store.lost(100) == []
    assert part(client, "a", session_id) == part(client, "b", session_id) == b"0"
    with pytest.raises(SessionClosed):
        await rig.claim(session_id, queues=["a"])


async def test_a_beat_repairs_what_an_open_session_has_lost_in_a_queue(rig: Rig, client: Any) -> None:
    session_id = await session_in(rig, "default")
    await rig.add(queue="late")
    client.hset(f"{NAMESPACE}:session:{session_id}", "queue:late", "1")  # it was about to join that queue
    assert part(client, "late", session_id) is None
    assert (await rig.beat(session_id)).open
    assert part(client, "late", session_id) == b"1"
    client.hset(f"{NAMESPACE}:{{late}}:parts", session_id, "0")
    await rig.beat(session_id)
    assert part(client, "late", session_id) == b"0"
    with pytest.raises(SessionClosed):
        await rig.claim(session_id, queues=["late"])


async def test_a_beat_that_was_counted_and_then_failed_does_not_say_that_nothing_was_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await session_in(rig, "default")
    assert isinstance(rig.store, RedisStore)
    connections = rig.store._connections
    execute = connections.execute
    epoch = f"{NAMESPACE}:epoch".encode()

    async def without_the_epoch(batch: Batch) -> list[Any]:
        if any(epoch in call.command for call in batch.calls):
            raise StoreUnavailable("the node of the epoch is down. Nothing was written")
        return await execute(batch)

    monkeypatch.setattr(connections, "execute", without_the_epoch)
    with pytest.raises(OutcomeUnknown) as caught:
        await rig.beat(session_id)
    assert "Nothing was written" not in str(caught.value)
    [view] = (await rig.store.sessions()).sessions
    assert view.beat == 1
