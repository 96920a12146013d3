"""The board: what a worker process is doing, in memory that outlives it.

The process writes; its supervisor reads, also after the process was killed in the middle of anything. It holds the
session's id, when the event loop last ran, how many jobs are done, and a place for each job that runs or has had an
outcome lately: when a process dies, an outcome may not have reached the store, and its job had started all the same.
There are many more places than jobs that run at once, and the one that was left first is used first: so an outcome is
remembered by not being written over. Times are on the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
from collections import deque
from typing import Self

import msgspec

_HEADER_ROOM = 64
_PLACE = struct.Struct("<36s Q d")
_PLACE_SIZE, _write_place = _PLACE.size, _PLACE.pack_into
_TICK = struct.Struct("<d")
_TICK_AT = 32
_READY_AT = 40
_LEAVING_AT = 41
_EMPTY, _STARTED, _ENDED = 0, 1, 2
_LATELY = 4096
"""Jobs with an outcome that are remembered: more than a worker lets wait for the store to confirm, or for a slot."""


class Started(msgspec.Struct, frozen=True, gc=False):
    """A job that has started. `hard_deadline` is infinite if it has none."""

    job_id: str
    version: int
    hard_deadline: float


class Board:
    """One worker process on a few pages. Only one thread of the process writes about jobs."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        # A byte for each place that says what is there, then the places.
        places = (len(memory) - _HEADER_ROOM) // (1 + _PLACE.size)
        self._places_at = _HEADER_ROOM + places
        self._free = deque(range(places))
        self._done = 0

    @staticmethod
    def size(slots: int) -> int:
        """Bytes for a process that runs so many jobs at once. Those may all end while as many wait to be confirmed."""
        return _HEADER_ROOM + (2 * slots + _LATELY) * (1 + _PLACE.size)

    @classmethod
    def private(cls, slots: int) -> Self:
        """A board that nobody else reads."""
        return cls(mmap.mmap(-1, cls.size(slots)))

    @classmethod
    def create(cls, slots: int) -> tuple[Self, int]:
        """A board to share, and the file descriptor that a child process inherits and opens it by."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("holdfast-board")
        else:
            with tempfile.TemporaryFile() as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, cls.size(slots))
        return cls(mmap.mmap(fd, cls.size(slots))), fd

    @classmethod
    def inherited(cls, fd: int) -> Self:
        """The board behind a file descriptor that this process was given."""
        board = cls(mmap.mmap(fd, os.fstat(fd).st_size))
        os.close(fd)
        return board

    # The process writes.

    def open_session(self, session_id: str) -> None:
        """Note the session before the store hears of it: no claim may be without a known session."""
        self._memory[0:32] = session_id.encode().ljust(32)[:32]

    def tick(self, now: float) -> None:
        """The event loop runs."""
        _TICK.pack_into(self._memory, _TICK_AT, now)

    def ready(self) -> None:
        """The process has started up and begins to claim."""
        self._memory[_READY_AT] = 1

    def leave(self) -> None:
        """The process takes no more jobs and ends when it has finished those that it runs."""
        self._memory[_LEAVING_AT] = 1

    def take(self) -> int:
        """A place for a job that will start: the one that was left first. What was remembered there is forgotten."""
        place = self._free.popleft()
        self._memory[_HEADER_ROOM + place] = _EMPTY
        return place

    def begin(self, job_id: str, version: int, hard_deadline: float) -> int:
        """`take` and `start` in one: the place of a job that starts at once."""
        place = self._free.popleft()
        memory = self._memory
        memory[_HEADER_ROOM + place] = _EMPTY
        _write_place(memory, self._places_at + place * _PLACE_SIZE, job_id.encode(), version, hard_deadline)
        memory[_HEADER_ROOM + place] = _STARTED
        return place

    def start(self, place: int, job_id: str, version: int, hard_deadline: float = math.inf) -> None:
        """The job for which the place was taken starts."""
        memory = self._memory
        # What is there is said last: a half-written place must not be read as a job.
        _write_place(memory, self._places_at + place * _PLACE_SIZE, job_id.encode(), version, hard_deadline)
        memory[_HEADER_ROOM + place] = _STARTED

    def end(self, place: int) -> None:
        """The job for which the place was taken has an outcome, whether it had started or not."""
        self._done += 1
        self._free.append(place)
        at = _HEADER_ROOM + place
        if self._memory[at] == _STARTED:
            self._memory[at] = _ENDED

    # The supervisor reads.

    @property
    def session_id(self) -> str:
        """The present session, or nothing before the first."""
        return bytes(self._memory[0:32]).rstrip(b"\0 ").decode()

    @property
    def last_tick(self) -> float:
        """When the event loop last ran; 0 before that."""
        return float(_TICK.unpack_from(self._memory, _TICK_AT)[0])

    @property
    def done(self) -> int:
        """How many jobs have had an outcome, as the process itself knows."""
        return self._done

    @property
    def is_ready(self) -> bool:
        """Whether the process has started up."""
        return self._memory[_READY_AT] == 1

    @property
    def is_leaving(self) -> bool:
        """Whether the process takes no more jobs."""
        return self._memory[_LEAVING_AT] == 1

    def running(self) -> list[Started]:
        """The jobs that have started and have no outcome."""
        return self._those(_STARTED)

    def started(self) -> list[Started]:
        """The same, and those that have had an outcome lately. Whoever has one has no deadline any more."""
        ended = [msgspec.structs.replace(ended, hard_deadline=math.inf) for ended in self._those(_ENDED)]
        return [*self.running(), *ended]

    def _those(self, wanted: int) -> list[Started]:
        found = []
        flags = self._memory[_HEADER_ROOM : self._places_at]
        place = flags.find(wanted)
        while place >= 0:
            job_id, version, deadline = _PLACE.unpack_from(self._memory, self._places_at + place * _PLACE.size)
            found.append(Started(job_id.decode("ascii", "replace"), version, deadline))
            place = flags.find(wanted, place + 1)
        return found

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
