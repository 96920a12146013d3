"""`on_failed`: what is enqueued when a job fails for good, in the same step, and what is refused at the start."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast import GiveUp, Holdfast, InvalidOption, JobHandle, Snooze, State, current
from holdfast.events import PartFailed
from holdfast.lifecycle import Move
from tests.worker.bench import PATIENCE, Bench, Heard, ended, failed, stored, wait_until
from tests.worker.shop import AT_ONCE


def follow_up_of(app: Holdfast, task: str) -> JobHandle[Any]:
    """The one job of that task, once it is there."""
    wait_until(lambda: len(app.find(task=task).jobs) == 1, f"a job of {task}")
    return app.find(task=task).jobs[0]


def test_the_follow_up_is_enqueued_in_the_same_step_as_the_failure(bench: Bench) -> None:
    store = bench.broken_store()
    moves: list[Move] = []

    def watch(batch: Sequence[Move]) -> None:
        moves.extend(batch)

    store.before_apply = watch
    app = bench.app(store)

    @app.task
    async def mourn(job_id: str) -> str:
        return job_id

    @app.task(max_retries=1, backoff=AT_ONCE, on_failed=mourn)
    async def fall() -> None:
        raise ValueError("down")

    bench.work(app)
    job = fall.enqueue()
    assert follow_up_of(app, "mourn").result(PATIENCE) == job.id
    about = [(move.to, len(move.then)) for move in moves if move.job_id == job.id]
    assert about == [(State.READY, 0), (State.FAILED, 1)]


def test_the_follow_up_takes_by_name_what_it_wants_to_know(bench: Bench) -> None:
    app = bench.app()

    @app.task(queue="morgue")
    async def everything(
        job_id: str, task: str, queue: str, reason: str, error: str, attempt: int, arguments: dict[str, Any]
    ) -> list[Any]:
        return [job_id, task, queue, reason, error, attempt, arguments]

    @app.task(queue="morgue")
    def a_little(error: str, shape: str = "square") -> list[str]:
        return [error, shape]

    @app.task(queue="morgue")
    async def nothing() -> str:
        return "something failed"

    @app.task(max_retries=1, backoff=AT_ONCE, on_failed=everything)
    async def first(left: int, right: list[str]) -> None:
        raise ValueError("down")

    @app.task(on_failed="a_little")
    async def second() -> None:
        raise GiveUp("enough")

    @app.task(max_retries=0, on_failed=nothing)
    def third() -> None:
        raise KeyError

    bench.work(app, queues=("default", "morgue"))
    job = first.enqueue(1, right=["a", "b"])
    second.enqueue()
    third.enqueue()
    assert follow_up_of(app, "everything").result(PATIENCE) == [
        job.id, "first", "default", "exhausted", "ValueError: down", 2, {"left": 1, "right": ["a", "b"]},
    ]  # fmt: skip
    assert follow_up_of(app, "a_little").result(PATIENCE) == ["GiveUp: enough", "square"]
    assert follow_up_of(app, "nothing").result(PATIENCE) == "something failed"


@pytest.mark.parametrize("why", ["hard limit", "snoozed out", "arguments"])
def test_every_way_to_fail_for_good_has_its_follow_up(bench: Bench, why: str) -> None:
    app = bench.app()

    @app.task(queue="morgue")
    async def mourn(reason: str, error: str) -> list[str]:
        return [reason, error.partition(":")[0]]

    @app.task(timeout=None, hard_timeout=0.1, max_retries=0, on_failed=mourn)
    async def deaf(number: int) -> None:
        while True:
            try:
                await asyncio.sleep(0.15)
                return
            except asyncio.CancelledError:
                continue

    @app.task(on_failed=mourn)
    async def sleepy(number: int) -> None:
        raise Snooze(0)

    bench.work(app, max_snoozes=0)
    expected = {
        "hard limit": ["exhausted", "HardTimeout"],
        "snoozed out": ["snoozed_out", "Snooze"],
        "arguments": ["permanent", "InvalidPayload"],
    }
    if why == "hard limit":
        deaf.enqueue(1)
    elif why == "snoozed out":
        sleepy.enqueue(1)
    else:
        job = sleepy.job(1)
        payload = b'{"number": "one"}'
        app.store.insert_blocking([type(job.new)(id=job.new.id, task="sleepy", payload=payload)])
    assert follow_up_of(app, "mourn").result(PATIENCE) == expected[why]


def test_a_job_that_succeeds_is_tried_again_or_is_cancelled_has_no_follow_up(bench: Bench) -> None:
    app = bench.app()

    @app.task
    async def mourn() -> None: ...

    @app.task(on_failed=mourn, backoff=AT_ONCE)
    async def second_time_lucky() -> int:
        if current().attempt == 1:
            raise ValueError("down")
        return current().attempt

    @app.task(on_failed=mourn)
    async def endless() -> None:
        await asyncio.sleep(20)

    worker = bench.work(app, lease_ttl=0.5)
    assert second_time_lucky.enqueue().result(PATIENCE) == 2
    job = endless.enqueue()
    wait_until(lambda: stored(job).state is State.IN_FLIGHT, "it runs")
    job.cancel()
    assert ended(job).state is State.CANCELLED
    assert worker.stop()
    assert not app.find(task="mourn").jobs


# What cannot work.


def test_a_follow_up_that_is_not_there_is_refused_when_the_worker_starts(bench: Bench) -> None:
    app = bench.app()

    @app.task(on_failed="nobody")
    async def fall() -> None: ...

    with pytest.raises(InvalidOption, match="task fall: on_failed: no task 'nobody' is registered here"):
        app.start_worker()


def test_a_follow_up_that_needs_what_nobody_can_give_is_refused_when_the_worker_starts(bench: Bench) -> None:
    app = bench.app()

    @app.task
    async def mourn(job_id: str, colour: str) -> None: ...

    @app.task(on_failed=mourn)
    async def fall() -> None: ...

    with pytest.raises(InvalidOption, match=r"on_failed of fall, and needs colour: it can take arguments, attempt"):
        app.start_worker()


@pytest.mark.parametrize("why", ["type", "size"])
def test_a_follow_up_that_cannot_be_made_does_not_keep_the_job_from_failing(
    bench: Bench, heard: Heard, why: str
) -> None:
    """Its types do not fit, or it is larger than a payload may be: nobody can know before it happens."""
    app = bench.app()

    @app.task
    async def mourn(error: int) -> None: ...

    @app.task
    async def copy(arguments: dict[str, str]) -> None: ...

    @app.task(max_retries=0, on_failed=mourn if why == "type" else copy)
    async def fall(text: str) -> None:
        bench.tally.runs["fall"] += 1
        raise ValueError("down")

    @app.task
    async def live() -> str:
        return "alive"

    bench.work(app, lease_ttl=0.5)
    job = fall.enqueue("x" * 262_125)
    assert failed(job) == ("exhausted", "ValueError", "down")
    assert bench.tally.runs["fall"] == 1
    assert live.enqueue().result(PATIENCE) == "alive"
    told = heard.wait_for(PartFailed)
    assert told.part == "on_failed"
    assert told.error.startswith(f"the on_failed of job {job.id} (fall) cannot be enqueued: ")
    assert ("InvalidPayload: $.error" if why == "type" else "PayloadTooLarge: ") in told.error
