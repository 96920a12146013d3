"""The one who enqueues in `holdfast demo`, and changes their mind about some of it.

With a number of jobs to do, it keeps the workers busy without a long queue before them. Without one, it goes slowly,
and now and then a burst comes. Import it only when the environment says where the demo's store is (see `demo_tasks`).
"""

from __future__ import annotations

import heapq
from typing import Any

from holdfast.app import Holdfast
from holdfast.batches import PreparedJob
from holdfast.cli.demo_ledger import Ledger
from holdfast.cli.demo_mix import kind_of
from holdfast.client import JobHandle
from holdfast.errors import StoreError
from holdfast.job import JobId
from holdfast.ports import SYSTEM
from holdfast.store import MOST_PER_CALL, CancelAnswer

RATE = 80.0
BURST = 400
_BURST_EVERY = 20.0
_LONGEST_STEP = 1.0
_MOST_WAITING = 3_000
_MOST_OPEN = 300
_MOST_AT_ONCE = 100
_PATIENCE = 30.0
_PAUSE = 0.2


class Producer:
    """Enqueues `wanted` jobs in all (None: until it is not asked any more), and books them in the ledger."""

    def __init__(self, app: Holdfast, ledger: Ledger, wanted: int | None) -> None:
        self._app = app
        self._ledger = ledger
        self._wanted = wanted
        self._number = 0
        self._to_cancel: list[tuple[float, JobId]] = []
        self._stepped_at = SYSTEM.clock.monotonic()
        self._due = 0.0
        self._next_burst = _BURST_EVERY

    @property
    def done(self) -> bool:
        """Whether everything that was wanted has been enqueued."""
        return self._number == self._wanted

    async def step(self) -> bool:
        """Enqueue and cancel what is due now. Whether a burst began."""
        if self._wanted is None:
            burst, due = self._paced()
        else:
            burst, due = False, min(self._wanted - self._number, _MOST_OPEN - len(self._ledger.open), _MOST_AT_ONCE)
        if due > 0:
            await self._enqueue(due)
        await self._cancel_due()
        return burst

    def _paced(self) -> tuple[bool, int]:
        """Whether a burst begins, and how many jobs are due."""
        now = SYSTEM.clock.monotonic()
        # A demo that was stopped for a while (Ctrl-Z) does not catch up.
        passed = min(now - self._stepped_at, _LONGEST_STEP)
        self._stepped_at = now
        self._next_burst -= passed
        self._due += passed * RATE
        burst = self._next_burst <= 0
        if burst:
            self._next_burst += _BURST_EVERY
            self._due += BURST
        if len(self._ledger.open) > _MOST_WAITING:
            self._due = 0.0  # somebody has paused a queue, or stopped the workers
        due = int(self._due)
        self._due -= due
        return burst, due

    async def _enqueue(self, count: int) -> None:
        kinds = [kind_of(number) for number in range(self._number, self._number + count)]
        calls = [kind.make(self._number + at) for at, kind in enumerate(kinds)]
        handles = await self._store_all(calls)
        now = SYSTEM.clock.monotonic()
        for kind, handle in zip(kinds, handles, strict=True):
            self._ledger.accept(handle.id, kind.label)
            if kind.cancel_after is not None:
                heapq.heappush(self._to_cancel, (now + kind.cancel_after, handle.id))
        self._number += count

    async def _store_all(self, calls: list[PreparedJob[Any]]) -> list[JobHandle[Any]]:
        deadline = SYSTEM.clock.monotonic() + _PATIENCE
        while True:
            try:
                return await self._app.aenqueue_many(calls)
            except StoreError:
                # Repeating it is safe: a prepared job has its id, and is stored once.
                if SYSTEM.clock.monotonic() > deadline:
                    raise
                await SYSTEM.clock.sleep(_PAUSE)

    async def _cancel_due(self) -> None:
        now = SYSTEM.clock.monotonic()
        due = []
        while self._to_cancel and self._to_cancel[0][0] <= now:
            due.append(heapq.heappop(self._to_cancel)[1])
        try:
            await self.cancel(due)
        except StoreError:
            for job_id in due:
                heapq.heappush(self._to_cancel, (now + _PAUSE, job_id))

    async def cancel(self, job_ids: list[JobId]) -> None:
        """Cancel these jobs, and book those that waited."""
        for first in range(0, len(job_ids), MOST_PER_CALL):
            part = job_ids[first : first + MOST_PER_CALL]
            answers = await self._app.store.request_cancel(part)
            await self._ledger.look(
                job_id
                for job_id, answer in zip(part, answers, strict=True)
                if answer in (CancelAnswer.CANCELLED, CancelAnswer.ENDED)
            )
