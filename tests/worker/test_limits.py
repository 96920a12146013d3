"""Time limits and cancellation: who is told to stop, who is stopped, and what a late handler can still do."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast import CancelAnswer, JobCancelled, JobHandle, State, Task, current
from holdfast.events import HandlerStuck, JobSettled, JobStarted, ProcessKilled, SettleRefused
from holdfast.worker.runner import Running
from tests.worker.bench import PATIENCE, Bench, Heard, ended, failed, make_eager, service_of, stored, wait_until
from tests.worker.shop import AT_ONCE, Shop

# Soft limits.


def test_a_coroutine_past_its_timeout_is_cancelled_and_cleans_up(bench: Bench) -> None:
    app = bench.app()
    cleaned_up = threading.Event()

    @app.task(timeout=0.1, max_retries=0)
    async def slow() -> None:
        try:
            await asyncio.sleep(20)
        finally:
            cleaned_up.set()

    bench.work(app)
    job = slow.enqueue()
    assert failed(job) == ("exhausted", "TimeoutError", "the handler ran longer than its timeout of 0.1 s")
    assert cleaned_up.is_set()
    assert ended(job).attempt == 1


def test_a_coroutine_past_its_timeout_is_tried_again(bench: Bench) -> None:
    app = bench.app()

    @app.task(timeout=0.1, backoff=AT_ONCE)
    async def slow_at_first() -> int:
        if current().attempt == 1:
            await asyncio.sleep(20)
        return current().attempt

    bench.work(app)
    assert slow_at_first.enqueue().result(PATIENCE) == 2


def test_a_plain_function_past_its_timeout_sees_that_it_should_stop(bench: Bench) -> None:
    app = bench.app()

    @app.task(timeout=0.1, max_retries=0)
    def slow() -> None:
        wait_until(lambda: current().cancelled, "it is told to stop")
        raise InterruptedError("stopped half-way")

    bench.work(app)
    assert failed(slow.enqueue()) == ("exhausted", "InterruptedError", "stopped half-way")


def test_a_handler_that_finishes_in_spite_of_its_timeout_has_succeeded(bench: Bench) -> None:
    app = bench.app()

    @app.task(timeout=0.05)
    def slow() -> str:
        wait_until(lambda: current().cancelled, "it is told to stop")
        return "done all the same"

    @app.task(timeout=0.05)
    async def slow_too() -> str:
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            return "done all the same"
        return "never"

    bench.work(app)
    assert slow.enqueue().result(PATIENCE) == "done all the same"
    assert slow_too.enqueue().result(PATIENCE) == "done all the same"


def test_a_handler_without_a_timeout_is_left_alone(bench: Bench) -> None:
    app = bench.app()

    @app.task(timeout=None)
    async def patient() -> bool:
        await asyncio.sleep(0.2)
        return current().cancelled

    bench.work(app)
    assert patient.enqueue().result(PATIENCE) is False


def test_every_deadline_is_kept_whatever_the_order_in_which_they_come(bench: Bench) -> None:
    app = bench.app()

    @app.task(timeout=0.3, max_retries=0)
    async def later() -> None:
        await asyncio.sleep(20)

    @app.task(timeout=0.1, max_retries=0)
    async def sooner() -> None:
        await asyncio.sleep(20)

    bench.work(app)
    began = time.monotonic()
    jobs = [later.enqueue(), sooner.enqueue(), later.enqueue()]
    assert {failed(job)[1] for job in jobs} == {"TimeoutError"}
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(("engine", "mode"), [("memory", "plain"), ("sqlite", "async")])
def test_an_isolated_handler_past_its_timeout_is_told_to_stop(
    bench: Bench, shop: Shop, mode: str, tmp_path: Path
) -> None:
    bench.work(shop.app)
    if mode == "plain":
        assert failed(shop.timed_alone.enqueue(str(tmp_path / "begun")))[1:] == ("RuntimeError", "I was told to stop")
    else:
        told = failed(shop.atimed_alone.enqueue(str(tmp_path / "begun")))
        assert told[1:] == ("TimeoutError", "the handler ran longer than its timeout of 0.2 s")
    assert shop.ping_alone.enqueue().result(PATIENCE) == "pong"


# Hard limits.


def test_an_isolated_handler_past_its_hard_limit_is_killed_with_its_process(
    bench: Bench, shop: Shop, heard: Heard, tmp_path: Path
) -> None:
    bench.work(shop.app)
    began = time.monotonic()
    job = shop.deaf_alone.enqueue(str(tmp_path / "begun"), 30.0)
    assert failed(job) == ("exhausted", "HardTimeout", "the handler ran past its hard limit of 0.4 s and did not stop")
    assert time.monotonic() - began < 10
    killed = heard.wait_for(ProcessKilled)
    assert (killed.job_id, killed.why) == (job.id, "hard timeout")
    following = shop.where_alone.enqueue()
    assert following.result(PATIENCE)["pid"] != killed.pid
    assert (stored(following).attempt, stored(following).crashes) == (1, 0)
    wait_until(lambda: not os.path.exists(f"/proc/{killed.pid}"), "the process is gone")


def test_a_thread_past_its_hard_limit_loses_its_job_and_its_slot_and_its_late_return_changes_nothing(
    bench: Bench, heard: Heard
) -> None:
    app = bench.app()
    let_go, returned = threading.Event(), threading.Event()

    @app.task(timeout=0.1, hard_timeout=0.3, max_retries=0)
    def deaf() -> str:
        let_go.wait(PATIENCE)
        returned.set()
        return "late"

    @app.task
    def quick() -> str:
        return "there is room again"

    worker = bench.work(app, concurrency=1)
    job = deaf.enqueue()
    assert failed(job) == ("exhausted", "HardTimeout", "the handler ran past its hard limit of 0.3 s and did not stop")
    stuck = heard.wait_for(HandlerStuck)
    assert (stuck.job_id, stuck.task, stuck.hard_timeout) == (job.id, "deaf", 0.3)
    assert quick.enqueue().result(PATIENCE) == "there is room again"
    assert not returned.is_set()

    let_go.set()
    assert returned.wait(PATIENCE)
    assert quick.enqueue().result(PATIENCE) == "there is room again"
    assert stored(job).state is State.FAILED
    assert stored(job).result is None
    assert len(heard.of(JobSettled, lambda settled: settled.job_id == job.id)) == 1
    assert not heard.of(SettleRefused)
    counts = service_of(worker).settler.counts
    wait_until(lambda: counts == {"failed": 1, "succeeded": 2}, "the worker has heard of the other two")


def test_a_coroutine_that_ignores_its_cancellation_loses_its_job_and_its_slot_at_the_hard_limit(
    bench: Bench, heard: Heard
) -> None:
    app = bench.app()
    let_go, returned = threading.Event(), threading.Event()

    @app.task(timeout=0.1, hard_timeout=0.3, max_retries=0)
    async def deaf() -> str:
        while not let_go.is_set():
            try:
                await asyncio.sleep(0.02)
            except asyncio.CancelledError:
                bench.tally.runs["asked to stop"] += 1
        returned.set()
        return "late"

    @app.task
    async def quick() -> str:
        return "there is room again"

    bench.work(app, concurrency=1)
    job = deaf.enqueue()
    assert failed(job)[:2] == ("exhausted", "HardTimeout")
    assert heard.wait_for(HandlerStuck).job_id == job.id
    assert quick.enqueue().result(PATIENCE) == "there is room again"
    assert bench.tally.runs["asked to stop"] == 2
    let_go.set()
    assert returned.wait(PATIENCE)
    assert quick.enqueue().result(PATIENCE) == "there is room again"
    assert stored(job).state is State.FAILED
    assert len(heard.of(JobSettled, lambda settled: settled.job_id == job.id)) == 1


def test_a_job_past_its_hard_limit_is_tried_again_beside_the_stuck_one(bench: Bench) -> None:
    app = bench.app()
    let_go = threading.Event()

    @app.task(timeout=None, hard_timeout=0.2, backoff=AT_ONCE)
    def deaf_at_first() -> int:
        if current().attempt == 1:
            let_go.wait(PATIENCE)
        return current().attempt

    bench.work(app, concurrency=1)
    assert deaf_at_first.enqueue().result(PATIENCE) == 2
    let_go.set()


# Cancellation.


def assert_cancelled(job: JobHandle[Any]) -> None:
    with pytest.raises(JobCancelled):
        job.result(PATIENCE)
    assert stored(job).reason == "cancelled"


@pytest.mark.parametrize("mode", ["async", "thread", "isolated", "isolated async"])
def test_a_running_job_is_cancelled_wherever_it_runs(bench: Bench, shop: Shop, mode: str, tmp_path: Path) -> None:
    begun = tmp_path / "begun"

    @shop.app.task
    async def asynchronously(path: str) -> None:
        begun.touch()
        try:
            await asyncio.sleep(20)
        finally:
            bench.tally.runs["stopped"] += 1

    @shop.app.task
    def on_a_thread(path: str) -> str:
        begun.touch()
        wait_until(lambda: current().cancelled, "it is told to stop")
        bench.tally.runs["stopped"] += 1
        raise InterruptedError

    tasks: dict[str, Task[[str], Any]] = {
        "async": asynchronously,
        "thread": on_a_thread,
        "isolated": shop.until_cancelled_alone,
        "isolated async": shop.auntil_cancelled_alone,
    }
    bench.work(shop.app, lease_ttl=0.5)
    job = tasks[mode].enqueue(str(begun))
    wait_until(begun.exists, "the handler begins")
    assert job.cancel() is CancelAnswer.ASKED
    assert_cancelled(job)
    assert "isolated" in mode or bench.tally.runs["stopped"] == 1
    assert shop.aping.enqueue().result(PATIENCE) == "pong"


@pytest.mark.usefixtures("keeps_what_it_fetched")
def test_a_job_that_waits_behind_a_busy_slot_is_cancelled_without_having_run(bench: Bench, heard: Heard) -> None:
    app = bench.app()
    let_go = threading.Event()

    @app.task
    def work(name: str) -> None:
        bench.tally.runs[name] += 1
        if name == "slow":
            let_go.wait(PATIENCE)

    worker = make_eager(bench.work(app, concurrency=1, lease_ttl=0.5))
    slow, _, victim, _ = app.enqueue_many([work.job(name) for name in ("slow", "before", "victim", "after")])
    wait_until(lambda: stored(victim).state is State.IN_FLIGHT, "the worker has it, too")
    heard.wait_for(JobStarted, lambda started: started.job_id == slow.id)
    assert victim.cancel() is CancelAnswer.ASKED
    assert_cancelled(victim)
    let_go.set()
    heard.wait_for(JobSettled, lambda settled: settled.state == "succeeded", count=3)
    assert bench.tally.runs == {"slow": 1, "before": 1, "after": 1}
    assert stored(victim).attempt == 0
    assert worker.stop()


def test_a_job_that_succeeds_after_somebody_asked_to_cancel_it_has_succeeded(bench: Bench) -> None:
    app = bench.app()
    begun, let_go = threading.Event(), threading.Event()

    @app.task
    def unaware() -> str:
        begun.set()
        let_go.wait(PATIENCE)
        return "done"

    @app.task
    async def stubborn() -> str:
        begun.set()
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            return "done all the same"
        return "never"

    bench.work(app, lease_ttl=0.5)
    job = unaware.enqueue()
    assert begun.wait(PATIENCE)
    assert job.cancel() is CancelAnswer.ASKED
    let_go.set()
    assert job.result(PATIENCE) == "done"

    begun.clear()
    job = stubborn.enqueue()
    assert begun.wait(PATIENCE)
    assert job.cancel() is CancelAnswer.ASKED
    assert job.result(PATIENCE) == "done all the same"


def test_a_job_that_fails_after_somebody_asked_to_cancel_it_is_cancelled_though_the_worker_has_not_heard(
    bench: Bench, heard: Heard
) -> None:
    app = bench.app()
    begun, let_go = threading.Event(), threading.Event()

    @app.task
    def unaware() -> str:
        begun.set()
        let_go.wait(PATIENCE)
        raise ValueError("and it would be tried again")

    bench.work(app, lease_ttl=60.0)  # no beat will tell it
    job = unaware.enqueue()
    assert begun.wait(PATIENCE)
    assert job.cancel() is CancelAnswer.ASKED
    let_go.set()
    assert_cancelled(job)
    assert heard.wait_for(JobSettled).reason == "cancelled"


@pytest.mark.parametrize("isolated", [False, True])
def test_a_job_that_is_cancelled_before_its_first_step_leaves_its_slot(
    bench: Bench, shop: Shop, heard: Heard, isolated: bool, tmp_path: Path
) -> None:
    """The cancel comes in the same turn of the event loop as the start."""

    @shop.app.task
    async def asynchronously(path: str) -> None:
        bench.tally.runs["victim"] += 1

    task: Task[[str], Any] = shop.auntil_cancelled_alone if isolated else asynchronously
    worker = bench.work(shop.app, concurrency=1)
    runner = service_of(worker)._runner

    def cancel_at_once(event: object) -> None:
        heard(event)  # type: ignore[arg-type]
        if isinstance(event, JobStarted) and event.task == task.name:
            asyncio.get_running_loop().call_soon(runner.cancel, [event.job_id])

    worker._ear._listener = cancel_at_once
    job = task.enqueue(str(tmp_path / "begun"))
    assert_cancelled(job)
    assert not bench.tally.runs["victim"]
    assert shop.aping.enqueue().result(PATIENCE) == "pong"


@pytest.mark.parametrize(("engine", "mode"), [("memory", "plain"), ("sqlite", "async")])
def test_an_isolated_job_that_is_cancelled_as_it_begins_hears_of_it(
    bench: Bench, shop: Shop, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order to stop reaches the process right behind the order to run."""
    task: Task[[str], Any] = shop.until_cancelled_alone if mode == "plain" else shop.auntil_cancelled_alone
    worker = bench.work(shop.app, concurrency=1)
    runner = service_of(worker)._runner
    begin = runner._begin_isolated

    def begin_and_cancel(running: Running) -> None:
        begin(running)
        asyncio.get_running_loop().call_soon(runner.cancel, [running.job.id])

    assert shop.ping_alone.enqueue().result(PATIENCE) == "pong"  # the process is there, and waits
    monkeypatch.setattr(runner, "_begin_isolated", begin_and_cancel)
    began = time.monotonic()
    assert_cancelled(task.enqueue(str(tmp_path / "begun")))
    assert time.monotonic() - began < 10
