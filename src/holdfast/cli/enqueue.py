"""`holdfast enqueue`: one job from a shell, checked against the task's own parameters."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from holdfast.app import Holdfast
from holdfast.cli.options import AppArgument
from holdfast.cli.output import note, write_line
from holdfast.client import Client, JobHandle
from holdfast.entry.loading import load_app
from holdfast.errors import InvalidOption, InvalidPayload
from holdfast.ports import SYSTEM
from holdfast.tasks import CallOptions, Enqueuer


def enqueue(
    app: AppArgument,
    task: Annotated[str, typer.Argument(metavar="TASK", help="The task's name.")],
    body: Annotated[
        str, typer.Argument(metavar="[BODY]", help="Its arguments: a JSON object, or - to read it from standard input.")
    ] = "{}",
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="Another queue than the task's.")] = None,
    priority: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="A label (high, normal, low), or -100 to 100, lower first.")
    ] = None,
    delay: Annotated[float | None, typer.Option(metavar="SECONDS", help="Not before so many seconds from now.")] = None,
    key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Idempotency key: the same key and body is the same job.")
    ] = None,
    correlation_id: Annotated[str | None, typer.Option(metavar="TEXT", help="To find related jobs by.")] = None,
    max_retries: Annotated[int | None, typer.Option(metavar="N", help="Tries after the first.")] = None,
) -> None:
    """Enqueue one job and print its id.

    The job is safe in the store when this returns.
    """
    loaded = load_app(app)
    if loaded.store.beside() is loaded.store:  # an engine without connections lives in one process
        raise InvalidOption(f"the jobs of {app} are in memory: this one would end with this very command")
    options = CallOptions(
        queue=queue,
        priority=_level(priority),
        delay=delay,
        key=key,
        correlation_id=correlation_id,
        max_retries=max_retries,
    )
    text = sys.stdin.buffer.read() if body == "-" else body.encode("utf-8", "surrogateescape")
    handle = asyncio.run(_enqueue(loaded, task, text, options))
    write_line(handle.id)
    if not handle.created:
        note(f"it was there already, and is {handle.state}")


async def _enqueue(app: Holdfast, task: str, body: bytes, options: CallOptions) -> JobHandle[Any]:
    spec = app.tasks[task]
    try:
        arguments = spec.signature.decode(body)
    except InvalidPayload as error:
        raise InvalidOption(f"BODY does not fit the task {task}: {error}") from error
    async with app:
        client = Client(app.store, settings=app.settings, ports=SYSTEM, listener=app.listener)
        enqueuer: Enqueuer[..., Any] = Enqueuer(spec, client, options)
        return await enqueuer.aenqueue(**arguments)


def _level(priority: str | None) -> str | int | None:
    try:
        return None if priority is None else int(priority)
    except ValueError:
        return priority
