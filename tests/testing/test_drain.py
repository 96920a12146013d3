"""Draining: everything that is due runs in the caller, in the order of claims, and the caller is told what happened."""

from __future__ import annotations

import asyncio
import threading
from datetime import UTC, datetime, timedelta

import pytest

from holdfast import CalledInEventLoop, CancelAnswer, FullJitter, GiveUp, Holdfast, JobCancelled, current
from holdfast.errors import HoldfastError, InvalidOption
from holdfast.events import JobSettled
from holdfast.testing.jobs import EndlessJobs, Jobs, adrain, drain, isolated
from tests.testing import shop
from tests.testing.shop import app, done, heard


def test_what_is_due_runs_and_is_told(jobs: Jobs) -> None:
    job = shop.welcome.enqueue(42, locale="de")
    assert done == []
    [run] = jobs.drain()
    assert (run.job_id, run.task, run.queue, run.attempt) == (job.id, "welcome", "mail", 1)
    assert (run.state, run.reason, run.result, run.error) == ("succeeded", "succeeded", "de: welcome, user 42", None)
    assert run.arguments == {"user_id": 42, "locale": "de"}
    assert job.result() == "de: welcome, user 42"
    assert jobs.drain() == []


async def test_in_an_event_loop(jobs: Jobs) -> None:
    job = await shop.newsletter.aenqueue(4)
    await shop.welcome.aenqueue(5)
    assert [run.result for run in await jobs.adrain()] == ["en: welcome, user 5", 8]
    assert await job.aresult() == 8


def test_coroutines_run_in_synchronous_code(jobs: Jobs) -> None:
    shop.newsletter.enqueue(4)
    assert [run.result for run in jobs.drain()] == [8]


def test_a_plain_handler_runs_on_the_calling_thread(jobs: Jobs) -> None:
    shop.thread_name.enqueue()
    assert [run.result for run in jobs.drain()] == [threading.current_thread().name]


async def test_drain_in_an_event_loop_names_its_twin(jobs: Jobs) -> None:
    with pytest.raises(CalledInEventLoop, match="await adrain"):
        jobs.drain()


def test_an_error_is_told_as_it_is(jobs: Jobs) -> None:
    shop.charge.enqueue(1)
    [run] = jobs.drain()
    assert (run.state, run.reason, run.retry_in, run.failed) == ("ready", "retried", 10, True)
    assert isinstance(run.error, ConnectionError)
    assert (
        str(run) == "charge(order=1, fails=99), attempt 1: ready (retried, again in 10 s): ConnectionError: attempt 1"
    )


def test_errors_are_raised_if_asked(jobs: Jobs) -> None:
    shop.charge.enqueue(1)
    shop.parcel.enqueue(shop.Address("a", "b"), datetime(2030, 1, 1, tzinfo=UTC))
    with pytest.raises(ConnectionError):
        jobs.drain(raise_errors=True)
    assert [run.task for run in jobs.runs] == ["charge"]
    assert [job.state for job in jobs.enqueued()] == ["ready", "ready"]


async def test_errors_are_raised_if_asked_in_an_event_loop(jobs: Jobs) -> None:
    await shop.steer.aenqueue("give up")
    with pytest.raises(GiveUp):
        await adrain(app, raise_errors=True)


def test_a_snooze_is_no_error(jobs: Jobs) -> None:
    shop.steer.enqueue("snooze")
    [run] = jobs.drain(raise_errors=True)
    assert (run.reason, run.failed, run.retry_in) == ("snoozed", False, 45)


# Order.


def test_the_order_is_that_of_claims(jobs: Jobs) -> None:
    for priority in ("low", "normal", "high"):
        for user in range(2):
            shop.welcome.options(priority=priority, correlation_id=f"{priority}-{user}").enqueue(user)
    names = {job.id: job.correlation_id for job in jobs.enqueued()}
    ran = [names[run.job_id] for run in jobs.drain()]
    assert ran == ["high-0", "high-1", "normal-0", "normal-1", "low-0", "low-1"]


def test_no_turn_is_inverted(jobs: Jobs) -> None:
    for number in range(40):
        shop.welcome.options(priority=number % 2).enqueue(number)
    assert [run.arguments["user_id"] % 2 for run in jobs.drain()] == [0] * 20 + [1] * 20


def test_shares_take_turns(jobs: Jobs) -> None:
    for share in "ab":
        for number in range(2):
            shop.welcome.options(share=share, correlation_id=share).enqueue(number)
    names = {job.id: job.correlation_id for job in jobs.enqueued()}
    assert "".join(str(names[run.job_id]) for run in jobs.drain()) in ("abab", "baba")


def test_what_jobs_enqueue_runs_too(jobs: Jobs) -> None:
    shop.fan_out.enqueue(2)
    runs = jobs.drain()
    assert [run.task for run in runs] == ["fan_out"] + ["welcome"] * 4
    assert runs[0].result == ["ready"] * 4


def test_twice_the_same(jobs: Jobs) -> None:
    def once() -> list[str]:
        with isolated(app, at=datetime(2030, 1, 1, tzinfo=UTC)) as inner:
            shop.charge.enqueue(1, fails=1)
            shop.afan_out.enqueue(3)
            shop.steer.enqueue("retry")
            return [str(run) for run in inner.drain(scheduled=True)]

    assert once() == once()


# Time.


def test_a_delayed_job_waits_for_the_clock(jobs: Jobs) -> None:
    shop.welcome.options(delay=60).enqueue(1)
    jobs.clock.advance(59.999999)
    assert jobs.drain() == []
    jobs.clock.advance(timedelta(microseconds=1))
    assert len(jobs.drain()) == 1


def test_the_clock_begins_with_the_present_and_can_be_set() -> None:
    with isolated(app) as jobs:
        assert abs(jobs.clock.time - datetime.now(UTC)) < timedelta(minutes=1)
        shop.welcome.options(run_at=datetime.now(UTC) + timedelta(hours=1)).enqueue(1)
        jobs.clock.advance(timedelta(hours=1, minutes=1))
        assert len(jobs.drain()) == 1
    midnight = datetime(2031, 12, 31, 23, 59, 59, tzinfo=UTC)
    with isolated(app, at=midnight) as jobs:
        assert jobs.clock.time == midnight


@pytest.mark.parametrize("at", [datetime(2030, 1, 1), "2030"])  # noqa: DTZ001
def test_a_time_without_a_zone_is_refused(at: datetime) -> None:
    with pytest.raises(InvalidOption, match="time zone"), isolated(app, at=at):
        pass


def test_scheduled_jobs_move_the_clock(jobs: Jobs) -> None:
    began = jobs.clock.time
    shop.charge.enqueue(7, fails=2)
    shop.welcome.options(delay=30).enqueue(1)
    runs = jobs.drain(scheduled=True)
    assert [(run.task, run.attempt, run.state) for run in runs] == [
        ("charge", 1, "ready"),
        ("charge", 2, "ready"),  # 10 s later
        ("welcome", 1, "succeeded"),  # at 30 s
        ("charge", 3, "succeeded"),  # at 70 s
    ]
    assert jobs.clock.time - began == timedelta(seconds=70)


def test_a_job_that_fails_for_good_is_followed_up(jobs: Jobs) -> None:
    job = shop.acharge.enqueue(7)
    runs = jobs.drain(scheduled=True)
    assert [run.task for run in runs] == ["acharge", "acharge", "acharge", "bury"]
    assert done[-1][1:4] == (job.id, "acharge", "exhausted")
    assert runs[2].follow_ups == (runs[3].job_id,)


def test_jitter_waits_as_long_as_it_may() -> None:
    local = Holdfast("memory://")

    @local.task(backoff=FullJitter(base=4, max=10))
    def flaky() -> None:
        raise ConnectionError

    with isolated(local) as jobs:
        flaky.enqueue()
        assert [run.retry_in for run in jobs.drain(scheduled=True)] == [4, 8, 10, None]


def test_retry_after(jobs: Jobs) -> None:
    shop.steer.enqueue("retry")
    assert [run.retry_in for run in jobs.drain(scheduled=True)] == [30, None]


def test_scheduled_needs_a_clock_that_stands_still() -> None:
    with isolated(app, frozen=False) as jobs:
        shop.welcome.options(delay=60).enqueue(1)
        assert jobs.drain() == []
        with pytest.raises(InvalidOption, match="real clock"):
            jobs.drain(scheduled=True)


# Bounds.


def test_jobs_without_an_end(jobs: Jobs) -> None:
    shop.tick.enqueue()
    with pytest.raises(EndlessJobs, match=r"50 jobs ran, and there are more \(tick 50 times; tick is next\).*limit="):
        jobs.drain(limit=50)
    assert [job.state for job in jobs.enqueued()][-1] == "ready"


async def test_jobs_without_an_end_in_an_event_loop(jobs: Jobs) -> None:
    await shop.atick.aenqueue()
    with pytest.raises(EndlessJobs):
        await jobs.adrain(limit=50)


def test_a_schedule_without_an_end(jobs: Jobs) -> None:
    shop.remind.enqueue(3600)
    with pytest.raises(EndlessJobs, match="remind"):
        jobs.drain(scheduled=True, limit=24)
    assert len(jobs.runs) == 24


def test_exactly_the_limit_is_no_error(jobs: Jobs) -> None:
    app.enqueue_many(shop.welcome.job(number) for number in range(10))
    assert len(jobs.drain(limit=10)) == 10


# Cancelling, pausing, replaying.


def test_a_cancelled_job_does_not_run(jobs: Jobs) -> None:
    job = shop.welcome.enqueue(1)
    assert job.cancel() is CancelAnswer.CANCELLED
    assert jobs.drain() == []


def test_a_running_job_is_cancelled() -> None:
    local = Holdfast("memory://")
    seen = []

    @local.task
    def plain() -> None:
        local.cancel(current().id)
        seen.append(current().cancelled)
        raise RuntimeError("stopped")

    @local.task
    async def coroutine() -> None:
        await local.acancel(current().id)
        await asyncio.sleep(60)

    with isolated(local) as jobs:
        handles = [plain.enqueue(), coroutine.enqueue()]
        assert [run.state for run in jobs.drain()] == ["cancelled", "cancelled"]
        assert seen == [True]
        for handle in handles:
            with pytest.raises(JobCancelled):
                handle.result()


def test_a_paused_queue_is_left_alone(jobs: Jobs) -> None:
    shop.welcome.enqueue(1)
    app.pause("mail")
    assert jobs.drain(scheduled=True) == []
    app.resume("mail")
    assert len(jobs.drain()) == 1


def test_a_dead_letter_comes_back(jobs: Jobs) -> None:
    job = shop.steer.enqueue("give up")
    jobs.drain()
    app.replay(job.id)
    assert [run.state for run in jobs.drain()] == ["failed"]


async def test_a_drain_that_is_cancelled_gives_its_job_back() -> None:
    local = Holdfast("memory://")
    running = asyncio.Event()

    @local.task
    async def patient() -> None:
        running.set()
        await asyncio.sleep(60)

    with isolated(local) as own:
        job = await patient.aenqueue()
        draining = asyncio.create_task(own.adrain())
        await running.wait()
        draining.cancel()
        with pytest.raises(asyncio.CancelledError):
            await draining
        assert (await job.arefresh()).state == "ready"
        assert job.failures == []


# Events, and what is not under test.


def test_listeners_hear_of_it(jobs: Jobs) -> None:
    shop.charge.enqueue(1)
    jobs.drain()
    [settled] = [event for event in heard if isinstance(event, JobSettled)]
    assert (settled.reason, settled.error, settled.retry_in) == ("retried", "ConnectionError: attempt 1", 10)


def test_only_an_isolated_application_is_drained() -> None:
    with pytest.raises(HoldfastError, match="not under test, and its real jobs are left alone"):
        drain(app)


def test_drain_finds_the_application(jobs: Jobs) -> None:
    shop.welcome.enqueue(1)
    assert [run.task for run in drain(app)] == ["welcome"]
