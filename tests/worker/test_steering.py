"""What a handler asks for by raising: another attempt, a later one, none at all; and jobs that cannot be run here."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import GiveUp, Holdfast, InvalidOption, JobHandle, Retry, Snooze, State, Steps, Task, current
from holdfast.events import JobSettled, TaskUnknown
from holdfast.failures import decode_history
from holdfast.job import NewJob
from holdfast.ports import SYSTEM
from tests.worker.bench import PATIENCE, Bench, Heard, ended, failed, stored, wait_until
from tests.worker.shop import AT_ONCE, Shop


def insert(app: Holdfast, task: str, payload: bytes, queue: str = "default") -> JobHandle[Any]:
    """A job as another program may have put it there."""
    job_id = SYSTEM.ids.job_id()
    app.store.insert_blocking([NewJob(id=job_id, task=task, payload=payload, queue=queue)])
    return app.get(job_id)


# Retry.


def test_retry_after_so_many_seconds_wins_over_the_backoff_of_the_task(bench: Bench, heard: Heard) -> None:
    app = bench.app()

    @app.task(backoff=Steps((3600.0,)))
    async def busy() -> int:
        if current().attempt == 1:
            raise Retry("come back", after=0.05)
        return current().attempt

    bench.work(app)
    job = busy.enqueue()
    assert job.result(PATIENCE) == 2
    first = heard.wait_for(JobSettled)
    assert (first.reason, first.retry_in, first.error) == ("retried", 0.05, "Retry: come back")
    assert stored(job).failures == 1


def test_retry_without_a_time_waits_as_the_backoff_of_the_task_says(bench: Bench, heard: Heard) -> None:
    app = bench.app()
    asked: list[int] = []

    def backoff(failures: int) -> float:
        asked.append(failures)
        return 0.01 * failures

    @app.task(backoff=backoff)
    def busy() -> int:
        if current().attempt < 3:
            raise Retry
        return current().attempt

    bench.work(app)
    assert busy.enqueue().result(PATIENCE) == 3
    assert asked == [1, 2]
    assert [settled.retry_in for settled in heard.of(JobSettled)][:2] == [0.01, 0.02]


def test_retry_counts_as_a_failure_and_ends_with_the_retries(bench: Bench) -> None:
    app = bench.app()

    @app.task(max_retries=2, backoff=AT_ONCE)
    async def hopeless() -> None:
        raise Retry("again", after=0)

    bench.work(app)
    job = hopeless.enqueue()
    assert failed(job) == ("exhausted", "Retry", "again")
    assert [failure.attempt for failure in decode_history(ended(job).failure_history)] == [1, 2, 3]


def test_an_error_is_tried_again_and_its_history_is_kept(bench: Bench) -> None:
    app = bench.app()

    @app.task(max_retries=1, backoff=AT_ONCE)
    def broken() -> None:
        raise ValueError(f"attempt {current().attempt}")

    bench.work(app)
    job = broken.enqueue()
    assert failed(job) == ("exhausted", "ValueError", "attempt 2")
    history = decode_history(ended(job).failure_history)
    assert [failure.message for failure in history] == ["attempt 1", "attempt 2"]
    assert all("in broken" in failure.traceback for failure in history)


# Snooze.


def test_a_snoozed_job_runs_later_and_has_used_no_attempt(bench: Bench, heard: Heard) -> None:
    app = bench.app()
    attempts: list[int] = []

    @app.task(max_retries=0)
    async def sleepy() -> int:
        attempts.append(current().attempt)
        if len(attempts) < 4:
            raise Snooze(0.02, "not yet")
        return current().attempt

    bench.work(app)
    job = sleepy.enqueue()
    assert job.result(PATIENCE) == 1
    assert attempts == [1, 1, 1, 1]
    assert (stored(job).attempt, stored(job).snoozes, stored(job).failures) == (1, 3, 0)
    assert [settled.retry_in for settled in heard.of(JobSettled)] == [0.02, 0.02, 0.02, None]


def test_a_job_that_snoozes_for_ever_fails_at_the_limit(bench: Bench) -> None:
    app = bench.app()

    @app.task
    def sleepy() -> None:
        bench.tally.runs["sleepy"] += 1
        raise Snooze(0, "five more minutes")

    bench.work(app, max_snoozes=3)
    job = sleepy.enqueue()
    assert failed(job) == ("snoozed_out", "Snooze", "five more minutes")
    assert bench.tally.runs["sleepy"] == 4
    assert ended(job).attempt == 0


@pytest.mark.parametrize("wait", [-1, float("nan"), "soon", True])
def test_a_time_that_is_none_is_refused_where_it_is_written(wait: Any) -> None:
    with pytest.raises(InvalidOption, match=r"Retry\(after="):
        Retry(after=wait)
    with pytest.raises(InvalidOption, match="Snooze"):
        Snooze(wait)


# Giving up.


def test_a_job_that_is_given_up_fails_at_once(bench: Bench) -> None:
    app = bench.app()

    @app.task(max_retries=5)
    async def hopeless() -> None:
        raise GiveUp("the account is closed")

    bench.work(app)
    job = hopeless.enqueue()
    assert failed(job) == ("permanent", "GiveUp", "the account is closed")
    assert ended(job).attempt == 1


def test_permanent_errors_and_their_subclasses_fail_at_once_and_others_are_tried_again(bench: Bench) -> None:
    app = bench.app()

    @app.task(permanent=(LookupError,), max_retries=1, backoff=AT_ONCE)
    async def look_up(kind: str) -> None:
        raise {"KeyError": KeyError, "ValueError": ValueError}[kind]("lost")

    bench.work(app)
    gone, wrong = look_up.enqueue("KeyError"), look_up.enqueue("ValueError")
    assert failed(gone)[:2] == ("permanent", "KeyError")
    assert ended(gone).attempt == 1
    assert failed(wrong)[:2] == ("exhausted", "ValueError")
    assert ended(wrong).attempt == 2


@pytest.mark.parametrize("how", ["retry", "snooze", "give up"])
def test_an_isolated_handler_steers_its_job_in_the_same_way(bench: Bench, shop: Shop, heard: Heard, how: str) -> None:
    bench.work(shop.app)
    job = shop.signals_alone.enqueue(how)
    if how == "retry":
        assert job.result(PATIENCE) == "attempt 2"
        assert heard.of(JobSettled)[0].retry_in == 0.05
    elif how == "snooze":
        heard.wait_for(JobSettled, lambda settled: settled.reason == "snoozed" and settled.retry_in == 3600.0)
        assert (stored(job).state, stored(job).attempt, stored(job).snoozes) == (State.READY, 0, 1)
    else:
        assert failed(job) == ("permanent", "GiveUp", "never")


# Jobs that do not fit.


@pytest.mark.parametrize(
    ("payload", "told"),
    [
        (b'{"left": "two", "right": 3}', "$.left: Expected `int`, got `str`"),
        (b'{"left": 2}', "$: Object missing required field `right`"),
        (b'{"left": 2, "right"', "$: Input data was truncated"),
        (b"[2, 3]", "$: Expected `object`, got `array`"),
    ],
)
def test_arguments_that_do_not_fit_fail_at_once_with_a_readable_reason(bench: Bench, payload: bytes, told: str) -> None:
    app = bench.app()

    @app.task
    async def add(left: int, right: int) -> int:
        bench.tally.runs["add"] += 1
        return left + right

    @app.task
    def add_on_a_thread(left: int, right: int) -> int:
        bench.tally.runs["add"] += 1
        return left + right

    bench.work(app)
    for task in ("add", "add_on_a_thread"):
        assert failed(insert(app, task, payload)) == ("permanent", "InvalidPayload", told)
    assert not bench.tally.runs["add"]
    assert add.enqueue(2, 3).result(PATIENCE) == 5


def test_arguments_that_do_not_fit_an_isolated_handler_fail_in_the_same_way(bench: Bench, shop: Shop) -> None:
    bench.work(shop.app)
    job = insert(shop.app, "add_alone", b'{"left": "two", "right": 3}')
    assert failed(job) == ("permanent", "InvalidPayload", "$.left: Expected `int`, got `str`")


def test_a_task_that_this_worker_does_not_know_waits_for_one_that_does(
    bench: Bench, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.runner._LONGEST_UNKNOWN_WAIT", 0.2)
    old = bench.app()

    @old.task
    async def known() -> None: ...

    behind = bench.work(old)
    new = bench.app()

    @new.task(name="deployed_later")
    async def deployed_later() -> int:
        return current().attempt

    job = deployed_later.enqueue()
    told = heard.wait_for(TaskUnknown)
    assert (told.job_id, told.task) == (job.id, "deployed_later")
    put_off = heard.wait_for(JobSettled)
    assert (put_off.reason, put_off.attempt) == ("snoozed", 0)
    assert put_off.retry_in is not None
    assert 0.1 <= put_off.retry_in <= 0.2
    behind.stop()
    bench.work(new)
    assert job.result(PATIENCE) == 1


def test_a_task_that_nobody_knows_fails_at_the_limit_and_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.worker.runner._LONGEST_UNKNOWN_WAIT", 0.1)
    app = bench.app()

    @app.task
    async def known() -> str:
        return "still here"

    bench.work(app, max_snoozes=1)
    job = insert(app, "unheard_of", b"{}")
    reason, kind, message = failed(job)
    assert (reason, kind) == ("snoozed_out", "UnknownTask")
    assert message == "no task 'unheard_of' is registered here; known are: known"
    assert ended(job).attempt == 0
    assert known.enqueue().result(PATIENCE) == "still here"


def test_a_function_that_returns_a_coroutine_is_told_to_be_async(bench: Bench) -> None:
    app = bench.app()

    async def inner() -> None: ...

    @app.task(max_retries=0)
    def outer() -> Any:
        return inner()

    bench.work(app)
    reason, kind, message = failed(outer.enqueue())
    assert (reason, kind) == ("exhausted", "InvalidOption")
    assert "make it `async def`" in message


def test_a_backoff_that_raises_does_not_keep_the_job_from_its_retry(bench: Bench) -> None:
    app = bench.app()

    def backoff(failures: int) -> float:
        raise RuntimeError("no idea")

    @app.task(backoff=backoff)
    async def once() -> int:
        if current().attempt == 1:
            raise ValueError("once")
        return current().attempt

    bench.work(app)
    assert once.enqueue().result(PATIENCE) == 2


def test_a_job_that_is_replayed_begins_anew(bench: Bench) -> None:
    app = bench.app()
    broken = [True]

    @app.task(max_retries=0)
    def flaky() -> int:
        if broken[0]:
            raise ValueError("broken")
        return current().attempt

    task: Task[[], int] = flaky
    bench.work(app)
    job = task.enqueue()
    assert failed(job)[0] == "exhausted"
    broken[0] = False
    app.replay(job.id)
    wait_until(lambda: stored(job).state is State.SUCCEEDED, "the replayed job succeeds")
    assert (stored(job).failures, stored(job).attempt) == (0, 2)
