"""The claimer: asks the store for as many jobs as can start soon, and waits when there are none: in the store, with the
next claim, if that is possible.

It owns the session: it opens it, opens another when the store has closed it, and gives back what the store says the
session holds though nobody here has heard of it (a claim whose reply was lost). Doing all of this in one loop means
that none of it can happen while a claim is under way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress

from holdfast.errors import SessionClosed, StoreError
from holdfast.events import Listener, SessionLost, tell
from holdfast.failures import Failure
from holdfast.job import SessionId
from holdfast.lifecycle import Lost, Released, settle
from holdfast.patience import Patient, WaitingClaims
from holdfast.policy import RetryPolicy
from holdfast.ports import MICROSECONDS, Ports
from holdfast.store import MOST_PER_CALL, Claimed, ClaimRequest, Session, Store
from holdfast.worker.holding import Holding
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler

_MOST_UNSETTLED = 2 * MOST_PER_CALL
_MOST_WAITED_FOR = 10
"""Jobs that a waiting claim takes: if this process stands still by then, they wait until its session is closed."""


class Claimer:
    """Used from one event loop; `wake`, `reconcile` and `session_lost` are called there, too."""

    def __init__(
        self,
        *,
        store: Store,
        queues: tuple[str, ...],
        runner: Runner,
        settler: Settler,
        holding: Holding,
        poll: float,
        introduce: Callable[[SessionId], Session],
        announce: Callable[[SessionId], None],
        opened: Callable[[SessionId], None],
        ports: Ports,
        listener: Listener,
    ) -> None:
        self._store = store
        self._queues = queues
        self._runner = runner
        self._settler = settler
        self._holding = holding
        self._poll = poll
        self._introduce = introduce
        self._announce = announce
        self._opened = opened
        self._ports = ports
        self._listener = listener
        self._waiting = store.waiting_claims(queues) if isinstance(store, Patient) else None
        self._patience: asyncio.Timeout | None = None
        """While a claim waits: its end."""
        self._woken = asyncio.Event()
        self._turn = 0
        self._in_doubt = False
        self._lost = False
        self._stopping = False
        self.session_id: SessionId = ""
        self.empty = False
        """Whether the last claim left nothing that is due. It may have brought jobs all the same."""

    @property
    def answered(self) -> int:
        """How many claims the store has answered."""
        return self._turn

    # What others tell it.

    def wake(self) -> None:
        """Something changed: a slot is free, a settlement went through, jobs may have come."""
        self._woken.set()

    def reconcile(self) -> None:
        """The store counts other jobs under the session than are known here."""
        self._in_doubt = True
        self._act()

    def session_lost(self, session_id: SessionId) -> None:
        """That session was closed by somebody else."""
        if session_id == self.session_id:
            self._lost = True
            self._act()

    def stop(self) -> None:
        """Claim no more. A claim that is under way is still answered: cancelled, it might have taken effect unseen. One
        that waits would be answered too late: it is cancelled, and what it took is looked for.
        """
        self._stopping = True
        self._act()

    def _act(self) -> None:
        """There is something to do that cannot wait for jobs."""
        self._woken.set()
        patience, self._patience = self._patience, None
        if patience is not None:
            patience.reschedule(0)

    # The loop.

    async def run(self) -> None:
        """Claim until told to stop. What it raises is temporary: run it again."""
        if not self.session_id:
            await self._open_session()
        while not self._stopping:
            self._woken.clear()
            if self._lost:
                await self._renew_session()
            if self._in_doubt:
                await self._give_back_unknown()
            limit = self._wanted()
            if limit < 1:
                await self._wait(None)
                continue
            claimed = await self._claim(limit)
            while claimed is not None and claimed.due_in != 0 and (waiting := self._where_to_wait()):
                claimed = await self._claim_patiently(waiting, claimed.due_in)
            if claimed is not None and claimed.due_in != 0:
                await self._wait(self._until(claimed.due_in))

    def _wanted(self) -> int:
        """How many jobs to claim now, if any."""
        if self._stopping or len(self._settler) > _MOST_UNSETTLED:
            return 0
        return min(self._runner.wanted, MOST_PER_CALL)

    def _where_to_wait(self) -> WaitingClaims | None:
        """The store's waiting claims, if there is nothing to do before jobs come, and a slot is free until then."""
        busy = self._stopping or self._lost or self._in_doubt or len(self._settler) > _MOST_UNSETTLED
        return None if busy or self._runner.free < 1 else self._waiting

    async def _claim(self, limit: int) -> Claimed | None:
        """Claim once. None: the session is closed."""
        return await self._answered(self._store.claim(self._request(limit)))

    async def _claim_patiently(self, waiting: WaitingClaims, due_in: int | None) -> Claimed | None:
        """Claim when there are jobs. None: something else is to be done first."""
        # Slots may become free meanwhile; none is taken, because no other claim is under way.
        request = self._request(min(self._runner.free, _MOST_WAITED_FOR))
        try:
            async with asyncio.timeout(None) as self._patience:
                claimed = await self._answered(waiting.claim(request, due_in=due_in, seconds=self._poll))
        except TimeoutError:
            self._in_doubt = True  # it may have been carried out
            return None
        finally:
            self._patience = None
        if claimed is not None and claimed.jobs:
            await self._ports.clock.sleep(0)  # the jobs begin before the next claim is sent
        return claimed

    def _request(self, limit: int) -> ClaimRequest:
        first = self._turn % len(self._queues)
        return ClaimRequest(
            session_id=self.session_id,
            queues=self._queues[first:] + self._queues[:first],  # no queue is always the last
            limit=limit,
            turn=self._turn // len(self._queues),  # so that each queue comes first in each kind of turn
        )

    async def _answered(self, claim: Awaitable[Claimed]) -> Claimed | None:
        """What the claim brought, handed to the runner. None: the session is closed."""
        try:
            claimed = await claim
        except SessionClosed:
            self._lost = True
            return None
        except StoreError:
            self._in_doubt = True  # it may have been carried out
            raise
        self._turn += 1
        self.empty = claimed.due_in != 0
        if claimed.jobs:
            self._runner.feed(self._holding.take(claimed.jobs))
        return claimed

    def _until(self, due_in: int | None) -> float:
        return self._poll if due_in is None else min(due_in / MICROSECONDS, self._poll)

    async def _wait(self, seconds: float | None) -> None:
        """Until something changes, or that long; without a time a poll interval, lest a missed wake-up stop us."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._poll if seconds is None else seconds):
                await self._woken.wait()
        self._woken.clear()

    async def listen(self) -> None:
        """Turn the store's wake-ups into ours, until cancelled. None are needed by claims that wait in the store."""
        if self._waiting is not None:
            try:
                await asyncio.Event().wait()
            finally:
                await self._waiting.close()
        else:
            async with aclosing(self._store.wakeups(self._queues)) as wakeups:  # type: ignore[type-var]
                async for _ in wakeups:
                    self._woken.set()

    # The session.

    async def _open_session(self) -> None:
        session = self._introduce(self._ports.ids.session_id())
        self._announce(session.id)  # first: whoever finds this process dead must know which session was its
        await self._store.open_session(session)
        self.session_id = session.id
        self._opened(session.id)  # now it beats; before, the store would not have known it
        self._lost = self._in_doubt = False

    async def _renew_session(self) -> None:
        tell(self._listener, SessionLost(self.session_id, len(self._holding)))
        self._runner.abandon()
        self._holding.forget()
        await self._open_session()

    async def clear_up(self) -> None:
        """After the last claim: if its reply was lost, give back what it took."""
        if self._in_doubt and not self._lost:
            await self._give_back_unknown()

    async def close_session(self) -> None:
        """Close it, and give back what has not started: what a claim took that nobody heard of, or too late."""
        if not await self._store.close_session(self.session_id):
            return  # somebody else has: what it held is his to bring back, and some of it may have run here
        lost = await self._store.lost(MOST_PER_CALL, session_id=self.session_id)
        unstarted = [job for job in lost if self._holding.give_back(job)]
        if unstarted:
            failure = Failure(self._ports.clock.now(), 0, "WorkerStopped", "the worker stopped before the job started")
            outcome = Lost(failure, started=False)
            await self._store.apply([settle(job, outcome, RetryPolicy(), self._ports.random) for job in unstarted])

    async def _give_back_unknown(self) -> None:
        self._in_doubt = False
        before = self._holding.known()
        try:
            held = await self._store.held(self.session_id)
        except StoreError:
            self._in_doubt = True
            raise
        for job in self._holding.reconcile(held, before):
            self._settler.add(job, Released(), RetryPolicy())
