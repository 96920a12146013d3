"""Corners of claiming: low jobs of busy queues, a claim under way at the end, releases and claims that fail."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import pytest

from holdfast import JobHandle, OutcomeUnknown, StoreError, StoreUnavailable, WorkerSettings
from holdfast.events import PartFailed, ignore
from holdfast.job import Job, NewJob
from holdfast.lanes import INVERTED_EVERY
from holdfast.lifecycle import Applied, Move
from holdfast.ports import SYSTEM
from holdfast.store import Claimed, ClaimRequest, Session, Store, all_sessions
from holdfast.stores.memory import MemoryStore
from holdfast.worker.board import Board
from holdfast.worker.claimer import Claimer
from holdfast.worker.heart import Heart
from holdfast.worker.holding import Holding
from tests.worker.bench import PATIENCE, Bench

URGENT, LOW = 0, 10


def new_job(queue: str = "default", priority: int = URGENT) -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}", queue=queue, priority=priority)


# Turns.


class BusyRunner:
    """Stands for the runner: it always wants ten jobs, and for each urgent one that it gets, another one comes."""

    wanted = 10

    def __init__(self, store: MemoryStore, queues: Sequence[str]) -> None:
        self._store = store
        self._waiting = set(queues)
        self.most = 100 * INVERTED_EVERY * len(queues)
        self.claims = 0
        self.served: dict[str, int] = {}
        """By queue, with which claim its low job came."""
        self.claimer: Claimer | None = None
        for queue in queues:
            store.insert_blocking([new_job(queue, LOW), *(new_job(queue) for _ in range(2 * self.wanted))])

    def feed(self, jobs: Iterable[Job]) -> None:
        self.claims += 1
        for job in jobs:
            if job.priority == LOW:
                self.served[job.queue] = self.claims
                self._waiting.discard(job.queue)
            else:
                self._store.insert_blocking([new_job(job.queue)])
        assert self.claimer is not None
        if not self._waiting or self.claims == self.most:
            self.claimer.stop()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8, 16])
async def test_a_low_job_of_every_queue_is_served_soon_though_all_queues_are_busy(count: int) -> None:
    queues = tuple(f"queue-{number:02}" for number in range(count))
    store = MemoryStore()
    runner = BusyRunner(store, queues)
    runner.claimer = Claimer(
        store=store,
        queues=queues,
        runner=cast(Any, runner),
        settler=cast(Any, []),
        holding=Holding(),
        poll=5.0,
        introduce=lambda session_id: Session(id=session_id, queues=queues),
        announce=lambda session_id: None,
        opened=lambda session_id: None,
        ports=SYSTEM,
        listener=ignore,
    )
    async with asyncio.timeout(PATIENCE):
        await runner.claimer.run()
    assert set(runner.served) == set(queues)
    assert max(runner.served.values()) <= INVERTED_EVERY * count


# The end.


class SlowToAnswer:
    """A store whose claims are carried out, and answered much too late."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.carried_out = asyncio.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def claim(self, request: ClaimRequest) -> Claimed:
        claimed = await self._inner.claim(request)
        if claimed.jobs:
            self.carried_out.set()
            await asyncio.sleep(3600)
        return claimed


@pytest.mark.parametrize("how", ["stopped twice", "no grace"])
async def test_what_a_claim_took_whose_answer_nobody_waited_for_comes_back_as_it_was(bench: Bench, how: str) -> None:
    inner = bench.store()
    store = SlowToAnswer(inner)
    app = bench.app(cast(Any, store))
    ran: Counter[int] = Counter()

    @app.task
    async def work(number: int) -> None:
        ran[number] += 1

    jobs: list[JobHandle[None]] = await app.aenqueue_many([work.job(number) for number in range(3)])
    grace = 0.0 if how == "no grace" else 3600.0
    service = app.worker_service(WorkerSettings(concurrency=3, grace=grace, keepers=False, lease_ttl=0.5))
    working = asyncio.create_task(service.run())
    async with asyncio.timeout(PATIENCE):
        await store.carried_out.wait()
        service.stop()
        if how == "stopped twice":
            service.stop_now()
        await working
    for handle in jobs:
        job = await inner.get(handle.id)
        assert job is not None
        assert (job.state, job.attempt, job.failures, job.crashes, job.suspect) == ("ready", 0, 0, 0, False)
        assert job.failure_history == b""
    assert not ran
    assert [view.open for view in await all_sessions(inner)] == [False]


# A release that fails.


class RefusesToRelease:
    """A store to which a session's claims can be given back only after the first try."""

    def __init__(self, inner: Store, error: StoreError) -> None:
        self._inner = inner
        self._error: StoreError | None = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        if (error := self._error) is not None:
            self._error = None
            raise error
        return await self._inner.apply(moves)


async def give_back_what_was_never_seen(store: Store, error: StoreError) -> tuple[Job, Holding]:
    """The event loop is blocked, the heart asks the store what is held, and cannot give it back."""
    session_id, holding = "session", Holding()
    await store.insert([new_job()])
    await store.open_session(Session(id=session_id, queues=("default",)))
    [job] = (await store.claim(ClaimRequest(session_id=session_id, queues=("default",), limit=1))).jobs
    heart = Heart(
        cast(Store, RefusesToRelease(store, error)),
        ttl=1.0,
        holding=holding,
        board=Board.private(1),
        loop=asyncio.get_running_loop(),
        lost=lambda session_id: None,
        cancel=lambda job_ids: None,
        reconcile=lambda: None,
        on_loop=tuple,
        ports=SYSTEM,
        listener=ignore,
    )
    heart.session_id = session_id
    assert await heart._give_back_unstarted() == 1
    return job, holding


async def test_what_the_heart_could_not_give_back_is_found_when_the_worker_asks_what_it_holds(bench: Bench) -> None:
    """The reply of the claim is lost, too: nobody else will ever name that job."""
    store = bench.app().store
    job, holding = await give_back_what_was_never_seen(store, StoreUnavailable("somebody tripped over the cable"))
    held = (await store.beat("session")).held
    assert len(holding) != held == 1  # by this the heart sees that something is wrong
    assert holding.reconcile(await store.held("session"), holding.known()) == [job]


async def test_what_the_heart_could_not_give_back_may_still_start_when_its_claim_is_answered(bench: Bench) -> None:
    job, holding = await give_back_what_was_never_seen(bench.app().store, StoreUnavailable("it was not there"))
    assert holding.take([job]) == [job]
    assert holding.start([job]) == [job]


async def test_what_the_heart_may_have_given_back_never_starts(bench: Bench) -> None:
    job, holding = await give_back_what_was_never_seen(bench.app().store, OutcomeUnknown("the reply got lost"))
    assert holding.take([job]) == []
    assert holding.start([job]) == []


# Claims that fail.


def pauses_after_failed_claims(bench: Bench, answered: Callable[[int], bool], count: int) -> list[float]:
    """How long a worker paused after each of so many claims that failed. `answered` says which do not, by number."""
    store = bench.broken_store()

    def fail(request: ClaimRequest) -> None:
        if not answered(store.claims):
            raise StoreUnavailable("somebody tripped over the cable")

    store.before_claim = fail
    app = bench.app(store)

    @app.task
    async def work() -> None:
        """Never enqueued."""

    bench.work(app, poll=0.01)
    bench.heard.wait_for(PartFailed, lambda event: event.part == "claimer", count=count)
    return [event.retry_in for event in bench.heard.of(PartFailed, lambda event: event.part == "claimer")][:count]


def test_a_claimer_that_was_answered_since_it_failed_pauses_no_longer_than_the_first_time(bench: Bench) -> None:
    pauses = pauses_after_failed_claims(bench, lambda number: number % 2 == 0, 6)
    assert max(pauses) <= 0.15


def test_a_claimer_that_is_never_answered_pauses_longer_and_longer(bench: Bench) -> None:
    pauses = pauses_after_failed_claims(bench, lambda number: False, 4)
    assert pauses[-1] >= 0.4
