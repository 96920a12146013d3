"""Handlers run as coroutines, on threads and in processes; what they see of their job, and what comes back."""

from __future__ import annotations

import asyncio
import io
import json
import os
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import Holdfast, NotInJob, PayloadTooLarge, State, Task, current
from holdfast.events import JobSettled, JobStarted, WorkerStarted
from holdfast.observe.logging import configure
from holdfast.ports import Ports, SystemSpawner
from holdfast.worker.isolation import find_application
from tests.worker.bench import PATIENCE, Bench, Heard, ended, failed, stored, wait_until
from tests.worker.shop import Shop, alook_around, avisit, look_around, visit


class Receipt(msgspec.Struct):
    total: int
    at: datetime


# Results.


def test_a_coroutine_runs_on_the_event_loop_and_its_result_comes_back_typed(bench: Bench) -> None:
    app = bench.app()

    @app.task
    async def buy(total: int) -> Receipt:
        await asyncio.sleep(0)
        return Receipt(total, datetime(2026, 1, 2, tzinfo=UTC))

    @app.task
    async def thread_name() -> str:
        return threading.current_thread().name

    bench.work(app)
    assert buy.enqueue(7).result(PATIENCE) == Receipt(7, datetime(2026, 1, 2, tzinfo=UTC))
    assert thread_name.enqueue().result(PATIENCE) == "holdfast-worker"


def test_a_plain_function_runs_on_a_thread_of_its_own_and_its_result_comes_back_typed(bench: Bench) -> None:
    app = bench.app()

    @app.task
    def buy(total: int) -> Receipt:
        return Receipt(total, datetime(2026, 1, 2, tzinfo=UTC))

    @app.task
    def thread_name() -> str:
        return threading.current_thread().name

    bench.work(app)
    assert buy.enqueue(7).result(PATIENCE) == Receipt(7, datetime(2026, 1, 2, tzinfo=UTC))
    assert thread_name.enqueue().result(PATIENCE).startswith("holdfast-handler")


def test_an_isolated_function_runs_in_another_process_which_is_used_again(bench: Bench, shop: Shop) -> None:
    bench.work(shop.app)
    first = shop.where_alone.enqueue().result(PATIENCE)
    second = shop.where_alone.enqueue().result(PATIENCE)
    assert first["pid"] != os.getpid()
    assert first["parent"] == os.getpid()
    assert second == first
    assert shop.add_alone.enqueue(2, 3).result(PATIENCE) == 5
    assert shop.add_later_alone.enqueue(2, 3).result(PATIENCE) == 5


def test_isolated_processes_end_with_their_worker(bench: Bench, shop: Shop) -> None:
    worker = bench.work(shop.app)
    pid = shop.where_alone.enqueue().result(PATIENCE)["pid"]
    assert worker.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_an_application_that_no_other_process_can_import_says_so_in_the_failure(bench: Bench) -> None:
    app = bench.app()

    @app.task(isolation="process")
    def alone() -> None: ...

    assert find_application(app, app.tasks) is None
    bench.work(app)
    reason, kind, message = failed(alone.enqueue())
    assert (reason, kind) == ("permanent", "InvalidOption")
    assert "define it at the top level of a module" in message


def test_the_application_is_found_where_its_tasks_are_defined(shop: Shop) -> None:
    assert find_application(shop.app, shop.app.tasks) == "tests.worker.shop:app"


def test_many_jobs_of_both_kinds_all_come_back_with_their_own_result(bench: Bench) -> None:
    app = bench.app()

    @app.task
    async def double(number: int) -> int:
        return 2 * number

    @app.task
    def triple(number: int) -> int:
        return 3 * number

    bench.work(app)
    jobs = app.enqueue_many([task.job(number) for number in range(100) for task in (double, triple)])
    results = [job.result(PATIENCE) for job in jobs]
    assert results == [factor * number for number in range(100) for factor in (2, 3)]


def test_no_more_handlers_run_at_once_than_the_worker_has_slots(bench: Bench) -> None:
    app = bench.app()

    @app.task
    def work(number: int) -> None:
        with bench.tally.running("work"):
            threading.Event().wait(0.005)

    bench.work(app, concurrency=3)
    for job in app.enqueue_many([work.job(number) for number in range(40)]):
        job.result(PATIENCE)
    assert bench.tally.most_at_once["work"] == 3


class Stingy(SystemSpawner):
    """A machine that has no thread left for handlers, until it has."""

    def __init__(self) -> None:
        self.refused = 0
        self.plenty = False

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        if name.startswith("holdfast-handler") and not self.plenty:
            self.refused += 1
            raise RuntimeError("can't start new thread")
        return super().thread(target, name)


def test_a_machine_that_has_no_thread_left_costs_a_job_nothing_but_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.worker.runner._NO_THREAD_PAUSE", 0.02)
    spawner = Stingy()
    app = bench.app(ports=Ports(spawner=spawner))

    @app.task(max_retries=0)
    def plain() -> int:
        return current().attempt

    @app.task
    async def asynchronous() -> str:
        return "needs none"

    bench.work(app)
    job = plain.enqueue()
    wait_until(lambda: spawner.refused >= 2, "it was tried more than once")
    assert asynchronous.enqueue().result(PATIENCE) == "needs none"
    spawner.plenty = True
    assert job.result(PATIENCE) == 1


# Context.


def contextual(shop: Shop) -> dict[str, Task[[str], str]]:
    return {
        "async": shop.app.task(avisit),
        "thread": shop.app.task(visit),
        "isolated": shop.visit_alone,
        "isolated async": shop.avisit_alone,
    }


def test_what_one_handler_leaves_in_its_context_variables_does_not_reach_the_next(bench: Bench, shop: Shop) -> None:
    tasks = contextual(shop)
    bench.work(shop.app, concurrency=1)
    for mode, task in tasks.items():
        seen = [task.enqueue(name).result(PATIENCE) for name in ("ann", "bob", "cid")]
        assert seen == ["nobody", "nobody", "nobody"], mode


def test_current_tells_the_job_in_every_mode(bench: Bench, shop: Shop) -> None:
    tasks: dict[str, Task[[], dict[str, Any]]] = {
        "async": shop.app.task(alook_around),
        "thread": shop.app.task(look_around),
        "isolated": shop.look_around_alone,
        "isolated async": shop.alook_around_alone,
    }
    bench.work(shop.app, queues=("desk",))
    for mode, task in tasks.items():
        job = task.options(queue="desk", key=f"key of {mode}", correlation_id="request 7").enqueue()
        assert job.result(PATIENCE) == {
            "id": job.id,
            "task": task.name,
            "queue": "desk",
            "key": f"key of {mode}",
            "attempt": 1,
            "correlation_id": "request 7",
            "cancelled": False,
            "is_async": "async" in mode,
            "state": {"middleware": "named"},
        }


def test_current_counts_the_attempts(bench: Bench) -> None:
    app = bench.app()

    @app.task(backoff=lambda failures: 0.0)
    async def third_time_lucky() -> int:
        if current().attempt < 3:
            raise ValueError("not yet")
        return current().attempt

    bench.work(app)
    assert third_time_lucky.enqueue().result(PATIENCE) == 3


def test_outside_of_a_handler_there_is_no_current_job(bench: Bench) -> None:
    with pytest.raises(NotInJob, match="inside a handler"):
        current()
    app = bench.app()

    @app.task
    def in_a_thread_of_its_own() -> str:
        said = []

        def ask() -> None:
            try:
                current()
            except NotInJob as error:
                said.append(type(error).__name__)

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return said[0]

    bench.work(app)
    assert in_a_thread_of_its_own.enqueue().result(PATIENCE) == "NotInJob"


def test_a_task_that_the_handler_starts_itself_sees_its_job(bench: Bench) -> None:
    app = bench.app()

    @app.task
    async def spread() -> list[str]:
        async def ask() -> str:
            return current().id

        return list(await asyncio.gather(ask(), ask()))

    bench.work(app)
    job = spread.enqueue()
    assert job.result(PATIENCE) == [job.id, job.id]


# Progress.


@pytest.mark.usefixtures("frequent_progress")
@pytest.mark.parametrize("mode", ["async", "thread", "isolated"])
def test_progress_is_kept_while_the_job_runs_and_the_newest_wins(
    bench: Bench, shop: Shop, mode: str, tmp_path: Path
) -> None:
    go_on = tmp_path / "go on"

    @shop.app.task
    async def asynchronously(path: str) -> None:
        for step in range(1, 4):
            current().progress({"step": step})
        while not go_on.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    @shop.app.task
    def on_a_thread(path: str) -> None:
        for step in range(1, 4):
            current().progress({"step": step})
        wait_until(go_on.exists, "the test lets it go on")

    tasks: dict[str, Task[[str], None]] = {
        "async": asynchronously,
        "thread": on_a_thread,
        "isolated": shop.tell_progress_alone,
    }
    bench.work(shop.app)
    job = tasks[mode].enqueue(str(go_on))
    wait_until(lambda: stored(job).progress == b'{"step":3}', "its progress is kept")
    assert stored(job).state is State.IN_FLIGHT
    go_on.touch()
    assert ended(job).state is State.SUCCEEDED


def test_progress_that_is_too_large_is_the_handlers_own_error(bench: Bench) -> None:
    app = bench.app()

    @app.task(permanent=(PayloadTooLarge,))
    async def boast() -> None:
        current().progress("x" * 20_000)

    bench.work(app)
    reason, kind, message = failed(boast.enqueue())
    assert (reason, kind) == ("permanent", "PayloadTooLarge")
    assert "16384" in message


# Correlation.


def test_the_correlation_id_goes_through_to_events_logs_and_the_jobs_that_follow(bench: Bench, heard: Heard) -> None:
    stream = io.StringIO()
    logs = configure(format="json", level="debug", stream=stream)

    def listen(event: Any) -> None:
        heard(event)
        logs.listener(event)

    app = bench.app(on_event=listen)

    @app.task
    async def mourn(job_id: str) -> str | None:
        return current().correlation_id

    @app.task(max_retries=0, on_failed=mourn)
    async def fall() -> None:
        raise ValueError("down")

    worker = bench.work(app)
    job = fall.options(correlation_id="request 7").enqueue()
    ended(job)
    wait_until(lambda: len(app.find(correlation_id="request 7").jobs) == 2, "the follow-up is there")
    follow_up = next(found for found in app.find(correlation_id="request 7").jobs if found.id != job.id)
    assert follow_up.result(PATIENCE) == "request 7"
    assert worker.stop()
    logs.close()

    for events in (heard.of(JobStarted), heard.of(JobSettled)):
        told = {event.job_id: event.correlation_id for event in events}
        assert told == {job.id: "request 7", follow_up.id: "request 7"}
    assert [exception.correlation_id for exception in worker.exceptions] == ["request 7"]
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    about = [line for line in lines if line.get("job_id") == job.id and "enqueued" not in line["msg"]]
    assert len(about) >= 2
    assert {line.get("request_id") for line in about} == {"request 7"}


# Events.


def test_a_run_is_told_from_its_start_to_its_end(bench: Bench, heard: Heard) -> None:
    app = bench.app()

    @app.task(queue="desk")
    async def greet() -> str:
        return "hello"

    worker = bench.work(app, concurrency=2)
    job = greet.enqueue()
    job.result(PATIENCE)
    settled = heard.wait_for(JobSettled)
    [began] = heard.of(WorkerStarted)
    [started] = heard.of(JobStarted)
    assert (began.queues, began.concurrency) == (("desk",), 2)
    assert (started.job_id, started.queue, started.task, started.attempt) == (job.id, "desk", "greet", 1)
    assert 0 <= started.waited < PATIENCE
    assert (settled.job_id, settled.state, settled.reason, settled.attempt) == (job.id, "succeeded", "succeeded", 1)
    assert settled.error == ""
    assert began.worker_id == started.worker_id == settled.worker_id != ""
    assert not worker.exceptions


def test_an_application_without_a_listener_works_as_well(bench: Bench) -> None:
    app = bench.keep(Holdfast(bench.store()))

    @app.task
    async def greet() -> str:
        return "hello"

    worker = app.start_worker()
    assert greet.enqueue().result(PATIENCE) == "hello"
    assert worker.stop()
