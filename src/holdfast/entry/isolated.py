"""The program of an isolated process: load the application, then run one job after another, each alone.

The main thread runs the handlers; a second thread listens, so that a job can be told to stop and the process ends with
its worker. Called as `python -m holdfast.entry.isolated FD MODULE:ATTRIBUTE PATHS PARENT MODULES`.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib
import importlib.util
import os
import queue
import signal
import socket
import sys
import threading
from contextlib import suppress

import msgspec

from holdfast.app import Holdfast, importing
from holdfast.entry.loading import load_app
from holdfast.errors import InvalidOption, UnknownTask
from holdfast.failures import capture
from holdfast.job import Job
from holdfast.lifecycle import HandlerOutcome, Released, Snoozed
from holdfast.ports import SYSTEM
from holdfast.registry import TaskSpec
from holdfast.worker import wire
from holdfast.worker.context import CurrentJob, Stop, Surroundings
from holdfast.worker.process_tree import die_with_parent


class _Isolated:
    def __init__(self, app: Holdfast, channel: wire.BlockingChannel) -> None:
        self._app = app
        self._channel = channel
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._current: CurrentJob | None = None
        self._task: asyncio.Task[HandlerOutcome] | None = None
        self._stopped: tuple[str, int, Stop] | None = None
        self._runner = asyncio.Runner()

    # The listener's thread.

    def listen(self) -> None:
        """Take messages until the worker is gone, then end at once: nobody would hear of the outcome."""
        while (message := self._channel.receive()) is not None:
            match message:
                case wire.RunJob(job):
                    self._jobs.put(job)
                case wire.StopJob(job_id, version, why):
                    with self._changing:
                        self._stopped = job_id, version, Stop(why)
                        self._stop_if_asked()
        os._exit(1)

    def _stop_if_asked(self) -> None:
        """Stop the handler, if it is the one that was asked to: the request may come before it begins, or too late."""
        current, task = self._current, self._task
        if current is None or self._stopped is None or self._stopped[:2] != (current.id, current.lease.version):
            return
        current.stop = self._stopped[2]
        if task is not None:
            with suppress(RuntimeError):  # it has just ended, and its loop stands still
                task.get_loop().call_soon_threadsafe(task.cancel)

    # The main thread.

    def serve(self) -> None:
        """Run jobs for ever."""
        process = os.getpid()
        while True:
            job = self._jobs.get()
            outcome = self._run(job)
            if os.getpid() != process:
                os._exit(1)  # the handler forked, and its child came back here
            with self._changing:
                self._current = None
            self._channel.send(wire.Done(job.id, job.version, outcome))

    def _run(self, job: Job) -> HandlerOutcome:
        app = self._app
        try:
            spec = app.tasks[job.task]
        except UnknownTask as error:
            # The worker knew it: it was registered after the modules were imported.
            return Snoozed(60.0, capture(error, at=SYSTEM.clock.now(), attempt=job.attempt + 1))
        current = CurrentJob(job, Surroundings(app.store, SYSTEM, self._note), spec.is_async)
        if spec.is_async:
            return self._runner.run(self._call(spec, job, current), context=contextvars.Context())
        self._begin(current, None)
        return contextvars.Context().run(app.handling.call_plain, spec, job, current)

    async def _call(self, spec: TaskSpec, job: Job, current: CurrentJob) -> HandlerOutcome:
        task = asyncio.create_task(self._app.handling.call_async(spec, job, current))
        self._begin(current, task)
        try:
            return await task
        except asyncio.CancelledError:
            return Released()  # stopped before its first step
        finally:
            with self._changing:
                self._task = None

    def _begin(self, current: CurrentJob, task: asyncio.Task[HandlerOutcome] | None) -> None:
        with self._changing:
            self._current, self._task = current, task
            self._stop_if_asked()

    def _note(self, current: CurrentJob) -> None:
        if current.latest_progress is not None:
            self._channel.send(wire.Progress(current.id, current.lease.version, current.latest_progress))


def _load(application: str) -> Holdfast:
    """As `load_app`, and also from a script that was run directly: `path/to/script.py:attribute`."""
    path, _, attribute = application.rpartition(":")
    if not path.endswith(".py"):
        return load_app(application)
    spec = importlib.util.spec_from_file_location("__holdfast_main__", path)
    if spec is None or spec.loader is None:
        raise InvalidOption(f"{path} cannot be imported")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    with importing(path):
        spec.loader.exec_module(module)
    app = getattr(module, attribute)
    if not isinstance(app, Holdfast):
        raise InvalidOption(f"{application} is not a Holdfast application")
    return app


def main(arguments: list[str]) -> None:
    """Serve the worker at the other end of the inherited connection."""
    fd, application, paths, parent, modules = arguments
    # Whoever stops a whole group of processes means the worker, which tells us what to do. Not `SIG_IGN`: what a
    # handler starts would inherit that.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    os.set_inheritable(int(fd), False)
    sys.path[:] = msgspec.json.decode(paths, type=list[str])
    die_with_parent(int(parent))
    channel = wire.BlockingChannel(socket.socket(fileno=int(fd)))
    isolated = _Isolated(_load(application), channel)
    for module in msgspec.json.decode(modules, type=list[str]):
        importlib.import_module(module)
    SYSTEM.spawner.thread(isolated.listen, "holdfast-isolated-listener")
    channel.send(wire.Ready())
    isolated.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
