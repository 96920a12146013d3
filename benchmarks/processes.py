"""What processes use, read from /proc: processor seconds and memory of a process with all that it started."""

import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_MEGABYTE = 1_000_000


class _Process(NamedTuple):
    pid: int
    parent: int
    ticks: int
    pages: int


def _read(pid: int) -> _Process | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name may have blanks and brackets
    # The times of children that have ended and were waited for are the parent's: so the sum over a tree never falls.
    return _Process(pid, int(fields[1]), sum(int(field) for field in fields[11:15]), int(fields[21]))


def tree(root: int) -> list[_Process]:
    """The process and all its descendants that live."""
    found = [process for name in os.listdir("/proc") if name.isdigit() and (process := _read(int(name)))]
    children: dict[int, list[_Process]] = {}
    for process in found:
        children.setdefault(process.parent, []).append(process)
    members = [process for process in found if process.pid == root]
    for member in members:
        members += children.get(member.pid, [])
    return members


def cpu_seconds(*roots: int) -> float:
    """Processor seconds of these processes and their descendants so far."""
    return sum(process.ticks for root in roots for process in tree(root)) / _TICKS


class Memory(NamedTuple):
    """Resident memory in megabytes. Shared pages count in each process that has them."""

    total: float
    largest: float
    processes: int


def memory(*roots: int) -> Memory:
    """The memory of these processes and their descendants."""
    sizes = [process.pages * _PAGE / _MEGABYTE for root in roots for process in tree(root)]
    return Memory(sum(sizes), max(sizes, default=0.0), len(sizes))
