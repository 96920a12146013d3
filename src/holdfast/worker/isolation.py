"""Isolated jobs: each runs alone in a spawned process that may crash, hang or eat all memory without harm to others.

A process is used again for the next isolated job as long as it lives. One that dies while it runs a job makes that
job's outcome `Crashed`, with how it ended; one whose job is past its hard limit is killed.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec

from holdfast.errors import InvalidOption
from holdfast.events import Listener, ProcessDied, ProcessKilled, tell
from holdfast.failures import Failure
from holdfast.job import Job
from holdfast.lifecycle import Crashed, Failed, Outcome, Released, Snoozed
from holdfast.ports import Ports
from holdfast.registry import Registry
from holdfast.worker import wire
from holdfast.worker.context import CurrentJob, Stop
from holdfast.worker.handling import hard_timeout_failure
from holdfast.worker.isolated_process import IsolatedProcess, how_it_ended, kill_and_reap

_MOST_IDLE = os.cpu_count() or 2
_MOST_SUSPECTS = 16
_MOST_STARTING = 2
"""A crash at high concurrency makes many suspects; as many processes at once would be the next crash."""
_STARTUP_DEADLINE = 60.0
_START_AGAIN = 5.0


class IsolatedPool:
    """Processes for isolated jobs. `application` is where they find the application: `module:attribute`."""

    def __init__(self, application: str | None, registry: Registry, *, ports: Ports, listener: Listener) -> None:
        self._application = application
        self._registry = registry
        self._ports = ports
        self._listener = listener
        self._idle: list[IsolatedProcess] = []
        self._all: set[IsolatedProcess] = set()
        self._suspects = asyncio.Semaphore(_MOST_SUSPECTS)
        self._starting = asyncio.Semaphore(_MOST_STARTING)

    async def run(
        self, job: Job, current: CurrentJob, hard_timeout: float | None, begun: Callable[[], None]
    ) -> Outcome:
        """See `runner.Isolation`."""
        if not job.suspect:
            return await self._run(job, current, hard_timeout, begun)
        try:
            await self._suspects.acquire()
        except asyncio.CancelledError:
            return Released()
        try:
            return await self._run(job, current, hard_timeout, begun)
        finally:
            self._suspects.release()

    async def close(self) -> None:
        """Kill every process: none is needed any more."""
        processes, self._all = self._all, set()
        for process in processes:
            process.kill()
        if processes:
            await asyncio.wait([process.code for process in processes], timeout=1.0)
        for process in processes:
            process.hang_up()

    async def _run(
        self, job: Job, current: CurrentJob, hard_timeout: float | None, begun: Callable[[], None]
    ) -> Outcome:
        if self._application is None:
            message = "the application cannot be imported by another process: define it at the top level of a module"
            # A suspect has no other way left than among the others again. Put off, it would never run.
            return Failed(self._failure(job, "InvalidOption", message), permanent=not job.suspect)
        try:
            process = await self._idle_or_new()
        except asyncio.CancelledError:
            return Released()  # it never began; if somebody cancelled it, releasing it completes that
        except (OSError, RuntimeError, InvalidOption, TimeoutError) as error:
            # Not the handler's failure: it has not begun, and a suspect is still one.
            message = f"no process could be started to run the job alone: {error}"
            return Snoozed(_START_AGAIN, self._failure(job, type(error).__name__, message))
        begun()
        process.send(wire.RunJob(job))
        outcome = await self._converse(process, job, current, hard_timeout)
        if not process.lives:
            self._drop(process)
        elif len(self._idle) < _MOST_IDLE:
            self._idle.append(process)
        else:
            process.kill()
            self._drop(process)
        return outcome

    async def _converse(
        self, process: IsolatedProcess, job: Job, current: CurrentJob, hard_timeout: float | None
    ) -> Outcome:
        deadline = None if hard_timeout is None else asyncio.get_running_loop().time() + hard_timeout
        hung_up = False
        while True:
            message = code = None
            try:
                async with asyncio.timeout_at(deadline):
                    if not hung_up:
                        message = await process.messages.get()
                        hung_up = message is None
                    if hung_up:
                        code = await process.ended()
            except TimeoutError:
                process.kill()
                tell(self._listener, ProcessKilled(job.session_id or "", process.pid, "hard timeout", job.id))
                return Failed(hard_timeout_failure(job, hard_timeout or 0.0, self._ports))
            except asyncio.CancelledError:
                # The runner asks the handler to stop. What it makes of that is still to come.
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
                process.send(wire.StopJob(job.id, job.version, (current.stop or Stop.CANCEL).value))
                continue
            match message:
                case wire.Done(job.id, job.version, outcome):
                    return outcome
                case wire.Progress(job.id, job.version, value):
                    current.keep_progress(value)
                case None:
                    how = how_it_ended(code)
                    tell(self._listener, ProcessDied(job.session_id or "", process.pid, how, job.id))
                    return Crashed(
                        self._failure(job, "ProcessDied", f"the process that ran the job alone ended: {how}")
                    )

    async def _idle_or_new(self) -> IsolatedProcess:
        if (process := self._take_idle()) is not None:
            return process
        async with self._starting:
            # One may have become idle meanwhile.
            return self._take_idle() or await self._spawn()

    def _take_idle(self) -> IsolatedProcess | None:
        while self._idle:
            process = self._idle.pop()
            if process.lives:
                return process
            self._drop(process)  # it died while it had nothing to do: no job is to blame
        return None

    async def _spawn(self) -> IsolatedProcess:
        if self._application is None:
            raise InvalidOption("the application cannot be imported by another process")
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                command = program("isolated", theirs.fileno(), self._application, _modules(self._registry))
                popen = self._ports.spawner.process(command, [theirs.fileno()])
            except BaseException:
                ours.close()
                raise
        try:
            process = IsolatedProcess(popen, self._ports)
        except RuntimeError:  # no thread could be started to wait for it
            ours.close()
            kill_and_reap(popen)
            raise
        self._all.add(process)
        try:
            async with asyncio.timeout(_STARTUP_DEADLINE):
                await process.connect(ours)
                message = await process.messages.get()
                code = await process.ended() if message is None else None
        except BaseException:
            process.kill()
            self._drop(process)
            raise
        if message is None:
            self._drop(process)
            raise OSError(f"it ended while it loaded {self._application}: {how_it_ended(code)}")
        return process

    def _drop(self, process: IsolatedProcess) -> None:
        self._all.discard(process)
        process.hang_up()

    def _failure(self, job: Job, kind: str, message: str) -> Failure:
        return Failure(self._ports.clock.now(), job.attempt + 1, kind, message)


def find_application(app: object, registry: Registry) -> str | None:
    """Where another process finds the application: `module:attribute`, or the script that is running now."""
    for module in {spec.function.__module__: sys.modules.get(spec.function.__module__) for spec in registry}.values():
        name = next((name for name, value in vars(module).items() if value is app), None) if module else None
        if module is None or name is None:
            continue
        if module.__name__ != "__main__":
            return f"{module.__name__}:{name}"
        if module.__spec__ is not None:  # python -m package.module
            return f"{module.__spec__.name}:{name}"
        return f"{os.path.abspath(module.__file__)}:{name}" if module.__file__ else None
    return None


def _modules(registry: Registry) -> str:
    """The modules that have tasks: each must be imported for its tasks to be known."""
    return msgspec.json.encode(sorted({spec.function.__module__ for spec in registry} - {"__main__"})).decode()


def program(entry: str, fd: int, application: str, *more: str) -> Sequence[str]:
    """The command line of one of our own processes. It sees the same modules as this one."""
    paths = msgspec.json.encode([path or os.getcwd() for path in sys.path]).decode()
    return [sys.executable, "-m", f"holdfast.entry.{entry}", str(fd), application, paths, str(os.getpid()), *more]
