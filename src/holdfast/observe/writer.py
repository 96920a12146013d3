"""Writes lines to a stream from a thread of its own, so that a stream that blocks or fails holds nobody up.

Up to `limit` lines wait. What comes while the queue is full, and what the stream refuses, is dropped and counted; when
the stream takes lines again, one of them says how many are missing.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

from holdfast.ports import Spawner

MOST_WAITING = 10_000
LAST_WORDS = 2.0
"""Seconds that `close` waits for the lines that are left."""


class Outlet:
    """A stream as a place for lines: each is written and flushed as a whole. The stream stays the caller's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, line: str) -> None:
        """Write one line. Raises what the stream raises; a character that it cannot encode is written escaped."""
        # One call and one flush for each line: processes that share a pipe do not get into each other's lines.
        try:
            self._stream.write(line + "\n")
        except UnicodeEncodeError as error:
            self._stream.write(line.encode(error.encoding, "backslashreplace").decode(error.encoding) + "\n")
        self._stream.flush()


class Writer:
    """Takes lines from any thread, at once. `dropped` counts those that are lost.

    `confess` is called on the writing thread with the number of lines that are missing at this place, and writes a
    line about it straight to the outlet.
    """

    def __init__(
        self,
        outlet: Outlet,
        *,
        confess: Callable[[int], None],
        spawner: Spawner,
        limit: int = MOST_WAITING,
    ) -> None:
        self._outlet = outlet
        self._confess = confess
        self._spawner = spawner
        self._limit = limit
        self.dropped = 0
        self._confessed = 0
        self._closed = False
        self._renew()
        with _writers_lock:
            _writers.add(self)

    def write(self, line: str) -> None:
        """Hand a line over, or drop it. Never blocks and never raises."""
        if self._closed or self._lines.qsize() >= self._limit or not self._started():
            self._drop()
        else:
            self._lines.put(line)

    def close(self) -> None:
        """Write what is left, for two seconds at most, and take no more."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            self._lines.put(None)
            thread.join(LAST_WORDS)

    def _renew(self) -> None:
        """The state that does not survive a fork: the child has no thread, and somebody else may hold the lock."""
        self._lock = threading.RLock()
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def _started(self) -> bool:
        if self._thread is None:
            with self._lock, contextlib.suppress(RuntimeError):  # no more threads, or the interpreter is ending
                self._thread = self._thread or self._spawner.thread(self._run, "holdfast-log")
        return self._thread is not None

    def _drop(self) -> None:
        with self._lock:
            self.dropped += 1

    def _run(self) -> None:
        written_since = 0
        while (line := self._lines.get()) is not None:
            try:
                self._outlet.write(line)
            except Exception:  # whatever the stream does: the next line may get through
                self._drop()
                continue
            if self.dropped > self._confessed:
                written_since += 1
                # Where they are missing: behind the line that was held up when the first one was dropped, and those
                # that were waiting then.
                if self._lines.empty() or written_since > self._limit:
                    written_since = 0
                    self._say_what_is_missing()
        self._say_what_is_missing()

    def _say_what_is_missing(self) -> None:
        dropped = self.dropped
        if dropped > self._confessed:
            with contextlib.suppress(Exception):
                self._confess(dropped - self._confessed)
                self._confessed = dropped


_writers: weakref.WeakSet[Writer] = weakref.WeakSet()
_writers_lock = threading.Lock()


def _after_fork_in_child() -> None:
    for writer in _writers:
        writer._renew()
    _writers_lock.release()


os.register_at_fork(
    before=_writers_lock.acquire, after_in_parent=_writers_lock.release, after_in_child=_after_fork_in_child
)
