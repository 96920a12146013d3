"""A worker without a background: it runs one claimed job in the caller, and settles it before it returns.

Handlers are called by the worker's own `Handling`, outcomes become moves by `lifecycle.settle`, and follow-ups come
from `FollowUps`: what a test sees is what production does. Of the worker's limits only `timeout` is kept. Nothing is
isolated in a process, and nothing is killed.

In synchronous code a plain handler runs on the calling thread and a coroutine on the application's portal. In an event
loop a coroutine runs on that loop and a plain handler on a thread, where it may block, as in a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
from collections.abc import Callable, Coroutine, Generator, Iterator
from typing import Any, TypeVar

import msgspec
from msgspec.structs import asdict

from holdfast.app import Holdfast
from holdfast.client import Client
from holdfast.errors import HoldfastError, InvalidPayload
from holdfast.events import JobStarted, tell
from holdfast.job import Job, JobId, Reason, State
from holdfast.lifecycle import Applied, HandlerOutcome, Move, Outcome, Released, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import MICROSECONDS, SYSTEM, Ports
from holdfast.registry import TaskSpec
from holdfast.store import Claimed, ClaimRequest, Session
from holdfast.sync import Portal
from holdfast.tasks import FollowUps
from holdfast.testing.expectations import arguments_of
from holdfast.testing.recording import RecordingStore
from holdfast.worker.context import CurrentJob, Stop, Surroundings
from holdfast.worker.handling import Handling, stopped
from holdfast.worker.settler import settlement

T = TypeVar("T")

_FAILED = frozenset({Reason.RETRIED, Reason.EXHAUSTED, Reason.PERMANENT, Reason.SNOOZED_OUT})
_real_seconds = SYSTEM.clock.monotonic


class EndlessJobs(HoldfastError):
    """Jobs that enqueue jobs without an end, or so many that it looks like it."""


class Run(msgspec.Struct, frozen=True, eq=False):
    """One attempt at a job, and where the job is after it."""

    job_id: JobId
    task: str
    queue: str
    arguments: dict[str, Any]
    attempt: int
    state: State
    """`ready` if it is to run again: `reason` says why, `retry_in` when."""
    reason: Reason
    result: Any
    """What the handler returned, as `job.result()` gives it."""
    error: BaseException | None
    """What the handler raised: the exception itself."""
    retry_in: float | None
    """In how many seconds it runs again."""
    follow_ups: tuple[JobId, ...]
    """The jobs that were enqueued because this one failed for good."""

    @property
    def failed(self) -> bool:
        """Whether the attempt failed. One that was snoozed or cancelled did not."""
        return self.error is not None and self.reason in _FAILED

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value!r:.80}" for name, value in self.arguments.items())
        raised = "" if self.error is None else f": {type(self.error).__name__}: {self.error}"
        again = "" if self.retry_in is None else f", again in {self.retry_in:g} s"
        return f"{self.task}({given}), attempt {self.attempt}: {self.state} ({self.reason}{again}){raised}"


class _RunningJob(CurrentJob):
    """The current job, and what only a test wants to know of it."""

    __slots__ = ("_deadline", "interrupt", "raised")

    def __init__(self, job: Job, spec: TaskSpec, store: RecordingStore, ports: Ports) -> None:
        super().__init__(job, Surroundings(store, ports, lambda _: self._keep_progress(store)), spec.is_async)
        self.raised: BaseException | None = None
        self.interrupt: Callable[[], object] = lambda: None
        self._deadline = math.inf if spec.options.timeout is None else _real_seconds() + spec.options.timeout

    @property
    def cancelled(self) -> bool:
        """See `CurrentJob.cancelled`. A plain handler has nobody beside it who watches its time, so it does so here."""
        if _real_seconds() > self._deadline:
            self.ask_to_stop(Stop.TIMEOUT)
        return super().cancelled

    def _keep_progress(self, store: RecordingStore) -> None:
        at_once(store.note(self.lease, self.latest_progress or b"null"))

    def ask_to_stop(self, why: Stop) -> None:
        """Tell the handler to stop, as a worker would. May come from any thread."""
        if self.stop is None:
            self.stop = why
            self.interrupt()

    def error_of(self, spec: TaskSpec, outcome: HandlerOutcome) -> BaseException | None:
        """What to show of what the handler raised."""
        if isinstance(outcome, Succeeded):
            return None
        if isinstance(self.raised, asyncio.CancelledError) and self.stop is Stop.TIMEOUT:
            return TimeoutError(stopped(Stop.TIMEOUT, spec, 0, 0).message)
        return self.raised


class _WatchedHandling(Handling, frozen=True):
    """As the worker calls handlers, and besides it keeps the exception itself."""

    def outcome_of(self, error: BaseException, spec: TaskSpec, job: Job, current: CurrentJob) -> HandlerOutcome:
        """See `Handling.outcome_of`."""
        if isinstance(current, _RunningJob):
            current.raised = error
        return super().outcome_of(error, spec, job, current)


Steps = Generator[Job, Run, None]
"""Yields claimed jobs; is sent what became of each."""


class Caller:
    """Claims, runs and settles jobs of one application under test, one at a time in each caller."""

    def __init__(self, app: Holdfast, client: Client, store: RecordingStore, on_run: Callable[[Run], None]) -> None:
        self.store = store
        self.runs: list[Run] = []
        """Every attempt so far, oldest first."""
        self._on_run = on_run
        self._app = app
        self._portal: Portal = client.portal
        self._ports = client.ports
        self._follow_ups = FollowUps(app.tasks, client, app.listener)
        self._session = Session(id=self._ports.ids.session_id(), host="test")
        self._context = contextvars.copy_context()
        self._turn = 0
        self._running: dict[JobId, _RunningJob] = {}
        store.cancel_running = self._cancel_running

    # Claiming.

    def claim_next(self) -> Claimed:
        """The next job that is due, if any, in the order of priorities and shares; and when the one after it is due."""
        at_once(self.store.open_session(self._session))
        # Each sixteenth turn of a worker begins with the lowest priority. In a test the order has no exceptions.
        turn, self._turn = self._turn + self._turn // 15, self._turn + 1
        queues = self.store.waiting_queues()
        return at_once(self.store.claim(ClaimRequest(session_id=self._session.id, queues=queues, limit=1, turn=turn)))

    def claim_one(self, job_id: JobId, *, early: bool = False) -> Job | None:
        """See `RecordingStore.claim_one`."""
        at_once(self.store.open_session(self._session))
        return self.store.claim_one(job_id, self._session.id, early=early)

    def release(self, job: Job) -> None:
        """Give a claimed job back."""
        self._settle(job, Released(), RetryPolicy())

    def context(self) -> contextvars.Context:
        """What a handler sees of context variables: as they were when the test began, never those of its caller."""
        return self._context.copy()

    # Running.

    def follow_blocking(self, steps: Steps, context: Callable[[Job], contextvars.Context]) -> None:
        """Run what the steps yield, to their end."""
        with contextlib.closing(steps):
            job = next(steps, None)
            while job is not None:
                job = _next(steps, self._run_blocking(job, context(job)))

    async def follow(self, steps: Steps, context: Callable[[Job], contextvars.Context]) -> None:
        """The same in an event loop."""
        with contextlib.closing(steps):
            job = next(steps, None)
            while job is not None:
                job = _next(steps, await self._run(job, context(job)))

    def _run_blocking(self, job: Job, context: contextvars.Context) -> Run:
        with self._begun(job) as (spec, current, handling):
            if spec.is_async:
                handler = self._on_loop(handling, spec, job, current)
                outcome = context.run(self._portal.run, "drain", handler)
            else:
                outcome = context.run(handling.call_plain, spec, job, current)
        return self._end(job, spec, current, outcome)

    async def _run(self, job: Job, context: contextvars.Context) -> Run:
        with self._begun(job) as (spec, current, handling):
            if spec.is_async:
                handler = self._on_loop(handling, spec, job, current)
                outcome = await asyncio.get_running_loop().create_task(handler, context=context)
            else:
                outcome = await self._on_thread(handling, spec, job, current, context)
        return self._end(job, spec, current, outcome)

    @contextlib.contextmanager
    def _begun(self, job: Job) -> Iterator[tuple[TaskSpec, _RunningJob, Handling]]:
        spec = self._app.tasks[job.task]
        current = _RunningJob(job, spec, self.store, self._ports)
        self._running[job.id] = current
        tell(
            self._app.listener,
            JobStarted(
                job.session_id or "",
                job.id,
                job.queue,
                job.task,
                job.attempt + 1,
                max(0, (job.claimed_at or job.run_at) - job.run_at) / MICROSECONDS,
                job.correlation_id,
            ),
        )
        try:
            yield spec, current, _WatchedHandling(**asdict(self._app.handling))
        except BaseException:  # the waiting was broken off, so there is no outcome
            self.release(job)
            raise
        finally:
            self._running.pop(job.id, None)

    async def _on_loop(self, handling: Handling, spec: TaskSpec, job: Job, current: _RunningJob) -> HandlerOutcome:
        loop = asyncio.get_running_loop()
        handler = loop.create_task(handling.call_async(spec, job, current))
        current.interrupt = lambda: loop.call_soon_threadsafe(handler.cancel)
        # Not `await handler`: a handler that is cancelled has an outcome, and whoever cancelled us would not notice.
        try:
            done, _ = await asyncio.wait({handler}, timeout=spec.options.timeout)
            if not done:
                current.ask_to_stop(Stop.TIMEOUT)
                await asyncio.wait({handler})
        except asyncio.CancelledError:
            current.stop = current.stop or Stop.SHUTDOWN
            handler.cancel()
            await asyncio.wait({handler})
            raise
        if handler.cancelled():  # before its first step
            return handling.outcome_of(asyncio.CancelledError(), spec, job, current)
        return handler.result()

    async def _on_thread(
        self, handling: Handling, spec: TaskSpec, job: Job, current: _RunningJob, context: contextvars.Context
    ) -> HandlerOutcome:
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[HandlerOutcome] = loop.create_future()

        def work() -> None:
            outcome = context.run(handling.call_plain, spec, job, current)
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set_result, outcome)

        SYSTEM.spawner.thread(work, "holdfast-handler")
        try:
            await asyncio.wait({ended})
        except asyncio.CancelledError:
            current.ask_to_stop(Stop.SHUTDOWN)
            raise
        return ended.result()

    def _cancel_running(self, job_id: JobId) -> None:
        if running := self._running.get(job_id):
            running.ask_to_stop(Stop.CANCEL)

    # Settling.

    def _end(self, job: Job, spec: TaskSpec, current: _RunningJob, outcome: HandlerOutcome) -> Run:
        move = self._settle(job, outcome, self._app.settings.worker.policy(spec.options.backoff))
        after = self.store.peek(job.id)
        run = Run(
            job_id=job.id,
            task=job.task,
            queue=job.queue,
            arguments=arguments_of(spec, job.payload),
            attempt=job.attempt + 1,
            state=after.state if after else move.to,
            reason=after.reason if after else move.reason,
            result=_result_of(spec, after),
            error=current.error_of(spec, outcome),
            retry_in=None if move.delay is None else move.delay / MICROSECONDS,
            follow_ups=tuple(following.id for following in move.then),
        )
        self.runs.append(run)
        self._on_run(run)
        return run

    def _settle(self, job: Job, outcome: Outcome, policy: RetryPolicy) -> Move:
        cancel_asked = False
        while True:
            move = settle(job, outcome, policy, self._ports.random, cancel_asked=cancel_asked)
            if move.to is State.FAILED:
                move = self._follow_ups.add(job, move)
            [answer] = at_once(self.store.apply([move]))
            if answer is not Applied.CANCEL_ASKED:
                break
            cancel_asked = True
        tell(self._app.listener, settlement(job, move, answer, 0.0))
        return move


def _next(steps: Steps, run: Run) -> Job | None:
    try:
        return steps.send(run)
    except StopIteration:
        return None


def stops_the_test(error: BaseException | None) -> bool:
    """Whether what a handler raised is not the handler's own affair: Ctrl-C, `pytest.fail`, jobs without an end."""
    return isinstance(error, EndlessJobs) or not isinstance(
        error, Exception | SystemExit | asyncio.CancelledError | None
    )


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, as none of the memory store does, in any code."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    work.close()
    raise RuntimeError("a verb of the memory store waited")


def _result_of(spec: TaskSpec, job: Job | None) -> Any:
    if job is None or job.result is None:
        return None
    try:
        return spec.signature.decode_result(job.result)
    except InvalidPayload:  # what it returned is not what it is annotated with: `job.result()` says so
        return msgspec.json.decode(job.result)
