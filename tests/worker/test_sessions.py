"""The session of a worker: kept while it lives, whatever its handlers do; lost when somebody closes it, and renewed."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from holdfast import State, StoreUnavailable, current
from holdfast.events import JobsRescued, JobStarted, LoopBlocked, PartFailed, SessionLost, SessionRescued, SettleRefused
from holdfast.failures import decode_history
from tests.worker import scenarios
from tests.worker.bench import PATIENCE, Bench, Heard, Times, make_eager, service_of, stored, wait_until
from tests.worker.shop import AT_ONCE, Shop


def close_session(bench: Bench, session_id: str) -> None:
    """What a keeper does that believes the worker to be dead."""
    assert asyncio.run(bench.store().close_session(session_id))


# A session that is lost.


@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_worker_whose_session_was_closed_stops_its_handlers_and_what_they_return_is_refused(
    bench: Bench, heard: Heard, mode: str
) -> None:
    app = bench.app()
    begun, stopped = threading.Event(), threading.Event()

    @app.task
    async def asynchronously() -> str:
        begun.set()
        try:
            await asyncio.sleep(20)
        except asyncio.CancelledError:
            stopped.set()
        return "late"

    @app.task
    def on_a_thread() -> str:
        begun.set()
        wait_until(lambda: current().cancelled, "it is told to stop")
        stopped.set()
        return "late"

    @app.task
    async def quick() -> str:
        return "goes on"

    worker = bench.work(app, keepers=False)
    first = service_of(worker).worker_id
    job = asynchronously.enqueue() if mode == "async" else on_a_thread.enqueue()
    assert begun.wait(PATIENCE)
    close_session(bench, first)

    assert stopped.wait(PATIENCE)
    assert heard.wait_for(SessionLost) == SessionLost(first, 1)
    refused = heard.wait_for(SettleRefused)
    assert (refused.worker_id, refused.job_id, refused.answer) == (first, job.id, "stale")
    assert service_of(worker).settler.counts["refused"] == 1
    assert stored(job).state is State.IN_FLIGHT  # until a keeper comes by

    assert quick.enqueue().result(PATIENCE) == "goes on"
    second = service_of(worker).worker_id
    assert second != first
    assert heard.wait_for(JobStarted, lambda started: started.task == "quick").worker_id == second
    counts = service_of(worker).settler.counts
    wait_until(lambda: counts == {"refused": 1, "succeeded": 1}, "the worker has heard of its success")


def test_jobs_of_a_lost_session_come_back_as_suspects_and_run_alone(
    bench: Bench, shop: Shop, heard: Heard, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    worker = bench.work(shop.app, lease_ttl=0.5)
    job = shop.slow_at_first.enqueue(str(trace))
    wait_until(trace.exists, "it runs")
    close_session(bench, service_of(worker).worker_id)
    result = job.result(PATIENCE)
    assert result.startswith("attempt 2 in process ")
    assert result != f"attempt 2 in process {os.getpid()}"
    assert heard.wait_for(JobsRescued).returned == 1
    assert (stored(job).crashes, stored(job).suspect) == (0, False)
    assert shop.aping.enqueue().result(PATIENCE) == "pong"


def test_jobs_of_a_lost_session_run_again_though_no_other_process_can_import_the_application(bench: Bench) -> None:
    """Such a suspect cannot run alone. It runs among the others, and that costs it an attempt."""
    app = bench.app()
    begun = threading.Event()

    @app.task(backoff=AT_ONCE)
    async def slow_at_first() -> str:
        if not begun.is_set():
            begun.set()
            await asyncio.sleep(60)
        return f"attempt {current().attempt}"

    worker = bench.work(app, lease_ttl=0.5)
    job = slow_at_first.enqueue()
    assert begun.wait(PATIENCE)
    close_session(bench, service_of(worker).worker_id)
    assert job.result(PATIENCE) == "attempt 3"
    history = decode_history(stored(job).failure_history)
    assert [failure.type for failure in history] == ["WorkerLost", "InvalidOption"]
    assert "define it at the top level of a module" in history[-1].message


@pytest.mark.usefixtures("keeps_what_it_fetched")
def test_jobs_that_were_fetched_under_a_lost_session_are_not_started(bench: Bench, heard: Heard) -> None:
    app = bench.app()
    let_go, begun = threading.Event(), threading.Event()

    @app.task
    def work(name: str) -> None:
        with bench.tally.running(name):
            if name == "slow":
                begun.set()
                let_go.wait(PATIENCE)

    worker = make_eager(bench.work(app, concurrency=1, keepers=False, lease_ttl=0.5))
    jobs = app.enqueue_many([work.job(name) for name in ("slow", "a", "b")])
    assert begun.wait(PATIENCE)
    wait_until(lambda: {stored(job).state for job in jobs} == {State.IN_FLIGHT}, "they are fetched")
    close_session(bench, service_of(worker).worker_id)
    assert heard.wait_for(SessionLost).held == 3
    let_go.set()
    heard.wait_for(SettleRefused)
    work.enqueue("later").result(PATIENCE)
    assert bench.tally.runs == {"slow": 1, "later": 1}


# A session that is kept.


def test_a_job_longer_than_the_ttl_runs_once(bench: Bench, heard: Heard) -> None:
    found = scenarios.outlive_the_ttl(bench, lambda app: bench.work(app, lease_ttl=0.5), lambda: time.sleep(1.2))
    assert found.runs == {"long": 1}
    assert found.states == {State.SUCCEEDED: 1}
    assert not heard.of(SessionRescued)


def test_beats_that_fail_for_a_moment_are_made_up_for_in_time(bench: Bench, heard: Heard) -> None:
    store = bench.broken_store()
    app = bench.app(store)

    @app.task
    def long() -> str:
        time.sleep(0.7)
        return f"attempt {current().attempt}"

    bench.work(app, lease_ttl=0.5, keepers=False)
    bench.work(bench.app_like(app), lease_ttl=0.5)
    job = long.enqueue()
    store.before_beat = Times(3, lambda: StoreUnavailable("somebody tripped over the cable"))
    assert job.result(PATIENCE) == "attempt 1"
    assert len(heard.of(PartFailed, lambda event: event.part == "heartbeat")) == 3
    assert not heard.of(SessionRescued)


def test_a_handler_that_blocks_the_event_loop_keeps_its_lease_and_the_jobs_behind_it_run_elsewhere(
    bench: Bench, heard: Heard
) -> None:
    """The second worker's keeper looks for dead ones with a TTL of one second, and the loop is blocked for longer."""
    found = scenarios.block_the_loop(bench, seconds=2.2)
    assert found.states == {State.SUCCEEDED: 6}
    assert found.runs == {"block": 1, 0: 1, 1: 1, 2: 1, 3: 1, 4: 1}
    [blocked] = heard.of(LoopBlocked)
    assert blocked.released == 5
    assert blocked.suspects == ("block",)
    assert blocked.seconds >= 2
    assert not heard.of(SessionRescued)
    assert not heard.of(SettleRefused)
    starts = heard.of(JobStarted, lambda started: started.task == "quick")
    assert [started.attempt for started in starts] == [1] * 5


@pytest.mark.parametrize("engine", ["sqlite"])
def test_a_handler_that_holds_the_lock_of_the_file_does_not_make_its_worker_look_dead(
    bench: Bench, heard: Heard
) -> None:
    """Its long transaction stops every beat. No keeper may judge by that."""
    app = bench.app()

    @app.task
    def hog() -> str:
        with closing(sqlite3.connect(bench.path, isolation_level=None)) as db:
            db.execute("BEGIN IMMEDIATE")
            time.sleep(1.0)
            db.execute("COMMIT")
        return f"attempt {current().attempt}"

    bench.work(app, lease_ttl=0.5)
    other = bench.app()
    other.task(name="hog")(hog.spec.function)
    bench.work(other, lease_ttl=0.5)
    assert hog.enqueue().result(PATIENCE) == "attempt 1"
    time.sleep(0.3)
    assert not heard.of(SessionRescued)
