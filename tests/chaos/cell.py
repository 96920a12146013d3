"""What a cell of the fault table is: one way to do harm, on the engines that it can be done to."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tests.chaos.rig import Rig

ENGINES = ("sqlite", "postgres", "mariadb", "redis")
SERVERS = ("postgres", "mariadb", "redis")
"""The engines that have a server."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of harm.

    `run` starts workers and producers on the rig, does the harm and returns. What comes after is the same for all
    cells, and the rig does it: it waits until every job has ended, stops the workers and has the history judged.
    """

    name: str
    """A few words, unique."""
    faults: str
    """Its number in the table of faults, as "F1"."""
    about: str
    """What is done, in one line, for the report."""
    engines: tuple[str, ...]
    run: Callable[[Rig], None]
    needs_root: bool = False
    programs: tuple[str, ...] = ()
    """What must be installed, besides the servers."""
    lacks: Callable[[], str] = str
    """What else this machine lacks for it, in words; empty if nothing."""
    smoke: bool = True
    """Whether every test run has it. If not, another cell does about the same in less time."""
