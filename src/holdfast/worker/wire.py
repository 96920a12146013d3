"""What a worker and the process of an isolated job say to each other: MessagePack values with their length before them.

No pickle: neither side runs what the other sends.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

from holdfast.job import Job
from holdfast.lifecycle import HandlerOutcome

_LENGTH = struct.Struct(">I")


class RunJob(msgspec.Struct, frozen=True, tag=True):
    """To the process: run this job."""

    job: Job


class StopJob(msgspec.Struct, frozen=True, tag=True):
    """To the process: the handler of that claim is to stop, now or as soon as it begins. `why` is a `Stop`."""

    job_id: str
    version: int
    why: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the process: the application is loaded."""


class Progress(msgspec.Struct, frozen=True, tag=True):
    """From the process: the handler of that claim told how far it is."""

    job_id: str
    version: int
    value: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """From the process: what became of that claim."""

    job_id: str
    version: int
    outcome: HandlerOutcome


ToProcess = RunJob | StopJob
FromProcess = Ready | Progress | Done

_encoder = msgspec.msgpack.Encoder()
to_process: msgspec.msgpack.Decoder[ToProcess] = msgspec.msgpack.Decoder(ToProcess)
from_process: msgspec.msgpack.Decoder[FromProcess] = msgspec.msgpack.Decoder(FromProcess)
LENGTH_SIZE = _LENGTH.size


def framed(message: ToProcess | FromProcess) -> bytes:
    """The message as it travels."""
    encoded = _encoder.encode(message)
    return _LENGTH.pack(len(encoded)) + encoded


def length_of(header: bytes) -> int:
    """How many bytes follow this header."""
    return int(_LENGTH.unpack(header)[0])


class BlockingChannel:
    """The process's end. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._input = connection.makefile("rb")

    def send(self, message: FromProcess) -> None:
        """Send the whole message, or raise `OSError` if the worker is gone."""
        with self._sending:
            self._connection.sendall(framed(message))

    def receive(self) -> ToProcess | None:
        """The next message, or None when the worker is gone."""
        header = self._input.read(LENGTH_SIZE)
        if len(header) < LENGTH_SIZE:
            return None
        body: Any = self._input.read(length_of(header))
        return to_process.decode(body)
