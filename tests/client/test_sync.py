"""Blocking and asynchronous twins: the same names and parameters, and none that blocks an event loop."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast import Holdfast, JobHandle, Task
from holdfast.errors import CalledInEventLoop, ForeignConnection
from holdfast.ports import SYSTEM
from holdfast.sync import Portal
from tests.client.conftest import MakeApp
from tests.client.helpers import totals


def a_names(kind: type) -> list[str]:
    """The names of asynchronous methods that stand for a twin."""
    return [
        name
        for name, member in inspect.getmembers(kind, inspect.iscoroutinefunction)
        if name.startswith("a") and not name.startswith("_")
    ]


TWINS = [(kind, name) for kind in (Holdfast, JobHandle, Task) for name in a_names(kind)]


def test_the_list_of_twins_is_not_empty() -> None:
    assert a_names(JobHandle) == ["acancel", "arefresh", "aresult"]
    assert a_names(Task) == ["aenqueue"]
    assert len(a_names(Holdfast)) == 12


@pytest.mark.parametrize(("kind", "name"), TWINS, ids=lambda value: getattr(value, "__name__", value))
def test_twins_have_the_same_parameters_and_results(kind: type, name: str) -> None:
    twin = getattr(kind, name[1:])
    assert not inspect.iscoroutinefunction(twin)
    assert inspect.signature(twin) == inspect.signature(getattr(kind, name))
    assert twin.__doc__


def test_every_blocking_method_has_a_twin() -> None:
    without = {"task", "job", "options", "name", "state", "failures", "look"}
    without |= {"start_worker", "worker_service", "supervisor", "replaced"}  # they make something, and wait for nothing
    for kind in (Holdfast, JobHandle, Task):
        for name, _ in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_") and name not in without and name not in a_names(kind):
                assert f"a{name}" in a_names(kind), name


@pytest.fixture
def job(app: Holdfast) -> JobHandle[None]:
    @app.task
    def work(n: int) -> None: ...

    return work.enqueue(1)


def blocking_calls(app: Holdfast, job: JobHandle[None]) -> dict[str, Callable[[], Any]]:
    return {
        "get": lambda: app.get(job.id),
        "find": app.find,
        "run_worker": app.run_worker,
        "cancel": lambda: app.cancel(job.id),
        "replay": lambda: app.replay(job.id),
        "pause": lambda: app.pause("default"),
        "resume": lambda: app.resume("default"),
        "counts": app.counts,
        "open": app.open,
        "close": app.close,
        "enqueue_many": lambda: app.enqueue_many([]),
        "forget": lambda: app.forget(job.id),
        "refresh": job.refresh,
        "result": lambda: job.result(timeout=0),
    }


async def test_no_blocking_call_inside_an_event_loop(app: Holdfast, job: JobHandle[None]) -> None:
    calls = blocking_calls(app, job)
    assert {f"a{name}" for name in calls} == set(a_names(Holdfast)) | set(a_names(JobHandle))
    for name, call in calls.items():
        with pytest.raises(
            CalledInEventLoop, match=rf"{name}\(\) would block .* use `await a{name}\(\.\.\.\)` instead"
        ):
            call()
    with pytest.raises(CalledInEventLoop, match=r"cancel\(\) would block"):
        job.cancel()
    with pytest.raises(CalledInEventLoop, match=r"open\(\) would block"), app:
        pass
    gc.collect()  # a coroutine that was never awaited would be an error here
    assert (await job.arefresh()).state == "ready"


async def test_enqueue_inside_an_event_loop_names_its_twin(app: Holdfast) -> None:
    @app.task
    def work(n: int) -> None: ...

    for enqueuer in (work, work.options(key="k")):
        with pytest.raises(CalledInEventLoop, match=r"use `await aenqueue\(\.\.\.\)` instead"):
            enqueuer.enqueue(1)
    assert await app.acounts() == []
    gc.collect()


async def test_another_thread_may_block_while_the_loop_runs(app: Holdfast, job: JobHandle[None]) -> None:
    [counts] = await asyncio.to_thread(app.counts)
    assert counts.ready == 1
    assert (await asyncio.to_thread(job.refresh)).state == "ready"


def test_a_listener_on_the_portal_must_not_block_it(make_app: MakeApp) -> None:
    refused: list[CalledInEventLoop] = []

    def listener(event: object) -> None:
        try:
            app.counts()
        except CalledInEventLoop as error:
            refused.append(error)
            raise

    app = make_app(on_event=listener)
    app.pause("default")
    assert len(refused) == 1


def test_open_and_close(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def work(n: int) -> None: ...

    with app as opened:
        assert opened is app
        work.enqueue(1)
        assert totals(app) == {"default": (1, 0, 0)}
    app.close()
    app.close()
    work.enqueue(2)  # it opens again if it is used again
    assert totals(app) == {"default": (2, 0, 0)}


async def test_open_and_close_in_a_loop(make_app: MakeApp) -> None:
    app = make_app()

    @app.task
    def work(n: int) -> None: ...

    async with app as opened:
        assert opened is app
        await work.aenqueue(1)
    await app.aclose()
    await work.aenqueue(2)
    [counts] = await app.acounts()
    assert counts.ready == 2


def test_making_an_application_opens_nothing(tmp_path: Path) -> None:
    app = Holdfast(f"sqlite:///{tmp_path}/jobs.db")
    assert list(tmp_path.iterdir()) == []
    app.open()
    assert (tmp_path / "jobs.db").exists()
    app.close()


def portal_threads() -> int:
    return sum(thread.name == "holdfast-portal" for thread in threading.enumerate())


def test_the_portal_starts_when_needed_and_ends() -> None:
    before = portal_threads()
    portal = Portal(SYSTEM)

    async def answer() -> int:
        return 42

    portal.close()
    assert portal_threads() == before
    assert portal.run("answer", answer()) == 42
    assert portal_threads() == before + 1
    portal.close()
    assert portal_threads() == before
    assert portal.run("answer", answer()) == 42
    portal.close()


def test_the_portal_hands_errors_over() -> None:
    portal = Portal(SYSTEM)

    async def fail() -> None:
        raise ForeignConnection("no")

    with pytest.raises(ForeignConnection, match="no"):
        portal.run("fail", fail())
    portal.close()


def test_closing_while_many_threads_call_never_hangs() -> None:
    portal = Portal(SYSTEM)
    done: list[int | Exception] = []

    async def answer() -> int:
        await asyncio.sleep(0)
        return 1

    def call() -> None:
        for _ in range(200):
            try:
                done.append(portal.run("answer", answer()))
            except Exception as error:
                done.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(50):
        portal.close()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert len(done) == 800
    portal.close()


@pytest.mark.parametrize("wait", [0.0, 0.05])  # 0: often before `run` has the future in its hands
def test_an_interrupted_call_is_cancelled(wait: float) -> None:
    """A signal handler that raises (Ctrl-C, a time limit) ends the waiting; nobody would ever hear of the rest."""

    class TimeIsUp(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise TimeIsUp

    portal = Portal(SYSTEM)
    began, ended = threading.Event(), threading.Event()

    async def for_ever() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    def send() -> None:
        began.wait(10)
        time.sleep(wait)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, interrupt)
    sender = threading.Thread(target=send)
    try:
        sender.start()
        with pytest.raises(TimeIsUp):
            portal.run("for_ever", for_ever())
    finally:
        signal.signal(signal.SIGALRM, before)
        sender.join()
    assert ended.wait(5)
    portal.close()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("used_before", [True, False])
def test_a_forked_child_has_a_portal_of_its_own(used_before: bool) -> None:
    portal = Portal(SYSTEM)

    async def answer() -> int:
        return 42

    if used_before:
        portal.run("answer", answer())
    with portal._lock:  # as another thread would hold it at the moment of the fork
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            try:
                assert portal.run("answer", answer()) == 42
                portal.close()
                os._exit(0)
            finally:
                os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert portal.run("answer", answer()) == 42  # the parent's loop is as it was
    portal.close()
