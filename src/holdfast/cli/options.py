"""What many commands have in common: the store they work on, and their usual options."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer

from holdfast.app import Holdfast
from holdfast.ports import SYSTEM
from holdfast.stores import open_store

T = TypeVar("T")

STORE_VARIABLE = "HOLDFAST_STORE"

StoreOption = Annotated[
    str,
    typer.Option("--store", metavar="URL", envvar=STORE_VARIABLE, help="The store, as in sqlite:///jobs.db."),
]
StoreArgument = Annotated[
    str,
    typer.Argument(metavar="URL", envvar=STORE_VARIABLE, help="The store, as in sqlite:///jobs.db."),
]
AppArgument = Annotated[
    str,
    typer.Argument(metavar="APP", help="The application as module:attribute; the current folder is importable."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="For programs: JSON, one object per line.")]
QueueOption = Annotated[str | None, typer.Option("--queue", metavar="NAME", help="Only jobs of this queue.")]
TaskOption = Annotated[str | None, typer.Option("--task", metavar="NAME", help="Only jobs of this task.")]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="At most so many, the newest.")]


def application(url: str, *, create: bool = False) -> Holdfast:
    """An application without tasks on that store: all that an operator needs. Nothing is opened yet.

    A store that does not exist is an error when it opens, unless it is to be created: a slip of the pen in a path must
    not look like an empty queue.
    """
    return Holdfast(open_store(url, SYSTEM, existing=not create))


def operate(url: str, work: Callable[[Holdfast], Awaitable[T]], *, create: bool = False) -> T:
    """Open the store, do the work, close the store. What the work answers."""

    async def opened() -> T:
        async with application(url, create=create) as app:
            return await work(app)

    return asyncio.run(opened())
