"""The heart gives a job back, and nobody hears what came of it: the worker asks the store, and no job stays behind.

The job was claimed, but the reply to the claim was lost, so that the event loop, which is blocked, will never hear of
it. The store counts it under the session, and so does the worker: the counts of the beats agree.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from holdfast.errors import OutcomeUnknown
from holdfast.events import ignore
from holdfast.job import Job, NewJob
from holdfast.lifecycle import Applied, Move
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.memory import MemoryStore
from holdfast.worker.board import Board
from holdfast.worker.heart import Heart
from holdfast.worker.holding import Holding

SESSION = "a" * 32


class NoAnswer(MemoryStore):
    """Every settlement ends with an unknown outcome, done or not."""

    def __init__(self, *, done: bool) -> None:
        super().__init__()
        self._done = done

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        if self._done:
            await super().apply(moves)
        raise OutcomeUnknown("the reply was lost")


async def claimed(store: MemoryStore) -> Job:
    await store.open_session(Session(id=SESSION))
    await store.insert([NewJob(id=SYSTEM.ids.job_id(), task="any", payload=b"{}", queue="any")])
    [job] = (await store.claim(ClaimRequest(session_id=SESSION, queues=("any",), limit=1))).jobs
    return job


@pytest.mark.parametrize("done", [False, True])
async def test_what_the_heart_gave_back_without_an_answer_is_asked_for(done: bool) -> None:
    store, holding, asked = NoAnswer(done=done), Holding(), asyncio.Event()
    job = await claimed(store)
    heart = Heart(
        store,
        ttl=15.0,
        holding=holding,
        board=Board.private(1),
        loop=asyncio.get_running_loop(),
        lost=lambda session_id: None,
        cancel=lambda job_ids: None,
        reconcile=asked.set,
        on_loop=tuple,
        ports=SYSTEM,
        listener=ignore,
    )
    heart.session_id = SESSION
    await heart._give_back_unstarted()
    async with asyncio.timeout(20):
        await asked.wait()
    assert holding.start([job]) == [], "it may be somebody else's by now"
    held = await store.held(SESSION)
    to_release = holding.reconcile(held, holding.known())
    assert [each.id for each in to_release] == [each.id for each in held]
    assert len(holding) == len(held)
