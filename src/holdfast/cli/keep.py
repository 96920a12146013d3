"""`holdfast keep`: the keepers alone, for a deployment that runs them apart from its workers."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Annotated, Any

import typer

from holdfast.app import Holdfast
from holdfast.cli.options import StoreOption, operate
from holdfast.cli.wording import masked
from holdfast.config import WorkerSettings
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.retention import Retention
from holdfast.observe.logging import configure
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
        stop = _stop_signal()
        rescue = Rescue(app.store, ports=SYSTEM, ttl=settings.lease_ttl, listener=logs.listener)
        retention = Retention(app.store, ports=SYSTEM, listener=logs.listener)
        logs.log.info(f"keeping {masked(store)}")
        await _until(stop, rescue.run(), retention.run())
        logs.log.info("stopped")

    logs = configure()
    try:
        operate(store, run)
    finally:
        logs.close()


def _stop_signal() -> asyncio.Event:
    """An event that SIGTERM and Ctrl-C set, from now on."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


async def _until(stop: asyncio.Event, *loops: Coroutine[Any, Any, None]) -> None:
    """Run the loops until the event. A loop that ends by itself is an error, and its error is raised."""
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
