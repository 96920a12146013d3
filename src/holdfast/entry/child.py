"""The program of a supervised worker process.

Called as `python -m holdfast.entry.child CONTROL-FD MODULE:ATTRIBUTE PATHS PARENT BOARD-FD SETTINGS LOGGING`. The
supervisor holds the other end of the control pipe: when that closes, it is gone, and the worker shuts down. Then nobody
else is left to end what the handlers had started.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import os
import signal
import sys

import msgspec

from holdfast.app import Holdfast
from holdfast.config import WorkerSettings
from holdfast.entry.loading import load_app
from holdfast.errors import HoldfastError, InvalidOption
from holdfast.events import Listener, both
from holdfast.observe.lines import Level
from holdfast.observe.logging import Format, LogEvents, Logs, configure
from holdfast.ports import SYSTEM
from holdfast.worker.board import Board
from holdfast.worker.event_loop import run_until_signalled
from holdfast.worker.process_tree import kill_marked, own_mark
from holdfast.worker.service import WorkerService
from holdfast.worker.supervisor import RETIRE, STOP, STOP_NOW

_USUAL_THRESHOLDS = (700, 10, 10)
_FEWER_COLLECTIONS = 10_000
_PATIENCE = 10.0
_TIME_TO_EXIT = 5.0


class Logging(msgspec.Struct, frozen=True):
    """How a worker process logs."""

    format: Format = "auto"
    level: Level = "info"


def listening(app: Holdfast, logs: Logs) -> Listener:
    """Who hears of what happens: the application's own listener, and ours, unless that one writes the log already."""
    return app.listener if isinstance(app.listener, LogEvents) else both(app.listener, logs.listener)


def collect_less_often() -> None:
    """Leave what is loaded now out of the search for cycles, and search after 10,000 new objects instead of 700: jobs
    leave hardly any. An application that has chosen its own thresholds keeps them.
    """
    if gc.get_threshold() == _USUAL_THRESHOLDS:
        gc.collect()
        gc.freeze()
        gc.set_threshold(_FEWER_COLLECTIONS, *_USUAL_THRESHOLDS[1:])


def main(arguments: list[str]) -> int:
    """Work until the supervisor says stop, or is gone."""
    control, application, paths, parent, board_fd, settings_json, logging_json = arguments
    sys.path[:] = msgspec.json.decode(paths, type=list[str])
    settings = msgspec.json.decode(settings_json, type=WorkerSettings)
    logging = msgspec.json.decode(logging_json, type=Logging)
    board = Board.inherited(int(board_fd))
    os.set_inheritable(int(control), False)
    try:
        app = load_app(application)
    except InvalidOption as error:
        sys.stderr.write("".join(getattr(error, "__notes__", ())) + f"holdfast: {error}\n")
        return 2
    logs = configure(format=logging.format, level=logging.level)
    collect_less_often()

    def started(service: WorkerService) -> None:
        loop = asyncio.get_running_loop()
        SYSTEM.spawner.thread(
            lambda: _watch_supervisor(int(control), loop, service, settings.grace), "holdfast-control"
        )

    try:
        listener = listening(app, logs)
        run_until_signalled(
            lambda: app.worker_service(settings, listener=listener, application=application, board=board),
            started=started,
            supervised=True,
        )
    except HoldfastError as error:
        sys.stderr.write(f"holdfast: {error}\n")
        return 2 if isinstance(error, InvalidOption) else 1
    finally:
        logs.close()
    if os.getppid() != int(parent):
        kill_marked(own_mark())
    return 0


def _watch_supervisor(control: int, loop: asyncio.AbstractEventLoop, service: WorkerService, grace: float) -> None:
    """Do what the supervisor says. Stop with it: by the event loop if that still runs, by force if not."""
    words = {RETIRE: service.retire, STOP: service.stop, STOP_NOW: service.stop_now}
    while word := os.read(control, 1):
        loop.call_soon_threadsafe(words[word])
    loop.call_soon_threadsafe(service.stop)
    SYSTEM.clock.pause(grace + _PATIENCE)
    kill_marked(own_mark())
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    # What the application registered to run at exit, such as the end of its own log; but not for ever.
    SYSTEM.spawner.thread(atexit._run_exitfuncs, "holdfast-exit").join(_TIME_TO_EXIT)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a handler that was left behind in a thread must not keep the process
