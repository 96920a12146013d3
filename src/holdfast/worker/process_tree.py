"""What Linux offers to keep a tree of processes together: die with the parent, adopt the orphans of a child.

On other systems these do nothing, and only process groups are killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from contextlib import suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    with suppress(AttributeError, OSError):  # not Linux
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which started this one, ends, however it ends."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # it ended before we could ask


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, so that `kill_descendants` finds it."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def memory_of(pid: int) -> int:
    """Bytes of memory that the process uses (resident), 0 if it cannot be told."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, ValueError, IndexError):
        return 0


def children_of(parent: int) -> list[int]:
    """The process ids whose parent is that process."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(encoding="utf-8", errors="replace")
            # The name stands in brackets and may hold anything: the fields are counted from the last bracket.
            if int(text.rpartition(")")[2].split()[1]) == parent:
                found.append(int(entry.parent.name))
        except (OSError, ValueError, IndexError):
            continue
    return found


def kill_strangers(known: set[int]) -> int:
    """Kill every child of this process that is not known, and whatever they leave to us in turn. How many it was."""
    killed = 0
    while strangers := [pid for pid in children_of(os.getpid()) if pid not in known]:
        for pid in strangers:
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError, PermissionError):
                known = known | {pid}
            killed += 1
    return killed
