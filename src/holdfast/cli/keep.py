"""`holdfast keep`: the keepers alone, for a deployment that runs them apart from its workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Annotated, Any

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.cli.options import StoreOption, operate
from holdfast.cli.output import note
from holdfast.cli.wording import masked, moment
from holdfast.config import WorkerSettings
from holdfast.events import Event
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.retention import Retention
from holdfast.ports import SYSTEM


def keep(
    store: StoreOption,
    lease_ttl: Annotated[
        float,
        typer.Option(metavar="SECONDS", help="A worker that was silent for so long is dead. As the workers have it."),
    ] = WorkerSettings().lease_ttl,
) -> None:
    """Run the keepers alone, until SIGTERM or Ctrl-C.

    They bring back the jobs of dead workers and remove what is past its retention. Workers run the same keepers
    themselves; any number may run at once.
    """
    settings = WorkerSettings(lease_ttl=lease_ttl)

    async def run(app: Holdfast) -> None:
        rescue = Rescue(app.store, ports=SYSTEM, ttl=settings.lease_ttl, listener=_tell)
        retention = Retention(app.store, ports=SYSTEM, listener=_tell)
        note(f"keeping {masked(store)}")
        await _until_stopped(rescue.run(), retention.run())

    operate(store, run)


async def _until_stopped(*loops: Coroutine[Any, Any, None]) -> None:
    """Run the loops until a signal to stop. A loop that ends by itself is an error, and its error is raised."""
    stop = asyncio.Event()
    running = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        running.add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    keepers = [asyncio.create_task(loop) for loop in loops]
    try:
        done, _ = await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
        for ended in done:
            await ended
    finally:
        for task in (stopped, *keepers):
            task.cancel()
        await asyncio.gather(stopped, *keepers, return_exceptions=True)


def _tell(event: Event) -> None:
    fields = " ".join(f"{name}={value}" for name, value in msgspec.structs.asdict(event).items())
    note(f"{moment(SYSTEM.clock.now())} {type(event).__name__} {fields}")
