"""Settlements go out in batches, and again until they are confirmed; claims whose reply is lost are given back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast import OutcomeUnknown, State, StoreUnavailable, current
from holdfast.events import JobSettled, JobStarted, PartFailed, SettleRefused
from holdfast.lifecycle import Move
from holdfast.observe.logging import configure
from holdfast.store import Claimed
from tests.observe.samples import Failing
from tests.worker import scenarios
from tests.worker.bench import PATIENCE, Bench, Heard, Times, ended, failed, service_of, stored, wait_until
from tests.worker.shop import AT_ONCE


def unavailable() -> Exception:
    return StoreUnavailable("somebody tripped over the cable")


def unknown() -> Exception:
    return OutcomeUnknown("the reply got lost")


# Batches.


@pytest.mark.parametrize("is_async", [True, False])
def test_many_quick_jobs_are_settled_in_few_calls(bench: Bench, is_async: bool) -> None:
    store = bench.broken_store()
    store.apply_takes = 0.002
    app = bench.app(store)

    @app.task
    async def quick(number: int) -> int:
        return number

    @app.task
    def quick_on_a_thread(number: int) -> int:
        return number

    task = quick if is_async else quick_on_a_thread
    jobs = app.enqueue_many([task.job(number) for number in range(1_000)])
    worker = bench.work(app, concurrency=20)
    assert worker.stop(drain=True, timeout=PATIENCE)
    assert service_of(worker).settler.counts == {"succeeded": 1_000}
    assert sum(store.applied) == 1_000
    assert len(store.applied) < 250
    assert max(store.applied) > 4
    assert store.claims < 500
    assert jobs[-1].result(PATIENCE) == 999


def test_a_single_job_is_settled_at_once(bench: Bench) -> None:
    """No timer waits for a batch to fill."""
    app = bench.app(store := bench.broken_store())

    @app.task
    async def quick() -> str:
        return "quick"

    bench.work(app)
    for _ in range(3):
        assert quick.enqueue().result(PATIENCE) == "quick"
    assert store.applied == [1, 1, 1]


# A store that fails.


@pytest.mark.parametrize("reply_is_lost", [False, True])
def test_settlements_are_kept_and_repeated_while_the_store_fails(
    bench: Bench, heard: Heard, reply_is_lost: bool
) -> None:
    found = scenarios.settle_while_the_store_fails(bench, reply_is_lost=reply_is_lost)
    assert found.states == {State.SUCCEEDED: 30}
    assert set(found.runs.values()) == {1}
    assert len(heard.of(PartFailed, lambda event: event.part == "settler")) >= 3
    assert not heard.of(SettleRefused)


def test_failures_retries_and_results_survive_the_outage_as_they_were(bench: Bench) -> None:
    store = bench.broken_store()
    app = bench.app(store)

    @app.task(max_retries=1, backoff=AT_ONCE)
    async def flaky(number: int) -> str:
        if current().attempt == 1:
            raise ValueError(f"number {number}")
        return f"number {number}"

    store.after_apply = Times(2, unknown)
    bench.work(app)
    jobs = app.enqueue_many([flaky.job(number) for number in range(5)])
    assert [job.result(PATIENCE) for job in jobs] == [f"number {number}" for number in range(5)]
    assert {stored(job).attempt for job in jobs} == {2}
    assert {stored(job).failures for job in jobs} == {1}


def test_the_worker_claims_no_more_than_it_can_settle_while_the_store_is_away(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it holds is bounded, however long the store does not take settlements."""
    monkeypatch.setattr("holdfast.worker.claimer._MOST_UNSETTLED", 100)
    store = bench.broken_store()
    app = bench.app(store)

    @app.task
    async def quick(number: int) -> None:
        bench.tally.runs["quick"] += 1

    outage = Times(10**9, unavailable)
    store.before_apply = outage
    app.enqueue_many([quick.job(number) for number in range(1_500)])
    worker = bench.work(app, concurrency=10)
    wait_until(lambda: len(service_of(worker).settler) > 100, "the settler is full")
    before = store.claims
    threading.Event().wait(0.1)
    assert store.claims <= before + 1
    assert bench.tally.runs["quick"] < 800
    outage.left = 0
    wait_until(lambda: service_of(worker).settler.counts["succeeded"] == 1_500, "all is settled")
    assert bench.tally.runs["quick"] == 1_500


# A claim whose reply is lost.


def test_jobs_of_a_claim_whose_reply_is_lost_are_found_given_back_and_run_once(bench: Bench, heard: Heard) -> None:
    store = bench.broken_store()
    app = bench.app(store)

    @app.task
    async def work(number: int) -> int:
        with bench.tally.running(number):
            return current().attempt

    lose = Times(1, unknown)

    def after(claimed: Claimed) -> None:
        if claimed.jobs:
            lose(claimed)

    store.after_claim = after
    jobs = app.enqueue_many([work.job(number) for number in range(4)])
    bench.work(app)
    assert [job.result(PATIENCE) for job in jobs] == [1, 1, 1, 1]
    assert {stored(job).version for job in jobs} == {2}
    assert set(bench.tally.runs.values()) == {1}
    assert set(bench.tally.most_at_once.values()) == {1}
    assert [event.part for event in heard.of(PartFailed)] == ["claimer"]
    assert len(heard.of(JobSettled, lambda settled: settled.reason == "released")) == 4


def test_every_other_reply_is_lost_and_every_job_runs_once(bench: Bench, heard: Heard) -> None:
    """Claims and settlements alike: nothing is lost, and nothing runs twice."""
    store = bench.broken_store()
    app = bench.app(store)

    @app.task
    def work(number: int) -> int:
        with bench.tally.running(number):
            return number

    calls = {"claim": 0, "apply": 0}

    def every_other(what: str) -> None:
        calls[what] += 1
        if calls[what] % 2:
            raise unknown()

    def after_claim(claimed: Claimed) -> None:
        if claimed.jobs and calls["claim"] < 4:
            every_other("claim")

    store.after_claim = after_claim
    store.after_apply = lambda moves: every_other("apply") if calls["apply"] < 4 else None
    jobs = app.enqueue_many([work.job(number) for number in range(60)])
    bench.work(app)
    assert [job.result(PATIENCE) for job in jobs] == list(range(60))
    assert set(bench.tally.runs.values()) == {1}
    assert {stored(job).attempt for job in jobs} == {1}
    assert calls["claim"] >= 2


def test_a_claim_that_was_not_carried_out_is_made_again(bench: Bench, heard: Heard) -> None:
    store = bench.broken_store()
    app = bench.app(store)

    @app.task
    async def work() -> str:
        return "done"

    store.before_claim = Times(2, unavailable)
    bench.work(app)
    assert work.enqueue().result(PATIENCE) == "done"
    assert [event.part for event in heard.of(PartFailed)] == ["claimer", "claimer"]


# One that spoils the batch.


def test_one_job_that_cannot_be_settled_does_not_take_the_others_of_its_batch_with_it(
    bench: Bench, heard: Heard
) -> None:
    """Field bug B16. River (PR #258): when one part of a batch could not be completed, the whole batch was given up.
    Here the others are settled one by one; without that they would stay in flight.
    """
    store = bench.broken_store()
    app = bench.app(store)
    together = threading.Barrier(5)

    @app.task
    def work(name: str) -> str:
        together.wait(PATIENCE)
        return name

    poison, *others = app.enqueue_many([work.job(name) for name in ("poison", "a", "b", "c", "d")])

    def choke(moves: Sequence[Move]) -> None:
        if any(move.job_id == poison.id and move.to is State.SUCCEEDED for move in moves):
            raise LookupError("a bug in the store")

    store.before_apply = choke
    store.apply_takes = 0.05
    bench.work(app, concurrency=5)
    assert [job.result(PATIENCE) for job in others] == ["a", "b", "c", "d"]
    assert failed(poison) == ("permanent", "LookupError", "a bug in the store")
    assert heard.of(PartFailed)[0].error == "LookupError: a bug in the store"


def test_one_job_that_can_not_be_settled_at_all_leaves_the_worker_working(bench: Bench) -> None:
    """Field bug B16, its other half. River (PR #1292): an error that no repetition mends was repeated in a tight loop.
    Here it is tried a few times, and others are served.
    """
    store = bench.broken_store()
    app = bench.app(store)

    @app.task
    async def work(name: str) -> str:
        bench.tally.runs[name] += 1
        return name

    poison = work.enqueue("poison")

    def choke(moves: Sequence[Move]) -> None:
        if any(move.job_id == poison.id for move in moves):
            raise LookupError("a bug in the store")

    store.before_apply = choke
    worker = bench.work(app)
    wait_until(lambda: len(store.applied) >= 3, "it was tried, alone, and as a failure")
    for number in range(10):
        assert work.enqueue(f"good {number}").result(PATIENCE) == f"good {number}"
    assert stored(poison).state is State.IN_FLIGHT
    assert bench.tally.runs["poison"] == 1
    store.before_apply = lambda moves: None
    assert worker.stop()


def test_a_worker_that_stops_settles_every_job_of_a_batch_that_has_to_go_out_one_by_one(bench: Bench) -> None:
    store = bench.broken_store()
    app = bench.app(store)
    split = threading.Event()

    @app.task
    async def work(number: int) -> int:
        return number

    def not_together(moves: Sequence[Move]) -> None:
        if len(moves) > 1:
            store.apply_takes = 0.05
            split.set()
            raise LookupError("a bug in the store")

    store.before_apply = not_together
    store.apply_takes = 0.3  # the first goes out alone, and meanwhile the others gather
    worker = bench.work(app, concurrency=6)
    first = work.enqueue(0)
    wait_until(lambda: store.applied == [1], "the first goes out")
    jobs = app.enqueue_many([work.job(number) for number in range(1, 7)])
    assert split.wait(PATIENCE)
    assert worker.stop()
    assert [stored(job).state for job in (first, *jobs)] == [State.SUCCEEDED] * 7


# Observers.


def test_a_listener_that_raises_harms_no_job(bench: Bench) -> None:
    def fall(event: object) -> None:
        bench.tally.runs[type(event).__name__] += 1
        raise RuntimeError("the observer is broken")

    app = bench.app(on_event=fall)

    @app.task(max_retries=1, backoff=AT_ONCE)
    async def flaky() -> int:
        if current().attempt == 1:
            raise ValueError("once")
        return current().attempt

    @app.task(timeout=None, hard_timeout=0.1, max_retries=0)
    def deaf() -> None:
        threading.Event().wait(0.3)

    worker = bench.work(app)
    assert flaky.enqueue().result(PATIENCE) == 2
    assert failed(deaf.enqueue())[1] == "HardTimeout"
    assert flaky.enqueue().result(PATIENCE) == 2
    assert worker.stop()
    for kind in ("WorkerStarted", "JobStarted", "JobSettled", "HandlerStuck", "WorkerStopped"):
        assert bench.tally.runs[kind] >= 1, kind


def test_a_log_that_cannot_be_written_harms_no_job(bench: Bench) -> None:
    logs = configure(format="json", level="debug", stream=Failing(10**9))
    app = bench.app(on_event=logs.listener)

    @app.task
    async def work() -> str:
        return "done"

    worker = bench.work(app)
    assert [work.enqueue().result(PATIENCE) for _ in range(5)] == ["done"] * 5
    assert worker.stop()
    logs.close()
    assert logs.dropped > 0


@pytest.mark.usefixtures("frequent_progress")
def test_progress_that_cannot_be_kept_harms_no_job(bench: Bench, heard: Heard) -> None:
    store = bench.broken_store()
    app = bench.app(store)
    noted = Times(1, unavailable)
    store.before_note = noted
    let_go = threading.Event()

    @app.task
    def work() -> str:
        current().progress(1)
        assert noted.over.wait(PATIENCE)
        current().progress(2)
        let_go.wait(PATIENCE)
        return "done"

    bench.work(app)
    job = work.enqueue()
    wait_until(lambda: stored(job).progress == b"2", "later progress is kept")
    let_go.set()
    assert job.result(PATIENCE) == "done"


def test_what_a_worker_did_is_counted(bench: Bench, heard: Heard) -> None:
    app = bench.app()

    @app.task(max_retries=1, backoff=AT_ONCE)
    async def work(how: str) -> Any:
        if how == "fail":
            raise ValueError
        if how == "flaky" and current().attempt == 1:
            raise ValueError
        return how

    worker = bench.work(app)
    jobs = [work.enqueue(how) for how in ("good", "fail", "flaky", "good")]
    for job in jobs:
        ended(job)
    assert worker.stop()
    assert service_of(worker).settler.counts == {"succeeded": 3, "failed": 1, "retried": 2}
    assert len(heard.of(JobStarted)) == 6
