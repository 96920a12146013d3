"""Enqueuing: the typed handle, its options, keys, limits and batches, blocking and not, on memory and SQLite."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from holdfast import PAYLOAD, Holdfast, QueueSettings, Settings, State, Task
from holdfast.batches import PreparedJob
from holdfast.client import JobHandle
from holdfast.errors import (
    ForeignConnection,
    InvalidOption,
    InvalidPayload,
    KeyConflict,
    OutcomeUnknown,
    PartlyRefused,
    PayloadTooLarge,
    QueueClosed,
    QueueFull,
    StoreUnavailable,
    UnknownPriority,
    UnknownTask,
)
from holdfast.events import Event, JobEnqueued, QueueDeep
from holdfast.job import Job, NewJob, Reason
from holdfast.ports import SYSTEM
from holdfast.store import Inserted
from holdfast.stores.memory import MemoryStore
from tests.client.conftest import MakeApp
from tests.client.helpers import BROKEN_FOR_GOOD, finish, succeed, take, totals


@pytest.fixture
def welcome(app: Holdfast) -> Task[[int, str], str]:
    @app.task(queue="mail", priority="high", max_retries=7, share="eu", version="2", retention=60)
    async def welcome(user_id: int, locale: str = "en") -> str:
        return f"{user_id}:{locale}"

    return welcome


@pytest.fixture
def double(app: Holdfast) -> Task[[int], int]:
    @app.task
    def double(n: int) -> int:
        return 2 * n

    return double


def stored(app: Holdfast, job_id: str) -> Job:
    details = app.get(job_id).details
    assert details is not None
    return details


# One job.


def test_enqueue_blocking(app: Holdfast, welcome: Any, events: list[Event]) -> None:
    job = welcome.enqueue(42)
    assert job.created
    assert job.state is State.READY
    details = stored(app, job.id)
    assert (details.task, details.task_version, details.queue, details.share) == ("welcome", "2", "mail", "eu")
    assert (details.priority, details.max_retries, details.retention) == (0, 7, 60_000_000)
    assert (details.payload, details.state, details.reason) == (b'{"user_id":42}', State.READY, Reason.ENQUEUED)
    assert (details.key, details.correlation_id, details.attempt) == (None, None, 0)
    assert events == [JobEnqueued(job.id, "mail", "welcome", True)]
    assert repr(job) == f"<Job {job.id} welcome ready>"


async def test_enqueue_in_an_event_loop(app: Holdfast, welcome: Any, events: list[Event]) -> None:
    job = await welcome.aenqueue(42, locale="de")
    assert job.created
    claimed = await take(app.store, "mail")
    assert claimed.id == job.id
    assert claimed.payload == b'{"user_id":42,"locale":"de"}'
    assert events == [JobEnqueued(job.id, "mail", "welcome", True)]


def test_calling_a_task_runs_it_here(app: Holdfast, double: Any, welcome: Any) -> None:
    assert double(4) == 8
    assert asyncio.run(welcome(1)) == "1:en"
    assert totals(app) == {}
    assert repr(double) == "<Task double on queue default>"
    assert (double.name, double.spec.is_async, welcome.spec.is_async) == ("double", False, True)


def test_the_settings_decide_what_nobody_said(make_app: MakeApp) -> None:
    app = make_app(
        settings=Settings.parse(
            {"queues": {"default_priority": "low"}, "jobs": {"max_retries": 1, "retention": 90, "key_window": 30}}
        )
    )

    @app.task(unique=True)
    def plain() -> None: ...

    details = stored(app, plain.enqueue().id)
    assert (details.priority, details.max_retries, details.retention) == (10, 1, 90_000_000)
    assert details.key is not None
    assert details.key.window == 30_000_000
    zeros = stored(app, plain.options(priority=0, max_retries=0, retention=0, key="z").enqueue().id)
    assert (zeros.priority, zeros.max_retries) == (0, 0)
    assert zeros.retention == 60_000_000  # a minute at least, so that a repeated call finds the job


def test_options_win_over_the_task_and_can_be_chained(app: Holdfast, welcome: Any) -> None:
    low = welcome.options(priority="low", queue="bulk", correlation_id="c-1")
    later = low.options(delay=60, priority=-7, share="", max_retries=1, retention=90.5)
    details = stored(app, later.enqueue(1).id)
    assert (details.queue, details.priority, details.share, details.correlation_id) == ("bulk", -7, "", "c-1")
    assert (details.max_retries, details.retention) == (1, 90_500_000)
    assert details.run_at == details.created_at + 60_000_000
    first = stored(app, low.enqueue(1).id)
    assert (first.priority, first.share, first.run_at) == (10, "eu", first.created_at)
    assert stored(app, welcome.enqueue(1).id).queue == "mail"


@pytest.mark.parametrize("delay", [0.25, timedelta(milliseconds=250)])
def test_delay(app: Holdfast, double: Any, delay: Any) -> None:
    details = stored(app, double.options(delay=delay).enqueue(1).id)
    assert details.run_at == details.created_at + 250_000


def test_run_at(app: Holdfast, double: Any) -> None:
    moment = datetime.now(UTC) + timedelta(hours=1)
    details = stored(app, double.options(run_at=moment).enqueue(1).id)
    assert abs(details.run_at - moment.timestamp() * 1_000_000) < 2
    for past in (datetime(1, 1, 1, tzinfo=UTC), datetime(1970, 1, 1, tzinfo=UTC)):
        details = stored(app, double.options(run_at=past).enqueue(1).id)
        assert details.run_at == details.created_at


# Keys.


def test_the_same_key_and_payload_is_the_same_job(app: Holdfast, double: Any, events: list[Event]) -> None:
    first = double.options(key="k").enqueue(1)
    again = double.options(key="k").enqueue(1)
    assert (first.created, again.created) == (True, False)
    assert again.id == first.id
    assert again.state is State.READY
    assert again.details is not None
    assert events[-1] == JobEnqueued(first.id, "default", "double", False)
    assert totals(app) == {"default": (1, 0, 0)}


async def test_an_existing_job_tells_its_real_state(app: Holdfast, double: Any) -> None:
    keyed = double.options(key="k")
    first = await keyed.aenqueue(1)
    await take(app.store)
    assert (await keyed.aenqueue(1)).state is State.IN_FLIGHT
    [again] = await app.aenqueue_many([keyed.job(1)])
    assert (again.id, again.created) == (first.id, False)


def test_a_finished_job_holds_its_key_and_tells_its_result(app: Holdfast, double: Any) -> None:
    first = double.options(key="k").enqueue(4)
    asyncio.run(succeed(app.store, b"8"))
    again = double.options(key="k").enqueue(4)
    assert (again.id, again.created, again.state) == (first.id, False, State.SUCCEEDED)
    assert again.result(timeout=0) == 8


def test_a_dead_or_cancelled_job_frees_its_key(app: Holdfast, double: Any) -> None:
    keyed = double.options(key="k")
    first = keyed.enqueue(1)
    asyncio.run(finish(app.store, BROKEN_FOR_GOOD))
    second = keyed.enqueue(2)
    assert second.created
    second.cancel()
    third = keyed.enqueue(3)
    assert third.created
    assert len({first.id, second.id, third.id}) == 3


def test_another_payload_is_a_conflict(app: Holdfast, double: Any, events: list[Event]) -> None:
    first = double.options(key="k").enqueue(1)
    with pytest.raises(KeyConflict, match=f"key 'k' of queue 'default' belongs to job {first.id}") as caught:
        double.options(key="k").enqueue(2)
    assert caught.value.job_id == first.id
    assert double.options(key="k", queue="other").enqueue(2).created
    assert len(events) == 2


async def test_another_payload_is_a_conflict_in_a_loop(app: Holdfast, double: Any) -> None:
    first = await double.options(key="k").aenqueue(1)
    with pytest.raises(KeyConflict) as caught:
        await double.options(key="k").aenqueue(2)
    assert caught.value.job_id == first.id


def test_the_payload_as_key(app: Holdfast) -> None:
    @app.task
    def pair(a: int, b: Any) -> None: ...

    by_payload = pair.options(key=PAYLOAD)
    first = by_payload.enqueue(1, {"x": 1, "y": 2})
    assert by_payload.enqueue(b={"y": 2, "x": 1}, a=1).id == first.id
    assert by_payload.enqueue(2, {"x": 1, "y": 2}).created
    assert pair.enqueue(1, {"x": 1, "y": 2}).created


def test_two_tasks_with_equal_payloads_do_not_meet(app: Holdfast) -> None:
    def work(n: int) -> None: ...

    one, two = app.task(name="one", unique=True)(work), app.task(name="two", unique=True)(work)
    assert one.enqueue(1).created
    assert two.enqueue(1).created


def test_unique_tasks(app: Holdfast) -> None:
    @app.task(unique=True)
    def once(n: int) -> None: ...

    @app.task(unique=0.05)
    def at_times(n: int) -> None: ...

    first = once.enqueue(1)
    assert once.enqueue(1).id == first.id
    assert once.enqueue(2).created
    assert once.options(key="mine").enqueue(1).created  # a key of the call's own wins
    key = stored(app, first.id).key
    assert key is not None
    assert key.window == 24 * 3600 * 1_000_000
    assert key.text == key.payload_hash

    early = at_times.enqueue(1)
    assert stored(app, early.id).key is not None
    threading.Event().wait(0.1)
    assert at_times.enqueue(1).created


def test_fifty_callers_with_one_key_make_one_job(app: Holdfast, double: Any) -> None:
    handles: list[Any] = []
    barrier = threading.Barrier(50)

    def call() -> None:
        barrier.wait()
        handles.append(double.options(key="k").enqueue(1))

    threads = [threading.Thread(target=call) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(handle.created for handle in handles) == 1
    assert len({handle.id for handle in handles}) == 1
    assert totals(app) == {"default": (1, 0, 0)}


async def test_fifty_tasks_with_one_key_make_one_job(app: Holdfast, double: Any) -> None:
    handles = await asyncio.gather(*(double.options(key="k").aenqueue(1) for _ in range(50)))
    assert sum(handle.created for handle in handles) == 1
    assert len({handle.id for handle in handles}) == 1


# Many.


def calls(task: Any, count: int) -> Iterator[PreparedJob[Any]]:
    return (task.job(n) for n in range(count))


def test_enqueue_many_from_a_generator(app: Holdfast, double: Any, events: list[Event]) -> None:
    handles = app.enqueue_many(calls(double, 2_500))
    assert [handle.created for handle in handles] == [True] * 2_500
    assert len({handle.id for handle in handles}) == 2_500
    assert totals(app) == {"default": (2_500, 0, 0)}
    assert len(events) == 2_500
    assert stored(app, handles[1_234].id).payload == b'{"n":1234}'
    assert asyncio.run(take(app.store)).id == handles[0].id


async def test_enqueue_many_in_a_loop(app: Holdfast, double: Any) -> None:
    handles = await app.aenqueue_many(calls(double, 2_500))
    assert len({handle.id for handle in handles}) == 2_500
    [counts] = await app.acounts()
    assert counts.ready == 2_500


def test_enqueue_many_with_progress_keeps_nothing(app: Holdfast, double: Any) -> None:
    """The callback is told after each round trip, and no handle outlives it."""
    told: list[int] = []
    made: list[weakref.ref[JobHandle[int]]] = []
    accept = app._client._accept

    def accepting(*args: Any) -> JobHandle[int]:
        handle = accept(*args)
        made.append(weakref.ref(handle))
        return handle

    app._client._accept = accepting  # type: ignore[method-assign, assignment]
    assert app.enqueue_many((double.job(i) for i in range(2_500)), progress=told.append) == 2_500
    assert told == [1_000, 2_000, 2_500]
    assert len(made) == 2_500
    assert [handle() for handle in made if handle() is not None] == []
    assert app.counts()[0].ready == 2_500


async def test_aenqueue_many_with_progress(app: Holdfast, double: Any) -> None:
    told: list[int] = []
    assert await app.aenqueue_many((double.job(i) for i in range(3)), progress=told.append) == 3
    assert told == [3]


def test_a_progress_that_fails_stops_and_says_where(app: Holdfast, double: Any) -> None:
    def fail(stored: int) -> None:
        raise RuntimeError(f"the screen is gone after {stored}")

    with pytest.raises(PartlyRefused, match="1000 jobs are stored; from position 1000 on nothing is stored") as caught:
        app.enqueue_many((double.job(i) for i in range(2_500)), progress=fail)
    assert (caught.value.stored, caught.value.accepted, caught.value.stopped_at) == (1_000, [], 1_000)


def test_refusals_without_end_are_not_collected(make_app: MakeApp) -> None:
    """A queue that is full refuses every job of an endless generator: it must end, and not fill the memory."""
    app, work = limited(make_app, max_depth=10)
    with pytest.raises(PartlyRefused) as caught:
        app.enqueue_many((work.job(i) for i in itertools.count()), progress=lambda stored: None)
    assert caught.value.stored == 10
    assert 1_000 < len(caught.value.refused) <= 2_000


def test_enqueue_many_of_large_payloads(app: Holdfast) -> None:
    @app.task
    def keep(text: str) -> None: ...

    handles = app.enqueue_many(keep.job("x" * 250_000) for _ in range(40))
    assert [handle.created for handle in handles] == [True] * 40
    assert totals(app) == {"default": (40, 0, 0)}


def test_enqueue_many_of_nothing_and_of_several_tasks(app: Holdfast, double: Any, welcome: Any) -> None:
    assert app.enqueue_many([]) == []
    first, second = app.enqueue_many([double.job(1), welcome.options(delay=5, key="k").job(2, locale="fr")])
    assert (first.task, second.task) == ("double", "welcome")
    assert totals(app) == {"default": (1, 0, 0), "mail": (1, 0, 0)}


def test_partly_refused(app: Holdfast, double: Any, events: list[Event]) -> None:
    keyed = double.options(key="k")
    with pytest.raises(
        PartlyRefused, match=r"3 jobs are stored; 1 were refused, first at position 2: key 'k'"
    ) as caught:
        app.enqueue_many([keyed.job(1), double.job(2), keyed.job(3), keyed.job(1)])
    first, second, fourth = caught.value.accepted
    assert (first.created, second.created, fourth.created) == (True, True, False)
    assert fourth.id == first.id
    assert list(caught.value.refused) == [2]
    refusal = caught.value.refused[2]
    assert isinstance(refusal, KeyConflict)
    assert refusal.job_id == first.id
    assert totals(app) == {"default": (2, 0, 0)}
    assert len(events) == 3


async def test_partly_refused_at_the_depth_limit(make_app: MakeApp) -> None:
    app = make_app(settings=Settings(queues=QueueSettings(max_depth=1_500)))

    @app.task
    def work(n: int) -> None: ...

    with pytest.raises(PartlyRefused) as caught:
        await app.aenqueue_many(calls(work, 2_500))
    assert len(caught.value.accepted) == 1_500
    assert list(caught.value.refused) == list(range(1_500, 2_500))
    assert all(isinstance(error, QueueFull) for error in caught.value.refused.values())


def test_an_argument_that_cannot_travel_stops_the_chunk_before_it_is_stored(app: Holdfast, double: Any) -> None:
    with pytest.raises(InvalidPayload):
        app.enqueue_many(double.job(n if n < 50 else "fifty") for n in range(100))
    assert totals(app) == {}


class FailsLater(MemoryStore):
    """Breaks down after the first chunk."""

    def insert_blocking(self, jobs: Any, *, limits: Any = None, fresh: bool = False) -> list[Inserted]:
        if self.snapshot()["depth"]:
            raise StoreUnavailable("gone")
        return super().insert_blocking(jobs, limits=limits, fresh=fresh)


def test_a_store_that_fails_half_way_does_not_hide_what_was_accepted() -> None:
    app = Holdfast(FailsLater())

    @app.task
    def work(n: int) -> None: ...

    for enqueue_many in (app.enqueue_many, lambda calls: asyncio.run(app.aenqueue_many(calls))):
        app.store.purge()  # type: ignore[attr-defined]
        with pytest.raises(PartlyRefused) as caught:
            enqueue_many(calls(work, 5_000))
        assert len(caught.value.accepted) == 1_000
        assert caught.value.refused == {}
        assert caught.value.stopped_at == 1_000
        assert isinstance(caught.value.stopped_by, StoreUnavailable)
        assert "1000 jobs are stored; from position 1000 on nothing is stored" in str(caught.value)
        with pytest.raises(StoreUnavailable, match="gone"):  # nothing was accepted: the error itself
            enqueue_many(calls(work, 5))


def test_an_unknown_outcome_half_way_is_not_called_not_stored() -> None:
    class AnswersNoMore(MemoryStore):
        def insert_blocking(self, jobs: Any, *, limits: Any = None, fresh: bool = False) -> list[Inserted]:
            first = not self.snapshot()["depth"]
            inserted = super().insert_blocking(jobs, limits=limits, fresh=fresh)
            if first:
                return inserted
            raise OutcomeUnknown("no reply", [job.id for job in jobs])

    app = Holdfast(AnswersNoMore())

    @app.task
    def work(n: int) -> None: ...

    with pytest.raises(PartlyRefused, match="unless the 500 jobs whose outcome is unknown are") as caught:
        app.enqueue_many(calls(work, 1_500))
    assert caught.value.stopped_at == 1_000
    assert isinstance(caught.value.stopped_by, OutcomeUnknown)
    assert len(caught.value.stopped_by.ids) == 500
    assert app.counts()[0].ready == 1_500  # they were stored, and only their ids can tell


def test_an_iterable_that_fails_half_way_does_not_hide_what_was_accepted(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def work(n: int) -> None: ...

    for enqueue_many in (app.enqueue_many, lambda calls: asyncio.run(app.aenqueue_many(calls))):
        with pytest.raises(PartlyRefused) as caught:
            enqueue_many(work.job(n if n != 1_500 else "no number") for n in range(2_000))  # type: ignore[arg-type]
        assert (len(caught.value.accepted), caught.value.stopped_at) == (1_000, 1_000)
        assert isinstance(caught.value.stopped_by, InvalidPayload)
        with pytest.raises(InvalidPayload):  # nothing was accepted: the error itself
            enqueue_many(work.job(n if n else "no number") for n in range(9))  # type: ignore[arg-type]
        for wrong in ([work], [1], 5, None):
            with pytest.raises(InvalidOption, match="enqueue_many takes"):
                enqueue_many(wrong)  # type: ignore[arg-type]


class WorksMeanwhile(MemoryStore):
    """An `Overlapping` store. It calls `meanwhile` as often as it is told, and breaks down when it is told."""

    times = 1
    fails_after = math.inf

    def insert_while(self, jobs: Any, meanwhile: Callable[[], object], *, limits: Any = None) -> list[Inserted]:
        for _ in range(self.times):
            meanwhile()
        if self.snapshot()["depth"] >= self.fails_after:
            raise StoreUnavailable("gone")
        return super().insert_blocking(jobs, limits=limits)


class Counted:
    """Calls of a task, and how many of them have been read."""

    def __init__(self, task: Any, count: int) -> None:
        self.read = 0
        self._calls = calls(task, count)

    def __iter__(self) -> Iterator[PreparedJob[Any]]:
        for call in self._calls:
            self.read += 1
            yield call


@pytest.mark.parametrize("times", [0, 1, 2])
@pytest.mark.parametrize("told", [False, True], ids=["handles", "progress"])
def test_the_next_chunk_is_read_while_the_store_has_this_one(times: int, told: bool) -> None:
    store = WorksMeanwhile()
    store.times = times
    app = Holdfast(store)

    @app.task
    def work(n: int) -> None: ...

    counted = Counted(work, 2_500)
    stored: list[int] = []
    read: list[int] = []

    def progress(number: int) -> None:
        stored.append(number)
        read.append(counted.read)

    if told:
        assert app.enqueue_many(counted, progress=progress) == 2_500
        assert stored == [1_000, 2_000, 2_500]
        assert read == [2_000, 2_500, 2_500] if times else [1_000, 2_000, 2_500]
    else:
        assert [handle.created for handle in app.enqueue_many(counted)] == [True] * 2_500
    assert app.counts()[0].ready == counted.read == 2_500


class SaysWhenItIsBusy(MemoryStore):
    """A store that can be asked whether an insert of an event loop is under way."""

    busy = False

    async def insert(self, jobs: Any, **named: Any) -> list[Inserted]:
        self.busy = True
        await asyncio.sleep(0)
        answers = await super().insert(jobs, **named)
        self.busy = False
        return answers


async def test_an_event_loop_reads_the_iterable_between_inserts() -> None:
    """Reading may take any time, and the loop stands still meanwhile: an insert under way would miss its deadline."""
    store = SaysWhenItIsBusy()
    app = Holdfast(store)

    @app.task
    def work(n: int) -> None: ...

    seen: list[bool] = []

    def read() -> Iterator[PreparedJob[Any]]:
        for call in calls(work, 2_500):
            seen.append(store.busy)
            yield call

    assert await app.aenqueue_many(read(), progress=lambda stored: None) == 2_500
    assert seen == [False] * 2_500


def test_what_was_read_ahead_is_not_stored_if_the_store_fails() -> None:
    store = WorksMeanwhile()
    store.fails_after = 1_000
    app = Holdfast(store)

    @app.task
    def work(n: int) -> None: ...

    with pytest.raises(PartlyRefused, match="1000 jobs are stored; from position 1000 on nothing is stored") as caught:
        app.enqueue_many(calls(work, 5_000))
    assert isinstance(caught.value.stopped_by, StoreUnavailable)
    assert app.counts()[0].ready == 1_000


def test_an_iterable_that_fails_while_it_is_read_ahead_fails_where_it_would_have() -> None:
    app = Holdfast(WorksMeanwhile())

    @app.task
    def work(n: int) -> None: ...

    told: list[int] = []
    with pytest.raises(PartlyRefused) as caught:
        app.enqueue_many((work.job(1_000 // (1_500 - n)) for n in range(5_000)), progress=told.append)
    assert (told, caught.value.stored, caught.value.stopped_at) == ([1_000], 1_000, 1_000)
    assert isinstance(caught.value.stopped_by, ZeroDivisionError)
    assert app.counts()[0].ready == 1_000


def test_all_accepted_without_handles_is_counted_at_once(app: Holdfast, double: Any, events: list[Event]) -> None:
    """Unless somebody listens, as here, or one of them was not new: then each is looked at."""
    same = double.job(0)
    told: list[int] = []
    assert app.enqueue_many([same, same, double.job(1)], progress=told.append) == 3
    assert told == [3]
    assert [event.created for event in events if isinstance(event, JobEnqueued)] == [True, False, True]
    quiet = Holdfast(MemoryStore())

    @quiet.task
    def work(n: int) -> None: ...

    accepted: list[object] = []
    quiet._client._accept_all = lambda *args: accepted.append(args) or iter(())  # type: ignore[method-assign, func-returns-value]
    assert quiet.enqueue_many(calls(work, 1_500), progress=told.append) == 1_500
    assert accepted == []


def test_a_prepared_job_has_no_connection(double: Any) -> None:
    with pytest.raises(InvalidOption, match="pass connection= to enqueue_many"):
        double.options(connection=object()).job(1)


# Limits.


def limited(make_app: MakeApp, **limits: Any) -> tuple[Holdfast, Any]:
    app = make_app(settings=Settings.parse({"queues": limits}))

    @app.task
    def work(n: int) -> None: ...

    return app, work


def test_a_full_queue_says_so(make_app: MakeApp, events: list[Event]) -> None:
    app, work = limited(make_app, max_depth=2)
    work.enqueue(1)
    work.options(delay=60).enqueue(2)
    with pytest.raises(QueueFull, match=r"queue 'default' holds as many waiting jobs as it may \(max_depth=2\)"):
        work.enqueue(3)
    with pytest.raises(QueueFull):
        asyncio.run(work.aenqueue(3))
    assert totals(app) == {"default": (2, 0, 0)}
    assert work.options(queue="other").enqueue(3).created
    asyncio.run(take(app.store))
    assert work.enqueue(3).created
    assert len(events) == 4


def test_a_queue_may_have_limits_of_its_own(make_app: MakeApp) -> None:
    _, work = limited(make_app, max_depth=1, depths={"bulk": {"max_depth": 3}, "free": {}})
    bulk, free = work.options(queue="bulk"), work.options(queue="free")
    assert all(bulk.enqueue(n).created for n in range(3))
    assert all(free.enqueue(n).created for n in range(5))
    for full in (bulk, work.options(queue="bulk")):
        with pytest.raises(QueueFull):
            full.enqueue(9)


def test_a_known_job_is_no_new_one_even_in_a_full_queue(make_app: MakeApp) -> None:
    _, work = limited(make_app, max_depth=1)
    first = work.options(key="k").enqueue(1)
    assert work.options(key="k").enqueue(1).id == first.id


def test_a_deep_queue_warns(make_app: MakeApp, events: list[Event]) -> None:
    _, work = limited(make_app, warn_depth=2)
    for n in range(3):
        assert work.enqueue(n).created
    assert [event for event in events if isinstance(event, QueueDeep)] == [QueueDeep("default", 2)] * 2


async def test_a_deep_queue_warns_in_a_loop(make_app: MakeApp, events: list[Event]) -> None:
    app, work = limited(make_app, warn_depth=2)
    await app.aenqueue_many([work.job(1), work.job(2)])
    assert [event for event in events if isinstance(event, QueueDeep)] == [QueueDeep("default", 2)]


def test_a_listener_that_raises_harms_nobody(make_app: MakeApp) -> None:
    heard = []

    def listener(event: Event) -> None:
        heard.append(event)
        raise RuntimeError("listener")

    app = make_app(on_event=listener, settings=Settings(queues=QueueSettings(warn_depth=1)))

    @app.task
    def work(n: int) -> None: ...

    job = work.enqueue(1)
    app.pause("default")
    app.resume("default")
    job.cancel()
    app.replay(job.id)
    assert len(app.enqueue_many([work.job(1)])) == 1
    assert len(heard) == 8


def test_after_a_shutdown_the_store_takes_nothing_new() -> None:
    store = MemoryStore()
    app = Holdfast(store)

    @app.task
    def work(n: int) -> None: ...

    first = work.enqueue(1)
    store.shutdown()
    with pytest.raises(QueueClosed):
        work.enqueue(2)
    with pytest.raises(QueueClosed):
        asyncio.run(work.aenqueue(2))
    with pytest.raises(QueueClosed):
        app.enqueue_many([work.job(2)])
    assert asyncio.run(take(store)).id == first.id
    app.close()


# Registration and options that cannot work.


def test_a_payload_over_the_limit(make_app: MakeApp) -> None:
    app = make_app(settings=Settings.parse({"jobs": {"max_payload": 20}}))

    @app.task
    def work(text: str) -> None: ...

    assert work.enqueue("a" * 9).created  # {"text":"aaaaaaaaa"}
    with pytest.raises(PayloadTooLarge, match="21 bytes"):
        work.enqueue("a" * 10)
    assert totals(app) == {"default": (1, 0, 0)}


class Callable_:
    def __call__(self, n: int) -> None: ...


def generator(n: int) -> Iterator[int]:
    yield n


def with_args(*args: int) -> None: ...


@pytest.mark.parametrize("function", [5, None, "name", Callable_(), Callable_, min, generator, with_args])
def test_what_cannot_be_a_task(app: Holdfast, function: Any) -> None:
    with pytest.raises(InvalidOption):
        app.task(name="work")(function)
    assert list(app.tasks) == []


def test_a_lambda_has_no_name_to_be_known_by(app: Holdfast) -> None:
    with pytest.raises(InvalidOption, match="task '<lambda>' is not a valid name"):
        app.task(lambda: None)


def test_a_name_is_taken_once(app: Holdfast, double: Any) -> None:
    with pytest.raises(InvalidOption, match="there is a task 'double' already"):
        app.task(name="double")(lambda: None)
    assert app.tasks["double"].name == "double"
    assert app.tasks["double"] is double.spec
    with pytest.raises(UnknownTask, match="no task 'triple' is registered here; known are: double"):
        app.tasks["triple"]


@pytest.mark.parametrize(
    "options",
    [
        {"name": ""},
        {"name": "a b"},
        {"name": 5},
        {"name": "x" * 129},
        {"version": ""},
        {"queue": "a/b"},
        {"queue": None},
        {"queue": ["default"]},
        {"share": "a\nb"},
        {"share": None},
        {"share": "x" * 129},
        {"priority": "urgent"},
        {"priority": 101},
        {"priority": 1.5},
        {"priority": True},
        {"max_retries": -1},
        {"max_retries": 1_001},
        {"max_retries": 10**5_000},
        {"backoff": 5},
        {"backoff": None},
        {"backoff": timedelta(1)},
        {"permanent": ValueError},
        {"permanent": [ValueError]},
        {"permanent": (ValueError, "KeyError")},
        {"permanent": None},
        {"timeout": 0},
        {"timeout": float("nan")},
        {"timeout": 10**400},
        {"timeout": "5"},
        {"hard_timeout": -1},
        {"isolation": "thread"},
        {"isolation": 10**5_000},
        {"unique": -1},
        {"unique": "yes"},
        {"unique": float("inf")},
        {"retention": -1},
        {"retention": 10**12},
        {"on_failed": 5},
        {"on_failed": ""},
    ],
    ids=lambda options: f"{next(iter(options))}-{type(next(iter(options.values()))).__name__}",
)
def test_task_options_that_cannot_work(app: Holdfast, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption, match=next(iter(options)) if "name" not in options else "task"):
        app.task(**{"name": "work", **options})(lambda: None)
    assert list(app.tasks) == []


def test_an_unknown_priority_names_the_known_ones(app: Holdfast, double: Any) -> None:
    with pytest.raises(UnknownPriority, match="use one of high, normal, low, or a number from -100 to 100"):
        app.task(priority="urgent")
    with pytest.raises(UnknownPriority):
        double.options(priority="urgent").enqueue(1)


def test_an_unknown_option_is_an_error(app: Holdfast, double: Any) -> None:
    with pytest.raises(InvalidOption, match=r"no task option retries: there are name, .*max_retries"):
        app.task(retries=5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="colour"):
        double.options(colour="red")


def test_on_failed_takes_a_task_or_its_name(app: Holdfast, double: Any) -> None:
    by_task = app.task(name="a", on_failed=double)(lambda n: None)
    by_name = app.task(name="b", on_failed="double")(lambda n: None)
    assert by_task.spec.options.on_failed == by_name.spec.options.on_failed == "double"
    with pytest.raises(InvalidOption):
        app.task(on_failed=double.options(queue="x"))


# Threads and forks.


def test_several_threads_enqueue_at_once(app: Holdfast, double: Any) -> None:
    failed: list[BaseException] = []

    def produce(first: int) -> None:
        try:
            for n in range(first, first + 25):
                double.enqueue(n)
            app.enqueue_many(double.job(n) for n in range(25))
            asyncio.run(double.aenqueue(1))
            app.counts()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=produce, args=(25 * number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert totals(app) == {"default": (8 * 51, 0, 0)}


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_use_after_fork(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db?durability=relaxed")

    @app.task
    def work(n: int) -> None: ...

    work.enqueue(1)
    assert totals(app) == {"default": (1, 0, 0)}  # the portal and the threads of the store are running
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work.enqueue(2)
            app.enqueue_many([work.job(3)])
            asyncio.run(work.aenqueue(4))
            status = 0 if totals(app) == {"default": (4, 0, 0)} else 2
        finally:
            os._exit(status)
    _, waited = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(waited) == 0
    assert totals(app) == {"default": (4, 0, 0)}
    work.enqueue(5)
    assert asyncio.run(take(app.store)).payload == b'{"n":1}'
    app.close()


# Connections, where there are none to share.


def test_memory_has_no_transactions_to_share() -> None:
    app = Holdfast("memory://")

    @app.task
    def work(n: int) -> None: ...

    with pytest.raises(ForeignConnection, match="memory store has no transactions"):
        work.options(connection=object()).enqueue(1)
    with pytest.raises(ForeignConnection, match="memory store has no transactions"):
        asyncio.run(work.options(connection=object()).aenqueue(1))
    with pytest.raises(ForeignConnection):
        app.enqueue_many([work.job(1)], connection=object())
    assert totals(app) == {}
    app.close()


def test_a_prepared_job_may_be_sent_twice(app: Holdfast, double: Any) -> None:
    call = double.job(1)
    assert isinstance(call.new, NewJob)
    [first], [again] = app.enqueue_many([call]), app.enqueue_many([call])
    assert (first.id, first.created, again.id, again.created) == (call.new.id, True, call.new.id, False)
    assert totals(app) == {"default": (1, 0, 0)}


class NotesFresh(MemoryStore):
    """Notes for how many jobs it was told that their ids are fresh, or not."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[int, bool]] = []

    def insert_blocking(self, jobs: Any, *, limits: Any = None, fresh: bool = False) -> list[Inserted]:
        self.told.append((len(jobs), fresh))
        return super().insert_blocking(jobs, limits=limits, fresh=fresh)

    async def insert(self, jobs: Any, *, limits: Any = None, checkpoint: Any = None, fresh: bool = False) -> Any:
        self.told.append((len(jobs), fresh))
        return super().insert_blocking(jobs, limits=limits, fresh=fresh)


def test_only_an_id_that_was_made_for_the_call_is_called_fresh() -> None:
    """A prepared job is a value: whoever has it may have stored it before, here or elsewhere."""
    store = NotesFresh()
    app = Holdfast(store)

    @app.task
    def work(n: int) -> None: ...

    work.enqueue(1)
    asyncio.run(work.aenqueue(2))
    assert store.told == [(1, True), (1, True)]
    store.told.clear()
    prepared = work.job(3)
    app.enqueue_many([prepared])
    app.enqueue_many([prepared, work.job(4)])
    asyncio.run(app.aenqueue_many([prepared]))
    assert store.told == [(1, False), (2, False), (1, False)]
    assert app.counts()[0].ready == 4


def test_forked_processes_make_ids_of_their_own() -> None:
    """They begin with the same random state: unless it is renewed, those of one millisecond would be the same."""
    made: list[str] = [SYSTEM.ids.job_id()]  # the state is there before the fork
    children = []
    for _ in range(4):
        reader, writer = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork of a process with threads
            pid = os.fork()
        if not pid:
            os.write(writer, "".join(SYSTEM.ids.job_id() for _ in range(200)).encode())
            os._exit(0)
        os.close(writer)
        children.append((pid, reader))
    for pid, reader in children:
        with os.fdopen(reader) as stream:
            text = stream.read()
        os.waitpid(pid, 0)
        made += [text[start : start + 36] for start in range(0, len(text), 36)]
    tails = [job_id[-8:] for job_id in made]  # whatever the millisecond was
    assert len(made) == len(set(made)) == 801
    assert len(set(tails)) > 790
