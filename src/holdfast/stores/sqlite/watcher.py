"""The watcher: a thread that turns the commits of other processes into wake-ups, for as long as somebody waits.

The truth is `PRAGMA data_version`: a look at it says whether anybody else has committed. When to look is said by the
writes to the log (`inotify.py`), and by the clock where nothing can be heard of them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from holdfast.ports import Clock, Ports
from holdfast.stores.sqlite.inotify import FileNotice
from holdfast.stores.wakeups import WakeupHub

_POLLING = (0.005,) * 30 + (0.025,) * 30 + (0.04,)
"""Where nothing can be heard: seconds before each look, from the last one that showed a commit of others; the last is
for ever."""
_CHASE = (0.00025, 0.00025, 0.0005, 0.001, 0.002, 0.005)
"""Seconds before each look after a write. It is heard of before it can be read: the disk is flushed in between, and
nothing tells the end of that. Nothing is listened to meanwhile, so a burst of writes is one."""
_LISTENING = (0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.5)
"""Seconds of silence before each look after those; the last is for ever."""
_PAUSE_AT_OWN_WRITES = 0.04
"""Seconds from a write to the look, while only our own process writes."""
_LOOKS_AT_OWN_WRITES = 10
"""That is taken for granted when so many writes in a row were not those of others."""
_MOST_MISSED = 3
"""So many commits in a row that were seen, but not heard of, mean that nothing is heard of others here."""
_LOOKS_WITHOUT_WAITER = 20
"""The watcher ends when so many looks found nobody waiting."""

Commits = tuple[int, int]
"""What changes when others commit: see `Writer.foreign_commits`."""


class Notice(Protocol):
    """See `FileNotice`."""

    def follow(self) -> bool: ...
    def wait(self, seconds: float) -> bool: ...
    def start_over(self) -> None: ...
    def close(self) -> None: ...


class Pace:
    """When to look next. `wait` comes before a look, `looked` after it."""

    def __init__(self, notice: Notice, clock: Clock) -> None:
        self._notice = notice
        self._clock = clock
        self._polled = 0
        self._chased = len(_CHASE)
        self._listened = 0
        self._follows = False
        self._own = 0
        self._silent = False
        self._missed = 0

    def looked(self, *, others: bool) -> None:
        """Whether the look showed a commit of others."""
        if not others:
            return
        self._polled = self._own = 0
        if self._follows:
            self._chased = len(_CHASE) - 1  # the next one, if any, is not far: but never without a pause
            self._judge()

    def _judge(self) -> None:
        """A commit that nothing was heard of may have been slow. Several mean that nothing is ever heard."""
        self._missed = self._missed + 1 if self._silent and not self._notice.wait(0) else 0
        self._silent = False
        if self._missed == _MOST_MISSED:
            self._notice.close()

    def failed(self) -> None:
        """The look raised. Whatever it was: whoever waits needs the next one, and polls meanwhile."""
        self._polled = len(_POLLING)

    def wait(self, most: float) -> None:
        """Until it is time for the next look. A silence is listened to for so many seconds at most."""
        if self._chased < len(_CHASE):
            self._chase()
            return
        self._follows = self._notice.follow()
        if not self._follows:
            self._clock.pause(_POLLING[min(self._polled, len(_POLLING) - 1)])
            self._polled += 1
        elif self._notice.wait(min(_LISTENING[self._listened], most)):
            self._heard()
        elif self._listened < len(_LISTENING) - 1:
            self._listened += 1
        else:
            self._own, self._silent = 0, True

    def _heard(self) -> None:
        self._own += 1
        self._listened, self._silent = 0, False
        if self._own <= _LOOKS_AT_OWN_WRITES:
            self._chased = 0
            self._chase()
        else:
            self._clock.pause(_PAUSE_AT_OWN_WRITES)

    def _chase(self) -> None:
        self._clock.pause(_CHASE[self._chased])
        self._chased += 1
        if self._chased == len(_CHASE):
            self._notice.start_over()


class Watcher:
    """Wakes all that wait at the hub when others committed. Its thread ends soon after nobody waits any more."""

    def __init__(self, path: Path, hub: WakeupHub, ports: Ports) -> None:
        self._path = path
        self._hub = hub
        self._clock = ports.clock
        self._spawner = ports.spawner
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._notice: FileNotice | None = None
        self._patience = 0
        self._seen: Commits | None = None

    def begin(self, commits: Callable[[], Commits | None]) -> None:
        """Watch from now on. `commits` is looked at, over and over; None: it cannot be said just now."""
        with self._lock:
            self._patience = _LOOKS_WITHOUT_WAITER
            if self._thread is None:
                self._seen = commits()
                self._thread = self._spawner.thread(lambda: self._watch(commits), "holdfast-sqlite-watcher")

    def _watch(self, commits: Callable[[], Commits | None]) -> None:
        try:
            # SQLite puts the log beside the file itself, also where the path is a link to it.
            with contextlib.closing(FileNotice(f"{os.path.realpath(self._path)}-wal")) as notice:
                self._notice = notice
                self._look_out(notice, commits)
        finally:
            with self._lock:  # whatever ended it: who waits next begins another
                if self._thread is threading.current_thread():
                    self._thread = None

    def _look_out(self, notice: FileNotice, commits: Callable[[], Commits | None]) -> None:
        pace = Pace(notice, self._clock)
        while self._is_wanted():
            try:
                pace.wait(_LISTENING[-1] if self._hub else _POLLING[-1])
            except Exception:
                notice.close()  # from now on by the clock alone
            try:
                others = self._others_committed(commits)
                if others:
                    self._hub.notify()
                pace.looked(others=others)
            except Exception:
                pace.failed()

    def _is_wanted(self) -> bool:
        with self._lock:
            self._patience = _LOOKS_WITHOUT_WAITER if self._hub else self._patience - 1
            if self._patience < 0:
                self._thread = None
            return self._patience >= 0

    def _others_committed(self, commits: Callable[[], Commits | None]) -> bool:
        before, now = self._seen, commits()
        if now is not None:
            self._seen = now
        return self._seen != before

    def forget_after_fork(self) -> None:
        """In the child: the thread is not here, and what it listens with belongs to the parent."""
        if self._notice is not None:
            self._notice.close()
