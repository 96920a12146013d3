"""Nobody starves: queues, priorities, and jobs that wait behind a slow one while another worker is idle."""

from __future__ import annotations

import threading
import time

from holdfast import State
from tests.worker.bench import PATIENCE, Bench, make_eager, stored, wait_until


def test_a_queue_that_never_runs_empty_does_not_starve_another(bench: Bench) -> None:
    app = bench.app()
    over = threading.Event()

    @app.task(queue="a_flood")
    async def flood() -> None:
        bench.tally.runs["flood"] += 1
        if not over.is_set():
            await flood.aenqueue()

    @app.task(queue="b_trickle")
    async def trickle() -> int:
        return bench.tally.runs["flood"]

    app.enqueue_many([flood.job() for _ in range(50)])
    bench.work(app, concurrency=2)
    wait_until(lambda: bench.tally.runs["flood"] > 100, "the flood runs")
    for _ in range(3):
        before = bench.tally.runs["flood"]
        assert trickle.enqueue().result(PATIENCE) - before < 2_000
    over.set()


def test_a_flood_of_urgent_jobs_does_not_starve_the_others_for_ever(bench: Bench) -> None:
    app = bench.app()
    over = threading.Event()

    @app.task(priority="high")
    async def urgent() -> None:
        bench.tally.runs["urgent"] += 1
        if not over.is_set():
            await urgent.aenqueue()

    @app.task(priority="low")
    async def whenever() -> int:
        return bench.tally.runs["urgent"]

    app.enqueue_many([urgent.job() for _ in range(50)])
    bench.work(app, concurrency=2)
    wait_until(lambda: bench.tally.runs["urgent"] > 100, "the urgent ones run")
    for _ in range(3):
        assert whenever.enqueue().result(PATIENCE) > 0
    over.set()


def test_urgent_jobs_overtake_those_that_wait(bench: Bench) -> None:
    app = bench.app()
    order: list[str] = []

    @app.task
    def work(name: str) -> None:
        order.append(name)

    calls = [
        work.options(priority=priority).job(f"{priority} {number}")
        for number in range(3)
        for priority in ("low", "normal", "high")
    ]
    app.enqueue_many(calls)
    worker = bench.work(app, concurrency=1)
    assert worker.stop(drain=True, timeout=PATIENCE)
    assert order == [f"{priority} {number}" for priority in ("high", "normal", "low") for number in range(3)]


def test_shares_of_one_queue_take_turns(bench: Bench) -> None:
    app = bench.app()
    order: list[str] = []

    @app.task
    def work(share: str) -> None:
        order.append(share)

    app.enqueue_many([work.options(share="many").job("many") for _ in range(100)])
    app.enqueue_many([work.options(share="few").job("few") for _ in range(5)])
    worker = bench.work(app, concurrency=4)
    assert worker.stop(drain=True, timeout=PATIENCE)
    assert len(order) == 105
    assert max(index for index, share in enumerate(order) if share == "few") < 60


def test_jobs_that_wait_behind_a_slow_one_are_given_to_an_idle_worker(bench: Bench) -> None:
    app = bench.app()
    let_go, begun = threading.Event(), threading.Event()

    @app.task
    def work(name: str) -> None:
        with bench.tally.running(name):
            if name == "slow":
                begun.set()
                let_go.wait(PATIENCE)

    make_eager(bench.work(app, concurrency=1))
    slow, *behind = app.enqueue_many([work.job(name) for name in ("slow", "a", "b", "c")])
    assert begun.wait(PATIENCE)
    wait_until(lambda: {stored(job).state for job in behind} == {State.IN_FLIGHT}, "they are fetched")
    began = time.monotonic()
    other = bench.app()
    other.task(name="work")(work.spec.function)
    bench.work(other, concurrency=1)
    wait_until(lambda: {stored(job).state for job in behind} == {State.SUCCEEDED}, "the idle worker runs them")
    assert time.monotonic() - began < 5
    assert stored(slow).state is State.IN_FLIGHT
    let_go.set()
    slow.result(PATIENCE)
    assert bench.tally.runs == {"slow": 1, "a": 1, "b": 1, "c": 1}
    assert {stored(job).attempt for job in behind} == {1}


def test_a_busy_worker_leaves_new_jobs_to_an_idle_one(bench: Bench) -> None:
    app = bench.app()
    let_go, begun = threading.Event(), threading.Event()

    @app.task
    def work(name: str) -> str:
        if name == "slow":
            begun.set()
            let_go.wait(PATIENCE)
        return threading.current_thread().name

    make_eager(bench.work(app, concurrency=1))
    slow = work.enqueue("slow")
    assert begun.wait(PATIENCE)
    time.sleep(0.2)
    bench.work(app, concurrency=1)
    for _ in range(5):
        job = work.enqueue("quick")
        job.result(PATIENCE)
        assert stored(job).version == 1  # nobody had fetched it before, and given it back
    assert stored(slow).state is State.IN_FLIGHT
    let_go.set()
