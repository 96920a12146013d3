"""Stopping: who may finish, who is given back and at what cost, and that the worker ends whatever its handlers do."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from holdfast import (
    EmbeddedWorker,
    Holdfast,
    InvalidOption,
    JobHandle,
    OutcomeUnknown,
    QueueClosed,
    State,
    StoreUnavailable,
    WorkerSettings,
    current,
)
from holdfast.events import JobSettled, JobStarted, WorkerStopped
from holdfast.store import Claimed, ClaimRequest, SessionView, all_sessions
from holdfast.worker.process_tree import children_of
from tests.worker.bench import PATIENCE, Bench, Heard, Times, ended, make_eager, service_of, stored, wait_until
from tests.worker.shop import AT_ONCE, Shop

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """What the call returns; an error if it takes longer. Something that hangs must not hang the whole run."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(seconds)
    assert results, f"not done after {time.monotonic() - began:.1f} s"
    return results[0]


def fate(job: JobHandle[Any]) -> tuple[str, str, int]:
    details = stored(job)
    return details.state.value, details.reason.value, details.attempt


def sessions(bench: Bench) -> list[SessionView]:
    return asyncio.run(all_sessions(bench.store()))


GIVEN_BACK = ("ready", "released", 0)


class Blocked:
    """A handler, of any kind, that has begun and waits for the test."""

    def __init__(self, app: Holdfast) -> None:
        self.begun, self.let_go, self.saw = threading.Event(), threading.Event(), threading.Event()

        @app.task(max_retries=0)
        async def asynchronously() -> str:
            self.begun.set()
            try:
                while not self.let_go.is_set():  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            except asyncio.CancelledError:
                self.saw.set()
                raise
            return "finished"

        @app.task(max_retries=0)
        def on_a_thread() -> str:
            self.begun.set()
            while not self.let_go.wait(0.005):
                if current().cancelled:
                    self.saw.set()
            return "finished"

        @app.task(max_retries=0)
        async def deaf() -> str:
            self.begun.set()
            while not self.let_go.is_set():
                try:
                    await asyncio.sleep(0.005)
                except asyncio.CancelledError:
                    self.saw.set()
            return "finished"

        @app.task
        async def quick() -> None: ...

        self.tasks = {"async": asynchronously, "thread": on_a_thread, "deaf": deaf}
        self.quick = quick

    def start(self, mode: str) -> JobHandle[str]:
        job = self.tasks[mode].enqueue()
        assert self.begun.wait(PATIENCE)
        return job


# Finishing.


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_worker_that_stops_lets_the_running_job_finish(bench: Bench, heard: Heard, mode: str) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = bench.work(app)
    job = blocked.start(mode)
    waiting = threading.Thread(target=worker.stop)
    waiting.start()
    later = blocked.quick.enqueue()
    waiting.join(0.1)
    assert waiting.is_alive()
    assert fate(job)[0] == "in_flight"
    assert not blocked.saw.is_set()
    blocked.let_go.set()
    waiting.join(PATIENCE)
    assert fate(job) == ("succeeded", "succeeded", 1)
    assert stored(job).result == b'"finished"'
    # It may have been claimed just before the stop was heard; then it was given back.
    assert fate(later) in {("ready", "enqueued", 0), ("ready", "released", 0)}
    stopped = heard.wait_for(WorkerStopped)
    assert (stopped.clean, stopped.succeeded, stopped.failed) == (True, 1, 0)
    assert [view.open for view in sessions(bench)] == [False]


@pytest.mark.usefixtures("frequent_progress")
def test_an_isolated_job_may_finish_as_well(bench: Bench, shop: Shop, tmp_path: Path) -> None:
    worker = bench.work(shop.app)
    job = shop.tell_progress_alone.enqueue(str(tmp_path / "go on"))
    wait_until(lambda: stored(job).progress, "it has begun")
    waiting = threading.Thread(target=worker.stop)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    (tmp_path / "go on").touch()
    waiting.join(PATIENCE)
    assert fate(job) == ("succeeded", "succeeded", 1)


@pytest.mark.usefixtures("keeps_what_it_fetched")
def test_jobs_that_were_fetched_but_not_started_can_be_claimed_at_once_and_have_used_no_attempt(
    bench: Bench, heard: Heard
) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = make_eager(bench.work(app, concurrency=1))
    calls = [blocked.tasks["thread"].job(), *(blocked.quick.job() for _ in range(3))]
    slow, *fetched = app.enqueue_many(calls)
    assert blocked.begun.wait(PATIENCE)
    wait_until(lambda: all(fate(job)[0] == "in_flight" for job in fetched), "they are fetched")
    waiting = threading.Thread(target=worker.stop)
    waiting.start()
    wait_until(lambda: all(fate(job) == GIVEN_BACK for job in fetched), "they are given back")
    assert fate(slow)[0] == "in_flight"

    other = bench.app()
    other.task(name="quick")(blocked.quick.spec.function)
    bench.work(other)
    for job in fetched:
        job.result(PATIENCE)
        assert fate(job) == ("succeeded", "succeeded", 1)
    assert waiting.is_alive()
    blocked.let_go.set()
    waiting.join(PATIENCE)
    assert heard.wait_for(WorkerStopped).released == 3


def test_a_claim_that_is_under_way_when_the_worker_stops_is_answered_and_given_back(bench: Bench) -> None:
    store = bench.broken_store()
    app = bench.app(store)
    blocked = Blocked(app)
    claiming = threading.Event()

    def claimed(request: ClaimRequest) -> None:
        claiming.set()

    store.before_claim = claimed
    store.claim_takes = 0.15
    jobs = app.enqueue_many([blocked.quick.job() for _ in range(3)])
    worker = bench.work(app)
    assert claiming.wait(PATIENCE)
    assert worker.stop()
    assert [fate(job) for job in jobs] == [GIVEN_BACK] * 3


def test_jobs_of_a_claim_whose_reply_is_lost_as_the_worker_stops_are_given_back(bench: Bench) -> None:
    store = bench.broken_store()
    app = bench.app(store)
    blocked = Blocked(app)
    claiming = threading.Event()

    def begun(request: ClaimRequest) -> None:
        claiming.set()

    def lose(claimed: Claimed) -> None:
        raise OutcomeUnknown("the reply got lost")

    store.before_claim, store.after_claim = begun, lose
    store.claim_takes = 0.15
    jobs = app.enqueue_many([blocked.quick.job() for _ in range(3)])
    worker = bench.work(app, keepers=False)
    assert claiming.wait(PATIENCE)
    assert worker.stop()
    assert [fate(job) for job in jobs] == [GIVEN_BACK] * 3


# The grace period.


@pytest.mark.usefixtures("short_last_words")
@pytest.mark.parametrize("mode", ["async", "thread", "deaf"])
def test_when_the_grace_period_is_over_the_job_is_given_back_without_an_attempt(
    bench: Bench, heard: Heard, mode: str
) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = bench.work(app, grace=0.1)
    job = blocked.start(mode)
    assert within(PATIENCE, worker.stop)
    assert blocked.saw.is_set()
    assert fate(job) == GIVEN_BACK
    stopped = heard.wait_for(WorkerStopped)
    assert stopped.clean is False
    assert stopped.released == 1
    blocked.let_go.set()
    time.sleep(0.05)
    assert fate(job) == GIVEN_BACK  # the late return of a handler changes nothing


def test_what_was_given_back_runs_elsewhere_while_the_old_handler_still_hangs(bench: Bench) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = bench.work(app, grace=60.0)
    job = blocked.start("thread")
    assert within(PATIENCE, lambda: worker.stop(timeout=0))
    other = bench.app()

    @other.task(name=blocked.tasks["thread"].name)
    async def elsewhere() -> str:
        return f"elsewhere, attempt {current().attempt}"

    bench.work(other)
    assert job.result(PATIENCE) == "elsewhere, attempt 1"
    blocked.let_go.set()


@pytest.mark.usefixtures("short_last_words")
def test_an_isolated_job_is_given_back_when_the_grace_period_is_over(bench: Bench, shop: Shop, tmp_path: Path) -> None:
    worker = bench.work(shop.app, grace=0.1)
    begun = [tmp_path / name for name in ("deaf", "plain", "async")]
    jobs: list[JobHandle[Any]] = [
        shop.endless_alone.enqueue(str(begun[0]), 60.0),
        shop.until_cancelled_alone.enqueue(str(begun[1])),
        shop.auntil_cancelled_alone.enqueue(str(begun[2])),
    ]
    wait_until(lambda: all(path.exists() for path in begun), "they run")
    assert within(PATIENCE, worker.stop)
    assert [fate(job) for job in jobs] == [GIVEN_BACK] * 3


@pytest.mark.usefixtures("short_last_words")
@pytest.mark.parametrize("mode", ["async", "thread", "deaf"])
def test_a_second_stop_gives_everything_back_at_once(bench: Bench, mode: str) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = bench.work(app, grace=60.0)
    job = blocked.start(mode)
    waiting = threading.Thread(target=worker.stop)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    began = time.monotonic()
    assert within(PATIENCE, lambda: worker.stop(timeout=0))
    assert time.monotonic() - began < 5
    waiting.join(PATIENCE)
    assert fate(job) == GIVEN_BACK
    blocked.let_go.set()


def test_a_stop_with_a_timeout_gives_back_what_still_runs_then(bench: Bench) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = bench.work(app, grace=60.0)
    job = blocked.start("async")
    assert within(PATIENCE, lambda: worker.stop(timeout=0.2))
    assert fate(job) == GIVEN_BACK


def test_stopping_without_patience_always_returns(bench: Bench) -> None:
    """The second order to stop may meet an event loop that is just ending, and gives no answer any more."""
    app = bench.app()
    blocked = Blocked(app)
    blocked.quick.enqueue()
    for _ in range(15):
        worker = app.start_worker()
        assert within(PATIENCE, lambda worker=worker: worker.stop(timeout=0))  # type: ignore[misc]
        assert worker.stop()


def test_a_stop_with_a_timeout_returns_though_a_handler_blocks_the_event_loop(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be given back from a loop that does not run; but whoever waits does not wait for it."""
    monkeypatch.setattr("holdfast.worker.embedded._LAST_WORDS", 0.2)
    app = bench.app()
    let_go, begun = threading.Event(), threading.Event()

    @app.task
    async def block() -> None:
        begun.set()
        let_go.wait(PATIENCE)

    worker = bench.work(app)
    block.enqueue()
    assert begun.wait(PATIENCE)
    assert within(PATIENCE, lambda: worker.stop(drain=True, timeout=0.2)) is False
    assert not let_go.is_set()
    monkeypatch.undo()
    let_go.set()


# Draining.


def test_a_worker_that_drains_runs_until_its_queues_are_empty_delayed_jobs_and_retries_included(bench: Bench) -> None:
    app = bench.app()

    @app.task(backoff=lambda failures: 0.1)
    async def flaky() -> int:
        if current().attempt < 3:
            raise ValueError("not yet")
        return current().attempt

    @app.task(queue="elsewhere")
    async def of_another_queue() -> None: ...

    worker = bench.work(app, queues=("default",))
    jobs = [flaky.enqueue(), flaky.options(delay=0.3).enqueue()]
    other = of_another_queue.enqueue()
    assert worker.stop(drain=True, timeout=PATIENCE)
    assert [fate(job) for job in jobs] == [("succeeded", "succeeded", 3)] * 2
    assert fate(other)[0] == "ready"


def test_after_a_drain_a_store_in_memory_takes_no_more_jobs_and_a_file_does(bench: Bench) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = bench.work(app)
    job = blocked.start("thread")
    draining = threading.Thread(target=lambda: worker.stop(drain=True))
    draining.start()
    if bench.engine == "memory":

        def refused() -> bool:
            try:
                blocked.quick.enqueue()
            except QueueClosed:
                return True
            return False

        wait_until(refused, "new jobs are refused while it drains")
    blocked.let_go.set()
    draining.join(PATIENCE)
    assert not draining.is_alive()
    assert fate(job)[0] == "succeeded"
    if bench.engine == "memory":
        with pytest.raises(QueueClosed):
            blocked.quick.enqueue()
    else:
        assert blocked.quick.enqueue().state is State.READY


def test_what_follows_a_failure_is_still_accepted_while_a_worker_drains(bench: Bench) -> None:
    app = bench.app()

    @app.task
    async def mourn(job_id: str) -> str:
        return job_id

    @app.task(max_retries=0, on_failed=mourn)
    async def fall() -> None:
        raise ValueError("down")

    job = fall.enqueue()
    worker = bench.work(app)
    assert worker.stop(drain=True, timeout=PATIENCE)
    [follow_up] = app.find(task="mourn").jobs
    assert follow_up.result(0) == job.id


def test_a_drain_that_takes_too_long_says_so_and_gives_the_rest_back(bench: Bench) -> None:
    app = bench.app()
    blocked = Blocked(app)
    worker = bench.work(app, concurrency=1)
    job, waiting = blocked.start("async"), blocked.quick.enqueue()
    assert within(PATIENCE, lambda: worker.stop(drain=True, timeout=0.3)) is False
    assert fate(job) == GIVEN_BACK
    assert fate(waiting)[0] == "ready"


def test_a_drain_does_not_wait_for_a_queue_that_is_paused(bench: Bench) -> None:
    app = bench.app()
    blocked = Blocked(app)
    app.pause("default")
    job = blocked.quick.enqueue()
    worker = bench.work(app)
    assert within(PATIENCE, lambda: worker.stop(drain=True))
    assert fate(job) == ("ready", "enqueued", 0)


def test_a_drain_outlasts_a_store_that_fails_for_a_while(bench: Bench) -> None:
    store = bench.broken_store()
    app = bench.app(store)
    blocked = Blocked(app)
    worker = bench.work(app)
    job = blocked.quick.enqueue()
    store.before_counts = Times(3, lambda: StoreUnavailable("somebody tripped over the cable"))
    assert within(PATIENCE, lambda: worker.stop(drain=True))
    assert fate(job)[0] == "succeeded"
    assert store.before_counts.left == 0


# The embedded worker.


def test_a_worker_that_has_stopped_leaves_no_thread_and_no_process_behind(bench: Bench, shop: Shop) -> None:
    before = set(children_of(os.getpid()))
    worker = bench.work(shop.app)
    for job in (shop.ping.enqueue(), shop.aping.enqueue(), shop.ping_alone.enqueue()):
        assert job.result(PATIENCE) == "pong"

    def of_the_worker() -> set[str]:
        kinds = ("holdfast-worker", "holdfast-heart", "holdfast-handler", "holdfast-wait")
        return {thread.name for thread in threading.enumerate() if thread.name.startswith(kinds)}

    assert len(of_the_worker()) == 4
    assert worker.stop()
    wait_until(lambda: not of_the_worker(), "all of its threads end")
    assert set(children_of(os.getpid())) <= before


def test_leaving_the_block_of_an_embedded_worker_stops_it(bench: Bench) -> None:
    app = bench.app()
    blocked = Blocked(app)
    with app.start_worker(WorkerSettings(concurrency=2)) as worker:
        blocked.quick.enqueue().result(PATIENCE)
        assert [view.open for view in sessions(bench)] == [True]
    assert [view.open for view in sessions(bench)] == [False]
    assert worker.stop()


def test_failed_attempts_are_listed_for_tests_to_look_at(bench: Bench, heard: Heard) -> None:
    app = bench.app()

    @app.task(max_retries=1, backoff=AT_ONCE)
    def fall(name: str) -> None:
        raise ValueError(f"{name}: down")

    @app.task
    async def stand() -> None: ...

    worker = bench.work(app)
    job = fall.enqueue("ann")
    ended(job)
    stand.enqueue().result(PATIENCE)
    heard.wait_for(JobSettled, count=3)
    listed = [(exception.job_id, exception.task, exception.type, exception.error) for exception in worker.exceptions]
    assert listed == [(job.id, "fall", "ValueError", "ann: down")] * 2


def test_the_list_of_failed_attempts_is_bounded(bench: Bench) -> None:
    app = bench.app()

    @app.task(max_retries=0)
    async def fall(number: int) -> None:
        raise ValueError(str(number))

    app.enqueue_many([fall.job(number) for number in range(1_200)])
    worker = bench.work(app)
    assert worker.stop(drain=True, timeout=PATIENCE)
    assert len(worker.exceptions) == 1_000
    assert len({exception.error for exception in worker.exceptions}) == 1_000


def test_a_worker_without_any_queue_says_so_at_the_start(bench: Bench) -> None:
    app = bench.app()
    with pytest.raises(InvalidOption, match="the application has no tasks"):
        app.start_worker()


def test_a_worker_looks_at_least_every_five_seconds_by_default() -> None:
    assert WorkerSettings().poll == 5.0


def test_the_poll_finds_what_no_wake_up_told_of(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    app = bench.app()
    blocked = Blocked(app)

    async def silence(self: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr("holdfast.worker.claimer.Claimer.listen", silence)
    bench.work(app, poll=0.1)
    time.sleep(0.15)
    began = time.monotonic()
    blocked.quick.enqueue().result(PATIENCE)
    assert time.monotonic() - began < 5


def test_without_a_poll_it_is_the_wake_up_that_tells(bench: Bench, heard: Heard) -> None:
    app = bench.app()
    blocked = Blocked(app)
    bench.work(app, poll=3600.0)
    wait_until(lambda: service_of(bench._workers[0])._claimer.empty, "it has looked, and found nothing")
    blocked.quick.enqueue().result(PATIENCE)
    assert len(heard.of(JobStarted)) == 1


async def test_a_worker_inside_a_running_event_loop_works_until_it_is_cancelled(bench: Bench) -> None:
    app = bench.app()

    @app.task
    async def work() -> str:
        return "done"

    running = asyncio.create_task(app.arun_worker(WorkerSettings()))
    job = await work.aenqueue()
    assert await job.aresult(PATIENCE) == "done"
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [view.open for view in await all_sessions(app.store)] == [False]
    await app.aclose()


@pytest.mark.usefixtures("short_last_words")
def test_a_worker_stops_though_the_store_is_away(bench: Bench) -> None:
    """What cannot be settled in time is left to the keepers."""
    store = bench.broken_store()
    app = bench.app(store)
    blocked = Blocked(app)
    worker: EmbeddedWorker = bench.work(app)
    store.before_apply = outage = Times(10**9, lambda: StoreUnavailable("somebody tripped over the cable"))
    job = blocked.quick.enqueue()
    wait_until(lambda: outage.left < 10**9, "the settlement does not go through")
    assert within(PATIENCE, lambda: worker.stop(timeout=0))
    assert fate(job)[0] == "in_flight"
    assert [view.open for view in sessions(bench)] == [False]
