"""Lost leases: who finds them, what they cost, and that a poison job cannot go on for ever."""

# ruff: noqa: S101

from __future__ import annotations

from holdfast.failures import decode_history
from holdfast.job import Job, Reason, SessionId, State
from holdfast.lifecycle import Applied, Crashed, Lost
from holdfast.testing.suite.harness import BOOM, QUEUE, Rig


async def _crash(rig: Rig, *, started: bool | None = None) -> Job:
    """Claim the only job, die, be rescued. The job as it then is."""
    session = await rig.session()
    job = await rig.take(session)
    await rig.store.close_session(session)
    assert await rig.rescue(started=started) == [job.id]
    return await rig.get(job.id)


async def test_a_crashed_workers_jobs_are_claimable_again(rig: Rig) -> None:
    """No work in flight is lost: another worker gets it, with a new lease."""
    ids = await rig.add_many(3)
    session = await rig.session()
    old = await rig.claim(session, 3)
    await rig.store.close_session(session)
    assert sorted(await rig.rescue()) == sorted(ids)
    heir = await rig.session()
    newer = await rig.claim(heir, 3)
    assert [job.id for job in newer] == ids
    assert [job.version for job in newer] == [job.version + 1 for job in old]


async def test_a_job_in_flight_stays_with_an_open_session(rig: Rig) -> None:
    """However much time passes: a lease ends with its session, not by a clock."""
    job_id = await rig.add()
    job = await rig.take()
    await rig.wait(10)
    assert await rig.store.lost(1000) == []
    assert await rig.state(job_id) is State.IN_FLIGHT
    assert await rig.ack(job) is Applied.APPLIED


async def test_closing_a_session_gives_nothing_back_by_itself(rig: Rig) -> None:
    """Its jobs stay in flight until a keeper has decided about them."""
    job_id = await rig.add()
    session = await rig.session()
    await rig.take(session)
    await rig.store.close_session(session)
    assert await rig.state(job_id) is State.IN_FLIGHT
    assert await rig.claim(await rig.session()) == []


async def test_lost_jobs_are_those_without_an_open_session(rig: Rig) -> None:
    """As they are, ready for a verdict; nothing of open sessions, nothing that waits, nothing that ended."""
    await rig.add_many(4)
    dead, alive = await rig.session(), await rig.session()
    lost = await rig.claim(dead, 2)
    await rig.ack(lost[0])
    await rig.take(alive)
    assert await rig.store.lost(1000) == []
    await rig.store.close_session(dead)
    assert await rig.store.lost(1000) == [lost[1]]


async def test_a_job_in_flight_without_any_session_is_lost_too(rig: Rig) -> None:
    """Rescue looks at what is, not at what happened: a session that vanished is as good as closed."""
    job_id = await rig.add()
    session = await rig.session()
    job = await rig.take(session)
    await rig.harness.erase_session(session)
    assert [lost.id for lost in await rig.store.lost(1000)] == [job_id]
    assert await rig.ack(job) is Applied.STALE
    assert await rig.store.note(job.lease, b"x") is Applied.STALE
    assert await rig.rescue() == [job_id]
    assert (await rig.take()).id == job_id


async def test_lost_is_limited_and_goes_on(rig: Rig) -> None:
    """A thousand lost jobs are rescued page by page."""
    ids = await rig.add_many(5)
    session = await rig.session()
    await rig.claim(session, 5)
    await rig.store.close_session(session)
    found: list[str] = []
    for size in (2, 2, 1, 0):
        page = await rig.store.lost(2)
        assert len(page) == size
        found += [job.id for job in page]
        await rig.store.apply([rig.move(job, Lost(BOOM)) for job in page])
    assert sorted(found) == sorted(ids)


async def test_lost_by_session(rig: Rig) -> None:
    """A supervisor asks for what its own child left behind."""
    await rig.add_many(3)
    one, two, alive = [await rig.session() for _ in range(3)]
    jobs: dict[SessionId, Job] = {session: await rig.take(session) for session in (one, two, alive)}
    for session in (one, two):
        await rig.store.close_session(session)
    for session in (one, two):
        assert await rig.store.lost(9, session_id=session) == [jobs[session]]
    assert await rig.store.lost(9, session_id=alive) == []
    assert await rig.store.lost(9, session_id="nobody") == []
    assert await rig.rescue(session_id=one) == [jobs[one].id]
    assert await rig.store.lost(9) == [jobs[two]]


async def test_a_rescued_job_keeps_its_place(rig: Rig) -> None:
    """It does not wait behind everything that came after it."""
    first, second = await rig.add_many(2)
    session = await rig.session()
    await rig.take(session)
    await rig.store.close_session(session)
    await rig.rescue()
    assert await rig.claim_ids(await rig.session()) == [first, second]


async def test_a_job_that_had_not_started_loses_nothing(rig: Rig) -> None:
    """A supervisor knows which jobs its child had only fetched."""
    await rig.add()
    job = await _crash(rig, started=False)
    assert (job.attempt, job.crashes, job.suspect, job.failure_history) == (0, 0, False, b"")


async def test_a_job_that_had_started_is_suspect(rig: Rig) -> None:
    """Its first crash only makes it suspect: neighbours may have been the cause."""
    await rig.add()
    assert (await _crash(rig, started=True)).suspect
    job = await _crash(rig, started=None)
    assert (job.suspect, job.failures, job.attempt) == (True, 0, 2)
    assert len(decode_history(job.failure_history)) == 2
    assert (await rig.take()).suspect


async def test_only_a_crash_alone_counts(rig: Rig) -> None:
    """The crash that made it suspect is not counted; those that follow, when it ran alone, are: 3 fail it."""
    job_id = await rig.add()
    for crashes in (0, 1, 2):
        job = await _crash(rig, started=True)
        assert (job.state, job.crashes) == (State.READY, crashes)
    job = await _crash(rig, started=True)
    assert (job.id, job.state, job.reason, job.crashes) == (job_id, State.FAILED, Reason.CRASHED, 3)
    assert (job.attempt, job.failures) == (4, 0)


async def test_the_crash_of_its_own_process_counts_at_once(rig: Rig) -> None:
    """The worker lives and says so itself, with the lease: 3 fail it, and the history tells each."""
    job_id = await rig.add()
    session = await rig.session()
    for crashes in (1, 2):
        assert await rig.settle(await rig.take(session), Crashed(BOOM)) is Applied.APPLIED
        job = await rig.get(job_id)
        assert (job.state, job.reason, job.crashes, job.suspect) == (State.READY, Reason.CRASHED, crashes, True)
        await rig.wait(1)
    assert await rig.settle(await rig.take(session), Crashed(BOOM)) is Applied.APPLIED
    job = await rig.get(job_id)
    assert (job.state, job.reason, job.crashes, job.failures) == (State.FAILED, Reason.CRASHED, 3, 0)
    assert len(decode_history(job.failure_history)) == 3


async def test_crashes_and_retries_are_counted_apart(rig: Rig) -> None:
    """A crash uses no retry."""
    await rig.add(max_retries=0)
    job = await _crash(rig, started=True)
    assert (job.state, job.failures) == (State.READY, 0)


async def test_a_finished_attempt_clears_the_suspicion(rig: Rig) -> None:
    """A suspect that ran to its end, even to an error, is no suspect any more; a release proves nothing."""
    await rig.add()
    await _crash(rig, started=True)
    session = await rig.session()
    await rig.release(await rig.take(session))
    job = await rig.take(session)
    assert job.suspect
    await rig.nack(job, retry_after=0)
    assert not (await rig.get(job.id)).suspect


async def test_two_keepers_rescue_a_job_once(rig: Rig) -> None:
    """Both see it, one moves it, and the other is told so."""
    await rig.add_many(3)
    session = await rig.session()
    await rig.claim(session, 3)
    await rig.store.close_session(session)
    async with rig.harness.second() as store:
        moves = [rig.move(job, Lost(BOOM, started=True)) for job in await rig.store.lost(9)]
        others = [rig.move(job, Lost(BOOM, started=True)) for job in await store.lost(9)]
        assert await rig.store.apply(moves) == [Applied.APPLIED] * 3
        assert await store.apply(others) == [Applied.ALREADY] * 3
    assert {job.attempt for job in await rig.dump()} == {1}


async def test_rescue_goes_over_all_queues(rig: Rig) -> None:
    """A session may hold jobs of several queues, paused ones included."""
    await rig.add()
    await rig.add(queue="other")
    session = await rig.session()
    ids = await rig.claim_ids(session, queues=[QUEUE, "other"])
    await rig.store.set_paused("other", True)
    await rig.store.close_session(session)
    assert sorted(await rig.rescue()) == sorted(ids)
