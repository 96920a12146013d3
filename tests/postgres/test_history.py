"""The rings of ended jobs: what lands where, what pruning counts, and that the tallies stay right whatever happens."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator

import pytest

from holdfast.job import Job, State
from holdfast.lifecycle import Applied, Failed, Outcome, Released, Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import InsertStatus
from holdfast.stores.postgres import PostgresStore
from holdfast.testing.suite.harness import BOOM
from tests.postgres.held_snapshot import slowest_calls
from tests.postgres.helpers import (
    DAY,
    HOUR,
    MINUTE,
    Database,
    Travel,
    claim,
    finish,
    new_job,
    new_jobs,
    open_session,
    raw,
)

SECOND = 1_000_000


@pytest.fixture
def travel(database: Database) -> Iterator[Travel]:
    travel = database.travelling()
    travel.home()
    yield travel
    travel.home()


async def ended(store: PostgresStore, *retentions: int, state: State = State.SUCCEEDED) -> list[Job]:
    """A job for each retention, brought to that end. As they then are."""
    new = [new_job(retention=retention) for retention in retentions]
    await store.insert(new)
    if state is State.CANCELLED:
        assert await store.request_cancel([job.id for job in new]) == ["cancelled"] * len(new)
    else:
        outcome = Succeeded() if state is State.SUCCEEDED else Failed(BOOM, permanent=True)
        session = await open_session(store)
        jobs = await claim(store, session, limit=len(new))
        assert [job.id for job in jobs] == [job.id for job in new]
        assert await finish(store, jobs, outcome) == [Applied.APPLIED] * len(new)
    found = [await store.get(job.id) for job in new]
    assert all(job and job.state is state for job in found)
    return [job for job in found if job]


def slots(database: Database) -> dict[str, int]:
    """In which slot each job of the rings lies."""
    return {str(job_id): slot for job_id, slot in database.sql("SELECT id, slot FROM {ns}_history")}


async def require_exact_counts(store: PostgresStore, database: Database) -> None:
    """What `counts` adds up is what there is."""
    rows = database.sql("SELECT queue, state, count(*) FROM {ns}_jobs GROUP BY 1, 2")
    there = {(queue, state): count for queue, state, count in rows}
    told: dict[tuple[str, str], int] = {}
    for counts in await store.counts():
        told[counts.queue, "ready"] = counts.ready + counts.scheduled
        for state in ("in_flight", "succeeded", "failed", "cancelled"):
            told[counts.queue, state] = getattr(counts, state)
    assert {place: count for place, count in told.items() if count} == there


# Where they land.


async def test_each_retention_has_its_ring(store: PostgresStore, database: Database, travel: Travel) -> None:
    for wait in (0, 9 * MINUTE, 12 * MINUTE, HOUR, 23 * HOUR, DAY, 8 * DAY, 11 * DAY):
        travel.by(wait)
        retentions = (0, MINUTE - 1, MINUTE, HOUR, HOUR + 1, DAY, 8 * DAY, 8 * DAY + 1, 100 * DAY)
        jobs = await ended(store, *retentions)
        found = slots(database)
        for job in jobs:
            assert job.ended_at is not None
            by_ten_minutes, by_day = job.ended_at // (10 * MINUTE) % 8, 8 + job.ended_at // DAY % 10
            if MINUTE <= job.retention <= HOUR:
                assert found[job.id] == by_ten_minutes
            elif HOUR < job.retention <= 8 * DAY:
                assert found[job.id] == by_day
            else:
                assert job.id not in found
        assert database.value("SELECT count(*) FROM {ns}_kept WHERE expires_at = ended_at + retention") % 4 == 0
    await require_exact_counts(store, database)


async def test_dead_letters_are_kept_apart_and_cancelled_jobs_are_not(store: PostgresStore, database: Database) -> None:
    [dead] = await ended(store, DAY, state=State.FAILED)
    [cancelled] = await ended(store, DAY, state=State.CANCELLED)
    assert slots(database).keys() == {cancelled.id}
    assert database.sql("SELECT id::text, expires_at FROM {ns}_kept") == [(dead.id, None)]
    await require_exact_counts(store, database)


# Pruning.


async def test_the_mark_moves_on_and_every_job_is_counted_once(
    store: PostgresStore, database: Database, travel: Travel
) -> None:
    short = await ended(store, *[MINUTE] * 5, *[0] * 2)
    long = await ended(store, *[2 * HOUR] * 4)
    await ended(store, DAY, state=State.FAILED)
    assert await store.prune(100) == 2  # those without a retention
    travel.by(2 * MINUTE)
    assert [await store.get(job.id) is not None for job in short[:5]] == [True] * 5  # until they are pruned
    assert await store.prune(3) == 3
    assert sum([await store.get(job.id) is not None for job in short[:5]]) == 2
    await require_exact_counts(store, database)
    assert await store.prune(100) == 2
    assert await store.prune(100) == 0
    await require_exact_counts(store, database)
    travel.by(2 * HOUR)
    assert await store.prune(3) == 3
    assert await store.prune(3) == 1
    assert [await store.get(job.id) for job in (*short, *long)] == [None] * 11
    [counts] = await store.counts()
    assert (counts.succeeded, counts.failed) == (0, 1)


async def test_a_slot_in_which_everything_was_pruned_is_emptied(
    store: PostgresStore, database: Database, travel: Travel
) -> None:
    await ended(store, *[MINUTE] * 20)
    travel.by(20 * MINUTE)
    await ended(store, *[MINUTE] * 3)
    await store.prune(100)
    assert database.number_of("history") == 23  # the mark has not gone beyond the first slot yet
    travel.by(2 * MINUTE)
    assert await store.prune(100) == 3
    assert database.number_of("history") == 3
    await require_exact_counts(store, database)
    travel.by(10 * MINUTE)
    [kept] = await ended(store, HOUR)
    assert await store.prune(100) == 0
    assert await store.get(kept.id) == kept


async def test_a_slot_is_used_again_while_pruned_rows_still_lie_in_it(
    store: PostgresStore, database: Database, travel: Travel
) -> None:
    """As when a reader kept it from being emptied for a whole turn of the ring."""
    with raw(database.url) as reader:
        reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        reader.execute(database.text("SELECT count(*) FROM {ns}_history"))
        old = await ended(store, *[MINUTE] * 5)
        travel.by(20 * MINUTE)
        await ended(store, MINUTE)
        travel.by(HOUR)
        assert await store.prune(100) == 6
        young = await ended(store, *[MINUTE] * 4)
        assert {slots(database)[job.id] for job in young} == {slots(database)[job.id] for job in old}
        assert [await store.get(job.id) for job in old] == [None] * 5
        assert [await store.get(job.id) for job in young] == young
        await require_exact_counts(store, database)
    assert await store.prune(100) == 0
    assert [await store.get(job.id) for job in young] == young
    await require_exact_counts(store, database)


async def test_an_id_whose_row_still_lies_there_may_be_used_again(
    store: PostgresStore, database: Database, travel: Travel
) -> None:
    [job] = await ended(store, MINUTE)
    assert (await store.insert([new_job(id=job.id)]))[0].status is InsertStatus.EXISTING
    travel.by(2 * MINUTE)
    assert (await store.insert([new_job(id=job.id)]))[0].status is InsertStatus.EXISTING  # as long as it can be read
    assert await store.prune(100) == 1
    assert database.number_of("history") == 1
    again = new_job(id=job.id, retention=MINUTE)
    assert (await store.insert([again]))[0].status is InsertStatus.CREATED
    [claimed] = await claim(store, await open_session(store))
    assert claimed.version == 1
    await finish(store, [claimed])
    assert database.number_of("history") == 2
    second = await store.get(job.id)
    assert second is not None
    await require_exact_counts(store, database)
    assert await store.apply([replay(second)]) == [Applied.APPLIED]
    await require_exact_counts(store, database)
    [claimed] = await claim(store, await open_session(store))
    await finish(store, [claimed])
    assert await store.forget([job.id]) == 1
    assert await store.get(job.id) is None
    await require_exact_counts(store, database)
    assert await store.prune(100) == 0


# The tallies.


async def test_tallies_stay_right_through_everything(store: PostgresStore, database: Database, travel: Travel) -> None:
    """A long random walk, with the same steps every time."""
    chance = random.Random(5)
    session = await open_session(store)
    done: Counter[str] = Counter()
    for _ in range(150):
        page = [str(row[0]) for row in database.sql("SELECT id FROM {ns}_jobs ORDER BY md5(id::text) LIMIT 4")]
        step = chance.choice(["insert", "finish", "fail", "release", "cancel", "forget", "replay", "prune", "wait"])
        done[step] += 1
        if step == "insert":
            retentions = [0, MINUTE, HOUR, DAY, 9 * DAY]
            await store.insert([new_job(queue=chance.choice("ab"), retention=r) for r in retentions * 2])
        elif step in ("finish", "fail", "release"):
            for queue in "ab":
                jobs = await claim(store, session, limit=5, queue=queue)
                outcomes: dict[str, Outcome] = {
                    "finish": Succeeded(),
                    "fail": Failed(BOOM, permanent=True),
                    "release": Released(),
                }
                await finish(store, jobs, outcomes[step])
        elif step == "cancel":
            await store.request_cancel(page)
        elif step == "forget":
            await store.forget(page)
        elif step == "replay":
            found = [await store.get(job_id) for job_id in page]
            await store.apply([replay(job) for job in found if job and job.ended_at])
        elif step == "prune":
            await store.prune(chance.choice([1, 5, 100]))
        else:
            travel.by(chance.choice([SECOND, MINUTE, 12 * MINUTE, 25 * HOUR]))
        await require_exact_counts(store, database)
    assert min(done.values()) > 2
    travel.by(20 * DAY)
    while await store.prune(1000):
        pass
    await store.prune(1000)
    assert database.value("SELECT count(*) FROM {ns}_jobs WHERE state IN ('succeeded', 'cancelled')") == 0
    await require_exact_counts(store, database)


async def test_tallies_are_added_up_from_time_to_time(store: PostgresStore, database: Database) -> None:
    await store.insert(new_jobs(40, retention=DAY))
    for job in await claim(store, await open_session(store), limit=40):
        await finish(store, [job])
    assert database.number_of("tallies") == 40
    database.sql("INSERT INTO {ns}_tallies SELECT 8, 'default', 'succeeded', 0 FROM generate_series(1, 1000)")
    assert await store.prune(10) == 0
    assert database.number_of("tallies") == 1
    await require_exact_counts(store, database)


@pytest.mark.parametrize("verb", ["forget", "replay"])
async def test_a_job_that_is_taken_away_while_it_is_pruned_is_counted_once(
    store: PostgresStore, database: Database, travel: Travel, verb: str
) -> None:
    """The one who takes it away has not committed when the other prunes."""
    [job, other] = await ended(store, MINUTE, MINUTE)
    with raw(database.url) as connection:
        connection.execute("BEGIN")
        if verb == "forget":
            connection.execute(database.text("SELECT {ns}_forget(ARRAY[%s::uuid])"), (job.id,))
        else:
            assert store.apply_on(connection, [replay(job)]) == [Applied.APPLIED]
        travel.by(2 * MINUTE)
        first = await store.prune(100)
        connection.execute("COMMIT")
    second = await store.prune(100)
    assert first + second == 1
    assert await store.get(other.id) is None
    await require_exact_counts(store, database)


async def test_a_job_that_is_pruned_while_it_is_taken_away_is_counted_once(
    store: PostgresStore, database: Database, travel: Travel
) -> None:
    """The other way round: whoever is late finds it gone."""
    [job] = await ended(store, MINUTE)
    travel.by(2 * MINUTE)
    with raw(database.url) as keeper:
        keeper.execute("BEGIN")
        keeper.execute(database.text("SELECT {ns}_prune(100)"))
        late = asyncio.gather(store.forget([job.id]), store.apply([replay(job)]))
        await asyncio.sleep(0.2)
        keeper.execute("COMMIT")
    forgotten, replayed = await late
    assert (forgotten, replayed) == (0, [Applied.GONE])
    await require_exact_counts(store, database)


async def test_adding_up_and_emptying_at_once_loses_no_count(
    store: PostgresStore, database: Database, travel: Travel
) -> None:
    await ended(store, *[MINUTE] * 5)
    travel.by(20 * MINUTE)
    await ended(store, MINUTE)
    travel.by(5 * MINUTE)
    await ended(store, *[HOUR] * 7)
    database.sql("SELECT {ns}_prune(100)")
    [(slot,)] = database.sql("SELECT {ns}_pruned_slots()")
    with raw(database.url) as adding:
        # Somebody has added up a part of the slot's tallies, and not committed.
        adding.execute("BEGIN")
        adding.execute(
            database.text(
                """WITH gone AS (DELETE FROM {ns}_tallies WHERE slot = %s AND jobs > 0 RETURNING *)
                   INSERT INTO {ns}_tallies SELECT slot, queue, state, sum(jobs) FROM gone GROUP BY 1, 2, 3"""
            ),
            (slot,),
        )
        emptying = asyncio.ensure_future(store.prune(100))
        await asyncio.sleep(0.02)
        adding.execute("COMMIT")
        await emptying
    await store.prune(100)
    assert database.value("SELECT count(*) FROM {ns}_history WHERE slot = %s", slot) == 0
    await require_exact_counts(store, database)


async def test_a_settlement_that_commits_after_its_retention(
    store: PostgresStore, database: Database, travel: Travel
) -> None:
    """In a transaction that was open for longer than the job was to be kept."""
    await store.insert([new_job(retention=MINUTE)])
    [job] = await claim(store, await open_session(store))
    success = settle(job, Succeeded(), RetryPolicy(), SYSTEM.random)
    with raw(database.url) as connection:
        connection.execute("BEGIN")
        assert store.apply_on(connection, [success]) == [Applied.APPLIED]
        travel.by(SECOND)
        await ended(store, MINUTE)
        travel.by(5 * MINUTE)
        assert await store.prune(100) == 1
        connection.execute("COMMIT")
    assert await store.get(job.id) is None
    travel.by(20 * MINUTE)
    await ended(store, MINUTE)
    travel.by(2 * MINUTE)
    await store.prune(100)
    assert database.number_of("history") == 1
    await require_exact_counts(store, database)


# The clock.


@pytest.mark.parametrize("back", [10 * SECOND, HOUR, 3 * DAY])
async def test_the_clock_is_set_back(store: PostgresStore, database: Database, travel: Travel, back: int) -> None:
    """Nothing is lost, nothing is pruned before its time, and the counts are right again soon."""
    pruned = await ended(store, *[MINUTE] * 3)
    travel.by(10 * MINUTE)
    assert await store.prune(100) == 3
    travel.by(-back)
    waiting = await ended(store, *[MINUTE] * 2, DAY)
    await store.insert(new_jobs(1))
    assert len(await claim(store, await open_session(store))) == 1
    for _ in range(2):
        await store.prune(100)
        assert [await store.get(job.id) for job in waiting] == waiting
        await require_exact_counts(store, database)
    travel.by(2 * MINUTE)
    for _ in range(2):
        await store.prune(100)
    assert [await store.get(job.id) is None for job in waiting] == [True, True, False]
    await require_exact_counts(store, database)
    travel.by(back + DAY + HOUR)
    while await store.prune(100):
        pass
    assert [await store.get(job.id) for job in (*pruned, *waiting)] == [None] * 6
    await require_exact_counts(store, database)


async def test_a_small_step_back_leaves_no_trace(store: PostgresStore, database: Database, travel: Travel) -> None:
    await ended(store, *[MINUTE] * 3)
    travel.by(MINUTE + SECOND)
    assert await store.prune(100) == 3
    travel.by(-2 * SECOND)
    assert await store.prune(100) == 0
    travel.by(10 * SECOND)
    assert await store.prune(100) == 0
    await require_exact_counts(store, database)


# Readers.


async def test_a_long_reader_delays_nobody(store: PostgresStore, database: Database, travel: Travel) -> None:
    """It has read the whole history and stays open. The ring turns: what ends lands in slots that are to be emptied."""
    times, pruned = await slowest_calls(database, 3, now_and_then=lambda: travel.by(10 * MINUTE))
    print(f"{len(times)} calls, {pruned} prunes, the slowest calls {[round(1000 * took) for took in times[:5]]} ms")
    assert len(times) > 50
    assert pruned > 5
    assert times[2] < 0.2  # two may be the machine's
    await require_exact_counts(store, database)


async def test_the_test_of_the_long_reader_notices(store: PostgresStore, database: Database, travel: Travel) -> None:
    """Negative control: somebody who waits longer for a slot makes those wait who write to it."""
    name = database.text("{ns}_empty_slot(smallint)").decode()
    database.sql(f"ALTER FUNCTION {name} SET lock_timeout = '1s'")
    try:
        times, _ = await slowest_calls(database, 6, now_and_then=lambda: travel.by(10 * MINUTE))
    finally:
        database.sql(f"ALTER FUNCTION {name} SET lock_timeout = '10ms'")
    assert times[2] > 0.2
