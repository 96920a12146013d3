"""Handlers that do what no handler should. After each of them, the same worker goes on with the next job.

One worker serves this whole page on each engine, so that whatever one handler breaks shows in those after it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast import EmbeddedWorker, JobHandle, ResultNotKept, State, Task
from holdfast.events import PartFailed, ProcessDied, SettleRefused
from holdfast.failures import Failure, decode_history
from tests.worker import shop as importable
from tests.worker.bench import ENGINES, PATIENCE, Bench, ended, failed, service_of, stored, wait_until
from tests.worker.shop import STORE, Shop, named

MODES = ("thread", "async", "isolated", "isolated async")
CRASHES = {
    "exit 0": "exit code 0",
    "exit 3": "exit code 3",
    "segfault": "killed by SIGSEGV",
    "abort": "killed by SIGABRT",
    "kill -9": "killed by SIGKILL (out of memory?)",
}


class Scene:
    """The shop, and the one worker that has to survive it all."""

    def __init__(self, bench: Bench, shop: Shop, worker: EmbeddedWorker) -> None:
        self.bench = bench
        self.shop = shop
        self.worker = worker
        self.session = service_of(worker).worker_id

    def misbehave(self, mode: str, how: str) -> JobHandle[Any]:
        tasks: dict[str, Task[[str], Any]] = {
            "thread": self.shop.misbehave,
            "async": self.shop.amisbehave,
            "isolated": self.shop.misbehave_alone,
            "isolated async": self.shop.amisbehave_alone,
        }
        return tasks[mode].enqueue(how)

    def goes_on(self) -> None:
        """The worker is the same as before, serves every kind of job, and no part of it has failed."""
        tasks = (self.shop.ping, self.shop.aping, self.shop.ping_alone, self.shop.aping_alone)
        for job in [task.enqueue() for task in tasks]:
            assert job.result(PATIENCE) == "pong"
        assert service_of(self.worker).worker_id == self.session
        assert not self.bench.heard.of(PartFailed)
        assert not self.bench.heard.of(SettleRefused)

    def died(self, job: JobHandle[Any]) -> list[str]:
        return [event.how for event in self.bench.heard.of(ProcessDied, lambda event: event.job_id == job.id)]


@pytest.fixture(scope="module", params=ENGINES)
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    bench = Bench(str(request.param), tmp_path_factory.mktemp("nasty"))
    with pytest.MonkeyPatch.context() as patch:
        if bench.engine == "sqlite":
            patch.setenv(STORE, f"sqlite:///{bench.path}")
        shop = Shop(bench.store(), on_event=bench.heard, middleware=[named])
        patch.setattr(importable, "app", bench.keep(shop.app))
        yield Scene(bench, shop, bench.work(shop.app, lease_ttl=5.0))
        bench.close()


def last_failure(job: JobHandle[Any]) -> Failure:
    return decode_history(ended(job).failure_history)[-1]


# Row 13: results.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("object", "has no JSON form"),
        ("NaN", "is no JSON number"),
        ("100 MB", "the result is 100000002 bytes of JSON, more than the 262144 allowed"),
    ],
)
def test_a_result_that_cannot_be_kept_does_not_make_the_job_run_again(
    scene: Scene, mode: str, how: str, told: str
) -> None:
    job = scene.misbehave(mode, how)
    assert ended(job).state is State.SUCCEEDED
    assert (ended(job).attempt, ended(job).result) == (1, None)
    with pytest.raises(ResultNotKept, match=told):
        job.result(PATIENCE)
    scene.goes_on()


# Rows 14, 15 and 17: exceptions.


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        ("SystemExit", "SystemExit", "3"),
        ("KeyboardInterrupt", "KeyboardInterrupt", ""),
        ("GeneratorExit", "GeneratorExit", ""),
        ("OwnBase", "OwnBase", "mine"),
        ("CancelledError", "CancelledError", "by myself"),
        ("Unprintable", "Unprintable", "<message not printable: SystemExit in __str__>"),
        ("RecursionError", "RecursionError", "maximum recursion depth exceeded"),
        ("MemoryError", "MemoryError", ""),
        ("ExceptionGroup", "ExceptionGroup", "several (2 sub-exceptions)"),
        ("cycle", "ValueError", "first"),
        ("50 MB", "ValueError", "m" * 2_000 + "… (50000000 characters)"),
        ("NUL", "ValueError", "a\\x00b\\ud800c"),
    ],
)
def test_whatever_a_handler_raises_fails_its_own_job_and_nothing_else(
    scene: Scene, mode: str, how: str, kind: str, message: str
) -> None:
    job = scene.misbehave(mode, how)
    assert ended(job).state is State.FAILED
    assert ended(job).reason == "exhausted"
    failure = last_failure(job)
    assert failure.type == kind
    assert failure.message.startswith(message)
    assert len(failure.message) < 2_100
    assert len(failure.traceback) < 8_100
    if how == "ExceptionGroup":
        assert "KeyError: 'two'" in failure.traceback
    scene.goes_on()


# Row 16: the process dies.


def test_an_isolated_handler_may_die_in_any_way_and_after_three_times_it_is_a_dead_letter(scene: Scene) -> None:
    jobs = {how: scene.shop.die_alone.enqueue(how) for how in CRASHES}
    for how, job in jobs.items():
        told = f"the process that ran the job alone ended: {CRASHES[how]}"
        assert failed(job) == ("crashed", "ProcessDied", told)
        assert [failure.message for failure in decode_history(ended(job).failure_history)] == [told] * 3
        assert (ended(job).attempt, ended(job).crashes, ended(job).failures) == (3, 3, 0)
        assert scene.died(job) == [CRASHES[how]] * 3
    scene.goes_on()


def test_a_coroutine_in_a_process_of_its_own_may_die_as_well(scene: Scene) -> None:
    job = scene.shop.adie_alone.enqueue("segfault")
    assert failed(job)[::2] == ("crashed", "the process that ran the job alone ended: killed by SIGSEGV")
    scene.goes_on()


def test_a_job_that_kills_its_process_twice_and_then_behaves_succeeds(scene: Scene, tmp_path: Path) -> None:
    job = scene.shop.die_until.enqueue(str(tmp_path / "runs"), 2)
    assert job.result(PATIENCE) == "run 3"
    assert (stored(job).attempt, stored(job).crashes, stored(job).suspect) == (3, 2, False)
    scene.goes_on()


@pytest.mark.parametrize("leaves_the_group", [False, True])
def test_a_process_that_dies_and_leaves_a_child_behind_is_noticed_at_once(scene: Scene, leaves_the_group: bool) -> None:
    """The child has inherited the connection to the worker, which therefore does not break."""
    shop = scene.shop
    task = shop.die_and_leave_a_stranger if leaves_the_group else shop.die_and_leave_a_child
    job = task.options(max_retries=0).enqueue(60.0)
    assert failed(job)[0] == "crashed"
    scene.goes_on()


def test_an_isolated_process_that_gets_no_more_memory_fails_its_job(scene: Scene) -> None:
    """By a limit of the operating system. What the kernel's out-of-memory killer sends is `kill -9`, above."""
    job = scene.shop.run_out_of_memory.enqueue()
    assert failed(job)[:2] == ("exhausted", "MemoryError")
    scene.goes_on()


# Row 19: forks, threads, and what belongs to the whole process.


@pytest.mark.parametrize("task", ["fork_and_return", "fork_and_raise"])
@pytest.mark.parametrize("alone", ["", "_alone"])
def test_a_forked_child_that_comes_back_from_the_handler_neither_settles_nor_works(
    scene: Scene, task: str, alone: str, tmp_path: Path
) -> None:
    forking: Task[[str], str] = getattr(scene.shop, task + alone)
    trace = tmp_path / "child"
    job = forking.enqueue(str(trace))
    assert job.result(PATIENCE) == "parent"
    wait_until(lambda: trace.read_text() == "x", "the child was there")
    assert stored(job).attempt == 1
    if not alone:
        reap_forked_children()
    scene.goes_on()


def reap_forked_children() -> None:
    """Wait until the children that forked handlers left us have ended. It was with code 1, not by working on."""

    def ended() -> bool:
        pid, status = os.waitpid(-1, os.WNOHANG)
        codes.append(status)
        return pid != 0

    codes: list[int] = []
    wait_until(ended, "the forked child ends")
    assert os.waitstatus_to_exitcode(codes[-1]) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["threads", "prints", "umask"])
def test_a_handler_may_leave_threads_behind_and_print_a_lot(
    scene: Scene, mode: str, how: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert scene.misbehave(mode, how).result(PATIENCE) == "done"
    scene.goes_on()


@pytest.mark.parametrize("mode", MODES)
def test_a_handler_may_change_the_working_directory(scene: Scene, mode: str) -> None:
    here = os.getcwd()
    try:
        assert scene.misbehave(mode, "cwd").result(PATIENCE) == "done"
        scene.goes_on()
    finally:
        os.chdir(here)


@pytest.mark.parametrize("mode", ["isolated", "isolated async"])
def test_an_isolated_handler_may_change_the_signal_handlers_of_its_process(scene: Scene, mode: str) -> None:
    assert scene.misbehave(mode, "signal handlers").result(PATIENCE) == "done"
    scene.goes_on()


@pytest.mark.parametrize("mode", ["thread", "async"])
def test_in_a_worker_thread_python_itself_refuses_to_change_signal_handlers(scene: Scene, mode: str) -> None:
    assert failed(scene.misbehave(mode, "signal handlers"))[1] == "ValueError"
    scene.goes_on()


def test_a_forked_child_that_comes_back_from_a_coroutine_neither_settles_nor_works(tmp_path: Path) -> None:
    """On an application of its own: it is the event loop of the worker that is forked."""
    bench = Bench("sqlite", tmp_path)
    app = bench.app()
    trace = tmp_path / "child"

    @app.task
    async def fork() -> str:
        if os.fork() == 0:
            trace.touch()
            return "child"
        while not trace.exists():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return "parent"

    @app.task
    async def where() -> int:
        return os.getpid()

    try:
        bench.work(app, lease_ttl=5.0)
        assert fork.enqueue().result(PATIENCE) == "parent"
        reap_forked_children()
        for job in app.enqueue_many([where.job() for _ in range(50)]):
            assert job.result(PATIENCE) == os.getpid()
    finally:
        bench.close()


def test_a_handler_that_hangs_up_its_own_event_loop_tasks_leaves_the_worker_its_own(scene: Scene) -> None:
    """It cancels itself, as a careless clean-up of `current_task()` would."""
    app = scene.bench.app()
    begun = threading.Event()

    @app.task(queue="own", max_retries=0)
    async def cancel_myself() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        begun.set()
        await asyncio.sleep(20)

    worker = scene.bench.work(app)
    job = cancel_myself.enqueue()
    assert failed(job)[:2] == ("exhausted", "CancelledError")
    assert begun.is_set()
    assert worker.stop()
