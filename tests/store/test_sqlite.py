"""The SQLite store passes the conformance suite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.failures import Failure, decode_history
from holdfast.job import Key, enqueued
from holdfast.lifecycle import Applied, Failed, Released, Succeeded
from holdfast.testing.suite import *  # noqa: F403
from holdfast.testing.suite import Harness, Rig
from tests.store.harnesses import SqliteHarness


@pytest.fixture
def harness(tmp_path: Path) -> Harness:
    return SqliteHarness(tmp_path)


async def test_an_insert_of_another_client_wakes_a_waiter(rig: Rig) -> None:
    """As between processes: the two clients know nothing of each other but the file."""
    async with rig.harness.second() as store:
        wakeups = rig.store.wakeups(["default"])
        heard = asyncio.ensure_future(anext(wakeups))
        await asyncio.sleep(0)
        await store.insert([rig.new()])
        await asyncio.wait_for(heard, 10)
        await wakeups.aclose()  # type: ignore[attr-defined]


async def test_a_job_is_counted_in_its_own_queue_whatever_the_move_says(rig: Rig) -> None:
    """The random model found the counts astray after an id had been forgotten and used again in another queue."""
    await rig.add()
    job = await rig.take(await rig.session())
    assert await rig.store.apply([replace(rig.move(job, Succeeded()), queue="elsewhere")]) == [Applied.APPLIED]
    assert [(counts.queue, counts.succeeded) for counts in await rig.store.counts()] == [("default", 1)]


async def test_one_bad_move_among_many_good_ones_spoils_none(rig: Rig) -> None:
    """Those that ended well are settled together if every guard holds, and judged one by one if one does not."""
    added = await rig.store.insert([rig.new() for _ in range(9)])
    session = await rig.session()
    jobs = list(await rig.claim(session, limit=9))
    assert {job.id for job in jobs} == {answer.job_id for answer in added}
    moves = [rig.move(job, Succeeded(b"%d" % number)) for number, job in enumerate(jobs)]
    moves[3] = replace(moves[3], version=moves[3].version + 1)
    moves[5] = rig.move(jobs[5], Released())
    moves[7] = replace(moves[7], job_id="00000000-0000-7000-8000-000000000000")
    expected = [Applied.APPLIED] * 9
    expected[3], expected[7] = Applied.STALE, Applied.GONE
    assert await rig.store.apply(moves) == expected
    repeated = [Applied.ALREADY] * 9
    repeated[3], repeated[7] = Applied.STALE, Applied.GONE
    assert await rig.store.apply(moves) == repeated
    results = [job.result if (job := await rig.store.get(one.id)) else None for one in jobs]
    assert results == [b"0", b"1", b"2", None, b"4", None, b"6", None, b"8"]


async def test_good_and_other_endings_in_one_call_are_answered_in_order(rig: Rig) -> None:
    await rig.store.insert([rig.new() for _ in range(6)])
    jobs = [*await rig.claim(await rig.session(), limit=6)]
    moves = [rig.move(job, Succeeded() if number % 2 else Released()) for number, job in enumerate(jobs)]
    stranger = replace(moves[2], session_id="nobody")
    assert await rig.store.apply([*moves[:2], stranger, *moves[3:]]) == [
        Applied.APPLIED,
        Applied.APPLIED,
        Applied.STALE,
        Applied.APPLIED,
        Applied.APPLIED,
        Applied.APPLIED,
    ]
    states = [job.state if (job := await rig.store.get(one.id)) else None for one in jobs]
    assert states == ["ready", "succeeded", "in_flight", "succeeded", "ready", "succeeded"]


async def test_a_claim_brings_long_payloads_and_histories_beside_short_ones(rig: Rig) -> None:
    """What is short comes in one text for all jobs of the lane; what is not is fetched."""
    payloads = [b"{}", b'{"a":"%s"}' % (b"x" * 9000), '{"ä":"\u20ac\u2028""}'.encode(), b'{"a":"%s"}' % (b"y" * 4090)]
    await rig.store.insert([rig.new(payload=payload, correlation_id='c"\u20ac') for payload in payloads])
    session = await rig.session()
    first = list(await rig.claim(session, limit=9))
    assert [job.payload for job in first] == payloads
    assert {job.correlation_id for job in first} == {'c"\u20ac'}
    failure = Failure(1, 1, "Error", "because")
    await rig.store.apply([rig.move(job, Failed(failure, retry_after=0)) for job in first])
    again = list(await rig.claim(session, limit=9))
    assert sorted(job.payload for job in again) == sorted(payloads)
    assert [[one.message for one in decode_history(job.failure_history)] for job in again] == [["because"]] * 4
    assert again == [await rig.store.get(job.id) for job in again]


async def test_jobs_that_are_alike_and_others_are_stored_as_they_are(rig: Rig) -> None:
    """Runs of jobs that have nearly everything in common are written together."""
    new = [rig.new(task="a", payload=b'{"n":%d}' % number, delay=number) for number in range(5)]
    new += [rig.new(task="b", share="s", priority=7, max_retries=2, correlation_id="c")]
    new += [rig.new(task="a", key=Key(f"k{number}", "hash", 1_000_000)) for number in range(3)]
    new += [rig.new(task="a", retention=60_000_000) for _ in range(3)]
    assert {answer.status for answer in await rig.store.insert([*new, *new[:2]])} == {"created", "existing"}
    for one in new:
        job = await rig.store.get(one.id)
        assert job is not None
        assert job == enqueued(one, job.created_at)
