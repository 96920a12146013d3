"""Tasks that run in the worker process itself. They reach the application as `modules.app`."""

from __future__ import annotations

import asyncio
import os

from tests.worker import modules
from tests.worker.program import wait_blocking, wait_for, write_down

_all_set = asyncio.Event()


@modules.app.task(timeout=None)
async def hold(gate: str) -> str:
    write_down("start")
    try:
        await wait_for(gate)
    except asyncio.CancelledError:
        write_down("told to stop")
        raise
    return "held"


@modules.app.task(timeout=None)
def hold_in_thread(gate: str) -> str:
    write_down("start")
    wait_blocking(gate)
    return "held"


@modules.app.task(timeout=None, isolation="process")
def stamp() -> int:
    """Isolated, in a module of its own, of which the application is no attribute."""
    return os.getpid()


# Handlers that all become ready to run in the same moment, the one that forks first.


@modules.app.task
async def fork_when_all_are_set() -> str:
    write_down("start")
    await _all_set.wait()
    child = os.fork()
    if child:
        write_down("forked", others=[child])
    return "back"


@modules.app.task
async def pay_when_all_are_set() -> str:
    write_down("start")
    await _all_set.wait()
    write_down("paid")
    return "paid"


@modules.app.task
async def set_all() -> None:
    _all_set.set()
