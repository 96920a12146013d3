"""Rescue: finds worker sessions that have died, closes them, and brings their jobs back.

A session is judged dead only by its beat counter: it must stand still for one TTL of this keeper's own monotonic
clock, over looks that followed each other closely, and in each of which a read came back in time, and a write as well
unless everybody was seen to have beaten since the look before (`watch.py`). No clocks are compared, so a store outage,
a lock that somebody holds for long, a pause of this very process or a clock step cannot make a live worker look dead.
Closing is a compare-and-set on the counter: a beat in between wins.

Bringing jobs back is level-triggered: whatever is in flight without an open session is lost, however that came about.

However many sessions and lost jobs there are, the store is not held up: they are taken page by page with a pause after
each, a pass works for a fifth of a second, and rests for as long before the next one goes on where it stopped.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.events import JobsRescued, KeeperFailed, Listener, SessionRescued, ignore, tell
from holdfast.failures import Failure
from holdfast.job import Job, State
from holdfast.keepers.watch import LATEST_LOOK, SessionWatch
from holdfast.lifecycle import Applied, Lost, Move, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import Clock, Ports
from holdfast.store import SessionView, Store

DEFAULT_TTL = 15.0
_NOBODY = "nobody"
_SEEN_AT_ONCE = 100
_RESCUED_AT_ONCE = 100
_WALKS_PER_TTL = 3
_WORK_PER_PASS = 0.2
_JITTER = 0.25
_BETWEEN_PAGES = 0.01
_JITTER_BETWEEN_PAGES = 0.5


class Walk(msgspec.Struct):
    """A look at every session, page after page: when it began, where it goes on, and whether it is over."""

    began: float
    cursor: str | None = None
    over: bool = False


class Stint:
    """The work of one pass, up to `most` seconds of it. Its own pauses are no work."""

    def __init__(self, clock: Clock, most: float = _WORK_PER_PASS) -> None:
        self._clock = clock
        self._most = most
        self._began = clock.monotonic()
        self._paused = 0.0

    def worked(self) -> float:
        """For how many seconds so far."""
        return self._clock.monotonic() - self._began - self._paused

    def is_over(self) -> bool:
        """Whether it is enough for one pass."""
        return self.worked() >= self._most

    async def pause(self, seconds: float) -> None:
        """Let others work."""
        before = self._clock.monotonic()
        await self._clock.sleep(seconds)
        self._paused += self._clock.monotonic() - before


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
        self._walk = Walk(began=-math.inf, over=True)
        self._walks = 0
        self._owed = False
        """Whether there may be jobs to bring back now."""

    async def run(self) -> None:
        """Pass after pass until cancelled; three walks in a TTL, with jitter. A failing store is tried again."""
        cut_short = False
        while True:
            if self._walk.over and not (cut_short and self._since_walk_began() < self._ttl / _WALKS_PER_TTL):
                self._begin_walk()
            stint = Stint(self._ports.clock)
            parts = [await self._attempt(part(stint)) for part in (self._walk_on, self._bring_back_on)]
            cut_short = any(parts)
            await self._ports.clock.sleep(self._pause_after(stint, cut_short=cut_short))

    async def one_pass(self) -> int:
        """Close all sessions that have died, then bring back every lost job, without a pause. How many jobs it was."""
        stint = Stint(self._ports.clock, math.inf)
        walk = Walk(began=self._ports.clock.monotonic())
        while await self._look(walk, stint):
            pass
        total = 0
        while rescued := await self._bring_back_some():
            total += rescued
        return total

    # The pace.

    async def _attempt(self, part: Awaitable[bool]) -> bool:
        """Whether that part of a pass was cut short.

        Whatever happens: a keeper that has died rescues nobody. What one part meets must not stop the other.
        """
        try:
            return await part
        except Exception as error:
            tell(self._listener, KeeperFailed("rescue", repr(error)))
            return False

    async def _goes_on(self, stint: Stint) -> bool:
        """Whether there is time for another page or batch. If so, after a pause."""
        if stint.is_over():
            return False
        await stint.pause(self._jittered(_BETWEEN_PAGES, _JITTER_BETWEEN_PAGES))
        return True

    def _pause_after(self, stint: Stint, *, cut_short: bool) -> float:
        """How long to rest: for as long as the pass has worked, or until the next walk is due, if that is later."""
        interval = self._ttl / _WALKS_PER_TTL
        idle = 0.0 if cut_short else interval - self._since_walk_began()
        return self._jittered(min(interval, max(idle, stint.worked())), _JITTER)

    def _jittered(self, seconds: float, jitter: float) -> float:
        return seconds * (1 + jitter * (2 * self._ports.random.fraction() - 1))

    # Sessions.

    def _begin_walk(self) -> None:
        self._walk = Walk(began=self._ports.clock.monotonic())
        # What others closed is theirs to bring back, and only if they fail to, ours: once in a TTL is enough.
        self._owed = self._owed or self._walks % _WALKS_PER_TTL == 0
        self._walks += 1

    def _since_walk_began(self) -> float:
        return self._ports.clock.monotonic() - self._walk.began

    async def _walk_on(self, stint: Stint) -> bool:
        """Look at the sessions from where the pass before stopped. Whether this one was cut short, too."""
        if self._walk.over:
            return False
        while await self._look(self._walk, stint):
            if not await self._goes_on(stint):
                return True
        if (took := self._since_walk_began()) > self._ttl * LATEST_LOOK:
            error = f"a look at all sessions took {took:.1f} s, too long to judge anybody by a TTL of {self._ttl:g} s"
            tell(self._listener, KeeperFailed("rescue", error))
        return False

    async def _look(self, walk: Walk, stint: Stint) -> bool:
        """Take the next page of the walk and close whoever has died. Whether there is more to look at.

        If closing is too much work for one pass, the walk stays at this page. If anything fails, the walk is over, and
        the next one begins after a whole pause.
        """
        clock = self._ports.clock
        asked_at = clock.monotonic()
        try:
            page = await self._store.sessions(cursor=walk.cursor, limit=_SEEN_AT_ONCE)
            if self._watch.suspects(page.sessions):
                # Somebody may hold a lock that stops every beat but no read. A beat for a session that does not exist
                # writes nothing, and shows whether the workers could have written theirs. Where all have beaten since
                # the look before, they have shown it themselves. A beat that waited like this one is written before
                # the session could be closed, and closing compares the counter.
                await self._store.beat(_NOBODY)
            for closed, view in enumerate(self._watch.still(page.sessions, asked_at, clock.monotonic())):
                if closed and stint.is_over():
                    return True
                await self._close(view)
        except BaseException:
            self._watch.forget()
            walk.over, walk.began = True, clock.monotonic()
            raise
        walk.cursor, walk.over = page.next, page.next is None
        return not walk.over

    async def _close(self, view: SessionView) -> None:
        if await self._store.close_session(view.id, if_beat=view.beat):
            self._owed, self._walks = True, 0
            tell(self._listener, SessionRescued(view.id))
        else:
            self._watch.forget(view.id)

    # Jobs.

    async def _bring_back_on(self, stint: Stint) -> bool:
        """Bring back lost jobs if there may be any. Whether it was cut short."""
        while self._owed:
            self._owed = await self._bring_back_some() > 0
            if self._owed and not await self._goes_on(stint):
                return True
        return False

    async def _bring_back_some(self) -> int:
        """One batch. How many jobs it was: none if none is lost, or if another keeper was faster with all of them."""
        jobs = await self._store.lost(_RESCUED_AT_ONCE)
        if not jobs:
            return 0
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
        if applied:
            failed = sum(move.to is State.FAILED for move in applied)
            tell(self._listener, JobsRescued(len(applied) - failed, failed))
        return len(applied)

    def _lost(self, job: Job, *, cancel_asked: bool = False) -> Move:
        failure = Failure(
            at=self._ports.clock.now(),
            attempt=job.attempt + 1,
            type="WorkerLost",
            message=f"the worker session {job.session_id} that held the job ended without settling it",
        )
        move = settle(job, Lost(failure), self._policy, self._ports.random, cancel_asked=cancel_asked)
        return self._follow(job, move) if self._follow and move.to is State.FAILED else move
