"""How the worker processes of `holdfast demo` tell it what happens: short lines through a named pipe.

Nobody ever waits for it: a line that finds the pipe full is dropped. So the demo takes its numbers from the store; what
comes by this way only says where to look, and makes the list of events.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec

from holdfast.events import Event, JobSettled, Listener, ProcessDied, ProcessKilled, WorkerStarted, ignore
from holdfast.job import ENDED, JobId, Reason, State

_LONGEST_ERROR = 120
_AT_ONCE = 65_536
_encode = msgspec.json.Encoder().encode


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker process begins to claim."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A worker settled a job for good."""

    job_id: JobId
    task: str
    state: State
    reason: Reason
    attempt: int
    error: str


class Died(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process ended that should not have. `job_id`: the job that ran alone in it; empty for a worker, whose `jobs`
    went back to their queues.
    """

    pid: int
    how: str
    job_id: JobId
    jobs: int


class Killed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """A process was killed for what it did."""

    pid: int
    why: str


Told = Ready | Ended | Died | Killed


def listener(path: str | None) -> Listener:
    """A listener that tells the demo behind that pipe what it wants to know. None: nobody wants to know anything."""
    if path is None:
        return ignore
    pipe: list[int] = []

    def tell(event: Event) -> None:
        told = _told(event)
        if told is None:
            return
        if not pipe:
            pipe.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        # One write: lines of several processes and threads do not mix as long as they are short.
        os.write(pipe[0], _encode(told) + b"\n")

    return tell


def _told(event: Event) -> Told | None:
    match event:
        case JobSettled() if event.state in ENDED:
            error = event.error[:_LONGEST_ERROR]
            return Ended(event.job_id, event.task, event.state, event.reason, event.attempt, error)
        case WorkerStarted():
            return Ready(os.getpid())
        case ProcessDied():
            return Died(event.pid, event.how, event.job_id, event.started + event.unstarted)
        case ProcessKilled():
            return Killed(event.pid, event.why)
    return None


class Feed:
    """The demo's end of the pipe. Made inside its event loop."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path, 0o600)
        self._reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        # A writer of our own: without any, a pipe is at its end and always ready to say so.
        self._writing = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        self._rest = b""
        self._heard: list[Told] = []
        self._decoder = msgspec.json.Decoder(Told)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reading, self._read)

    def take(self) -> list[Told]:
        """What was told since the last call."""
        heard, self._heard = self._heard, []
        return heard

    def close(self) -> None:
        """Listen no more."""
        self._loop.remove_reader(self._reading)
        os.close(self._reading)
        os.close(self._writing)

    def _read(self) -> None:
        try:
            read = os.read(self._reading, _AT_ONCE)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            try:
                self._heard.append(self._decoder.decode(line))
            except msgspec.MsgspecError:
                continue  # a line that was too long for one write, and mixed with another
