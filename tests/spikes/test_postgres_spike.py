"""The port tried on PostgreSQL: is every verb one round trip, and does its guard hold against what runs beside it?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import psycopg
import pytest
from msgspec.structs import replace

from holdfast.errors import SessionClosed
from holdfast.failures import Failure
from holdfast.job import Job, NewJob
from holdfast.lifecycle import Applied, Failed, Lost, Move, Outcome, Released, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, InsertStatus, Session
from tests.servers import PostgresServer
from tests.spikes.postgres_spike import SCHEMA, PostgresSpike

Connect = Callable[[], Awaitable[PostgresSpike]]
FAILURE = Failure(at=0, attempt=1, type="Error", message="no")


@pytest.fixture
async def connect(postgres_server: PostgresServer) -> AsyncIterator[Connect]:
    """Makes further connections to one schema of this test's own."""
    schema = f"spike_{SYSTEM.ids.session_id()}"
    opened: list[psycopg.AsyncConnection] = []

    async def connect() -> PostgresSpike:
        options = f"-c search_path={schema} -c lock_timeout=10s"
        opened.append(await psycopg.AsyncConnection.connect(postgres_server.url, autocommit=True, options=options))
        return PostgresSpike(opened[-1])

    first = await connect()
    await first.connection.execute(f"CREATE SCHEMA {schema}")
    await first.connection.execute(SCHEMA)
    yield connect
    for connection in opened:
        await connection.close()


@pytest.fixture
async def store(connect: Connect) -> PostgresSpike:
    return await connect()


def new(*, priority: int = 5, share: str = "", delay: int = 0, task: str = "t") -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task=task, payload=b"{}", priority=priority, share=share, delay=delay)


async def opened(store: PostgresSpike, jobs: int = 0) -> str:
    session_id = SYSTEM.ids.session_id()
    await store.open_session(Session(id=session_id))
    if jobs:
        await store.insert([new() for _ in range(jobs)])
    return session_id


async def claim(store: PostgresSpike, session_id: str, limit: int = 10, turn: int = 0) -> list[Job]:
    request = ClaimRequest(session_id=session_id, queues=("default",), limit=limit, turn=turn)
    return list((await store.claim(request)).jobs)


def move(job: Job, outcome: Outcome) -> Move:
    return settle(job, outcome, RetryPolicy(), SYSTEM.random)


async def blocked(task: asyncio.Task[object]) -> bool:
    done, _ = await asyncio.wait([task], timeout=0.2)
    return not done


async def count(store: PostgresSpike, table: str) -> int:
    row = await (await store.connection.execute(f"SELECT count(*) FROM {table}")).fetchone()
    assert row is not None
    return int(row[0])


# One after the other.


async def test_claim_and_ack_are_one_round_trip_each_once_the_lanes_are_known(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=5)
    first, *_ = await claim(store, session_id, limit=1)
    before = store.round_trips
    jobs = await claim(store, session_id)
    assert [job.version for job in jobs] == [1] * 4
    assert jobs == sorted(jobs, key=lambda job: (job.run_at, job.id))
    assert await store.apply([move(job, Succeeded()) for job in (first, *jobs)]) == [Applied.APPLIED] * 5
    assert store.round_trips == before + 2
    assert await count(store, "ended") == 5
    assert await count(store, "in_flight") == 0


async def test_inserting_the_same_ids_again_is_existing_in_every_state(store: PostgresSpike) -> None:
    session_id = await opened(store)
    news = [new() for _ in range(3)]
    assert {answer.status for answer in await store.insert(news)} == {InsertStatus.CREATED}
    done, _ = await claim(store, session_id, limit=2)
    await store.apply([move(done, Succeeded())])
    assert {answer.status for answer in await store.insert(news)} == {InsertStatus.EXISTING}


async def test_an_ack_after_close_and_rescue_is_stale(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=1)
    (job,) = await claim(store, session_id)
    assert (await store.beat(session_id)).held == 1
    assert not await store.close_session(session_id, if_beat=0)
    assert await store.close_session(session_id, if_beat=1)
    assert await store.apply([move(job, Succeeded())]) == [Applied.STALE]
    assert await store.lost(10) == await store.lost(10, session_id=session_id) == [job]
    assert await store.apply([move(job, Lost(FAILURE))]) == [Applied.APPLIED]
    assert await store.lost(10) == []
    assert not (await store.beat(session_id)).open
    assert await store.apply([move(job, Succeeded())]) == [Applied.STALE]
    (again,) = await claim(store, await opened(store))
    assert (again.version, again.attempt, again.suspect) == (2, 1, True)
    assert await store.apply([move(job, Succeeded())]) == [Applied.STALE]


async def test_repeated_moves_are_already_and_unknown_jobs_gone(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=2)
    acked, released = await claim(store, session_id)
    moves = [move(acked, Succeeded(b"1")), move(released, Released())]
    assert await store.apply(moves) == [Applied.APPLIED] * 2
    await store.close_session(session_id)
    unknown = replace(moves[0], job_id=SYSTEM.ids.job_id())
    assert await store.apply([*moves, unknown]) == [Applied.ALREADY, Applied.ALREADY, Applied.GONE]


async def test_a_repeated_release_is_stale_once_somebody_claimed_the_job_again(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=1)
    (job,) = await claim(store, session_id)
    assert await store.apply([move(job, Released())]) == [Applied.APPLIED]
    await claim(store, session_id)
    assert await store.apply([move(job, Released())]) == [Applied.STALE]


async def test_stale_rows_do_not_abort_the_others(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=4)
    jobs = await claim(store, session_id)
    moves = [move(job, Succeeded()) for job in jobs]
    moves[1] = replace(moves[1], version=0)
    moves[2] = replace(moves[2], session_id=await opened(store))
    before = store.round_trips
    assert await store.apply(moves) == [Applied.APPLIED, Applied.STALE, Applied.STALE, Applied.APPLIED]
    assert store.round_trips == before + 2
    assert await count(store, "ended") == 2


async def test_a_cancel_that_was_asked_is_answered_and_ack_beats_it(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=2)
    nacked, acked = await claim(store, session_id)
    for job in (nacked, acked):
        await store.ask_to_cancel(job.id)
    assert set((await store.beat(session_id)).cancel) == {nacked.id, acked.id}
    moves = [move(nacked, Failed(FAILURE)), move(acked, Succeeded())]
    assert await store.apply(moves) == [Applied.CANCEL_ASKED, Applied.APPLIED]
    moved = settle(nacked, Failed(FAILURE), RetryPolicy(), SYSTEM.random, cancel_asked=True)
    assert await store.apply([moved]) == [Applied.APPLIED]


async def test_a_retry_waits_for_its_time_on_the_stores_clock(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=1)
    (job,) = await claim(store, session_id)
    await store.apply([move(job, Failed(FAILURE, retry_after=0.3))])
    request = ClaimRequest(session_id=session_id, queues=("default",), limit=1)
    early = await store.claim(request)
    assert early.jobs == ()
    assert early.due_in is not None
    assert 0 < early.due_in <= 300_000
    await asyncio.sleep(early.due_in / 1_000_000)
    (again,) = (await store.claim(request)).jobs
    assert (again.id, again.failures, again.version) == (job.id, 1, 2)


async def test_following_jobs_are_inserted_with_their_move_or_not_at_all(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=2)
    moves = [
        replace(move(job, Succeeded()), then=(new(task="a"), new(task="b"))) for job in await claim(store, session_id)
    ]
    moves[1] = replace(moves[1], version=0)
    before = store.round_trips
    assert await store.apply(moves[:1]) == [Applied.APPLIED]
    assert store.round_trips == before + 1
    assert await store.apply(moves) == [Applied.ALREADY, Applied.STALE]
    assert [job.task for job in await claim(store, session_id)] == ["a", "b"]


# Lanes.


async def test_lanes_are_served_by_priority_and_inverted_every_sixteenth_turn(store: PostgresSpike) -> None:
    session_id = await opened(store)
    await store.insert([new(priority=priority) for priority in (10, 0, 5, 0)])
    jobs = await claim(store, session_id)
    assert [job.priority for job in jobs] == [0, 0, 5, 10]
    await store.apply([move(job, Released()) for job in jobs])
    assert [job.priority for job in await claim(store, session_id, limit=3, turn=15)] == [10, 5, 0]


async def test_a_new_lane_is_served_at_once_for_one_more_round_trip(store: PostgresSpike) -> None:
    session_id = await opened(store, jobs=3)
    await claim(store, session_id, limit=1)
    await store.insert([new(priority=0)])
    before = store.round_trips
    assert [job.priority for job in await claim(store, session_id, limit=2)] == [0, 5]
    assert store.round_trips == before + 2


async def test_shares_divide_a_batch_and_leave_nothing_over(store: PostgresSpike) -> None:
    session_id = await opened(store)
    await store.insert([new(share="a") for _ in range(9)] + [new(share=share) for share in "bcc"])
    assert [job.share for job in await claim(store, session_id, limit=6)] == list("aabcca")
    assert [job.share for job in await claim(store, session_id, limit=6)] == list("aaaaaa")


# Side by side.


async def test_close_waits_for_a_claim_under_way_and_lost_sees_its_jobs(connect: Connect) -> None:
    worker, keeper = await connect(), await connect()
    session_id = await opened(worker, jobs=2)
    async with worker.connection.transaction():
        jobs = await claim(worker, session_id)
        assert (await keeper.beat(session_id)).open  # a beat does not wait
        closing = asyncio.create_task(keeper.close_session(session_id))
        assert await blocked(closing)
        assert await worker.lost(10) == []
    assert await closing
    assert {job.id for job in await keeper.lost(10)} == {job.id for job in jobs}
    assert await keeper.apply([move(job, Lost(FAILURE)) for job in jobs]) == [Applied.APPLIED] * 2


async def test_claims_and_moves_that_meet_a_close_under_way_are_refused(connect: Connect) -> None:
    keeper, claimer, settler = await connect(), await connect(), await connect()
    session_id = await opened(keeper, jobs=2)
    (job,) = await claim(claimer, session_id, limit=1)
    async with keeper.connection.transaction():
        assert await keeper.close_session(session_id)
        claiming = asyncio.create_task(claim(claimer, session_id))
        settling = asyncio.create_task(settler.apply([move(job, Succeeded())]))
        assert await blocked(claiming)
        assert await blocked(settling)
    with pytest.raises(SessionClosed):
        await claiming
    assert await settling == [Applied.STALE]
    assert await keeper.lost(10) == [job]
    assert await count(keeper, "ready") == 1


async def test_whatever_is_claimed_by_the_time_of_the_close_is_all_there_will_be(connect: Connect) -> None:
    claimer, beater, keeper = await connect(), await connect(), await connect()
    await keeper.insert([new() for _ in range(100)])
    for turn in range(60):
        session_id = await opened(keeper)

        async def close(session_id: str = session_id, wait: float = turn / 10_000) -> set[str]:
            await asyncio.sleep(wait)
            assert await keeper.close_session(session_id)
            return {job.id for job in await keeper.lost(100, session_id=session_id)}

        beat, seen, claimed = await asyncio.gather(
            beater.beat(session_id), close(), claim(claimer, session_id), return_exceptions=True
        )
        assert not isinstance(beat, BaseException)
        assert not isinstance(seen, BaseException)
        jobs = [] if isinstance(claimed, SessionClosed) else claimed
        assert not isinstance(jobs, BaseException)
        assert {job.id for job in jobs} == seen
        await keeper.apply([move(job, Lost(FAILURE, started=False)) for job in jobs])


async def test_an_ack_repeated_while_the_first_is_under_way_is_already(connect: Connect) -> None:
    one, other = await connect(), await connect()
    session_id = await opened(one, jobs=1)
    (job,) = await claim(one, session_id)
    async with one.connection.transaction():
        assert await one.apply([move(job, Succeeded())]) == [Applied.APPLIED]
        repeated = asyncio.create_task(other.apply([move(job, Succeeded())]))
        assert await blocked(repeated)
    assert await repeated == [Applied.ALREADY]


async def test_an_ack_that_waits_for_a_cancel_under_way_is_applied(connect: Connect) -> None:
    worker, operator = await connect(), await connect()
    session_id = await opened(worker, jobs=1)
    (job,) = await claim(worker, session_id)
    async with operator.connection.transaction():
        await operator.ask_to_cancel(job.id)
        acking = asyncio.create_task(worker.apply([move(job, Succeeded())]))
        assert await blocked(acking)
    assert await acking == [Applied.APPLIED]
    assert await count(worker, "in_flight") == 0


async def test_a_settle_in_the_handlers_own_transaction_does_not_hold_up_beats(connect: Connect) -> None:
    handler, beater = await connect(), await connect()
    session_id = await opened(handler, jobs=1)
    (job,) = await claim(handler, session_id)
    async with handler.connection.transaction():
        assert await handler.apply([move(job, Succeeded())]) == [Applied.APPLIED]
        assert (await beater.beat(session_id)).held == 1
    assert (await beater.beat(session_id)).held == 0
