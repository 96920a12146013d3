"""Inline mode: enqueuing runs the job, through the store and the lifecycle as they are, before it returns."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest

from holdfast import (
    CalledInEventLoop,
    ForeignConnection,
    GiveUp,
    Holdfast,
    InvalidPayload,
    JobFailed,
    NotFinished,
    Retry,
    State,
    Task,
    current,
)
from holdfast.errors import HoldfastError
from holdfast.events import JobEnqueued, JobSettled, JobStarted
from holdfast.testing.jobs import EndlessJobs, Jobs, inline, isolated
from tests.testing import shop
from tests.testing.shop import Address, app, done, heard


@pytest.fixture
def at_once(jobs: Jobs) -> Iterator[Jobs]:
    with jobs.inline():
        yield jobs


@pytest.fixture
def kept(jobs: Jobs) -> Iterator[Jobs]:
    with jobs.inline(raise_errors=False):
        yield jobs


# What runs where.


def test_a_plain_job_runs_before_enqueue_returns(at_once: Jobs) -> None:
    job = shop.welcome.enqueue(42)
    assert done == [("welcome", 42)]
    assert job.created
    assert job.state is State.SUCCEEDED
    assert job.result() == "en: welcome, user 42"


def test_a_coroutine_runs_before_enqueue_returns(at_once: Jobs) -> None:
    job = shop.newsletter.enqueue(7)
    assert done == [("newsletter", 7)]
    assert job.result() == 14


async def test_both_kinds_run_before_aenqueue_returns(at_once: Jobs) -> None:
    plain, coroutine = await shop.welcome.aenqueue(1), await shop.newsletter.aenqueue(2)
    assert done == [("welcome", 1), ("newsletter", 2)]
    assert (plain.state, coroutine.state) == ("succeeded", "succeeded")
    assert await plain.aresult() == "en: welcome, user 1"
    assert await coroutine.aresult() == 4


def test_many_run_in_their_order(at_once: Jobs) -> None:
    handles = app.enqueue_many([shop.welcome.job(1), shop.newsletter.job(2), shop.welcome.job(3)])
    assert done == [("welcome", 1), ("newsletter", 2), ("welcome", 3)]
    assert [job.state for job in handles] == ["succeeded"] * 3


async def test_many_run_in_an_event_loop(at_once: Jobs) -> None:
    handles = await app.aenqueue_many(shop.welcome.job(number) for number in range(3))
    assert [job.state for job in handles] == ["succeeded"] * 3


def test_a_plain_handler_runs_on_the_calling_thread(at_once: Jobs) -> None:
    assert shop.thread_name.enqueue().result() == threading.current_thread().name


async def test_in_an_event_loop_a_plain_handler_may_block(at_once: Jobs) -> None:
    job = await shop.fan_out.aenqueue(2)
    assert await job.aresult() == ["succeeded"] * 4


async def test_a_coroutine_runs_on_the_callers_loop() -> None:
    loops = []

    async def where() -> None:
        loops.append(asyncio.get_running_loop())

    local = Holdfast("memory://")
    with inline(local):
        await local.task(where).aenqueue()
    assert loops == [asyncio.get_running_loop()]


async def test_blocking_calls_stay_refused_in_an_event_loop(at_once: Jobs) -> None:
    with pytest.raises(CalledInEventLoop):
        shop.welcome.enqueue(1)
    assert done == []


# As in production.


def test_arguments_travel_as_json(at_once: Jobs) -> None:
    address, at = Address("Lane 1", "Ghent"), datetime(2030, 1, 1, tzinfo=UTC)
    shop.parcel.enqueue(address, at)
    [(_, received, received_at)] = done
    assert (received, received_at) == (address, at)
    assert received is not address


def test_what_json_cannot_carry_is_refused(at_once: Jobs) -> None:
    with pytest.raises(InvalidPayload):
        shop.welcome.enqueue({1, 2})  # type: ignore[arg-type]
    assert done == []


def test_the_job_went_through_the_lifecycle(at_once: Jobs) -> None:
    job = shop.charge.enqueue(5, fails=0).refresh()
    assert job.details is not None
    assert (job.details.attempt, job.details.reason, job.details.version) == (1, "succeeded", 1)
    assert [(type(event), event.job_id) for event in heard if isinstance(event, JobStarted | JobSettled)] == [
        (JobStarted, job.id),
        (JobSettled, job.id),
    ]
    assert [event.created for event in heard if isinstance(event, JobEnqueued)] == [True]


def test_a_handler_does_not_see_the_context_of_its_caller(at_once: Jobs) -> None:
    token = shop.tenant.set("caller")
    try:
        assert shop.whose.enqueue().result() == "nobody"
        assert shop.awhose.enqueue().result() == "nobody"
    finally:
        shop.tenant.reset(token)


async def test_nor_in_an_event_loop(at_once: Jobs) -> None:
    shop.tenant.set("caller")
    assert await (await shop.whose.aenqueue()).aresult() == "nobody"
    assert await (await shop.awhose.aenqueue()).aresult() == "nobody"


def test_a_handler_sees_what_was_set_before_the_test_began() -> None:
    def run() -> str:
        shop.tenant.set("fixture")
        with inline(app):
            return shop.whose.enqueue().result()

    assert contextvars.copy_context().run(run) == "fixture"


def test_nothing_of_a_job_leaks_out(at_once: Jobs) -> None:
    shop.charge.enqueue(1, fails=0)
    with pytest.raises(HoldfastError, match="inside a handler"):
        current()


def test_a_key_makes_the_second_call_the_same_job(at_once: Jobs) -> None:
    first = shop.welcome.options(key="welcome:1").enqueue(1)
    second = shop.welcome.options(key="welcome:1").enqueue(1)
    assert done == [("welcome", 1)]
    assert (second.id, second.created, second.state) == (first.id, False, "succeeded")


def test_middleware_is_entered() -> None:
    entered = []

    class Opened:
        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *exc: object) -> None:
            entered.append("out")

    local = Holdfast("memory://", middleware=[lambda job: Opened()])

    @local.task
    def nothing() -> None:
        entered.append("run")

    with inline(local):
        nothing.enqueue()
    assert entered == ["in", "run", "out"]


def test_progress_is_kept() -> None:
    seen = []
    local = Holdfast("memory://")

    @local.task
    def work() -> None:
        current().progress({"done": 3})
        seen.append(local.get(current().id).progress)

    with inline(local):
        work.enqueue()
    assert seen == [{"done": 3}]


# Errors.


def test_what_a_handler_raises_is_raised_to_the_caller(at_once: Jobs) -> None:
    with pytest.raises(ConnectionError, match="attempt 1") as raised:
        shop.charge.enqueue(1)
    assert any(entry.name == "charge" for entry in raised.traceback)
    [job] = at_once.enqueued(shop.charge)
    assert job.state == "ready"
    assert app.get(job.id).failures[0].type == "ConnectionError"


@pytest.mark.parametrize("task", ["charge", "acharge"])
async def test_and_in_an_event_loop(at_once: Jobs, task: str) -> None:
    with pytest.raises(ConnectionError, match="attempt 1"):
        await getattr(shop, task).aenqueue(1)


def test_kept_errors_are_retried_at_once_until_the_dead_letters(kept: Jobs) -> None:
    before = kept.clock.time
    job = shop.charge.enqueue(1)
    assert job.state == "failed"
    assert [entry for entry in done if entry[0] == "charge"] == [("charge", 1, number) for number in (1, 2, 3)]
    assert kept.clock.time == before
    with pytest.raises(JobFailed, match="ConnectionError: attempt 3") as raised:
        job.result()
    assert len(raised.value.failures) == 3


def test_a_retry_that_succeeds(kept: Jobs) -> None:
    job = shop.acharge.enqueue(1, fails=2)
    assert job.result() == "charged"
    assert [run.reason for run in kept.runs] == ["retried", "retried", "succeeded"]


def test_the_follow_up_runs_too(kept: Jobs) -> None:
    job = shop.charge.enqueue(9)
    assert done[-1] == (
        "bury",
        job.id,
        "charge",
        "exhausted",
        "ConnectionError: attempt 3",
        {"order": 9},
    )
    kept.assert_enqueued(shop.bury, arguments={"task": "charge"}, times=1)


def test_the_follow_up_runs_before_the_error_is_raised(at_once: Jobs) -> None:
    with pytest.raises(ConnectionError):
        shop.charge.options(max_retries=0).enqueue(9)
    assert done[-1][0] == "bury"


def test_give_up_is_raised_and_final(at_once: Jobs) -> None:
    with pytest.raises(GiveUp, match="no such order"):
        shop.steer.enqueue("give up")
    [job] = at_once.enqueued()
    assert job.state == "failed"


def test_retry_is_raised(at_once: Jobs) -> None:
    with pytest.raises(Retry, match="busy"):
        shop.steer.enqueue("retry")
    assert at_once.runs[0].retry_in == 30


def test_kept_signals(kept: Jobs) -> None:
    assert shop.steer.enqueue("give up").state == "failed"
    assert shop.steer.enqueue("retry").state == "failed"
    assert [run.reason for run in kept.runs] == ["permanent", "retried", "exhausted"]


@pytest.mark.parametrize("raise_errors", [True, False])
def test_a_snoozed_job_waits(jobs: Jobs, raise_errors: bool) -> None:
    with jobs.inline(raise_errors=raise_errors):
        job = shop.steer.enqueue("snooze")
    assert (job.state, jobs.runs[0].reason, jobs.runs[0].retry_in) == ("ready", "snoozed", 45)
    assert jobs.drain() == []
    jobs.clock.advance(45)
    assert [run.attempt for run in jobs.drain()] == [1]


def test_a_result_that_no_handler_will_bring_is_refused_at_once(jobs: Jobs) -> None:
    job = shop.welcome.enqueue(1)
    with pytest.raises(NotFinished, match=r"drain\(\)"):
        job.result()
    with pytest.raises(NotFinished, match=r"drain\(\)"):
        job.result(timeout=5)


def test_the_rest_of_a_batch_waits_after_an_error(at_once: Jobs) -> None:
    with pytest.raises(ConnectionError):
        app.enqueue_many([shop.welcome.job(1), shop.charge.job(2), shop.welcome.job(3)])
    assert [job.state for job in at_once.enqueued()] == ["succeeded", "ready", "ready"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.fail.Exception])
def test_what_is_not_the_handlers_own_affair_always_comes_out(error: type[BaseException]) -> None:
    local = Holdfast("memory://")

    @local.task
    def interrupted() -> None:
        raise error("stop")

    with inline(local, raise_errors=False) as jobs:
        with pytest.raises(error):
            interrupted.enqueue()
        assert len(jobs.runs) == 1


def test_a_handler_that_exits_is_a_failed_attempt() -> None:
    local = Holdfast("memory://")

    @local.task(max_retries=0)
    def leave() -> None:
        raise SystemExit(3)

    with inline(local, raise_errors=False):
        assert leave.enqueue().state == "failed"


def test_the_timeout_of_a_coroutine(kept: Jobs) -> None:
    assert shop.aslow.enqueue().state == "failed"
    assert isinstance(kept.runs[0].error, TimeoutError)
    assert "0.05 s" in str(kept.runs[0].error)


async def test_the_timeout_of_a_coroutine_in_an_event_loop(at_once: Jobs) -> None:
    with pytest.raises(TimeoutError, match=r"timeout of 0\.05 s"):
        await shop.aslow.aenqueue()


def test_a_plain_handler_sees_its_timeout(kept: Jobs) -> None:
    assert shop.slow.enqueue().state == "failed"


async def test_a_plain_handler_sees_its_timeout_in_an_event_loop(kept: Jobs) -> None:
    assert (await shop.slow.aenqueue()).state == "failed"


async def test_a_caller_that_is_cancelled_gives_the_job_back() -> None:
    stopped = []
    local = Holdfast("memory://")

    @local.task
    async def patient() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.append(True)
            raise

    with inline(local) as jobs:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await patient.aenqueue()
        assert stopped == [True]
        [job] = jobs.enqueued()
        assert job.state == "ready"
        assert (await local.aget(job.id)).failures == []


# Nesting.


def test_nested_blocking_enqueues(at_once: Jobs) -> None:
    assert shop.fan_out.enqueue(2).result() == ["succeeded"] * 4
    assert len(done) == 4


@pytest.mark.parametrize("blocking", [True, False])
async def test_nested_enqueues_in_event_loops(at_once: Jobs, blocking: bool) -> None:
    if blocking:
        result = await asyncio.to_thread(lambda: shop.afan_out.enqueue(2).result())
    else:
        result = await (await shop.afan_out.aenqueue(2)).aresult()
    assert result == ["succeeded"] * 3


def test_plain_functions_and_coroutines_nest_in_turns(at_once: Jobs) -> None:
    shop.relay.enqueue(6)
    assert [left for _, left in done] == [6, 5, 4, 3, 2, 1, 0]


async def test_plain_functions_and_coroutines_nest_in_turns_in_an_event_loop(at_once: Jobs) -> None:
    await shop.arelay.aenqueue(6)
    assert [left for _, left in done] == [6, 5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("raise_errors", [True, False])
@pytest.mark.parametrize("task", [shop.tick, shop.relay])
def test_nesting_without_an_end(jobs: Jobs, raise_errors: bool, task: Task[[int], None]) -> None:
    with (
        jobs.inline(raise_errors=raise_errors, most_nested=5),
        pytest.raises(EndlessJobs, match=r"5 deep \(… > .* > .* > .* > …\): do they ever end"),
    ):
        task.enqueue(10**6)
    assert len(jobs.runs) == 5


async def test_nesting_without_an_end_in_an_event_loop(jobs: Jobs) -> None:
    with jobs.inline(), pytest.raises(EndlessJobs, match="atick > atick > atick"):
        await shop.atick.aenqueue()
    assert len(jobs.runs) == 20


def test_a_handler_cannot_hide_nesting_without_an_end() -> None:
    local = Holdfast("memory://")

    @local.task
    def stubborn() -> None:
        for _ in range(3):
            try:
                stubborn.enqueue()
            except Exception:
                raise ValueError("hidden") from None

    with inline(local, raise_errors=False) as jobs, pytest.raises(EndlessJobs):
        stubborn.enqueue()
    assert len(jobs.runs) == 20


# What waits all the same.


def test_a_delayed_job_waits(at_once: Jobs) -> None:
    job = shop.welcome.options(delay=60).enqueue(1)
    assert (job.state, done) == ("ready", [])
    at_once.clock.advance(60)
    assert [run.task for run in at_once.drain()] == ["welcome"]


def test_a_paused_queue_waits(at_once: Jobs) -> None:
    app.pause("mail")
    assert shop.welcome.enqueue(1).state == "ready"
    app.resume("mail")
    assert shop.welcome.enqueue(2).state == "succeeded"
    assert done == [("welcome", 2)]


def test_a_job_on_a_connection_is_refused_with_advice(at_once: Jobs) -> None:
    with pytest.raises(ForeignConnection, match=r"welcome is enqueued on a connection.*drain\(\) after the commit"):
        shop.welcome.options(connection=object()).enqueue(1)


# The block.


def test_inline_isolates_by_itself_and_ends() -> None:
    own = app.store
    with inline(app) as jobs:
        assert shop.welcome.enqueue(1).state == "succeeded"
        jobs.assert_enqueued(shop.welcome)
    assert app.store is own


def test_inline_inside_an_isolated_application_shares_its_jobs(jobs: Jobs) -> None:
    with inline(app) as inner:
        assert inner is jobs
        shop.welcome.enqueue(1)
    later = shop.welcome.enqueue(2)
    assert later.state == "ready"
    assert [job.state for job in jobs.enqueued()] == ["succeeded", "ready"]


def test_the_store_in_between_is_a_store(at_once: Jobs) -> None:
    async def use() -> None:
        async with app:
            await shop.welcome.aenqueue(1)

    asyncio.run(use())
    app.close()
    assert app.counts()[0].succeeded == 1


def test_isolated_inside_inline_is_another_world(at_once: Jobs) -> None:
    with isolated(app) as other:
        assert shop.welcome.enqueue(1).state == "ready"
        assert len(other.enqueued()) == 1
    assert at_once.enqueued() == []
    assert shop.welcome.enqueue(2).state == "succeeded"
