"""A supervisor on a machine that now and then has no process, or no thread, to spare.

`python -m tests.worker.modules.short_of_resources PROCESSES THREADS`: the numbers of the attempts that fail, of those
to start a process and of those to start a thread that waits for one, counted from 1 and divided by commas.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import msgspec

from holdfast.config import WorkerSettings
from holdfast.entry.child import Logging
from holdfast.observe.logging import configure
from holdfast.ports import Ports, Process, SystemSpawner
from tests.worker.modules.everything import app

APPLICATION = "tests.worker.modules.everything:app"


class Short(SystemSpawner):
    """Starts what it is told to, except for some."""

    def __init__(self, processes: set[int], threads: set[int]) -> None:
        self._processes, self._threads = processes, threads
        self._tried = self._watched = 0

    def process(self, command: Sequence[str], fds: Sequence[int]) -> Process:
        self._tried += 1
        if self._tried in self._processes:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return super().process(command, fds)

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        if name.startswith("holdfast-wait"):
            self._watched += 1
            if self._watched in self._threads:
                raise RuntimeError("can't start new thread")
        return super().thread(target, name)


async def _supervise(spawner: Short) -> int:
    settings = WorkerSettings(processes=2, concurrency=1, lease_ttl=1.0)
    arguments = (msgspec.json.encode(settings).decode(), msgspec.json.encode(Logging(format="json")).decode())
    with app.replaced(app.store, Ports(spawner=spawner)):
        supervisor = app.supervisor(APPLICATION, settings, arguments=arguments, listener=logs.listener)
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, supervisor.stop)
        return await supervisor.run()


if __name__ == "__main__":
    logs = configure(format="json")
    failing = [{int(number) for number in text.split(",") if number} for text in sys.argv[1:]]
    code = asyncio.run(_supervise(Short(*failing)))
    logs.close()
    sys.exit(code)
