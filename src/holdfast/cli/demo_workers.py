"""The workers of `holdfast demo`: the program `holdfast worker`, by way of `demo_supervisor`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from holdfast.cli.wording import first_line
from holdfast.errors import HoldfastError
from holdfast.ports import SYSTEM
from holdfast.worker.isolated_process import how_it_ended

APPLICATION = "holdfast.cli.demo_tasks:app"
STORE_VARIABLE = "HOLDFAST_DEMO_STORE"
EVENTS_VARIABLE = "HOLDFAST_DEMO_EVENTS"
"""What the application reads from the environment when it is imported: its store, and the pipe of `demo_feed`."""

_GRACE = 2.0
_LONGEST_STOP = 20.0
_LOOK_EVERY = 0.05


class Workers:
    """The supervisor and its worker processes. They end with this process, however that ends."""

    def __init__(self, log: Path, *, processes: int, concurrency: int, lease_ttl: float) -> None:
        self._log = log
        options = {
            "processes": processes,
            "concurrency": concurrency,
            "lease-ttl": lease_ttl,
            "grace": _GRACE,
            "log-level": "error",
        }
        self._process = SYSTEM.spawner.process(
            [
                *(sys.executable, "-m", "holdfast.cli.demo_supervisor", str(os.getpid()), str(log), APPLICATION),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            [],
        )

    def check(self) -> None:
        """An error with the workers' last words, if they have ended by themselves."""
        code = self._process.poll()
        if code is not None:
            words = f": {self._last_words()}" if code > 0 else ""
            raise HoldfastError(f"the supervisor of the workers has ended ({how_it_ended(code)}){words}")

    def _last_words(self) -> str:
        with contextlib.suppress(OSError, IndexError):
            return first_line(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-1])
        return "it left no word"

    async def stop(self, *, hurry: Callable[[], bool]) -> None:
        """Have them finish what runs, and wait until they have ended. In a `hurry` they give it back at once."""
        self._tell(signal.SIGTERM)
        hurried = False
        deadline = SYSTEM.clock.monotonic() + _LONGEST_STOP
        while self._process.poll() is None:
            if hurry() and not hurried:
                hurried = True
                self._tell(signal.SIGTERM)
            if SYSTEM.clock.monotonic() > deadline:
                self._tell(signal.SIGKILL)  # the worker processes see it gone, and end
            await SYSTEM.clock.sleep(_LOOK_EVERY)

    def _tell(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
