"""`holdfast worker`: run jobs in watched processes until somebody says stop."""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated, Any

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.config import WorkerSettings
from holdfast.entry.child import Logging, listening
from holdfast.entry.loading import load_app
from holdfast.errors import InvalidOption
from holdfast.observe.logging import Log, configure
from holdfast.worker.supervisor import Supervisor

_MEBIBYTE = 2**20


def worker(
    application: Annotated[str, typer.Argument(metavar="APP", help="The application, as module:attribute.")],
    queues: Annotated[
        str, typer.Option(metavar="A,B", help="The queues to work on.  [default: those that the tasks name]")
    ] = "",
    concurrency: Annotated[
        int | None, typer.Option(help="How many jobs each process runs at once.  [default: 10]")
    ] = None,
    processes: Annotated[int | None, typer.Option(help="How many processes.  [default: 1]")] = None,
    lease_ttl: Annotated[
        float | None,
        typer.Option(help="Seconds without a heartbeat after which a worker counts as dead.  [default: 15]"),
    ] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that running jobs may go on after SIGTERM.  [default: 30]")
    ] = None,
    max_jobs: Annotated[int | None, typer.Option(help="Replace a process after so many jobs.")] = None,
    max_memory: Annotated[
        int | None, typer.Option(metavar="MIB", help="Replace a process that uses more memory than this.")
    ] = None,
    log_format: Annotated[str, typer.Option(metavar="auto|json|console", help="How to log.")] = "auto",
    log_level: Annotated[str, typer.Option(metavar="debug|info|warning|error", help="From which level on.")] = "info",
) -> None:
    """Run jobs until SIGTERM or Ctrl-C: then running jobs finish, and the rest goes back. A second signal stops now.

    Processes that die are replaced, and their jobs are back in their queues at once.
    """
    app = load_app(application)
    if app.store.beside() is app.store:  # one without connections of its own lives in one process
        raise InvalidOption(
            "a store in memory cannot be shared with worker processes: use app.start_worker(), or another store"
        )
    given: dict[str, Any] = {
        "queues": tuple(queue.strip() for queue in queues.split(",") if queue.strip()) or None,
        "concurrency": concurrency,
        "processes": processes,
        "lease_ttl": lease_ttl,
        "grace": grace,
        "max_jobs": max_jobs,
        "max_memory": None if max_memory is None else max_memory * _MEBIBYTE,
    }
    settings = msgspec.structs.replace(
        app.settings.worker, **{name: value for name, value in given.items() if value is not None}
    )
    try:
        logging = msgspec.convert({"format": log_format, "level": log_level}, Logging)
    except msgspec.ValidationError as error:
        raise InvalidOption(f"logging: {error}") from error
    logs = configure(format=logging.format, level=logging.level)
    supervisor = app.supervisor(
        application,
        settings,
        arguments=(msgspec.json.encode(settings).decode(), msgspec.json.encode(logging).decode()),
        listener=listening(app, logs),
    )
    try:
        code = asyncio.run(_supervise(app, supervisor, settings, logs.log))
    finally:
        logs.close()
    if code:
        raise typer.Exit(code)


async def _supervise(app: Holdfast, supervisor: Supervisor, settings: WorkerSettings, log: Log) -> int:
    await app.aopen()  # a store that cannot be opened is an error here, not in every process again and again
    log.info(f"store: {app.store!r}")
    await _warn_of_queues(app, settings, log)
    loop = asyncio.get_running_loop()
    heard: list[int] = []

    def stop(number: int) -> None:
        heard.append(number)
        if len(heard) == 1:
            log.info(
                f"stopping: running jobs may finish within {settings.grace:g} s; signal once more to give them back now"
            )
        supervisor.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    code = await supervisor.run()
    return code or (128 + heard[1] if len(heard) > 1 else 0)


async def _warn_of_queues(app: Holdfast, settings: WorkerSettings, log: Log) -> None:
    """Say what would otherwise look like a worker that does nothing."""
    known = app.tasks.queues()
    counts = {count.queue: count for count in await app.acounts()}
    for queue in settings.queues or known:
        if queue in counts and counts[queue].paused:
            log.warning(
                f"queue {queue} is paused: nothing is taken from it until `holdfast queues resume {queue}`", queue=queue
            )
        elif queue not in known and queue not in counts:
            log.warning(f"no task names the queue {queue}, and it has no jobs: is the name right?", queue=queue)
