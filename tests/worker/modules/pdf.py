"""Isolated tasks. A process that runs one may run the next, too, and what the first has left there goes on."""

from __future__ import annotations

import os
import threading
import time

from holdfast import current
from tests.worker.modules import app
from tests.worker.program import wait_blocking, write_down

PATIENCE = 20.0
_told = threading.Event()


@app.task(timeout=None, isolation="process")
def render() -> int:
    return os.getpid()


@app.task(timeout=None, isolation="process")
def hold_alone(gate: str) -> str:
    write_down("start")
    wait_blocking(gate)
    return "held"


@app.task(isolation="process")
def leave_a_bomb(seconds: float) -> int:
    """The process dies when it has nothing to do any more."""
    threading.Timer(seconds, lambda: os._exit(9)).start()
    return os.getpid()


@app.task(isolation="process")
def leave_somebody_who_tells() -> int:
    """A thread goes on to tell progress when the job is over: of the wrong job, if nobody looks."""
    job = current()

    def tell() -> None:
        while True:
            time.sleep(0.01)
            job.progress("of the job before")
            _told.set()

    threading.Thread(target=tell, daemon=True).start()
    return os.getpid()


@app.task(isolation="process")
def wait_until_somebody_tells() -> int:
    """Runs until the thread of the job before has told something once more."""
    _told.clear()
    assert _told.wait(PATIENCE)
    return os.getpid()
