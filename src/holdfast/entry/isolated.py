"""The program of an isolated process: load the application, then run one job after another, each alone.

The main thread runs the handlers; a second thread listens, so that a job can be told to stop and the process ends with
its worker. Called as `python -m holdfast.entry.isolated FD MODULE:ATTRIBUTE PATHS PARENT`.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import os
import queue
import socket
import sys

import msgspec

from holdfast.app import Holdfast
from holdfast.entry.loading import load_app
from holdfast.errors import InvalidOption
from holdfast.job import Job
from holdfast.lifecycle import HandlerOutcome
from holdfast.ports import SYSTEM
from holdfast.worker import wire
from holdfast.worker.context import CurrentJob, Stop
from holdfast.worker.process_tree import die_with_parent


class _Isolated:
    def __init__(self, app: Holdfast, channel: wire.BlockingChannel) -> None:
        self._app = app
        self._channel = channel
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._current: CurrentJob | None = None
        self._task: asyncio.Task[HandlerOutcome] | None = None
        self._runner = asyncio.Runner()

    def listen(self) -> None:
        """Take messages until the worker is gone, then end at once: nobody would hear of the outcome."""
        while (message := self._channel.receive()) is not None:
            match message:
                case wire.RunJob(job):
                    self._jobs.put(job)
                case wire.StopJob(why):
                    self._stop(Stop(why))
        os._exit(1)

    def _stop(self, why: Stop) -> None:
        if self._current is not None:
            self._current.stop = why
        if (task := self._task) is not None:
            task.get_loop().call_soon_threadsafe(task.cancel)

    def serve(self) -> None:
        """Run jobs for ever."""
        process = os.getpid()
        while True:
            outcome = self._run(self._jobs.get())
            if os.getpid() != process:
                os._exit(1)  # the handler forked, and its child came back here
            self._channel.send(wire.Done(outcome))

    def _run(self, job: Job) -> HandlerOutcome:
        app = self._app
        spec = app.tasks[job.task]
        self._current = CurrentJob(job, app.store, SYSTEM, is_async=spec.is_async, noted=self._note)
        if not spec.is_async:
            return contextvars.Context().run(app.handling.call_plain, spec, job, self._current)
        return self._runner.run(self._call(spec.name, job, self._current), context=contextvars.Context())

    async def _call(self, task: str, job: Job, current: CurrentJob) -> HandlerOutcome:
        self._task = asyncio.create_task(self._app.handling.call_async(self._app.tasks[task], job, current))
        try:
            return await self._task
        finally:
            self._task = None

    def _note(self, current: CurrentJob) -> None:
        if current.latest_progress is not None:
            self._channel.send(wire.Progress(current.latest_progress))


def _load(application: str) -> Holdfast:
    """As `load_app`, and also from a script that was run directly: `path/to/script.py:attribute`."""
    path, _, attribute = application.rpartition(":")
    if not path.endswith(".py"):
        return load_app(application)
    spec = importlib.util.spec_from_file_location("__holdfast_main__", path)
    if spec is None or spec.loader is None:
        raise InvalidOption(f"{path} cannot be imported")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    app = getattr(module, attribute)
    if not isinstance(app, Holdfast):
        raise InvalidOption(f"{application} is not a Holdfast application")
    return app


def main(arguments: list[str]) -> None:
    """Serve the worker at the other end of the inherited connection."""
    fd, application, paths, parent = arguments
    sys.path[:] = msgspec.json.decode(paths, type=list[str])
    die_with_parent(int(parent))
    channel = wire.BlockingChannel(socket.socket(fileno=int(fd)))
    isolated = _Isolated(_load(application), channel)
    SYSTEM.spawner.thread(isolated.listen, "holdfast-isolated-listener")
    channel.send(wire.Ready())
    isolated.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
