"""Isolated jobs: each runs alone in a spawned process that may crash, hang or eat all memory without harm to others.

A process is used again for the next isolated job as long as it lives. One that dies while it runs a job makes that
job's outcome `Crashed`, with how it ended; one whose job is past its hard limit is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from holdfast.errors import InvalidOption
from holdfast.events import Listener, ProcessDied, ProcessKilled, tell
from holdfast.failures import Failure
from holdfast.job import Job
from holdfast.lifecycle import Crashed, Failed, Outcome, Released
from holdfast.ports import Ports, Process
from holdfast.registry import Registry
from holdfast.worker import wire
from holdfast.worker.context import CurrentJob, Stop
from holdfast.worker.runner import hard_timeout_failure

_MOST_IDLE = os.cpu_count() or 2
_MOST_SUSPECTS = 16
_MOST_STARTING = 2
"""A crash at high concurrency makes many suspects; as many processes at once would be the next crash."""
_STARTUP_DEADLINE = 60.0
_REAP_DEADLINE = 2.0
_LAST_WORDS = 0.1
"""For what a process said before it ended to be read."""


def how_it_ended(code: int | None) -> str:
    """A process's end in words: "killed by SIGSEGV", "exit code 3"."""
    if code is None:
        return "still running"
    if code >= 0:
        return f"exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"killed by {name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")


class _Process:
    """One spawned process and the conversation with it."""

    def __init__(self, popen: Process, ports: Ports) -> None:
        self.popen = popen
        self.messages: asyncio.Queue[wire.FromProcess | None] = asyncio.Queue(maxsize=100)
        self._ports = ports
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None

    async def connect(self, connection: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._reading = asyncio.create_task(self._read(reader))
        loop = asyncio.get_running_loop()

        def wait() -> None:
            self.popen.wait()
            with suppress(RuntimeError):  # the worker has ended itself
                loop.call_soon_threadsafe(loop.call_later, _LAST_WORDS, self._hang_up)

        self._ports.spawner.thread(wait, f"holdfast-wait-{self.popen.pid}")

    def _hang_up(self) -> None:
        """The process has ended, but what its handler forked may hold its end of the connection open."""
        if self._writer is not None:
            self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                length = wire.length_of(await reader.readexactly(wire.LENGTH_SIZE))
                await self.messages.put(wire.from_process.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
            await self.messages.put(None)  # nothing sensible comes any more

    def send(self, message: wire.ToProcess) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.framed(message))

    def kill(self) -> None:
        """Kill the process and whatever it started in its group."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    async def ended(self) -> int | None:
        """Its exit code, once it has one. It is killed if it takes its time after it hung up."""
        clock = self._ports.clock
        deadline = clock.monotonic() + _REAP_DEADLINE
        while (code := self.popen.poll()) is None and clock.monotonic() < deadline + _REAP_DEADLINE:
            if clock.monotonic() > deadline:
                self.kill()
            await clock.sleep(0.005)
        self.kill()  # what it left behind
        if self._reading is not None:
            self._reading.cancel()
        if self._writer is not None:
            self._writer.close()
        return code


class IsolatedPool:
    """Processes for isolated jobs. `application` is where they find the application: `module:attribute`."""

    def __init__(self, application: str | None, *, ports: Ports, listener: Listener) -> None:
        self._application = application
        self._ports = ports
        self._listener = listener
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()
        self._suspects = asyncio.Semaphore(_MOST_SUSPECTS)
        self._starting = asyncio.Semaphore(_MOST_STARTING)

    async def run(
        self, job: Job, current: CurrentJob, hard_timeout: float | None, begun: Callable[[], None]
    ) -> Outcome:
        """See `runner.Isolation`."""
        try:
            if not job.suspect:
                return await self._run(job, current, hard_timeout, begun)
            async with self._suspects:
                return await self._run(job, current, hard_timeout, begun)
        except asyncio.CancelledError:
            return Released()  # it never began; if somebody cancelled it, releasing it completes that

    async def close(self) -> None:
        """Kill every process: none is needed any more."""
        for process in list(self._all):
            process.kill()
            await self._buried(process)

    async def _run(
        self, job: Job, current: CurrentJob, hard_timeout: float | None, begun: Callable[[], None]
    ) -> Outcome:
        try:
            process = await self._idle_or_new()
        except (OSError, InvalidOption, TimeoutError) as error:
            return Failed(self._failure(job, type(error).__name__, f"no isolated process could be started: {error}"))
        begun()
        process.send(wire.RunJob(job))
        outcome = await self._converse(process, job, current, hard_timeout)
        if process in self._all and len(self._idle) < _MOST_IDLE:
            self._idle.append(process)
        elif process in self._all:
            process.kill()
            await self._buried(process)
        return outcome

    async def _converse(self, process: _Process, job: Job, current: CurrentJob, hard_timeout: float | None) -> Outcome:
        deadline = None if hard_timeout is None else asyncio.get_running_loop().time() + hard_timeout
        while True:
            try:
                async with asyncio.timeout_at(deadline):
                    message = await process.messages.get()
            except TimeoutError:
                process.kill()
                await self._buried(process)
                tell(self._listener, ProcessKilled(job.session_id or "", process.popen.pid, "hard timeout", job.id))
                return Failed(hard_timeout_failure(job, hard_timeout or 0.0, self._ports))
            except asyncio.CancelledError:
                # The runner asks the handler to stop. What it makes of that is still to come.
                if (task := asyncio.current_task()) is not None:
                    task.uncancel()
                process.send(wire.StopJob((current.stop or Stop.CANCEL).value))
                continue
            match message:
                case wire.Done(outcome):
                    return outcome
                case wire.Progress(value):
                    current.keep_progress(value)
                case None:
                    how = how_it_ended(await self._buried(process))
                    tell(self._listener, ProcessDied(job.session_id or "", process.popen.pid, how, job.id))
                    return Crashed(
                        self._failure(job, "ProcessDied", f"the process that ran the job alone ended: {how}")
                    )

    async def _idle_or_new(self) -> _Process:
        if not self._idle:
            async with self._starting:
                if not self._idle:  # one may have become idle meanwhile
                    return await self._spawn()
        return self._idle.pop()

    async def _spawn(self) -> _Process:
        if self._application is None:
            raise InvalidOption(
                "the application cannot be imported by another process: define it at the top level of a module, "
                "as in app = Holdfast(...)"
            )
        ours, theirs = socket.socketpair()
        with theirs:
            popen = self._ports.spawner.process(
                program("isolated", theirs.fileno(), self._application), [theirs.fileno()]
            )
        process = _Process(popen, self._ports)
        self._all.add(process)
        await process.connect(ours)
        try:
            async with asyncio.timeout(_STARTUP_DEADLINE):
                message = await process.messages.get()
        except BaseException:
            process.kill()
            await self._buried(process)
            raise
        if message is None:
            raise OSError(f"it ended while it loaded {self._application}: {how_it_ended(await self._buried(process))}")
        return process

    async def _buried(self, process: _Process) -> int | None:
        self._all.discard(process)
        if process in self._idle:
            self._idle.remove(process)
        return await process.ended()

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


def program(entry: str, fd: int, application: str, *more: str) -> Sequence[str]:
    """The command line of one of our own processes. It sees the same modules as this one."""
    paths = msgspec.json.encode([path or os.getcwd() for path in sys.path]).decode()
    return [sys.executable, "-m", f"holdfast.entry.{entry}", str(fd), application, paths, str(os.getpid()), *more]
