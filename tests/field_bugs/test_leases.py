"""Field bugs about leases: who holds a job, for how long, by which clock, and who is found when his time is over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest

from holdfast import Holdfast, WorkerSettings, current
from holdfast.events import Event, JobsRescued, SessionRescued
from holdfast.job import Job, JobId, NewJob, SessionId, State
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Applied, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import MICROSECONDS, SYSTEM, Ports, SystemClock
from holdfast.store import ClaimRequest, Session, Store, all_sessions
from tests.field_bugs.places import EVERY_ENGINE, SHARED_BY_PROCESSES, MakePlace, Place, Played, on
from tests.worker.programs import DEADLINE, throughout

TTL = 1.0
LONG = 10 * TTL
MORE_THAN_A_PAGE = 250
"""The keepers take a hundred lost jobs, and look at a hundred sessions, at once."""


class SkewedClock(SystemClock):
    """The clock on the wall of a machine that nobody has set."""

    def __init__(self, hours: int) -> None:
        self._ahead = hours * 3600 * MICROSECONDS

    def now(self) -> int:
        return super().now() + self._ahead


def new_jobs(count: int) -> list[NewJob]:
    return [NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(count)]


async def open_session(store: Store) -> SessionId:
    session_id = SYSTEM.ids.session_id()
    await store.open_session(Session(id=session_id, queues=("default",)))
    return session_id


async def claim(store: Store, session_id: SessionId, limit: int = 1000) -> Sequence[Job]:
    return (await store.claim(ClaimRequest(session_id=session_id, queues=("default",), limit=limit))).jobs


# A job that takes ten TTLs.


class LongRun(msgspec.Struct):
    attempts: list[int]
    job: Job
    took: float
    rescues: list[Event]
    """What the other worker's keepers did."""


def run_for_long(place: Place) -> LongRun:
    """One worker runs it. Another has free hands, keepers, and a clock that is an hour ahead."""
    settings = WorkerSettings(lease_ttl=TTL, concurrency=2)
    attempts: list[int] = []
    rescues: list[Event] = []
    begun, finish = threading.Event(), threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, SessionRescued | JobsRescued):
            rescues.append(event)

    with (
        Holdfast(place.store()) as app,
        Holdfast(place.store(), ports=Ports(clock=SkewedClock(1)), on_event=listen) as other,
    ):

        @app.task(timeout=None)
        def long() -> str:
            attempts.append(current().attempt)
            begun.set()
            finish.wait(DEADLINE)
            return "done"

        other.task(name=long.name)(long.spec.function)
        with app.start_worker(settings):
            job = long.enqueue()
            assert begun.wait(DEADLINE)
            began = time.monotonic()
            with other.start_worker(settings):
                throughout(LONG, lambda: len(attempts) == 1, "it runs once")
                finish.set()
                assert job.result(timeout=DEADLINE) == "done"
        details = job.refresh().details
    assert details is not None
    return LongRun(attempts, details, time.monotonic() - began, rescues)


@pytest.fixture(scope="module", autouse=True)
def long_run(places: MakePlace) -> Played[LongRun]:
    """It takes its time while the tests run that stand before those that ask for it."""
    return places.ask(EVERY_ENGINE, run_for_long)


# Clocks that differ.


@on(*SHARED_BY_PROCESSES)
async def test_b25_a_keeper_whose_clock_is_wrong_takes_no_lease_from_the_living(place: Place) -> None:
    """MLflow (PR 25199), Occurrent (PR 664): leases were compared with the clock of whoever looked, and a replica whose
    clock was ahead stole those of the living.

    Here one keeper is an hour ahead, another behind, and the worker that they look at beats. It is left alone for more
    than a TTL; and when it beats no more, it is found, whatever the clocks say. The control: by its own clock, the one
    that is ahead would have closed the session at its first look.
    """
    ahead, behind = SkewedClock(1), SkewedClock(-1)
    async with place.store() as store, asyncio.timeout(DEADLINE):
        await store.insert(new_jobs(1))
        session_id = await open_session(store)
        [job] = await claim(store, session_id)
        keepers = [Rescue(store, ports=Ports(clock=clock), ttl=TTL / 2) for clock in (ahead, behind)]
        began = time.monotonic()
        while time.monotonic() < began + TTL:
            await store.beat(session_id)
            assert [await keeper.one_pass() for keeper in keepers] == [0, 0]
            [view] = [view for view in await all_sessions(store) if view.id == session_id]
            assert view.open
            assert ahead.now() - view.beat_at > TTL * MICROSECONDS
            await asyncio.sleep(TTL / 20)
        while not any([await keeper.one_pass() for keeper in keepers]):  # noqa: ASYNC110  time has to pass
            await asyncio.sleep(TTL / 20)
        assert await store.apply([settle(job, Succeeded(b"1"), RetryPolicy(), SYSTEM.random)]) == [Applied.STALE]


# What is claimed is held from the first moment on.


@on(*EVERY_ENGINE)
async def test_b14_a_job_is_never_seen_without_its_lease(place: Place) -> None:
    """Bull (#356, #258): a job was moved to `active` first and locked afterwards; a stall check in between took it for
    stalled, and it ran twice.

    Here four claim while a fifth asks for what is lost, as fast as he can, through a connection of his own. He never
    finds anything, and each job is claimed once. Were claim and lease two steps, he would find those in between.
    """
    claimed: Counter[JobId] = Counter()
    looks = found = 0
    async with place.store() as store, place.store() as other:
        await store.insert(new_jobs(400))

        async def take() -> None:
            session_id = await open_session(store)
            while jobs := await claim(store, session_id, 5):
                claimed.update(job.id for job in jobs)
                assert {job.session_id for job in jobs} == {session_id}
                await asyncio.sleep(0)

        async def look() -> None:
            nonlocal looks, found
            while claimed.total() < 400:
                found += len(await other.lost(100))
                looks += 1
                await asyncio.sleep(0)

        await asyncio.gather(look(), *(take() for _ in range(4)))
        assert set(claimed.values()) == {1}
        assert found == 0
        assert looks > 0
        # The control: as soon as a session is closed, the same question finds what it holds.
        for view in await all_sessions(store):
            await store.close_session(view.id)
        assert len(await other.lost(1000)) == 400


# Those who are dead are found, whoever stands before them.


@on(*EVERY_ENGINE)
async def test_b07_the_jobs_of_a_worker_that_was_removed_are_found(place: Place) -> None:
    """Procrastinate (#1518): the row of a dead worker was removed before its jobs had been looked for, and nobody saw
    them again. Oban (#862): a new worker with the name of the dead one hid its orphans.

    Here the lease is on the job. A closed session is not removed while it holds one; and each start has an id of its
    own, so a worker on the same host with the same pid is somebody else: the job of the first is lost, that of the
    second is not. (The suite adds a session that vanished: `test_a_job_in_flight_without_any_session_is_lost_too`.)
    """
    async with place.store() as store:
        first, second = new_jobs(2)
        await store.insert([first])
        sessions = [Session(id=SYSTEM.ids.session_id(), host="pod-0", pid=1, queues=("default",)) for _ in range(2)]
        await store.open_session(sessions[0])
        [held] = await claim(store, sessions[0].id)
        assert held.id == first.id
        await store.open_session(sessions[1])  # the pod is back
        await store.insert([second])
        [running] = await claim(store, sessions[1].id)
        await store.close_session(sessions[0].id)
        await store.prune(1000)
        assert [job.id for job in await store.lost(1000)] == [first.id]
        assert await Rescue(store, ports=SYSTEM, ttl=TTL).one_pass() == 1
        [again] = await claim(store, sessions[1].id)
        assert (again.id, again.version) == (first.id, held.version + 1)
        moves = [settle(job, Succeeded(b"1"), RetryPolicy(), SYSTEM.random) for job in (running, again)]
        assert await store.apply(moves) == [Applied.APPLIED] * 2
        await store.prune(1000)
        assert await store.lost(1000) == []


@on(*EVERY_ENGINE)
async def test_b09_a_lost_job_is_found_behind_any_number_of_living_ones(place: Place) -> None:
    """River (PR #1331, #1288, #1318): the rescuer took a page of the oldest jobs that were running; if none of them
    could be rescued, it never came to those behind, and jobs without a timeout were ignored altogether.

    Here more jobs than two pages are in flight under more living sessions than one page, all older than the one that
    is lost. One pass brings back that one and no other. A page of the oldest would hold none that is lost.
    """
    async with place.store() as store:
        living = [await open_session(store) for _ in range(MORE_THAN_A_PAGE // 2)]
        await store.insert(new_jobs(MORE_THAN_A_PAGE))
        for session_id in living:
            assert len(await claim(store, session_id, 2)) == 2
        [lost] = new_jobs(1)
        await store.insert([lost])
        dead = await open_session(store)
        assert [job.id for job in await claim(store, dead)] == [lost.id]
        await store.close_session(dead)

        assert await Rescue(store, ports=SYSTEM, ttl=TTL * 600).one_pass() == 1
        job = await store.get(lost.id)
        assert job is not None
        assert job.state is State.READY
        counted = sum(count.in_flight for count in await store.counts())
        assert counted == MORE_THAN_A_PAGE


# What became of the job that takes ten TTLs.


@on(*EVERY_ENGINE)
def test_b01_a_job_longer_than_the_visibility_timeout_runs_once(engine: str, long_run: Played[LongRun]) -> None:
    """Celery (#5935, #5306, #6229) on Redis hands a job out again when the visibility timeout is over, though it still
    runs: one more copy with every timeout.

    Here the heartbeat keeps the lease: a job of ten TTLs runs once, beside a worker that has nothing to do. Without
    the heartbeat it would run again after one TTL (`test_without_the_heartbeat_...` in `tests/worker` shows it).
    """
    found = long_run[engine]
    assert found.attempts == [1]
    assert (found.job.state, found.job.version, found.job.result) == (State.SUCCEEDED, 1, b'"done"')
    assert found.took >= LONG


@on(*EVERY_ENGINE)
def test_b08_no_rescue_goes_by_the_age_of_a_job_alone(engine: str, long_run: Played[LongRun]) -> None:
    """Oban's Lifeline (hexpm PR 1825) rescues whatever has been executing for so long, dead or not: live jobs ran two
    or three times a night.

    Here the job has been in flight for ten TTLs, and the keepers of the other worker closed no session and brought
    back no job. A rule by age would have brought it back nine times.
    """
    found = long_run[engine]
    assert found.job.ended_at is not None
    assert found.job.claimed_at is not None
    assert found.job.ended_at - found.job.claimed_at > 9 * TTL * MICROSECONDS
    assert found.rescues == []
