"""Ten claimers, rescuers and bulk cancels on the same rows: no error reaches user code, nothing is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from holdfast.job import Job, JobId, Key, State
from holdfast.lifecycle import Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, JobQuery, QueueCounts, Store
from holdfast.stores import open_store
from holdfast.stores.memory import MemoryStore
from tests.faults.engines import Database
from tests.faults.history import History, Recorded, check_conservation, check_counts, check_keys, check_versions
from tests.faults.storm import QUEUES, new_job, open_session, storm, tidy_up

SEEN = (
    "insert created",
    "insert existing",
    "cancel cancelled",
    "cancel asked",
    "cancel ended",
    "closed",
    "rescued",
    "succeeded applied",
    "retried applied",
    "released applied",
    "lost applied",
    "replayed applied",
)
"""What must have happened for the test to mean anything."""
SEEN_IN_TIME = ("insert key_conflict", "session closed", "succeeded stale", "replayed key_taken", "lost cancel_asked")
"""What must have happened, too, when it went on for long."""
LONG = 20.0


async def all_jobs(store: Store | Recorded) -> list[Job]:
    found: list[Job] = []
    cursor: JobId | None = None
    while True:
        page = await store.find(JobQuery(limit=1000, cursor=cursor))
        found += page.jobs
        if page.next is None:
            return found
        cursor = page.next


async def test_ten_claimers_rescuers_and_bulk_cancels_on_the_same_rows(
    database: Database, fault_seconds: float
) -> None:
    """On MariaDB this is field bug B26. InnoDB (MySQL bug 111637; Oban's changelog): SKIP LOCKED over a secondary index
    deadlocks with updates by the primary key. Here deadlocks are repeated by the store, none reaches user code, and
    nothing is lost; `test_without_retries_the_deadlock_reaches_user_code` is the control.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    deadlocks = database.deadlocks()
    async with open_store(database.url(), SYSTEM) as store:
        history = storm(database.url(), fault_seconds, seed)
        deadlocks = database.deadlocks() - deadlocks
        print(f"{database.engine}: {fault_seconds:g} s, {len(history.created)} jobs, {len(history.claimed)} claims, ")
        print(f"{deadlocks} deadlocks counted by the server; {dict(sorted(history.seen.items()))}")
        assert history.errors == []
        check_counts(await store.counts(), await all_jobs(store))

        await tidy_up(Recorded(store, history))
        jobs = await all_jobs(store)
        check_conservation(history, jobs)
        check_versions(history, jobs)
        check_keys(jobs)
        check_counts(await store.counts(), jobs)
        assert await store.lost(1) == []
    wanted = SEEN + SEEN_IN_TIME if fault_seconds >= LONG else SEEN
    assert [what for what in wanted if not history.seen[what]] == []


# The checks find what they look for.


@pytest.fixture
async def told() -> tuple[History, list[Job]]:
    """A job that succeeded, and two that were cancelled first and brought back."""
    history = History()
    chance = random.Random(0)
    store = Recorded(MemoryStore(), history)
    session_id = await open_session(store)
    await store.insert([new_job(chance, Key(text, "hash", 10**9)) for text in "abc"])
    [first] = (await store.claim(ClaimRequest(session_id=session_id, queues=QUEUES, limit=1))).jobs
    await store.apply([settle(first, Succeeded(b"1"), RetryPolicy(), SYSTEM.random)])
    await store.request_cancel([job.id for job in await all_jobs(store)])
    await store.apply([replay(job) for job in await all_jobs(store) if job.state is State.CANCELLED])
    await tidy_up(store)
    assert Counter(version for _, version in history.claimed) == {1: 1, 2: 2}
    return history, await all_jobs(store)


async def test_a_lost_a_doubled_and_an_unknown_job_would_be_found(told: tuple[History, list[Job]]) -> None:
    history, jobs = told
    check_conservation(history, jobs)
    for wrong in (jobs[1:], [*jobs, jobs[0]], [*jobs[1:], replace(jobs[0], id=SYSTEM.ids.job_id())]):
        with pytest.raises(AssertionError):
            check_conservation(history, wrong)


async def test_a_job_that_ended_twice_or_not_at_all_would_be_found(told: tuple[History, list[Job]]) -> None:
    history, jobs = told
    with pytest.raises(AssertionError):
        check_conservation(replace(history, ended=[*history.ended, jobs[0].id]), jobs)
    with pytest.raises(AssertionError):
        check_conservation(replace(history, ended=history.ended[1:]), jobs)
    with pytest.raises(AssertionError):
        check_conservation(history, [replace(jobs[0], state=State.READY), *jobs[1:]])


async def test_a_claim_that_two_had_and_a_version_that_went_back_would_be_found(
    told: tuple[History, list[Job]],
) -> None:
    history, jobs = told
    check_versions(history, jobs)
    for claimed in ([*history.claimed, history.claimed[0]], history.claimed[1:]):
        with pytest.raises(AssertionError):
            check_versions(replace(history, claimed=claimed), jobs)
    with pytest.raises(AssertionError):
        check_versions(history, [replace(job, version=job.version - 1) for job in jobs])
    with pytest.raises(AssertionError):
        check_versions(replace(history, settled=[*history.settled, history.settled[0]]), jobs)


async def test_a_key_with_two_holders_and_a_wrong_count_would_be_found(told: tuple[History, list[Job]]) -> None:
    _, jobs = told
    check_keys(jobs)
    with pytest.raises(AssertionError):
        check_keys([*jobs, replace(jobs[0], id=SYSTEM.ids.job_id())])
    by_queue = Counter(job.queue for job in jobs)
    counts = [QueueCounts(queue=queue, succeeded=number) for queue, number in by_queue.items()]
    check_counts(counts, jobs)
    with pytest.raises(AssertionError):
        check_counts(counts, jobs[1:])
