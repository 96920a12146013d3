"""Situations in which a guard decides. The tests assert that all goes well; the negative controls, with the guard taken
away, that it does not.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from holdfast import Holdfast, JobHandle, OutcomeUnknown, State, StoreUnavailable
from holdfast.events import LoopBlocked
from tests.worker.bench import PATIENCE, Bench, Times, make_eager, stored, wait_until


class Found(msgspec.Struct):
    """What a test finds afterwards: how many jobs are in which state, and how often each ran."""

    states: Mapping[State, int]
    runs: Mapping[object, int]
    most_at_once: Mapping[object, int] = {}


def _found(bench: Bench, jobs: list[JobHandle[Any]]) -> Found:
    return Found(Counter(stored(job).state for job in jobs), bench.tally.runs, bench.tally.most_at_once)


def settle_while_the_store_fails(bench: Bench, *, reply_is_lost: bool = False, outage: float = 5.0) -> Found:
    """Thirty jobs; the first three settlements do not go through, or only seem not to. That of a later job does.

    `outage`: how many seconds it lasts at most, for a worker that does not try three times.
    """
    store = bench.broken_store()
    app = bench.app(store)

    @app.task
    async def work(number: int) -> int:
        bench.tally.runs[number] += 1
        return number

    if reply_is_lost:
        fault = store.after_apply = Times(3, lambda: OutcomeUnknown("the reply got lost"))
    else:
        fault = store.before_apply = Times(3, lambda: StoreUnavailable("somebody tripped over the cable"))
    worker = bench.work(app)
    jobs = app.enqueue_many([work.job(number) for number in range(30)])
    wait_until(lambda: len(bench.tally.runs) == 30, "all have run")
    fault.over.wait(outage)
    fault.left = 0
    work.enqueue(30).result(PATIENCE)
    worker.stop()
    return _found(bench, jobs)


def outlive_the_ttl(bench: Bench, start: Callable[[Holdfast], Any], take_long: Callable[[], object]) -> Found:
    """A handler on a thread that takes more than two TTLs, beside a second worker that rescues whoever seems dead."""
    app = bench.app()
    returned = threading.Event()

    @app.task(max_retries=0)
    def long() -> str:
        with bench.tally.running("long"):
            take_long()
        returned.set()
        return "done"

    start(app)
    job = long.enqueue()
    wait_until(lambda: bench.tally.runs["long"] == 1, "it begins")
    other = bench.app()

    @other.task(name="long", max_retries=0)
    def long_elsewhere() -> str:
        with bench.tally.running("long"):
            return "done elsewhere"

    bench.work(other, lease_ttl=0.5)
    assert returned.wait(PATIENCE)
    time.sleep(0.2)
    return _found(bench, [job])


def block_the_loop(bench: Bench, *, seconds: float) -> Found:
    """A coroutine blocks the event loop of the first worker, which has fetched five more jobs. A second one is idle.

    Ends when the loop of the first has run again for a while.
    """
    let_go = threading.Event()
    blocked = threading.Event()
    app = bench.app()

    @app.task
    async def block() -> str:
        with bench.tally.running("block"):
            blocked.set()
            let_go.wait(PATIENCE)
        return "done"

    @app.task
    async def quick(number: int) -> str:
        with bench.tally.running(number):
            return threading.current_thread().name

    make_eager(bench.work(app, concurrency=1))
    jobs: list[JobHandle[Any]] = list(app.enqueue_many([block.job(), *(quick.job(number) for number in range(5))]))
    assert blocked.wait(PATIENCE)
    began = time.monotonic()

    other = bench.app()
    other.task(name="quick")(quick.spec.function)

    @other.task(name="block")
    async def block_elsewhere() -> str:
        with bench.tally.running("block"):
            return "done elsewhere"

    bench.work(other, concurrency=2)
    bench.heard.wait_for(LoopBlocked)
    wait_until(lambda: {stored(job).state for job in jobs[1:]} == {State.SUCCEEDED}, "the second worker runs them")
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    let_go.set()
    wait_until(lambda: stored(jobs[0]).state is State.SUCCEEDED, "the first worker goes on")
    time.sleep(0.15)
    return _found(bench, jobs)
