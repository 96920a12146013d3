"""What was enqueued: looking at it, asserting it, and messages that help."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from unittest.mock import ANY

import pytest

from holdfast import PAYLOAD, Holdfast, InvalidOption, UnknownPriority, UnknownTask
from holdfast.errors import HoldfastError
from holdfast.testing.jobs import Jobs, assert_enqueued, assert_not_enqueued, enqueued, isolated
from tests.testing import shop
from tests.testing.shop import Address, app


def message_of(jobs: Jobs, *args: object, **expected: object) -> str:
    with pytest.raises(AssertionError) as raised:
        jobs.assert_enqueued(*args, **expected)  # type: ignore[arg-type]
    return str(raised.value)


# Looking.


def test_what_was_enqueued_has_its_arguments_decoded(jobs: Jobs) -> None:
    shop.parcel.enqueue(Address("Lane 1", "Ghent"), datetime(2030, 1, 1, tzinfo=UTC))
    shop.welcome.options(delay=60, key="welcome:1", correlation_id="request-7").enqueue(1)
    parcel, welcome = jobs.enqueued()
    assert parcel.arguments == {"to": Address("Lane 1", "Ghent"), "sent_at": datetime(2030, 1, 1, tzinfo=UTC)}
    assert welcome.arguments == {"user_id": 1, "locale": "en"}
    assert (welcome.task, welcome.queue, welcome.priority) == ("welcome", "mail", 0)
    assert (welcome.delay, welcome.key, welcome.correlation_id) == (60, "welcome:1", "request-7")
    assert welcome.run_at == jobs.clock.time + timedelta(seconds=60)
    assert [job.id for job in jobs.enqueued(shop.welcome)] == [welcome.id]
    assert jobs.enqueued("parcel") == [parcel] == enqueued(app, shop.parcel)


def test_what_has_run_since_is_still_there(jobs: Jobs) -> None:
    shop.charge.options(delay=5).enqueue(1)
    jobs.drain(scheduled=True)
    charge, bury = jobs.enqueued()
    assert (charge.state, charge.delay) == ("failed", 5)
    assert (bury.task, bury.state) == ("bury", "succeeded")


def test_a_repeated_key_is_one_job(jobs: Jobs) -> None:
    for _ in range(2):
        shop.welcome.options(key=PAYLOAD).enqueue(1)
    jobs.assert_enqueued(shop.welcome, times=1, key=PAYLOAD)


def test_clear_forgets(jobs: Jobs) -> None:
    shop.welcome.enqueue(1)
    jobs.drain()
    shop.welcome.enqueue(2)
    jobs.clear()
    assert (jobs.enqueued(), jobs.runs, jobs.drain()) == ([], [], [])
    shop.welcome.enqueue(3)
    assert len(jobs.drain()) == 1


async def test_looking_needs_no_await(jobs: Jobs) -> None:
    await shop.welcome.aenqueue(1)
    jobs.assert_enqueued(shop.welcome)
    assert len(jobs.enqueued()) == 1


# Asserting.


def test_expectations_that_are_met(jobs: Jobs) -> None:
    later = datetime.now(UTC) + timedelta(days=1)
    shop.welcome.options(delay=60, priority="low", share="acme", key="k", correlation_id="c").enqueue(1, locale="de")
    shop.welcome.options(run_at=later, queue="bulk").enqueue(2)

    [first] = jobs.assert_enqueued(
        shop.welcome,
        times=1,
        arguments={"user_id": 1},
        queue="mail",
        share="acme",
        priority="low",
        delay=timedelta(minutes=1),
        key="k",
        correlation_id="c",
    )
    assert first.arguments["locale"] == "de"
    assert len(jobs.assert_enqueued(shop.welcome, times=2)) == 2
    jobs.assert_enqueued("welcome", arguments={"locale": "en"}, run_at=later, queue="bulk", priority=0)
    jobs.assert_enqueued(shop.welcome, arguments={"user_id": ANY, "locale": "en"})
    jobs.assert_enqueued(times=2)
    jobs.assert_enqueued(queue="bulk")
    jobs.assert_enqueued(shop.parcel, times=0)
    jobs.assert_not_enqueued(shop.parcel)
    jobs.assert_not_enqueued(shop.welcome, arguments={"user_id": 3})
    jobs.assert_not_enqueued(shop.welcome, delay=0, queue="mail")
    assert_enqueued(shop.welcome, times=1, delay=60)
    assert_not_enqueued(shop.welcome, delay=61)


def test_nothing_was_enqueued(jobs: Jobs) -> None:
    assert message_of(jobs, shop.welcome) == "welcome was not enqueued. Nothing was enqueued."
    jobs.assert_not_enqueued()


def test_something_else_was_enqueued(jobs: Jobs) -> None:
    shop.welcome.enqueue(7)
    shop.newsletter.options(delay=60, key="issue-3").enqueue(3)
    assert message_of(jobs, shop.welcome, arguments={"user_id": 42, "locale": "en"}, queue="bulk") == (
        "welcome with user_id=42, locale='en', queue='bulk' was not enqueued. Enqueued were:\n"
        "  1. welcome(user_id=7, locale='en') on queue mail  <- user_id is 7, not 42; queue is 'mail', not 'bulk'\n"
        "  2. newsletter(issue=3) on queue mail, in 60 s, key 'issue-3'"
    )


def test_every_difference_is_named(jobs: Jobs) -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    shop.welcome.options(run_at=at, share="a", correlation_id="x").enqueue(1)
    told = message_of(
        jobs, shop.welcome, share="b", priority="low", delay=0, run_at=at + timedelta(days=1), key="k",
        correlation_id="y",
    )  # fmt: skip
    for difference in (
        "share is 'a', not 'b'",
        "priority is 0, not 10",
        "not 0 s",
        "run_at is 2030-01-01T00:00:00+00:00, not 2030-01-02T00:00:00+00:00",
        "key is None, not 'k'",
        "correlation_id is 'x', not 'y'",
    ):
        assert difference in told


def test_another_number_of_times(jobs: Jobs) -> None:
    shop.welcome.enqueue(1)
    shop.welcome.enqueue(2)
    assert message_of(jobs, shop.welcome, times=1, arguments={"user_id": ANY}).startswith(
        "welcome with user_id=<ANY> was enqueued 2 times, not once. Enqueued were:\n"
        "  1. welcome(user_id=1, locale='en') on queue mail  <- this one\n"
    )
    assert message_of(jobs, shop.welcome, times=3).startswith("welcome was enqueued 2 times, not 3 times.")


def test_what_should_not_have_been_enqueued(jobs: Jobs) -> None:
    shop.welcome.enqueue(1)
    with pytest.raises(AssertionError, match=r"^welcome was enqueued \(once\), and should not have been\. Enqueued"):
        jobs.assert_not_enqueued(shop.welcome)
    with pytest.raises(AssertionError, match=r"^a job was enqueued \(once\), and should not have been"):
        jobs.assert_not_enqueued()


def test_a_long_list_is_cut(jobs: Jobs) -> None:
    app.enqueue_many(shop.welcome.job(number) for number in range(100))
    told = message_of(jobs, shop.parcel).splitlines()
    assert len(told) == 22
    assert told[-1] == "  … and 80 more"


# Expectations that could never be met, or always.


def test_a_parameter_that_the_task_does_not_have(jobs: Jobs) -> None:
    for check in (jobs.assert_enqueued, jobs.assert_not_enqueued):
        with pytest.raises(InvalidOption, match="task welcome has no parameter 'user': it has locale, user_id"):
            check(shop.welcome, arguments={"user": 1})


def test_a_word_that_is_not_in_the_vocabulary(jobs: Jobs) -> None:
    with pytest.raises(TypeError, match="dely"):
        jobs.assert_not_enqueued(shop.welcome, dely=3)  # type: ignore[call-arg]
    with pytest.raises(UnknownPriority):
        jobs.assert_not_enqueued(shop.welcome, priority="urgent")


def test_a_task_of_nobody(jobs: Jobs) -> None:
    with pytest.raises(UnknownTask):
        jobs.assert_not_enqueued("wellcome")
    other = Holdfast("memory://").task(shop.welcome.spec.function)
    with pytest.raises(InvalidOption, match="belongs to another application"):
        jobs.assert_not_enqueued(other)
    with pytest.raises(HoldfastError, match="the application of task welcome is not under test"):
        assert_not_enqueued(other)


def test_two_applications_are_told_apart(jobs: Jobs) -> None:
    local = Holdfast("memory://")
    twin = local.task(shop.welcome.spec.function)
    with isolated(local):
        twin.enqueue(1)
        assert_enqueued(twin, times=1)
        assert_not_enqueued(shop.welcome)
