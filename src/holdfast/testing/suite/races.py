"""Many callers at once: tasks, clients, threads and event loops. Whatever the interleaving, one wins."""

# ruff: noqa: S101

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from msgspec.structs import replace

from holdfast.errors import SessionClosed
from holdfast.job import Job, State
from holdfast.lifecycle import Applied, Failed, Lost, Outcome, Released, Succeeded
from holdfast.store import CancelAnswer, DepthLimit, InsertStatus
from holdfast.testing.suite.harness import BOOM, QUEUE, Rig

T = TypeVar("T")

MANY = 16
SOON = 10.0
"""Seconds. Only a store that never answers takes as long."""


async def _at_once(calls: list[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Every call on a thread and an event loop of its own, all let go at the same moment."""
    barrier = threading.Barrier(len(calls))

    def run(call: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async def main() -> T:
            barrier.wait(SOON)
            return await call()

        return asyncio.run(main())

    loop = asyncio.get_running_loop()
    answers: list[asyncio.Future[T]] = [loop.create_future() for _ in calls]

    def thread(call: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]) -> None:
        try:
            loop.call_soon_threadsafe(answer.set_result, run(call))
        except BaseException as error:
            loop.call_soon_threadsafe(answer.set_exception, error)

    threads = [threading.Thread(target=thread, args=pair) for pair in zip(calls, answers, strict=True)]
    for started in threads:
        started.start()
    try:
        return await asyncio.gather(*answers)
    finally:
        for started in threads:
            await asyncio.to_thread(started.join)


async def test_many_callers_with_one_key_create_one_job(rig: Rig) -> None:
    """All are told the same job, and exactly one created it."""
    async with rig.harness.second() as store:
        answers = await asyncio.gather(
            *(client.insert([rig.new(key=rig.key())]) for client in (rig.store, store) for _ in range(MANY))
        )
    assert len({answer.job_id for [answer] in answers}) == 1
    assert Counter(answer.status for [answer] in answers) == {
        InsertStatus.CREATED: 1,
        InsertStatus.EXISTING: 2 * MANY - 1,
    }
    assert len(await rig.dump()) == 1


async def test_many_threads_with_one_key_create_one_job(rig: Rig) -> None:
    """The blocking call from many threads, half of them with another payload."""

    def insert(payload_hash: str) -> Callable[[], Coroutine[Any, Any, InsertStatus]]:
        async def call() -> InsertStatus:
            [answer] = rig.store.insert_blocking([rig.new(key=rig.key("k", payload_hash))])
            return answer.status

        return call

    statuses = Counter(await _at_once([insert(hashed) for hashed in ("a", "b") * (MANY // 2)]))
    assert statuses == {
        InsertStatus.CREATED: 1,
        InsertStatus.EXISTING: MANY // 2 - 1,
        InsertStatus.KEY_CONFLICT: MANY // 2,
    }
    assert len(await rig.dump()) == 1


async def test_many_inserts_of_one_id_create_one_job(rig: Rig) -> None:
    """A caller that repeats itself in panic still has one job."""
    new = rig.new()
    async with rig.harness.second() as store:
        answers = await asyncio.gather(
            *(client.insert([new]) for client in (rig.store, store) for _ in range(MANY)),
        )
    assert Counter(answer.status for [answer] in answers)[InsertStatus.CREATED] == 1
    assert len(await rig.dump()) == 1


async def test_many_claimers_never_get_the_same_job(rig: Rig) -> None:
    """Every job goes to exactly one of many sessions on two clients."""
    ids = await rig.add_many(5 * MANY)
    sessions = [await rig.session() for _ in range(MANY)]
    async with rig.harness.second() as store:
        clients = [rig, rig.using(store)]
        claims = await asyncio.gather(
            *(clients[turn % 2].claim(session, 1 + turn % 5, turn=turn) for turn, session in enumerate(sessions * 4))
        )
    claimed = [job for jobs in claims for job in jobs]
    assert sorted(job.id for job in claimed) == sorted(ids)
    assert {job.version for job in claimed} == {1}
    for session in sessions:
        mine = {job.id for job in claimed if job.session_id == session}
        assert {job.id for job in await rig.store.held(session)} == mine


async def test_many_threads_and_loops_share_a_store(rig: Rig) -> None:
    """Whole lives of jobs on many threads, each with an event loop of its own, on one store object."""

    def worker(number: int) -> Callable[[], Coroutine[Any, Any, int]]:
        async def live() -> int:
            session = await rig.session()
            if number % 2:
                rig.store.insert_blocking([rig.new() for _ in range(10)])
            else:
                await rig.add_many(10)
            done = 0
            while jobs := await rig.claim(session, 3):
                answers = await rig.store.apply([rig.move(job, Succeeded()) for job in jobs])
                assert answers == [Applied.APPLIED] * len(jobs)
                done += len(jobs)
            assert (await rig.beat(session)).held == 0
            return done

        return live

    done = await _at_once([worker(number) for number in range(8)])
    left = await rig.claim(await rig.session(), 1000)
    assert sum(done) + len(left) == 80
    [counts] = await rig.store.counts()
    assert (counts.succeeded, counts.in_flight) == (sum(done), len(left))


async def test_a_claim_races_with_the_close_of_its_session(rig: Rig) -> None:
    """Either the claim is refused, or what it got is found as lost: never in flight unnoticed, never settled."""
    for attempt in range(10):
        job_id = await rig.add(queue=f"q{attempt}")
        session = await rig.session()
        async with rig.harness.second() as store:
            claim = rig.claim(session, queues=[f"q{attempt}"])
            calls: list[Awaitable[object]] = [claim, store.close_session(session)]
            claimed, closed = await asyncio.gather(*(calls if attempt % 2 else calls[::-1]), return_exceptions=True)
            if not attempt % 2:
                claimed, closed = closed, claimed
        assert closed is True
        if isinstance(claimed, SessionClosed):
            assert await rig.state(job_id) is State.READY
            assert await rig.store.lost(9) == []
        else:
            assert isinstance(claimed, list)
            [job] = claimed
            assert await rig.ack(job) is Applied.STALE
            assert await rig.rescue() == [job_id]
        await rig.store.request_cancel([job_id])


async def test_an_ack_races_with_the_close_of_its_session(rig: Rig) -> None:
    """Either it was in time, or the job is lost and runs again: never both, never neither."""
    for _ in range(10):
        job_id = await rig.add()
        session = await rig.session()
        job = await rig.take(session)
        async with rig.harness.second() as store:
            acked, closed = await asyncio.gather(rig.ack(job), store.close_session(session))
        assert closed
        if acked is Applied.APPLIED:
            assert await rig.store.lost(9) == []
            assert await rig.state(job_id) is State.SUCCEEDED
        else:
            assert acked is Applied.STALE
            assert await rig.rescue() == [job_id]
            await rig.store.request_cancel([job_id])


async def test_a_beat_races_with_a_conditional_close(rig: Rig) -> None:
    """The beat came first and the keeper failed, or the session is closed and the beat says so."""
    for _ in range(10):
        session = await rig.session()
        async with rig.harness.second() as store:
            beat, closed = await asyncio.gather(rig.beat(session), store.close_session(session, if_beat=0))
        assert beat.open is not closed


async def test_many_outcomes_of_one_claim_have_one_winner(rig: Rig) -> None:
    """Ack, nack and release of the same lease at once: one is applied, the others are stale."""
    await rig.add()
    job = await rig.take()
    outcomes: list[Outcome] = [Succeeded(b"r"), Failed(BOOM, permanent=True), Released()]
    async with rig.harness.second() as store:
        clients = [rig, rig.using(store)]
        answers = await asyncio.gather(
            *(clients[number % 2].settle(job, outcomes[number % 3]) for number in range(12)),
        )
    tally = Counter(answers)
    assert tally[Applied.APPLIED] == 1
    assert tally[Applied.ALREADY] == 3
    assert tally[Applied.STALE] == 8


async def test_many_keepers_rescue_each_job_once(rig: Rig) -> None:
    """Each lost job costs one attempt, however many keepers run."""
    await rig.add_many(MANY)
    session = await rig.session()
    await rig.claim(session, MANY)
    await rig.store.close_session(session)

    async def keep(client: Rig) -> Counter[Applied]:
        jobs = await client.store.lost(1000)
        return Counter(await client.store.apply([rig.move(job, Lost(BOOM, started=True)) for job in jobs]))

    async with rig.harness.second() as store:
        tallies = await asyncio.gather(*(keep(client) for client in (rig, rig.using(store)) for _ in range(4)))
    assert sum(tally[Applied.APPLIED] for tally in tallies) == MANY
    assert {(job.attempt, job.state) for job in await rig.dump()} == {(1, State.READY)}


async def test_a_cancel_races_with_a_claim(rig: Rig) -> None:
    """The job is cancelled, or its holder is told: never claimed and cancelled."""
    for _ in range(10):
        job_id = await rig.add()
        session = await rig.session()
        async with rig.harness.second() as store:
            jobs, [answer] = await asyncio.gather(rig.claim(session), store.request_cancel([job_id]))
        if answer is CancelAnswer.CANCELLED:
            assert jobs == []
            assert await rig.state(job_id) is State.CANCELLED
        else:
            assert answer is CancelAnswer.ASKED
            assert (await rig.beat(session)).cancel == (job_id,)
            assert await rig.settle(jobs[0], Released(), cancel_asked=True) is Applied.APPLIED


async def test_concurrent_inserts_overshoot_a_limit_at_most_by_what_they_insert(rig: Rig) -> None:
    """The limit holds for every later caller."""
    limits = {QUEUE: DepthLimit(max_depth=5)}
    async with rig.harness.second() as store:
        answers = await asyncio.gather(
            *(client.insert([rig.new()], limits=limits) for client in (rig.store, store) for _ in range(MANY))
        )
    created = sum(answer.status is InsertStatus.CREATED for [answer] in answers)
    assert 5 <= created <= 5 + 2 * MANY
    assert len(await rig.dump()) == created
    [late] = await rig.store.insert([rig.new()], limits=limits)
    assert late.status is InsertStatus.FULL


# Wake-ups.


async def _woken_by(rig: Rig, queue: str, act: Callable[[], Awaitable[object]]) -> None:
    """Somebody who waits for the queue hears of what `act` does."""
    wakeups: AsyncIterator[None] = rig.store.wakeups([queue])
    heard = asyncio.ensure_future(anext(wakeups))
    await asyncio.sleep(0)  # the waiter is there
    await act()
    await asyncio.wait_for(heard, SOON)
    await wakeups.aclose()  # type: ignore[attr-defined]


async def test_an_insert_wakes_a_waiter(rig: Rig) -> None:
    """Somebody who waits for the queue need not poll for a new job."""
    await _woken_by(rig, QUEUE, lambda: rig.store.insert([rig.new()]))


async def test_a_blocking_insert_wakes_a_waiter(rig: Rig) -> None:
    """From another thread."""
    await _woken_by(rig, QUEUE, lambda: asyncio.to_thread(rig.store.insert_blocking, [rig.new()]))


async def test_a_job_given_back_wakes_a_waiter(rig: Rig) -> None:
    """A release is as good as a new job."""
    await rig.add()
    job = await rig.take()
    await _woken_by(rig, QUEUE, lambda: rig.release(job))


async def test_a_following_job_wakes_a_waiter(rig: Rig) -> None:
    """In its own queue, which need not be that of the job that it follows."""
    await rig.add()
    job: Job = await rig.take()
    move = replace(rig.move(job, Succeeded()), then=(rig.new(queue="next"),))
    await _woken_by(rig, "next", lambda: rig.apply(move))


async def test_a_resumed_queue_wakes_a_waiter(rig: Rig) -> None:
    """What waited behind the pause is claimable now."""
    await rig.store.set_paused(QUEUE, True)
    await rig.add()
    await _woken_by(rig, QUEUE, lambda: rig.store.set_paused(QUEUE, False))


async def test_several_waiters_are_all_woken(rig: Rig) -> None:
    """A hint is for everybody who waits for the queue, and none is lost between two waits."""
    waiters = [rig.store.wakeups([QUEUE, f"q{number}"]) for number in range(3)]
    heard = [asyncio.ensure_future(anext(waiter)) for waiter in waiters]
    await asyncio.sleep(0)
    await rig.add()
    await asyncio.wait_for(asyncio.gather(*heard), SOON)
    await rig.add()
    await asyncio.wait_for(asyncio.gather(*(anext(waiter) for waiter in waiters)), SOON)
    for waiter in waiters:
        await waiter.aclose()  # type: ignore[attr-defined]
