"""What Linux offers to keep a tree of processes together: die with the parent, adopt the orphans of a child.

A worker process carries a mark in its environment, and so does all that its handlers start: by that a daemon is known,
whoever is its parent now. On other systems these do nothing, and only process groups are killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_MARK = "HOLDFAST_PROCESS"
_MOST_ROUNDS = 200


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
    return [pid for pid, (its_parent, _) in _processes().items() if its_parent == parent]


def _processes() -> dict[int, tuple[int, int]]:
    """The parent and the session of every process."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text(encoding="utf-8", errors="replace")
            # The name stands in brackets and may hold anything: the fields are counted from the last bracket.
            _, parent, _, session = text.rpartition(")")[2].split()[:4]
            found[int(entry.parent.name)] = int(parent), int(session)
        except (OSError, ValueError):
            continue
    return found


@contextmanager
def marking(mark: str) -> Iterator[None]:
    """What is started meanwhile carries the mark, and so does whatever that starts."""
    os.environ[_MARK] = mark
    try:
        yield
    finally:
        del os.environ[_MARK]


def own_mark() -> str:
    """The mark that this process was started with."""
    return os.environ.get(_MARK, "")


def _mark_of(pid: int) -> str:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return ""
    name = f"{_MARK}=".encode()
    return next((entry[len(name) :].decode("ascii", "replace") for entry in environment if entry.startswith(name)), "")


def kill_marked(mark: str) -> None:
    """Kill every other process that carries the mark, wherever it has gone."""
    own = os.getpid()
    for _ in range(_MOST_ROUNDS):  # they may start others meanwhile; and one that the kernel holds may take its time
        found = [pid for pid in _processes() if pid != own and mark and _mark_of(pid) == mark]
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return


def kill_strangers(known: set[int], marks: Collection[str]) -> int:
    """Kill every child of this process that is not known, and whatever they leave to us in turn. How many it was.

    Those that carry one of the marks are spared: the process that started them lives.
    """
    killed = 0
    while strangers := [pid for pid in children_of(os.getpid()) if pid not in known]:
        for pid in strangers:
            if _mark_of(pid) in marks:
                known = known | {pid}
                continue
            try:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            except (ProcessLookupError, ChildProcessError, PermissionError):
                known = known | {pid}
            killed += 1
    return killed


def reap_strangers(known: set[int]) -> None:
    """Lay to rest every orphan of another session that came to us and has ended. They would pile up as zombies."""
    with suppress(ChildProcessError, AttributeError):
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return  # nobody has ended, as usual
        us, our_session = os.getpid(), os.getsid(0)
        for pid, (parent, session) in _processes().items():
            if parent == us and session != our_session and pid not in known:
                os.waitpid(pid, os.WNOHANG)
