"""Hears of writes to a file, by whatever process of this machine, where Linux tells (inotify).

It is a hint and no more: an event may be missed, may come before what was written can be read, and may be of our own
making. Where nothing can be heard (another system, no file, no instance left) it says so, and the caller polls.
"""

from __future__ import annotations

import contextlib
import os
import select
from typing import Any

_WRITTEN, _ATTRIBUTES, _DELETED, _MOVED = 0x2, 0x4, 0x400, 0x800
"""IN_MODIFY, IN_ATTRIB (also: it lost its name, while others have it open), IN_DELETE_SELF, IN_MOVE_SELF."""
_ONCE = 0x80000000
"""IN_ONESHOT: the first event ends the watch. While there is one, every write to the file costs the writer more."""
_EVENTS = _WRITTEN | _ATTRIBUTES | _DELETED | _MOVED | _ONCE
_MOST_READ = 65536
_MILLISECONDS = 1000


def _system_library() -> Any:
    """The C library, or None if it has no inotify."""
    try:
        import ctypes

        library = ctypes.CDLL(None)
        library.inotify_init1.argtypes = (ctypes.c_int,)
        library.inotify_add_watch.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_uint32)
        library.inotify_rm_watch.argtypes = (ctypes.c_int, ctypes.c_int)
    except Exception:  # even MemoryError, where no memory may be executed
        return None
    return library


class FileNotice:
    """Used by one thread. After a fork, the child must `close` its copy and nothing else: what it reads from it, its
    parent would not hear.
    """

    def __init__(self, path: str) -> None:
        self._path = os.fsencode(path)
        self._library = _system_library()
        self._descriptor = -1
        self._watch = -1
        self._news = False

    def follow(self) -> bool:
        """Listen to the file that has the name by now. False: there is nothing to be heard.

        If it was not listened to before, the next `wait` ends at once: look for what was written until then.
        """
        if self._library is None or not self._has_instance():
            return False
        # While it is listened to, this answers the watch that there is.
        watch = self._library.inotify_add_watch(self._descriptor, self._path, _EVENTS)
        if watch != self._watch:
            if self._watch >= 0:  # of another file; mostly it is gone by itself
                self._library.inotify_rm_watch(self._descriptor, self._watch)
            self._watch = watch
            self._news = watch >= 0
        return bool(watch >= 0)

    def _has_instance(self) -> bool:
        if self._descriptor < 0:
            self._descriptor = self._library.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
            if self._descriptor >= 0:
                self._readable = select.poll()
                self._readable.register(self._descriptor, select.POLLIN)
        return self._descriptor >= 0

    def wait(self, seconds: float) -> bool:
        """Whether something was written since `follow` or `start_over`, or is within so many seconds. It says so once;
        after that nothing is heard until one of them.
        """
        if self._news:
            self._news = False
            return True
        if not self._readable.poll(seconds * _MILLISECONDS):
            return False
        self._forget()
        return True

    def start_over(self) -> None:
        """Only what is written from now on is news: the caller looks for the rest."""
        if self._descriptor >= 0:
            self._forget()
            self.follow()
            self._news = False

    def _forget(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, _MOST_READ)  # what exactly does not matter: `follow` sees what became of it

    def close(self) -> None:
        """Hear nothing any more, and never again."""
        descriptor, self._descriptor, self._library = self._descriptor, -1, None
        if descriptor >= 0:
            with contextlib.suppress(OSError):  # somebody closed every descriptor that he found
                os.close(descriptor)
