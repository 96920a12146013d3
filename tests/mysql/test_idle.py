"""What a worker without work asks of the server, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.errors import SessionClosed
from holdfast.store import ClaimRequest
from holdfast.stores.mysql import MysqlStore
from holdfast.stores.mysql.pace import Pace, Paces
from holdfast.stores.mysql.pool import AsyncPooledLine
from holdfast.testing.clock import ManualClock
from tests.mysql.helpers import claim, connect, done, new_job, new_jobs, open_session

Sent = list[str]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    """Every statement that goes to the server."""
    seen: Sent = []
    send = AsyncPooledLine.send

    async def noting(line: AsyncPooledLine, statements: Sequence[str]) -> Any:
        seen.extend(statements)
        return await send(line, statements)

    monkeypatch.setattr(AsyncPooledLine, "send", noting)
    return seen


@pytest.fixture
async def idle(store: MysqlStore, sent: Sent) -> MysqlStore:
    """A store whose last claim has found nothing."""
    await open_session(store)
    assert await claim(store) == []
    sent.clear()
    return store


async def test_a_claim_that_finds_nothing_is_one_statement(idle: MysqlStore, sent: Sent) -> None:
    assert await claim(idle) == []
    assert len(sent) == 1


async def test_what_comes_in_is_claimed_all_the_same(idle: MysqlStore) -> None:
    await idle.insert([new_job(share="a"), new_job(priority=3)])
    assert len(await claim(idle)) == 2


async def test_a_look_tells_when_the_first_job_is_due(idle: MysqlStore, sent: Sent) -> None:
    await idle.insert([new_job(delay=90_000_000, share="a"), new_job(delay=60_000_000, share="b")])
    assert await claim(idle) == []
    sent.clear()
    claimed = await idle.claim(ClaimRequest(session_id="s", queues=("default",), limit=1))
    assert claimed.jobs == ()
    assert 50_000_000 < (claimed.due_in or 0) <= 60_000_000
    assert len(sent) == 1


async def test_a_look_leaves_paused_queues_alone(idle: MysqlStore, sent: Sent) -> None:
    await idle.set_paused("default", True)
    await idle.insert(new_jobs(1))
    sent.clear()
    assert await claim(idle) == []
    assert len(sent) == 1
    await idle.set_paused("default", False)
    assert len(await claim(idle)) == 1


async def test_a_look_of_a_closed_session_is_refused(idle: MysqlStore) -> None:
    await idle.close_session("s")
    with pytest.raises(SessionClosed):
        await claim(idle)


async def test_a_beat_is_one_statement(idle: MysqlStore, sent: Sent) -> None:
    await idle.insert(new_jobs(3))
    jobs = await claim(idle)
    sent.clear()
    assert await idle.beat("s") == (beat := await idle.beat("s"))
    assert (beat.open, beat.held, beat.cancel) == (True, 3, ())
    assert not (await idle.beat("nobody")).open
    assert len(sent) == 3
    await idle.request_cancel([jobs[1].id])
    beat = await idle.beat("s")
    assert (beat.held, beat.cancel) == (3, (jobs[1].id,))


async def test_a_beat_does_not_wait_for_jobs_that_somebody_has_locked(idle: MysqlStore, url: str) -> None:
    await idle.insert(new_jobs(2))
    jobs = await claim(idle)
    with connect(url, autocommit=False) as connection:
        assert idle.apply_on(connection, done(jobs)) == ["applied"] * 2
        assert (await asyncio.wait_for(idle.beat("s"), 1)).held == 2
        connection.rollback()


async def test_pruning_nothing_is_one_statement_that_only_reads(idle: MysqlStore, sent: Sent) -> None:
    await idle.insert(new_jobs(2))
    for job in await claim(idle):
        await idle.apply(done([job]))  # two rows in the totals: too few to sum them up
    sent.clear()
    assert await idle.prune(100) == 0
    [look] = sent
    assert look.startswith("SELECT")
    assert "FOR UPDATE" not in look


def looks(pace: Pace, clock: ManualClock, seconds: int, *, found: bool = False) -> list[int]:
    """At which seconds somebody who asks at every tick looks."""
    when = []
    for second in range(1, seconds + 1):
        clock.advance(1)
        if pace.is_time():
            when.append(second)
            pace.looked(found=found)
    return when


def test_looks_in_vain_become_rarer() -> None:
    clock = ManualClock()
    assert looks(Paces(clock).of(["a"]), clock, 30) == [1, *range(2, 31, 2)]


def test_a_look_that_finds_something_makes_them_frequent_again() -> None:
    clock = ManualClock()
    pace = Paces(clock).of(["a", "b"])
    looks(pace, clock, 30)
    pace.looked(found=True)
    assert looks(pace, clock, 4, found=True) == [1, 2, 3, 4]


def test_each_set_of_queues_has_its_own_pace() -> None:
    clock = ManualClock()
    paces = Paces(clock)
    paces.of(["a"]).looked(found=False)
    assert not paces.of(["b"]).quiet
    assert paces.of(["b", "a"]) is paces.of(["a", "b"])
