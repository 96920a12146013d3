"""Corners of isolated jobs: requests to stop that come too early or too late, processes that die or go on when nobody
needs them, and processes that cannot be had.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from holdfast import JobHandle, State
from holdfast.entry.isolated import _Isolated
from holdfast.events import JobSettled, PartFailed, ProcessDied
from holdfast.failures import decode_history
from holdfast.job import Job, NewJob, enqueued
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Crashed, Failed, Outcome, Succeeded
from holdfast.ports import SYSTEM, Ports, Process, SystemSpawner
from holdfast.store import ClaimRequest, Session
from holdfast.worker import wire
from holdfast.worker.context import CurrentJob, Stop, Surroundings
from holdfast.worker.isolated_process import IsolatedProcess
from holdfast.worker.isolation import IsolatedPool
from tests.worker import shop as importable
from tests.worker.bench import PATIENCE, Bench, Heard, ended, failed, stored
from tests.worker.modules import everything
from tests.worker.shop import AT_ONCE, STORE, Shop, named

HOW_OFTEN = 5
"""For races: each round has the chance to lose."""


def claimed(task: str, **arguments: Any) -> Job:
    """A job as a worker has it."""
    new = NewJob(id=SYSTEM.ids.job_id(), task=task, payload=msgspec.json.encode(arguments))
    return msgspec.structs.replace(enqueued(new, 0), session_id="session", version=1)


class Scene:
    """A pool of processes, and what is told."""

    def __init__(self, application: str, shop: Shop | None = None) -> None:
        self.heard = Heard()
        self.app = shop.app if shop else everything.app
        self.pool = IsolatedPool(application, self.app.tasks, ports=SYSTEM, listener=self.heard)
        self.progress: list[bytes | None] = []

    def start(self, job: Job, *, hard_timeout: float | None = None, stop_at_once: Stop | None = None) -> Run:
        """Run the job, as the runner would. `stop_at_once`: and stop it in the moment after it has begun."""
        run = Run(CurrentJob(job, Surroundings(self.app.store, SYSTEM, self._note), is_async=False))

        def begun() -> None:
            if stop_at_once is not None:
                asyncio.get_running_loop().call_soon(run.stop, stop_at_once)

        run.task = asyncio.create_task(self.pool.run(job, run.current, hard_timeout, begun))
        return run

    async def run(self, job: Job) -> Outcome:
        return await self.start(job).outcome()

    def _note(self, current: CurrentJob) -> None:
        self.progress.append(current.latest_progress)


class Run:
    """A job that runs."""

    task: asyncio.Task[Outcome]

    def __init__(self, current: CurrentJob) -> None:
        self.current = current

    def stop(self, why: Stop) -> None:
        """As the runner does it."""
        self.current.stop = why
        self.task.cancel()

    async def outcome(self) -> Outcome:
        async with asyncio.timeout(PATIENCE):
            return await self.task


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    scene = Scene("tests.worker.modules.everything:app")
    yield scene
    await scene.pool.close()


@pytest.fixture
async def shop_scene() -> AsyncIterator[Scene]:
    shop = Shop("memory://")
    scene = Scene("tests.worker.shop:app", shop)
    yield scene
    await scene.pool.close()


# A stop in the moment after the end.


class Overheard(asyncio.Queue[wire.FromProcess | None]):
    """What a process says. Somebody hears of its last words as soon as they have arrived, before anybody reads them."""

    def __init__(self, last_words: Callable[[], None]) -> None:
        super().__init__()
        self._last_words = last_words

    async def put(self, item: wire.FromProcess | None) -> None:
        await super().put(item)
        if item is None or isinstance(item, wire.Done):
            self._last_words()


class LateStops:
    """Stops the job that runs, so many steps of the event loop after it has ended in its process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: Run | None = None
        self.steps = self.sent = 0
        take, kill = IsolatedPool._idle_or_new, IsolatedProcess.kill

        async def overhear(pool: IsolatedPool) -> IsolatedProcess:
            process, run = await take(pool), self.run
            process.messages = Overheard(lambda: self._stop_after(self.steps, run))
            return process

        def overhear_kill(process: IsolatedProcess) -> None:
            kill(process)
            self._stop_after(self.steps + 1, self.run)  # nobody else's turn comes before the next step

        monkeypatch.setattr(IsolatedPool, "_idle_or_new", overhear)
        monkeypatch.setattr(IsolatedProcess, "kill", overhear_kill)

    def _stop_after(self, steps: int, run: Run | None) -> None:
        if steps:
            asyncio.get_running_loop().call_soon(self._stop_after, steps - 1, run)
        elif run is not None:
            self.sent += 1
            run.stop(Stop.SHUTDOWN)


@pytest.fixture
def late_stops(monkeypatch: pytest.MonkeyPatch) -> LateStops:
    return LateStops(monkeypatch)


@pytest.mark.parametrize("room", [1, 0], ids=["the process is kept", "the process is not needed any more"])
async def test_an_isolated_job_that_has_returned_has_succeeded_though_a_stop_comes_in_the_next_moment(
    shop_scene: Scene, late_stops: LateStops, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("holdfast.worker.isolation._MOST_IDLE", room)
    for steps in range(4):
        late_stops.steps = steps
        late_stops.run = shop_scene.start(claimed("ping_alone"))
        assert await late_stops.run.outcome() == Succeeded(b'"pong"')
    await shop_scene.pool.close()
    assert late_stops.sent >= 4


async def test_an_isolated_job_that_has_crashed_is_charged_though_a_stop_comes_in_the_next_moment(
    shop_scene: Scene, late_stops: LateStops
) -> None:
    for steps in range(3):
        late_stops.steps = steps
        late_stops.run = shop_scene.start(claimed("die", how="exit 3"))
        outcome = await late_stops.run.outcome()
        assert isinstance(outcome, Crashed)
        assert outcome.failure.message.endswith("exit code 3")
    assert late_stops.sent >= 3


async def test_an_isolated_job_past_its_hard_limit_has_failed_though_a_stop_comes_in_the_next_moment(
    shop_scene: Scene, late_stops: LateStops
) -> None:
    for steps in range(2):
        late_stops.steps = steps
        job = claimed("endless_alone", path="/dev/null", seconds=60)
        late_stops.run = shop_scene.start(job, hard_timeout=0.05)
        outcome = await late_stops.run.outcome()
        assert isinstance(outcome, Failed)
        assert outcome.failure.type == "HardTimeout"
    await shop_scene.pool.close()
    assert late_stops.sent >= 2


# A stop before the beginning.


class Scripted:
    """The worker at the other end: it says what it has to say, and then nothing more."""

    def __init__(self, *messages: wire.ToProcess) -> None:
        self._messages = list(messages)
        self.heard: list[wire.FromProcess] = []

    def receive(self) -> wire.ToProcess:
        if not self._messages:
            raise EOFError
        return self._messages.pop(0)

    def send(self, message: wire.FromProcess) -> None:
        self.heard.append(message)


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("timed_alone", "RuntimeError: I was told to stop"),
        ("atimed_alone", "TimeoutError: the handler ran longer than its timeout of 0.2 s"),
    ],
    ids=["plain", "async"],
)
def test_a_stop_that_reaches_the_process_before_the_handler_has_begun_stops_it(
    tmp_path: Path, task: str, told: str
) -> None:
    job = claimed(task, path=str(tmp_path / "begun"))
    script = Scripted(wire.RunJob(job), wire.StopJob(job.id, job.version, Stop.TIMEOUT.value))
    isolated = _Isolated(Shop("memory://").app, cast(Any, script))
    with pytest.raises(EOFError):
        isolated.listen()
    outcome = isolated._run(job)
    assert isinstance(outcome, Failed)
    assert f"{outcome.failure.type}: {outcome.failure.message}" == told
    isolated._runner.close()


@pytest.mark.parametrize("task", ["ping_alone", "add_later_alone"])
def test_a_stop_that_was_meant_for_the_job_before_stops_no_other(task: str) -> None:
    before, job = claimed("ping_alone"), claimed(task, **({} if task == "ping_alone" else {"left": 1, "right": 2}))
    again = msgspec.structs.replace(job, version=job.version + 1)
    stops = [wire.StopJob(other.id, other.version, Stop.CANCEL.value) for other in (before, again)]
    isolated = _Isolated(Shop("memory://").app, cast(Any, Scripted(*stops)))
    with pytest.raises(EOFError):
        isolated.listen()
    assert isinstance(isolated._run(job), Succeeded)
    isolated._runner.close()


@pytest.mark.parametrize(
    ("task", "told"), [("timed_alone", "RuntimeError"), ("atimed_alone", "TimeoutError")], ids=["plain", "async"]
)
async def test_a_stop_in_the_moment_after_the_beginning_arrives(
    shop_scene: Scene, tmp_path: Path, task: str, told: str
) -> None:
    for _ in range(HOW_OFTEN):
        job = claimed(task, path=str(tmp_path / "begun"))
        outcome = await shop_scene.start(job, stop_at_once=Stop.TIMEOUT).outcome()
        assert isinstance(outcome, Failed)
        assert outcome.failure.type == told


# What a job leaves in its process.


async def test_a_process_that_dies_when_it_has_nothing_to_do_is_nobodys_fault(scene: Scene) -> None:
    first = await scene.run(claimed("leave_a_bomb", seconds=0.05))
    assert isinstance(first, Succeeded)
    [process] = scene.pool._idle
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.shield(process.code) == 9
    second = await scene.run(claimed("render"))
    assert isinstance(second, Succeeded)
    assert second.result not in (None, first.result)  # in another process
    assert scene.heard.of(ProcessDied) == []


async def test_progress_that_a_job_tells_after_its_end_is_not_that_of_the_next_one(scene: Scene) -> None:
    first = await scene.run(claimed("leave_somebody_who_tells"))
    second = await scene.run(claimed("wait_until_somebody_tells"))
    assert isinstance(first, Succeeded)
    assert second == first  # in the same process
    assert scene.progress == []


# No process to be had.


class ShortOfProcesses(SystemSpawner):
    """Refuses the first ones."""

    def __init__(self, refused: int) -> None:
        self.left = refused

    def process(self, command: Sequence[str], fds: Sequence[int]) -> Process:
        if self.left:
            self.left -= 1
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return super().process(command, fds)


class ShortOfThreads(SystemSpawner):
    """Refuses the first threads that are to wait for a process."""

    def __init__(self, refused: int) -> None:
        self.left = refused
        self.started: list[Process] = []

    def process(self, command: Sequence[str], fds: Sequence[int]) -> Process:
        self.started.append(super().process(command, fds))
        return self.started[-1]

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        if name.startswith("holdfast-wait") and self.left:
            self.left -= 1
            raise RuntimeError("can't start new thread")
        return super().thread(target, name)


def open_shop(bench: Bench, spawner: SystemSpawner, monkeypatch: pytest.MonkeyPatch) -> Shop:
    """As the fixture `shop`, with that spawner. What cannot be started is tried again soon."""
    monkeypatch.setattr("holdfast.worker.isolation._START_AGAIN", 0.05)
    if bench.engine == "sqlite":
        monkeypatch.setenv(STORE, f"sqlite:///{bench.path}")
    shop = Shop(bench.store(), on_event=bench.heard, middleware=[named], ports=Ports(spawner=spawner))
    monkeypatch.setattr(importable, "app", bench.keep(shop.app))
    return shop


def settlements(heard: Heard, job: JobHandle[Any], count: int) -> list[str]:
    """How its claims ended. The last is told a moment after the store has it."""

    def are_its_own(settled: JobSettled) -> bool:
        return settled.job_id == job.id

    heard.wait_for(JobSettled, are_its_own, count=count)
    return [settled.reason.value for settled in heard.of(JobSettled, are_its_own)]


async def lose(bench: Bench) -> None:
    """A worker claims all there is and dies: what it held are suspects now."""
    store = bench.store()
    await store.open_session(Session(id="dead", queues=("default",)))
    await store.claim(ClaimRequest(session_id="dead", queues=("default",), limit=100))
    await store.close_session("dead")
    await Rescue(store, ports=SYSTEM).one_pass()


def test_a_suspect_for_which_no_process_can_be_started_is_put_off_as_it_is_and_runs_later(
    bench: Bench, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = open_shop(bench, ShortOfProcesses(2), monkeypatch)
    job = shop.ping.options(max_retries=0).enqueue()
    asyncio.run(lose(bench))
    assert (stored(job).suspect, stored(job).attempt) == (True, 1)
    bench.work(shop.app)
    assert job.result(PATIENCE) == "pong"
    assert settlements(heard, job, 3) == ["snoozed", "snoozed", "succeeded"]
    details = ended(job)
    assert (details.attempt, details.failures, details.crashes, details.snoozes) == (2, 0, 0, 2)
    assert [failure.type for failure in decode_history(details.failure_history)] == ["WorkerLost"]
    assert [event.retry_in for event in heard.of(JobSettled, lambda event: event.reason == "snoozed")] == [0.05, 0.05]


def test_a_suspect_that_waits_for_a_process_is_still_a_suspect(
    bench: Bench, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop = open_shop(bench, ShortOfProcesses(1), monkeypatch)
    monkeypatch.setattr("holdfast.worker.isolation._START_AGAIN", 3600.0)
    job = shop.ping.enqueue()
    asyncio.run(lose(bench))
    bench.work(shop.app)
    heard.wait_for(JobSettled, lambda settled: settled.job_id == job.id)
    details = stored(job)
    assert (details.state, details.reason, details.suspect) == (State.READY, "snoozed", True)
    assert (details.attempt, details.failures, details.crashes) == (1, 0, 0)


def test_a_process_that_nobody_can_wait_for_is_ended_and_its_job_put_off(
    bench: Bench, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawner = ShortOfThreads(1)
    shop = open_shop(bench, spawner, monkeypatch)
    bench.work(shop.app)
    job = shop.where_alone.enqueue()
    pid = job.result(PATIENCE)["pid"]
    assert settlements(heard, job, 2) == ["snoozed", "succeeded"]
    first, second = spawner.started
    assert (first.returncode, second.pid) == (-signal.SIGKILL, pid)


def test_an_isolated_task_of_an_application_that_no_other_process_can_import_fails_at_once_and_says_why(
    bench: Bench, heard: Heard
) -> None:
    app = bench.app()

    @app.task(isolation="process", max_retries=5)
    def local() -> None: ...

    bench.work(app)
    assert failed(local.enqueue()) == (
        "permanent",
        "InvalidOption",
        "the application cannot be imported by another process: define it at the top level of a module",
    )
    assert not heard.of(PartFailed)


def test_a_suspect_of_an_application_that_no_other_process_can_import_runs_among_the_others_again(
    bench: Bench, heard: Heard
) -> None:
    app = bench.app()

    @app.task(backoff=AT_ONCE)
    def local() -> str:
        return "done"

    job = local.enqueue()
    asyncio.run(lose(bench))
    assert stored(job).suspect
    bench.work(app)
    assert job.result(PATIENCE) == "done"
    assert settlements(heard, job, 2) == ["retried", "succeeded"]
    assert [failure.type for failure in decode_history(ended(job).failure_history)] == ["WorkerLost", "InvalidOption"]
