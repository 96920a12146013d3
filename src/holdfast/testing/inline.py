"""Inline mode: a store that runs each job in the caller as soon as it takes it.

It is put in the place of a test's `RecordingStore`, around which it is wrapped, so everything else stays as it is: the
job is inserted, claimed, run and settled, and only then does the insert return. A job that is not due yet, or whose
queue is paused, waits. A handler that enqueues has its jobs run before it goes on.
"""

from __future__ import annotations

import contextvars
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self, cast

import msgspec

from holdfast.errors import ForeignConnection
from holdfast.job import Job, JobId, NewJob, Reason
from holdfast.store import Checkpoint, DepthLimit, Inserted, InsertStatus, Store
from holdfast.testing.calling import Caller, EndlessJobs, Steps, stops_the_test

MOST_NESTED = 20


class _Outermost(msgspec.Struct, eq=False):
    """The enqueue by which it all began."""

    broken_by: EndlessJobs | None = None
    """Set when jobs were nested too deep. It comes out at the top, whatever the handlers in between make of it."""


class _Level(msgspec.Struct, frozen=True, eq=False):
    """Where a handler runs: the tasks that run around it, and its own."""

    outermost: _Outermost
    tasks: tuple[str, ...] = ()


_level: contextvars.ContextVar[_Level] = contextvars.ContextVar("holdfast_inline_level")


class InlineStore:
    """A `RecordingStore`, through the caller that runs its jobs. Use `wrap` to get it typed as a `Store`."""

    def __init__(self, caller: Caller, *, raise_errors: bool, most_nested: int) -> None:
        self._caller = caller
        self._raise_errors = raise_errors
        self._most_nested = most_nested

    def __getattr__(self, name: str) -> Any:
        return getattr(self._caller.store, name)

    async def __aenter__(self) -> Self:
        """Nothing to open. Python looks these two up on the class, past `__getattr__`."""
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Nothing to close."""

    # New jobs.

    async def insert(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
        fresh: bool = False,
    ) -> list[Inserted]:
        """See `Store.insert`. What was created and is due has run when this returns."""
        level = self._next_level()
        inserted = await self._caller.store.insert(jobs, limits=limits, checkpoint=checkpoint, fresh=fresh)
        await self._caller.follow(self._steps(_created(inserted), level), lambda job: self._context(level, job))
        return inserted

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """The same, blocking."""
        level = self._next_level()
        inserted = self._caller.store.insert_blocking(jobs, limits=limits, fresh=fresh)
        self._caller.follow_blocking(self._steps(_created(inserted), level), lambda job: self._context(level, job))
        return inserted

    def insert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> NoReturn:
        """Always refused: nobody can tell when the transaction is committed."""
        raise ForeignConnection(
            f"{', '.join(sorted({job.task for job in jobs}))} is enqueued on a connection, so it exists only after the "
            f"commit, which inline() cannot see: leave inline() out, and run the jobs with drain() after the commit"
        )

    async def ainsert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> NoReturn:
        """Always refused, as `insert_on`."""
        self.insert_on(connection, jobs, limits=limits)

    # Running.

    def _next_level(self) -> _Level:
        level = _level.get(None) or _Level(_Outermost())
        if level.outermost.broken_by is None and len(level.tasks) >= self._most_nested:
            level.outermost.broken_by = EndlessJobs(
                f"inline jobs enqueue inline jobs, {len(level.tasks)} deep (… > {' > '.join(level.tasks[-3:])} > …): "
                f"do they ever end? Leave inline() out and use drain(), which does not nest, or pass most_nested="
            )
        if level.outermost.broken_by is not None:
            raise level.outermost.broken_by
        return level

    def _context(self, level: _Level, job: Job) -> contextvars.Context:
        context = self._caller.context()
        context.run(_level.set, _Level(level.outermost, (*level.tasks, job.task)))
        return context

    def _steps(self, job_ids: Iterable[JobId], level: _Level) -> Steps:
        for job_id in job_ids:
            job = self._caller.claim_one(job_id)
            while job is not None:
                run = yield job
                yield from self._steps(run.follow_ups, level)
                if level.outermost.broken_by is not None:
                    raise level.outermost.broken_by
                if run.error is not None and (stops_the_test(run.error) or (self._raise_errors and run.failed)):
                    raise run.error
                again = run.reason is Reason.RETRIED
                job = self._caller.claim_one(job_id, early=True) if again else None


def _created(inserted: Iterable[Inserted]) -> list[JobId]:
    return [answer.job_id for answer in inserted if answer.status is InsertStatus.CREATED]


def wrap(caller: Caller, *, raise_errors: bool, most_nested: int) -> Store:
    """The caller's store in inline mode."""
    return cast(Store, InlineStore(caller, raise_errors=raise_errors, most_nested=most_nested))
