"""Connections that callers bring along, as every SQL store meets them: asynchronous ones, and those of SQLAlchemy.

Nothing is imported for it: a driver is recognised by what its connections can do.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from holdfast.errors import ForeignConnection

T = TypeVar("T")


def is_asynchronous(connection: object) -> bool:
    """Whether it belongs to an event loop: one of psycopg, asyncpg, asyncmy, aiosqlite, SQLAlchemy or their like."""
    if hasattr(connection, "run_sync") or hasattr(type(connection), "__aenter__"):
        return True
    verbs = (getattr(connection, name, None) for name in ("execute", "commit"))
    return any(callable(verb) and inspect.iscoroutinefunction(inspect.unwrap(verb)) for verb in verbs)


def require_blocking(connection: object, instead: str) -> None:
    """`ForeignConnection` for an asynchronous connection: a blocking call cannot wait for it, but `instead` can."""
    if is_asynchronous(connection):
        raise ForeignConnection(f"{kind_of(connection)} belongs to an event loop: use `await {instead}(...)` with it")


async def on_guest(connection: object, work: Callable[[object], T]) -> T:
    """Do blocking work on a connection that was given in a coroutine.

    SQLAlchemy's AsyncSession and AsyncConnection lend the work their blocking side (`run_sync`). A blocking connection
    is used as it is, on this thread. `ForeignConnection` for any other: what a store can await itself, it takes before.
    """
    run_sync: Callable[[Callable[[object], T]], Awaitable[T]] | None = getattr(connection, "run_sync", None)
    if run_sync is not None:
        return await run_sync(work)
    if is_asynchronous(connection):
        raise ForeignConnection(
            f"{kind_of(connection)} is no kind of asynchronous connection that this store can share: pass SQLAlchemy's "
            f"AsyncSession or AsyncConnection on the store's own database, or a blocking connection"
        )
    return work(connection)


def behind_sqlalchemy(connection: object) -> Any | None:
    """The driver's connection behind SQLAlchemy's Session or Connection, in its transaction; None if it is neither.

    One that came through `run_sync` is an adapter: its cursors wait by themselves, and its `driver_connection` is the
    asynchronous one. `ForeignConnection` if it is closed, or its transaction has failed.
    """
    try:
        to_connection = getattr(connection, "connection", None)
        bound: Any = to_connection() if inspect.ismethod(to_connection) else connection
        if inspect.ismethod(getattr(bound, "in_transaction", None)) and not bound.in_transaction():
            # A Connection begins with its first own statement, and would take its commit for an empty one.
            bound.begin()
        driver = getattr(getattr(bound, "connection", None), "dbapi_connection", None)
    except Exception as error:  # whatever SQLAlchemy says of one that is closed or has failed
        raise ForeignConnection(f"the connection cannot be used here: {error}") from error
    return driver if hasattr(driver, "cursor") else None


def kind_of(connection: object) -> str:
    """What to call it in an error."""
    return f"{type(connection).__module__}.{type(connection).__qualname__}"
