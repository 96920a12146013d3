"""Rescue: finds worker sessions that have died, closes them, and brings their jobs back.

A session is judged dead only by its beat counter: it must stand still for one TTL of this keeper's own monotonic
clock, over passes that followed each other closely, and in each of which a write and a read came back in time. No
clocks are compared, so a store outage, a lock that somebody holds for long, a pause of this very process or a clock
step cannot make a live worker look dead. Closing is a compare-and-set on the counter: a beat in between wins.

Bringing jobs back is level-triggered: whatever is in flight without an open session is lost, however that came about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from holdfast.events import JobsRescued, KeeperFailed, Listener, SessionRescued, ignore, tell
from holdfast.failures import Failure
from holdfast.job import Job, SessionId, State
from holdfast.lifecycle import Applied, Lost, Move, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import Ports
from holdfast.store import SessionView, Store

DEFAULT_TTL = 15.0
_NOBODY = "nobody"
_RESCUED_AT_ONCE = 100
_JITTER = 0.25
_PASSES_PER_TTL = 3
_LATEST_LOOK = 2 / 3
"""Of a TTL, after the look before. Passes are a third apart, and jitter makes that at most half."""


class _Sighting(msgspec.Struct, frozen=True, gc=False):
    beat: int
    first_seen: float


class SessionWatch:
    """Remembers since when each session's beat stands still. No I/O."""

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._sightings: dict[SessionId, _Sighting] = {}
        self._last_answered = -math.inf

    def still(self, views: Sequence[SessionView], asked_at: float, answered_at: float) -> list[SessionView]:
        """The open sessions whose counter has stood still for one TTL, as of a read between those two moments.

        A sighting counts from the moment when its read was answered until the moment when the present one was asked:
        the shortest time for which the counter can have stood still. A look that took longer than a third of the TTL,
        or came so late after the one before that this process itself must have been stopped, proves nothing, and
        neither does anything seen before it.
        """
        if answered_at - asked_at > self._ttl / 3 or asked_at - self._last_answered > self._ttl * _LATEST_LOOK:
            self.forget()
        self._last_answered = answered_at
        known = self._sightings
        self._sightings = {
            view.id: sighting
            if (sighting := known.get(view.id)) and sighting.beat == view.beat
            else _Sighting(view.beat, answered_at)
            for view in views
            if view.open
        }
        return [view for view in views if view.open and asked_at - self._sightings[view.id].first_seen >= self._ttl]

    def forget(self) -> None:
        """Start over: a read failed, so nothing is known about the time before."""
        self._sightings.clear()


class Rescue:
    """The keeper. Any number may run at once, in any process. `follow` adds to a failure what is enqueued after it."""

    def __init__(
        self,
        store: Store,
        *,
        ports: Ports,
        ttl: float = DEFAULT_TTL,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008
        listener: Listener = ignore,
        follow: Callable[[Job, Move], Move] | None = None,
    ) -> None:
        self._store = store
        self._follow = follow
        self._ports = ports
        self._ttl = ttl
        self._policy = policy
        self._listener = listener
        self._watch = SessionWatch(ttl)

    async def run(self) -> None:
        """Pass after pass, three in a TTL with jitter, until cancelled. A failing store is tried again."""
        passes = 0
        while True:
            # Whatever happens: a keeper that has died rescues nobody. What one half meets must not stop the other.
            closed = False
            try:
                closed = await self._close_dead()
            except Exception as error:
                self._watch.forget()
                tell(self._listener, KeeperFailed("rescue", repr(error)))
            try:
                # What others closed is theirs to bring back, and only if they fail to, ours: once in a TTL is enough.
                if closed or passes % _PASSES_PER_TTL == 0:
                    await self._bring_back()
            except Exception as error:
                closed = True  # again with the next pass
                tell(self._listener, KeeperFailed("rescue", repr(error)))
            passes = 0 if closed else passes + 1
            jitter = 1 + _JITTER * (2 * self._ports.random.fraction() - 1)
            await self._ports.clock.sleep(self._ttl / _PASSES_PER_TTL * jitter)

    async def one_pass(self) -> int:
        """Close the sessions that have died, then bring back every lost job. How many jobs it was."""
        await self._close_dead()
        return await self._bring_back()

    async def _close_dead(self) -> bool:
        """Whether it closed any."""
        clock = self._ports.clock
        asked_at = clock.monotonic()
        # Somebody may hold a lock that stops every beat but no read. A beat for a session that does not exist writes
        # nothing, and shows whether the workers could have written theirs.
        await self._store.beat(_NOBODY)
        views = await self._store.sessions()
        closed = False
        for view in self._watch.still(views, asked_at, clock.monotonic()):
            if await self._store.close_session(view.id, if_beat=view.beat):
                closed = True
                tell(self._listener, SessionRescued(view.id))
        return closed

    async def _bring_back(self) -> int:
        total = 0
        while jobs := await self._store.lost(_RESCUED_AT_ONCE):
            moves = [self._lost(job) for job in jobs]
            answers = await self._store.apply(moves)
            again = [
                self._lost(job, cancel_asked=True)
                for job, answer in zip(jobs, answers, strict=True)
                if answer is Applied.CANCEL_ASKED
            ]
            if again:
                moves += again
                answers += await self._store.apply(again)
            applied = [move for move, answer in zip(moves, answers, strict=True) if answer is Applied.APPLIED]
            if not applied:
                break  # another keeper was faster with all of them
            failed = sum(move.to is State.FAILED for move in applied)
            tell(self._listener, JobsRescued(len(applied) - failed, failed))
            total += len(applied)
        return total

    def _lost(self, job: Job, *, cancel_asked: bool = False) -> Move:
        failure = Failure(
            at=self._ports.clock.now(),
            attempt=job.attempt + 1,
            type="WorkerLost",
            message=f"the worker session {job.session_id} that held the job ended without settling it",
        )
        move = settle(job, Lost(failure), self._policy, self._ports.random, cancel_asked=cancel_asked)
        return self._follow(job, move) if self._follow and move.to is State.FAILED else move
