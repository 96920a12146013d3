"""The heartbeat: keeps the session open from a thread and a connection of its own, whatever the handlers do.

It beats every third of the TTL. What a beat answers is handed to the event loop: jobs to cancel, a count that does not
fit, a session that was closed. When the event loop itself has not run for two seconds, a handler blocks it: the jobs
that have not started are given back from here, and somebody is told; and so every two seconds, because a claim that
waits in the store may bring more. When a handler is past its hard limit and the loop
cannot deal with it, the heart stops: such a process must not hold its jobs for ever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress

from holdfast.errors import HoldfastError, StoreUnavailable
from holdfast.events import Listener, LoopBlocked, PartFailed, tell
from holdfast.job import Job, SessionId
from holdfast.lifecycle import Applied, Released, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import Ports
from holdfast.store import MOST_PER_CALL, Beat, Store
from holdfast.worker.board import Board
from holdfast.worker.holding import Holding

BLOCKED_AFTER = 2.0
_LOOK_EVERY = 0.25
_HARD_LIMIT_MARGIN = 1.0


class Heart:
    """`store` is its own (`Store.beside`). The callbacks run on the worker's event loop."""

    def __init__(
        self,
        store: Store,
        *,
        ttl: float,
        holding: Holding,
        board: Board,
        loop: asyncio.AbstractEventLoop,
        lost: Callable[[SessionId], None],
        cancel: Callable[[Iterable[str]], None],
        reconcile: Callable[[], None],
        on_loop: Callable[[], tuple[str, ...]],
        ports: Ports,
        listener: Listener,
    ) -> None:
        self._store = store
        self._ttl = ttl
        self._holding = holding
        self._board = board
        self._worker_loop = loop
        self._lost = lost
        self._cancel = cancel
        self._reconcile = reconcile
        self._on_loop = on_loop
        self._ports = ports
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._beating: asyncio.Task[None] | None = None
        self._mismatches = 0
        self._give_back_at = BLOCKED_AFTER
        """For how long the loop has stood still when jobs are given back, once more."""
        self._stopped = False
        self.session_id: SessionId = ""

    # Starting and stopping, from the worker's event loop.

    def start(self) -> None:
        """Beat in a thread of its own."""
        self._ports.spawner.event_loop(self._serve, "holdfast-heart")

    def stop(self) -> None:
        """Beat no more. The thread ends soon after. Repeating it is harmless."""
        if self._stopped:
            return  # a second cancellation would meet it while it closes its store
        self._stopped = True
        if self._loop is not None:
            with suppress(RuntimeError):  # it has ended already
                self._loop.call_soon_threadsafe(self._stop_beating)

    def _stop_beating(self) -> None:
        if self._beating is not None:
            self._beating.cancel()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._beating = asyncio.current_task()
        if self._stopped:
            return
        with suppress(asyncio.CancelledError):
            await self.run()
        await self._store.__aexit__(None, None, None)

    async def run(self) -> None:
        """Beat and watch, until cancelled. Neither ends by an error."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._for_ever(self._beat_on, "heartbeat"))
            parts.create_task(self._for_ever(self._watch_loop, "loop watch"))

    async def _for_ever(self, part: Callable[[], object], name: str) -> None:
        while True:
            try:
                await part()  # type: ignore[misc]
            except Exception as error:
                # A beat that failed is tried again soon: there are three in a TTL, and they are to be used.
                retry_in = self._ttl / 12 * (0.5 + self._ports.random.fraction())
                tell(self._listener, PartFailed(self.session_id, name, f"{type(error).__name__}: {error}", retry_in))
                await self._ports.clock.sleep(retry_in)

    # Beating.

    async def _beat_on(self) -> None:
        while True:
            session_id = self.session_id
            if session_id and not self._past_a_hard_limit():
                known = len(self._holding)
                self._answer(session_id, known, await self._store.beat(session_id))
            await self._ports.clock.sleep(self._ttl / 3)

    def _past_a_hard_limit(self) -> bool:
        latest = self._ports.clock.monotonic() - _HARD_LIMIT_MARGIN
        return any(started.hard_deadline < latest for started in self._board.running())

    def _answer(self, session_id: SessionId, known: int, beat: Beat) -> None:
        if not beat.open:
            self._tell_loop(lambda: self._lost(session_id))
            return
        if beat.cancel:
            self._tell_loop(lambda: self._cancel(beat.cancel))
        # Claims and settlements that are under way make the two differ for a moment; a lost reply makes them differ
        # for good.
        self._mismatches = 0 if beat.held in (known, len(self._holding)) else self._mismatches + 1
        if self._mismatches >= 2:
            self._mismatches = 0
            self._tell_loop(self._reconcile)

    def _tell_loop(self, call: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the worker has ended
            self._worker_loop.call_soon_threadsafe(call)

    # Watching the worker's event loop.

    async def _watch_loop(self) -> None:
        while True:
            await self._ports.clock.sleep(_LOOK_EVERY)
            still = self._ports.clock.monotonic() - self._board.last_tick
            if still < BLOCKED_AFTER:
                self._give_back_at = BLOCKED_AFTER
            elif still >= self._give_back_at and self.session_id:
                first, self._give_back_at = self._give_back_at == BLOCKED_AFTER, still + BLOCKED_AFTER
                released = await self._give_back_unstarted()
                if first or released:
                    tell(self._listener, LoopBlocked(self.session_id, still, released, self._on_loop()))

    async def _give_back_unstarted(self) -> int:
        """Also what a claim has just brought and the blocked loop has not even seen: the store knows."""
        held = await self._store.held(self.session_id)
        unstarted = [job for job in held if self._holding.give_back(job)]
        for first in range(0, len(unstarted), MOST_PER_CALL):
            await self._release(unstarted[first : first + MOST_PER_CALL])
        if unstarted:
            # What is given back is counted until the reply to its claim arrives. If nobody waits for that any more, it
            # would hide as many jobs that another late claim takes: the loop asks, when it runs again.
            self._tell_loop(self._reconcile)
        return len(unstarted)

    async def _release(self, jobs: list[Job], *, cancel_asked: bool = False) -> None:
        moves = [settle(job, Released(), RetryPolicy(), self._ports.random, cancel_asked=cancel_asked) for job in jobs]
        try:
            answers = await self._store.apply(moves)
        except StoreUnavailable:
            for job in jobs:  # nothing was written: they are held, and nobody knows of them until the worker asks
                self._holding.settled(job)
            return
        except HoldfastError:
            # Nobody knows whether they are still held. The count of a beat would not show it: they are counted here.
            self._holding.doubt(jobs)
            return
        again = [job for job, answer in zip(jobs, answers, strict=True) if answer is Applied.CANCEL_ASKED]
        if again and not cancel_asked:
            await self._release(again, cancel_asked=True)
