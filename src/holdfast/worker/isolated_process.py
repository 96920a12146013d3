"""One process for isolated jobs, as its worker sees it: what it says, how it is told, and how it ended.

A thread waits for its end. That thread kills what the process left behind before it reaps the process: until then
nobody else can have its number.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from contextlib import suppress

import msgspec

from holdfast.ports import Ports, Process
from holdfast.worker import wire

_TIME_TO_DIE = 1.0
_LEFT_TO_READ = 0.1
"""Seconds for what a process said before it ended to be read."""


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


def kill_and_reap(popen: Process) -> None:
    """End a process that nobody watches yet, and whatever it started in its group."""
    with suppress(ProcessLookupError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait()


class IsolatedProcess:
    """A started process. Used from one event loop."""

    def __init__(self, popen: Process, ports: Ports) -> None:
        self.pid = popen.pid
        self.messages: asyncio.Queue[wire.FromProcess | None] = asyncio.Queue(maxsize=100)
        """What it says. None: nothing comes any more."""
        self.code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Its exit code, once it has one."""
        self._popen = popen
        self._reaping = threading.Lock()
        self._reaped = self._killed = False
        self._loop = asyncio.get_running_loop()
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        ports.spawner.thread(self._wait, f"holdfast-wait-{popen.pid}")

    async def connect(self, connection: socket.socket) -> None:
        """Begin to talk with it."""
        reader, self._writer = await asyncio.open_connection(sock=connection)
        self._reading = asyncio.create_task(self._read(reader))

    @property
    def lives(self) -> bool:
        """Whether it has not ended, or is about to, as far as is known."""
        return not self._killed and not self.code.done()

    def send(self, message: wire.ToProcess) -> None:
        """Tell it something; nothing happens if it is gone."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(wire.framed(message))

    def kill(self) -> None:
        """Kill it and whatever it started in its group. `code` follows."""
        self._killed = True
        with self._reaping:
            if not self._reaped:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    async def ended(self) -> int:
        """Its exit code. One that has hung up and lives on is killed."""
        await asyncio.wait([self.code], timeout=_TIME_TO_DIE)
        self.kill()
        return await asyncio.shield(self.code)

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        with self._reaping:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            code = self._popen.wait()
            self._reaped = True
        with suppress(RuntimeError):  # the worker has ended itself
            self._loop.call_soon_threadsafe(self._on_end, code)

    def _on_end(self, code: int) -> None:
        if not self.code.done():
            self.code.set_result(code)
        # Something that left its group may still hold its end of the connection.
        self._loop.call_later(_LEFT_TO_READ, self.hang_up)

    def hang_up(self) -> None:
        """Close the connection: there is nothing more to hear from it."""
        if self._writer is not None:
            self._writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            with suppress(asyncio.IncompleteReadError, OSError, msgspec.MsgspecError):
                while True:
                    length = wire.length_of(await reader.readexactly(wire.LENGTH_SIZE))
                    await self.messages.put(wire.from_process.decode(await reader.readexactly(length)))
        except asyncio.CancelledError:  # the event loop ends: whoever waits for a message must end, too
            if self.messages.full():
                self.messages.get_nowait()
            self.messages.put_nowait(None)
            raise
        await self.messages.put(None)
