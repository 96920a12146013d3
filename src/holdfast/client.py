"""The client: enqueue, read and steer jobs. One implementation, asynchronous; blocking twins run it through a portal.

Only enqueuing has a blocking way of its own, because it is the call that a program makes most: the store does it
directly on the calling thread.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from holdfast.batches import Batch, PreparedJob
from holdfast.codec import Signature
from holdfast.config import Settings
from holdfast.errors import (
    HoldfastError,
    InvalidOption,
    JobCancelled,
    JobFailed,
    JobNotFound,
    JobStillLive,
    KeyConflict,
    NotFinished,
    QueueFull,
    ResultNotKept,
    shown,
)
from holdfast.events import CancelRequested, JobEnqueued, JobReplayed, Listener, QueueDeep, QueuePaused, ignore, tell
from holdfast.failures import RESULT_NOT_KEPT, Failure, decode_history
from holdfast.job import ENDED, Job, JobId, NewJob, State, check_name, check_text
from holdfast.lifecycle import Applied, replay
from holdfast.ports import Ports
from holdfast.store import (
    CancelAnswer,
    DepthLimit,
    Inserted,
    InsertStatus,
    JobQuery,
    Overlapping,
    QueueCounts,
    Store,
)
from holdfast.sync import Portal, refuse_in_event_loop

R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

_FIRST_POLL = 0.002
_SLOWEST_POLL = 0.1
_UNTYPED = Signature(lambda: None)
_CREATED = InsertStatus.CREATED


class JobPage(msgspec.Struct, frozen=True):
    """Some jobs, and the cursor of the next page (None: this was the last)."""

    jobs: tuple[JobHandle[Any], ...]
    next: JobId | None


class Client:
    """What a producer or an operator does with a store."""

    def __init__(self, store: Store, *, settings: Settings, ports: Ports, listener: Listener = ignore) -> None:
        self.settings = settings
        self.portal = Portal(ports)
        self._listener = listener
        self.use(store, ports)

    def use(self, store: Store, ports: Ports) -> None:
        """Work on that store from now on. One that runs jobs as it takes them lets us `peek` at what became of them."""
        self.ports = ports
        self._store = store
        self._overlapping = store if isinstance(store, Overlapping) else None
        self._peek: Callable[[JobId], Job | None] | None = getattr(store, "peek", None)

    # Enqueuing.

    async def enqueue(self, prepared: PreparedJob[R], connection: Any = None) -> JobHandle[R]:
        """Store one job that was prepared for this call, inside the caller's transaction if a connection is given."""
        new = [prepared.new]
        if connection is None:  # not by `_insert`: this is the call that a program makes most, and each step costs
            [inserted] = await self._store.insert(new, limits=self._limits(new), fresh=True)
        else:
            [inserted] = await self._insert(new, connection)
        handle = self._accept(prepared, inserted)
        return handle if handle.created else await handle.look()

    def enqueue_blocking(self, prepared: PreparedJob[R], connection: Any = None) -> JobHandle[R]:
        """The same on the calling thread, by the store's shortest way."""
        refuse_in_event_loop("enqueue")
        new = [prepared.new]
        if connection is None:
            [inserted] = self._store.insert_blocking(new, limits=self._limits(new), fresh=True)
        else:
            [inserted] = self._insert_blocking(new, connection)
        handle = self._accept(prepared, inserted)
        return handle if handle.created else self.portal.run("enqueue", handle.look())

    async def enqueue_many(
        self, calls: Iterable[PreparedJob[R]], connection: Any = None, progress: Callable[[int], object] | None = None
    ) -> Batch[R, JobHandle[R]]:
        """Store many jobs, a thousand in one round trip, reading the calls as it goes.

        `PartlyRefused` if some were refused (the others are stored), or if the store or the iterable failed after some
        were stored: then it says at which position it stopped.
        """
        batch: Batch[R, JobHandle[R]] = Batch(calls, progress)
        while chunk := batch.next_chunk():
            try:
                answers = await self._insert([call.new for call in chunk], connection)
            except HoldfastError as error:
                batch.stop(error)
            self._add(batch, chunk, answers)
        return batch

    def enqueue_many_blocking(
        self, calls: Iterable[PreparedJob[R]], connection: Any = None, progress: Callable[[int], object] | None = None
    ) -> Batch[R, JobHandle[R]]:
        """The same on the calling thread, by the store's shortest way. The calls are read at most a thousand ahead."""
        refuse_in_event_loop("enqueue_many")
        batch: Batch[R, JobHandle[R]] = Batch(calls, progress)
        while chunk := batch.next_chunk():
            try:
                answers = self._insert_blocking_while([call.new for call in chunk], connection, batch)
            except HoldfastError as error:
                batch.stop(error)
            self._add(batch, chunk, answers)
        return batch

    async def _insert(self, new: Sequence[NewJob], connection: Any) -> list[Inserted]:
        if connection is not None:
            return await self._store.ainsert_on(connection, new, limits=self._limits(new))
        return await self._store.insert(new, limits=self._limits(new))

    def _insert_blocking(self, new: Sequence[NewJob], connection: Any) -> list[Inserted]:
        if connection is not None:
            return self._store.insert_on(connection, new, limits=self._limits(new))
        return self._store.insert_blocking(new, limits=self._limits(new))

    def _insert_blocking_while(self, new: Sequence[NewJob], connection: Any, batch: Batch[Any, Any]) -> list[Inserted]:
        """Insert them, and read ahead while they are on their way, if the store lets its caller do that.

        Not on an event loop: whoever reads an iterable there keeps it from what the insert waits for, deadlines too.
        """
        if self._overlapping is None or batch.at_end or connection is not None:
            return self._insert_blocking(new, connection)
        return self._overlapping.insert_while(new, batch.read_ahead, limits=self._limits(new))

    def _add(self, batch: Batch[R, JobHandle[R]], chunk: Sequence[PreparedJob[R]], answers: Sequence[Inserted]) -> None:
        if (
            not (batch.keeps_handles or self._peek)
            and self._listener is ignore
            and len(answers) == len(chunk)
            and all(answer.status is _CREATED and not answer.deep for answer in answers)
        ):
            batch.add_stored(len(chunk))
            return
        batch.add(self._accept_all(chunk, answers))

    def _accept_all(
        self, chunk: Sequence[PreparedJob[R]], answers: Sequence[Inserted]
    ) -> Iterator[JobHandle[R] | HoldfastError]:
        for prepared, inserted in zip(chunk, answers, strict=True):
            try:
                yield self._accept(prepared, inserted)
            except HoldfastError as error:
                yield error

    def _limits(self, jobs: Iterable[NewJob]) -> Mapping[str, DepthLimit] | None:
        queues = self.settings.queues
        if queues.max_depth is None and queues.warn_depth is None and not queues.depths:
            return None
        limits = {job.queue: queues.depth_limit(job.queue) for job in jobs}
        return {queue: limit for queue, limit in limits.items() if limit is not None}

    def _accept(self, prepared: PreparedJob[R], inserted: Inserted) -> JobHandle[R]:
        """The handle for what the store answered, or the error that it stands for."""
        new, status = prepared.new, inserted.status
        created = status is InsertStatus.CREATED
        if not created:
            self._refuse(new, inserted)
        if inserted.deep:
            warn_depth = (self.settings.queues.depth_limit(new.queue) or DepthLimit()).warn_depth or 0
            tell(self._listener, QueueDeep(new.queue, warn_depth))
        if self._listener is not ignore:
            tell(self._listener, JobEnqueued(inserted.job_id, new.queue, new.task, created))
        details = None if self._peek is None else self._peek(inserted.job_id)
        return JobHandle(self, inserted.job_id, new.task, prepared.signature, created=created, details=details)

    def _refuse(self, new: NewJob, inserted: Inserted) -> None:
        """Raise the error that the answer stands for, if it stands for one."""
        status = inserted.status
        if status is InsertStatus.FULL:
            limit = self.settings.queues.depth_limit(new.queue)
            most = limit.max_depth if limit else None
            bound = "the capacity of the store" if most is None else f"max_depth={most}"
            raise QueueFull(
                f"queue {new.queue!r} holds as many waiting jobs as it may ({bound}): try again later, or add workers"
            )
        if status is InsertStatus.KEY_CONFLICT:
            raise KeyConflict(
                f"key {new.key.text if new.key else ''!r} of queue {new.queue!r} belongs to job {inserted.job_id}, "
                f"which has another task or payload",
                inserted.job_id,
            )

    # Reading.

    async def load(self, job_id: JobId) -> Job:
        """The job as the store has it, or `JobNotFound`."""
        job = await self._store.get(_check_id(job_id))
        if job is None:
            raise JobNotFound(
                f"there is no job {shown(job_id)}: it never existed, its retention ended, or the transaction that "
                f"enqueues it has not committed yet"
            )
        return job

    async def get(self, job_id: JobId) -> JobHandle[Any]:
        """A handle to a job known by its id. Its result is plain JSON, since the task's annotations are not known."""
        job = await self.load(job_id)
        return JobHandle(self, job.id, job.task, _UNTYPED, details=job)

    async def find(
        self,
        *,
        states: State | str | Iterable[State | str] = (),
        queue: str | None = None,
        task: str | None = None,
        correlation_id: str | None = None,
        cursor: JobId | None = None,
        limit: int = 100,
    ) -> JobPage:
        """Jobs that match, newest first. Pass a page's `next` as `cursor` for the page after it."""
        try:
            wanted = tuple(State(state) for state in ([states] if isinstance(states, str) else states))
        except ValueError as error:
            raise InvalidOption(f"{error}; the states are {', '.join(State)}") from error
        for what, name in (("queue", queue), ("task", task)):
            if name is not None:
                check_name(what, name)
        if correlation_id is not None:
            check_text("correlation_id", correlation_id, 256)
        if cursor is not None:
            _check_id(cursor)
        page = await self._store.find(
            JobQuery(states=wanted, queue=queue, task=task, correlation_id=correlation_id, cursor=cursor, limit=limit)
        )
        return JobPage(tuple(JobHandle(self, job.id, job.task, _UNTYPED, details=job) for job in page.jobs), page.next)

    async def counts(self) -> list[QueueCounts]:
        """Every queue that has jobs or is paused."""
        return await self._store.counts()

    # Steering.

    async def cancel(self, job_id: JobId) -> CancelAnswer:
        """Cancel a waiting job at once, or ask the worker that holds it. `JobNotFound` if there is none."""
        [answer] = await self._store.request_cancel([_check_id(job_id)])
        if answer is CancelAnswer.GONE:
            raise JobNotFound(f"there is no job {shown(job_id)} to cancel")
        tell(self._listener, CancelRequested(job_id, answer.value))
        return answer

    async def replay(self, job_id: JobId) -> JobHandle[Any]:
        """Bring an ended job back to its queue, with its payload as it was and a fresh set of retries."""
        while True:
            job = await self.load(job_id)
            if job.state not in ENDED:
                raise JobStillLive(f"job {job_id} is {job.state}; only a job that has ended can be replayed")
            [answer] = await self._store.apply([replay(job)])
            if answer is Applied.KEY_TAKEN:
                raise KeyConflict(
                    f"job {job_id} cannot come back: its key {job.key.text if job.key else ''!r} belongs to another "
                    f"job now",
                    job_id,
                )
            if answer in (Applied.APPLIED, Applied.ALREADY):
                tell(self._listener, JobReplayed(job_id, job.queue))
                return await self.get(job_id)
            # Somebody replayed or removed it in between: look again.

    async def forget(self, job_id: JobId) -> None:
        """Remove a job that has ended, for good. `JobNotFound`, or `JobStillLive` if it has not ended."""
        if not await self._store.forget([_check_id(job_id)]):
            job = await self.load(job_id)
            raise JobStillLive(f"job {job_id} is {job.state}; cancel it, or wait until it has ended, to forget it")

    async def pause(self, queue: str) -> None:
        """Stop claims from a queue. What is in flight goes on; enqueuing goes on."""
        await self._set_paused(queue, True)

    async def resume(self, queue: str) -> None:
        """Let claims from a queue go on."""
        await self._set_paused(queue, False)

    async def _set_paused(self, queue: str, paused: bool) -> None:
        await self._store.set_paused(check_name("queue", queue), paused)
        tell(self._listener, QueuePaused(queue, paused))

    async def wait_ended(self, job_id: JobId, timeout: float | None) -> Job:
        """The job once it has ended, or `NotFinished` after `timeout` seconds (None: wait for ever)."""
        if timeout is not None and (not isinstance(timeout, int | float) or math.isnan(timeout)):
            raise InvalidOption(f"timeout must be a number of seconds, or None to wait for ever, not {shown(timeout)}")
        clock = self.ports.clock
        deadline = None if timeout is None else clock.monotonic() + timeout
        pause = _FIRST_POLL
        while True:
            job = await self.load(job_id)
            if job.state in ENDED:
                return job
            left = pause if deadline is None else deadline - clock.monotonic()
            if left <= 0:
                waiting = f"no worker has taken it yet; does one run for queue {job.queue!r}?"
                told = waiting if job.state is State.READY else "it goes on"
                raise NotFinished(f"job {job_id} is still {job.state} after {timeout:g} s; {told}")
            await clock.sleep(min(pause, left))
            pause = min(pause * 2, _SLOWEST_POLL)


class JobHandle(Generic[R_co]):
    """A job that somebody enqueued or found. `state` and `details` are as last seen: `refresh` looks again."""

    def __init__(
        self,
        client: Client,
        job_id: JobId,
        task: str,
        signature: Signature,
        *,
        created: bool = False,
        details: Job | None = None,
    ) -> None:
        self.id = job_id
        self.task = task
        self.created = created
        """Whether this very call created the job. False: its key or id was there already."""
        self.details = details
        self._client = client
        self._signature = signature

    @property
    def state(self) -> State:
        """The state as last seen."""
        return self.details.state if self.details else State.READY

    @property
    def failures(self) -> list[Failure]:
        """The error history as last seen, oldest first."""
        return decode_history(self.details.failure_history) if self.details else []

    @property
    def progress(self) -> Any:
        """What the handler told last with `current().progress(...)`, as last seen; None if nothing."""
        return msgspec.json.decode(self.details.progress) if self.details and self.details.progress else None

    async def look(self) -> JobHandle[R_co]:
        """Look the job up if it is there: one that was found by its key may be pruned, or not yet committed."""
        with contextlib.suppress(JobNotFound):
            await self.arefresh()
        return self

    async def arefresh(self) -> JobHandle[R_co]:
        """Look the job up again; `JobNotFound` if its retention ended."""
        self.details = await self._client.load(self.id)
        return self

    def refresh(self) -> JobHandle[R_co]:
        """Blocking twin of `arefresh`."""
        return self._client.portal.run("refresh", self.arefresh())

    async def aresult(self, timeout: float | None = None) -> R_co:
        """Wait until the job has ended, and return what its handler returned.

        Raises `JobFailed`, `JobCancelled`, `ResultNotKept`, or `NotFinished` after `timeout` seconds.
        """
        job = self.details = await self._client.wait_ended(self.id, timeout)
        if job.state is State.FAILED:
            last = self.failures[-1] if self.failures else None
            raise JobFailed(
                f"job {self.id} ({self.task}) failed for good ({job.reason})"
                + (f": {last.type}: {last.message}" if last else ""),
                self.failures,
            )
        if job.state is State.CANCELLED:
            raise JobCancelled(f"job {self.id} ({self.task}) was cancelled")
        if job.result is not None:
            return cast(R_co, self._signature.decode_result(job.result))
        if self.failures and self.failures[-1].type == RESULT_NOT_KEPT:
            raise ResultNotKept(f"job {self.id} ({self.task}) succeeded, but {self.failures[-1].message}")
        return cast(R_co, None)

    def result(self, timeout: float | None = None) -> R_co:
        """Blocking twin of `aresult`."""
        return self._client.portal.run("result", self.aresult(timeout))

    async def acancel(self) -> CancelAnswer:
        """Cancel the job: at once if it waits, by asking its worker if it runs."""
        return await self._client.cancel(self.id)

    def cancel(self) -> CancelAnswer:
        """Blocking twin of `acancel`."""
        return self._client.portal.run("cancel", self.acancel())

    def __repr__(self) -> str:
        return f"<Job {self.id} {self.task} {self.state}>"


def _check_id(job_id: JobId) -> JobId:
    if isinstance(job_id, JobHandle):
        raise InvalidOption(f"{job_id!r} is a handle: pass its id, or call its own method")
    return check_text("job id", job_id, 128)
