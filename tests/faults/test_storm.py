"""Ten claimers, rescuers and bulk cancels on the same rows: no error reaches user code, nothing is lost."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from holdfast.job import Job, Key, State
from holdfast.lifecycle import Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, JobQuery
from holdfast.stores import open_store
from holdfast.stores.memory import MemoryStore
from holdfast.testing.history import History, check
from holdfast.testing.history.events import AnyEvent, Claim, Settle
from holdfast.testing.history.findings import happenings
from tests.faults.engines import Database
from tests.faults.history import Told, judge
from tests.faults.storm import QUEUES, new_job, open_session, storm, tidy_up

SEEN = (
    "enqueue created",
    "enqueue existing",
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
SEEN_IN_TIME = ("enqueue key_conflict", "session closed", "succeeded stale", "replayed key_taken", "lost cancel_asked")
"""What must have happened, too, when it went on for long."""
LONG = 20.0
MOST_STORMS = 6
"""On a machine that has other things to do, one may be over before much has happened."""
PATIENCE = 60.0
"""Seconds that a call may take there: errors are to be those of the engine, not of a machine that is short of time."""
CONSERVATION = 3
"""The invariant that holds at any moment, too, when nobody calls."""


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
    wanted = SEEN + SEEN_IN_TIME if fault_seconds >= LONG else SEEN
    told, missing = Told(), list(wanted)
    async with open_store(database.url(), SYSTEM) as store:
        for number in range(MOST_STORMS):
            told.add(storm(database.url(timeout=PATIENCE), fault_seconds, seed + number))
            history = await told.history(store)
            assert told.errors == []
            assert [str(violation) for violation in check(history) if violation.invariant == CONSERVATION] == []
            seen = told.seen + happenings(history)
            missing = [what for what in wanted if not seen[what]]
            print(f"{database.engine}: {fault_seconds:g} s, {seen['enqueue created']} jobs, {seen['claim']} claims, ")
            print(f"{database.deadlocks() - deadlocks} deadlocks counted by the server; {dict(sorted(seen.items()))}")
            if not missing:
                break
        await tidy_up(told.noted(store))
        assert [str(violation) for violation in judge(await told.history(store))] == []
        assert await store.lost(1) == []
    assert missing == []


# The checks find what they look for.


@pytest.fixture
async def history() -> History:
    """A job that succeeded, and two that were cancelled first and brought back."""
    told = Told()
    chance = random.Random(0)
    plain = MemoryStore()
    store = told.noted(plain)
    session_id = await open_session(store)
    await store.insert([new_job(chance, Key(text, "hash", 10**9)) for text in "abc"])
    [first] = (await store.claim(ClaimRequest(session_id=session_id, queues=QUEUES, limit=1))).jobs
    await store.apply([settle(first, Succeeded(b"1"), RetryPolicy(), SYSTEM.random)])
    jobs = (await store.find(JobQuery())).jobs
    await store.request_cancel([job.id for job in jobs])
    jobs = (await store.find(JobQuery())).jobs
    await store.apply([replay(job) for job in jobs if job.state is State.CANCELLED])
    await tidy_up(store)
    history = await told.history(plain)
    assert Counter(event.version for event in history.events if isinstance(event, Claim)) == {1: 1, 2: 2}
    return history


def with_jobs(history: History, *jobs: Job) -> History:
    return replace(history, ending=replace(history.ending, jobs=jobs))


def with_events(history: History, *events: AnyEvent) -> History:
    return replace(history, events=events)


def found(history: History) -> set[int]:
    return {violation.invariant for violation in judge(history)}


async def test_a_history_in_order_is_found_in_order(history: History) -> None:
    assert judge(history) == []


async def test_a_lost_a_doubled_and_an_unknown_job_would_be_found(history: History) -> None:
    first, *others = history.ending.jobs
    assert 1 in found(with_jobs(history, *others))
    assert 3 in found(with_jobs(history, first, first, *others))
    assert 2 in found(with_jobs(history, first, *others, replace(first, id=SYSTEM.ids.job_id())))


async def test_a_job_that_ended_twice_or_not_at_all_would_be_found(history: History) -> None:
    first, *others = history.ending.jobs
    ends = [event for event in history.events if isinstance(event, Settle) and event.to is State.SUCCEEDED]
    assert 6 in found(with_events(history, *history.events, ends[0]))
    assert 6 in found(with_events(history, *(event for event in history.events if event is not ends[0])))
    assert 1 in found(with_jobs(history, replace(first, state=State.READY), *others))


async def test_a_claim_that_two_had_and_a_version_that_went_back_would_be_found(history: History) -> None:
    claims = [event for event in history.events if isinstance(event, Claim)]
    assert 4 in found(with_events(history, *history.events, claims[0]))
    assert 4 in found(with_events(history, *(event for event in history.events if event is not claims[0])))
    jobs = history.ending.jobs
    assert 4 in found(with_jobs(history, *(replace(job, version=job.version - 1) for job in jobs)))
    settles = [event for event in history.events if isinstance(event, Settle) and event.session_id is not None]
    assert 5 in found(with_events(history, *history.events, settles[0]))


async def test_a_key_with_two_holders_and_a_wrong_count_would_be_found(history: History) -> None:
    first, *others = history.ending.jobs
    assert 13 in found(with_jobs(history, first, *others, replace(first, id=SYSTEM.ids.job_id())))
    assert 3 in found(with_jobs(history, *others))
