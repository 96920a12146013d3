"""The board: what a worker process is doing, in memory that outlives it.

The process writes; its supervisor reads, also after the process was killed in the middle of anything. It holds the
session's id, when the event loop last ran, how many jobs are done, for each slot the job that runs there, and the jobs
that have an outcome since lately: when a process dies, an outcome may not have reached the store, and its job had
started all the same. Times are on the machine's monotonic clock, which all its processes share.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
from typing import Self

import msgspec

_HEADER_ROOM = 64
_SLOT = struct.Struct("<B 36s Q d")
_SLOT_ROOM = 64
_TICK = struct.Struct("<d")
_TICK_AT = 32
_READY_AT = 40
_LEAVING_AT = 41
_STARTED = 1
_LATE = struct.Struct("<36s Q")
_LATELY = 4096
"""Jobs with an outcome that are remembered: more than a worker lets wait for the store to confirm."""
_LATE_ROOM = _LATELY * _LATE.size


class Started(msgspec.Struct, frozen=True, gc=False):
    """A job that has started. `hard_deadline` is infinite if it has none."""

    job_id: str
    version: int
    hard_deadline: float


class Board:
    """One worker process on a few pages. Each slot has one writer at a time, and all end on the same thread."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self._slots = (len(memory) - _HEADER_ROOM - _LATE_ROOM) // _SLOT_ROOM
        self._lately_at = _HEADER_ROOM + self._slots * _SLOT_ROOM
        self._late = 0
        self._done = 0

    @staticmethod
    def size(slots: int) -> int:
        """Bytes for a process with so many slots."""
        return _HEADER_ROOM + slots * _SLOT_ROOM + _LATE_ROOM

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

    def start(self, slot: int, job_id: str, version: int, hard_deadline: float = math.inf) -> None:
        """A job starts in this slot."""
        at = _HEADER_ROOM + slot * _SLOT_ROOM
        # The flag goes last: a half-written slot must not be read as a job.
        _SLOT.pack_into(self._memory, at, 0, job_id.encode(), version, hard_deadline)
        self._memory[at] = _STARTED

    def end(self, slot: int) -> None:
        """The job in this slot, if one had started there, has an outcome."""
        self._done += 1
        at = _HEADER_ROOM + slot * _SLOT_ROOM
        if self._memory[at] == _STARTED:
            _, job_id, version, _ = _SLOT.unpack_from(self._memory, at)
            # First there, then no longer here: a kill in between leaves it in both places, not in none.
            _LATE.pack_into(self._memory, self._lately_at + self._late % _LATELY * _LATE.size, job_id, version)
            self._late += 1
            self._memory[at] = 0

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
        found = []
        for slot in range(self._slots):
            flag, job_id, version, deadline = _SLOT.unpack_from(self._memory, _HEADER_ROOM + slot * _SLOT_ROOM)
            if flag:
                found.append(Started(job_id.decode("ascii", "replace"), version, deadline))
        return found

    def started(self) -> list[Started]:
        """The same, and those that have had an outcome lately. Whoever has one has no deadline any more."""
        lately = _LATE.iter_unpack(self._memory[self._lately_at :])
        ended = [Started(job_id.decode("ascii", "replace"), version, math.inf) for job_id, version in lately if version]
        return [*self.running(), *ended]

    def close(self) -> None:
        """Give the memory back."""
        self._memory.close()
