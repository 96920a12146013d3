"""Whether it is still the same store: one that was emptied or rolled back has another epoch, or counts less in it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from holdfast.errors import StoreReplaced
from holdfast.job import SessionId
from holdfast.stores.redis import opening
from holdfast.stores.redis.dispatch import Verb
from holdfast.stores.redis.verbs import Verbs

Epoch = tuple[str, int]
"""Which it is, and how many beats were counted in it."""


def is_same(known: Epoch, found: Epoch) -> bool:
    """Whether the epoch found is the one known, and later."""
    return found[0] == known[0] and found[1] > known[1]


async def require_same(
    run: Callable[[Verb[Any]], Awaitable[Any]],
    verbs: Verbs,
    session_id: SessionId,
    *,
    fresh: str,
    where: str,
    went_back: bool = False,
) -> None:
    """Note the present epoch. If it is another, begin one named `fresh`, close the session, raise `StoreReplaced`.

    `went_back`: the session's own counter has shown it already. That of the epoch rises with every beat of every
    worker: alone, it would be back where it was soon after a short way back.
    """
    expected = verbs.epoch
    known, _ = expected
    found = await run(opening.epoch(verbs.layout, verbs.scripts, known, ""))
    if is_same(expected, found) and not went_back:
        verbs.epoch = found
        return
    verbs.start_over()
    await run(verbs.sessions.close(session_id, None))
    await run(opening.keep_layout(verbs.layout))
    verbs.epoch = await run(opening.epoch(verbs.layout, verbs.scripts, known, fresh, anew=True))
    raise StoreReplaced(
        f"{where} was emptied or rolled back (a restart without its data, a failover, FLUSHALL): "
        f"jobs accepted before may be missing, jobs settled before may run again. Session {session_id} was closed"
    )
