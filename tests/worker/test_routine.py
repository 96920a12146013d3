"""What is routine, that a job starts and that it succeeds, is not even made for a listener that does not want it."""

from __future__ import annotations

import asyncio
import contextvars
import io

import pytest

from holdfast import Holdfast, JobHandle, State, WorkerSettings
from holdfast.events import Event, JobSettled, JobStarted, both, hears_routine, ignore
from holdfast.observe.logging import configure
from tests.worker.bench import PATIENCE, Bench, Heard, service_of, wait_until


class Uninterested(Heard):
    """It wants to know what goes wrong, and no more."""

    routine = False


def test_a_listener_hears_everything_unless_it_says_otherwise() -> None:
    assert hears_routine(Heard())
    assert not hears_routine(Uninterested())
    assert not hears_routine(ignore)


@pytest.mark.parametrize(("level", "routine"), [("debug", True), ("info", False), ("error", False)])
def test_a_log_wants_the_routine_at_debug_only(level: str, routine: bool) -> None:
    logs = configure(level=level, stream=io.StringIO())  # type: ignore[arg-type]
    assert hears_routine(logs.listener) is routine
    logs.close()


def test_two_listeners_hear_the_routine_if_one_of_them_wants_it() -> None:
    assert hears_routine(both(Uninterested(), Heard()))
    assert hears_routine(both(Heard(), Uninterested()))
    assert not hears_routine(both(Uninterested(), Uninterested()))
    assert not hears_routine(both(Uninterested(), ignore))


@pytest.mark.parametrize("engine", ["memory"])
def test_who_does_not_want_the_routine_hears_of_failures_and_of_results_that_were_not_kept(bench: Bench) -> None:
    heard = Uninterested()
    app = bench.app(on_event=heard)

    @app.task(max_retries=0)
    async def work(name: str) -> object:
        if name == "fails":
            raise ValueError("broken")
        return object() if name == "odd" else None

    bench.work(app)
    jobs: dict[str, JobHandle[object]] = {name: work.enqueue(name) for name in ("fails", "odd", "good")}
    wait_until(lambda: not any(count.in_flight + count.ready for count in app.counts()), "all have ended")
    settled = {event.job_id: event for event in heard.of(JobSettled)}
    assert settled[jobs["fails"].id].error == "ValueError: broken"
    assert settled[jobs["odd"].id].state is State.SUCCEEDED
    assert settled[jobs["odd"].id].error.startswith("ResultNotKept")
    assert jobs["good"].id not in settled
    assert heard.of(JobStarted) == []


@pytest.mark.parametrize("engine", ["memory"])
def test_an_embedded_worker_wants_the_routine_only_for_the_sake_of_the_application(bench: Bench) -> None:
    for listener, routine in ((Heard(), True), (Uninterested(), False), (ignore, False)):
        worker = bench.work(bench.app(on_event=listener), queues=("default",))
        assert service_of(worker)._runner._routine is routine
        assert service_of(worker).settler._routine is routine


# Contexts.

LEFT = contextvars.ContextVar("left", default="nothing")


@pytest.mark.parametrize("kind", ["coroutine", "plain"])
@pytest.mark.parametrize("engine", ["memory"])
def test_what_a_listener_or_a_handler_leaves_in_its_context_reaches_no_job(bench: Bench, kind: str) -> None:
    def leaving(event: Event) -> None:
        LEFT.set(f"a listener's, of {type(event).__name__}")

    app = bench.app(on_event=leaving)
    seen: list[str] = []

    def look() -> None:
        seen.append(LEFT.get())
        LEFT.set("a handler's")

    if kind == "coroutine":

        @app.task
        async def coroutine() -> None:
            look()
            await asyncio.sleep(0)

        jobs = app.enqueue_many(coroutine.job() for _ in range(50))
    else:
        plain = app.task(look)
        jobs = app.enqueue_many(plain.job() for _ in range(50))
    bench.work(app, concurrency=4)
    for job in jobs:
        job.result(PATIENCE)
    assert seen == ["nothing"] * 50


# Tasks that somebody else cancels.


async def test_a_job_whose_task_a_stranger_cancels_before_its_first_step_is_given_back_and_runs_later() -> None:
    app = Holdfast("memory://")
    ran: list[str] = []

    @app.task
    async def work(name: str) -> None:
        ran.append(name)
        if name == "wild" and not ran.count("victim"):
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                if "_run_async" in repr(task.get_coro()):
                    task.cancel()

    jobs = [await work.aenqueue(name) for name in ("wild", "victim")]
    service = app.worker_service(WorkerSettings(concurrency=2, poll=0.1))
    running = asyncio.create_task(service.run())
    for job in jobs:
        await job.aresult(timeout=PATIENCE)
    assert sorted(ran) == ["victim", "wild"]
    assert service._runner.free == 2
    service.stop()
    assert await running
