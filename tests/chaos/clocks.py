"""Clocks that are wrong, one for each program: the wall clock of a process, set from outside while it runs.

The monotonic clock stays right, as it does on a real machine whose wall clock is set. But libfaketime 0.9.10 makes a
sleep until a moment of that clock fail: Python's `time.sleep` raises OSError in such a program. Waiting for an event, a
lock or an event loop works.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest


class WrongClock:
    """A clock that programs are started with (`environment`). It is right until it is `set`."""

    def __init__(self, folder: Path) -> None:
        find_library()
        handle, name = tempfile.mkstemp(prefix="clock-", dir=folder)
        os.close(handle)
        self._file = Path(name)
        self._file.chmod(0o644)  # servers run as users of their own
        self.set(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove what programs that were killed have left behind: each has a semaphore and a page of memory."""
        for left in Path("/dev/shm").glob("*faketime_*"):
            if not Path("/proc", left.name.rpartition("_")[2]).exists():
                left.unlink(missing_ok=True)

    @property
    def environment(self) -> dict[str, str]:
        """What a program needs to go by this clock."""
        return {
            "LD_PRELOAD": str(find_library()),
            "FAKETIME_TIMESTAMP_FILE": str(self._file),
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",  # a child goes by the same clock
            "FAKETIME_NO_CACHE": "1",  # a jump is seen at once
        }

    @property
    def prefix(self) -> list[str]:
        """The same as the beginning of a command line."""
        return ["env", *(f"{name}={value}" for name, value in self.environment.items())]

    def set(self, seconds: float) -> None:
        """From now on it is wrong by so many seconds: fast, or slow if negative."""
        new = self._file.with_suffix(".new")
        new.write_text(f"{seconds:+.3f}\n")
        new.chmod(0o644)
        new.rename(self._file)  # nobody reads half of it


def library() -> Path | None:
    """The library that programs are started with; None where it is not installed."""
    return next(iter(sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))), None)


def find_library() -> Path:
    """The same. The test is skipped where it is not installed."""
    found = library()
    if found is None:
        pytest.skip("wrong clocks need libfaketime: apt-get install libfaketime")
    return found
