"""The runner: starts claimed jobs in free slots, watches their limits, and hands their outcomes to the settler.

A coroutine function runs on the event loop, a plain one on a thread, an isolated one (or any job that was running when
a process died) in a process of its own. Everything here happens on the event loop.

A job that ends only leaves its outcome. What follows from it, the next jobs for the free slots and word to the claimer,
is done once for all jobs that end in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from functools import partial
from typing import Any, Protocol

import msgspec

from holdfast.config import WorkerSettings
from holdfast.errors import UnknownTask
from holdfast.events import HandlerStuck, JobStarted, Listener, TaskUnknown, hears_routine, tell
from holdfast.failures import capture
from holdfast.job import Job, Lease
from holdfast.lifecycle import Failed, Outcome, Released, Snoozed
from holdfast.policy import RetryPolicy
from holdfast.ports import MICROSECONDS, Ports
from holdfast.registry import Registry, TaskSpec
from holdfast.store import Store
from holdfast.worker.board import Board
from holdfast.worker.context import CurrentJob, Stop, Surroundings
from holdfast.worker.event_loop import makes_plain_tasks
from holdfast.worker.handling import NOTHING_RETURNED, Handling, hard_timeout_failure
from holdfast.worker.holding import Holding
from holdfast.worker.settler import Settler
from holdfast.worker.threads import HandlerThreads

_LONGEST_UNKNOWN_WAIT = 60.0
_WINDOW_SECONDS = 0.05
_LARGEST_WINDOW = 2_000
_MEASURE_EVERY = 0.02
_STALE_AFTER = 5 * _WINDOW_SECONDS
_NO_THREAD_PAUSE = 1.0
"""When the machine has no threads left, the job goes back after a while: others may be better off."""


class Isolation(Protocol):
    """Where jobs run in processes of their own."""

    def run(
        self, job: Job, current: CurrentJob, hard_timeout: float | None, begun: Callable[[], None]
    ) -> Coroutine[Any, Any, Outcome]:
        """Run the job alone in a process, after `begun` was called. Whatever becomes of that process becomes the
        outcome. Cancelled, it tells the handler (`current.stop` says why) and waits for what that makes of it; before
        the handler has begun, it ends without it.
        """

    async def close(self) -> None:
        """End every process."""


class _Plan(msgspec.Struct, frozen=True):
    """What is the same for every job of a task."""

    spec: TaskSpec
    is_async: bool
    isolated: bool
    timeout: float
    hard_timeout: float
    first_limit: float
    """The smaller of the two."""
    policy: RetryPolicy


class Running(msgspec.Struct, eq=False):
    """A job in a slot."""

    job: Job
    plan: _Plan
    current: CurrentJob
    place: int
    """On the board."""
    started: float
    soft_deadline: float
    hard_deadline: float
    begun: bool = True
    """False while an isolated job waits for its process. Its limits and its crash count begin with its handler."""
    task: asyncio.Task[None] | None = None
    cancel_asked: bool = False


class Runner:
    """Runs up to `settings.concurrency` jobs at once. `stuck` is called when a handler had to be left behind."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        settings: WorkerSettings,
        handling: Handling,
        holding: Holding,
        board: Board,
        settler: Settler,
        isolation: Isolation,
        ports: Ports,
        listener: Listener,
        freed: Callable[[], None],
        stuck: Callable[[], None],
    ) -> None:
        self._store = store
        self._registry = registry
        self._settings = settings
        self._handling = handling
        self._holding = holding
        self._board = board
        self._settler = settler
        self._isolation = isolation
        self._ports = ports
        self._listener = listener
        self._freed = freed
        self._stuck = stuck
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        """As the worker found it. Each job gets a copy: what a handler leaves in its context must not reach the next.
        Nothing ever runs in this one, so that a listener leaves nothing in it, either."""
        self._own_context = self._context.copy()
        self._plans: dict[str, _Plan] = {}
        self._concurrency = settings.concurrency
        self._buffer: deque[Job] = deque()
        self._threads: HandlerThreads[Outcome] = HandlerThreads(ports, "holdfast-handler")
        self._monotonic = ports.clock.monotonic
        self._routine = hears_routine(listener)
        self._surroundings = Surroundings(store, ports, self._note)
        self._turning = self._plain_tasks = False
        self._last_start = self._last_fed = self._measured_at = ports.clock.monotonic()
        self._finished = 0
        self._rate = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._noted: dict[Lease, CurrentJob] = {}
        self._abandoned: set[asyncio.Task[None]] = set()
        self.running: dict[int, Running] = {}
        """By their places on the board."""
        self.stopping = False

    # What the claimer asks.

    @property
    def free(self) -> int:
        """How many slots are free."""
        return self._concurrency - len(self.running)

    @property
    def wanted(self) -> int:
        """How many more jobs to claim: free slots, and as many behind them as have lately ended in 50 ms.

        Nothing while all slots are busy and none has changed hands lately: others may be idle.
        """
        now = self._monotonic()
        free = self.free
        if not free and now - self._last_start > 2 * _WINDOW_SECONDS:
            return 0
        elapsed = now - self._measured_at
        if elapsed >= _MEASURE_EVERY:
            self._rate += (self._finished / elapsed - self._rate) / 2
            self._finished, self._measured_at = 0, now
        window = min(int(self._rate * _WINDOW_SECONDS), _LARGEST_WINDOW)
        buffered = len(self._buffer)
        return 0 if buffered > window // 2 else free + window - buffered

    def feed(self, jobs: Iterable[Job]) -> None:
        """Start these jobs as slots allow."""
        self._buffer.extend(jobs)
        self._last_fed = self._monotonic()
        self._pump()

    # Starting and ending.

    def _pump(self) -> None:
        """Start jobs until all slots are taken, or none is left."""
        buffer = self._buffer
        self._plain_tasks = makes_plain_tasks(self._loop)
        while not self.stopping and (count := min(len(buffer), self.free)) > 0:
            jobs = [buffer.popleft() for _ in range(count)]
            startable = self._holding.start(jobs)
            now = self._last_start = self._monotonic()
            self._watch_until(min([self._start(job, now) for job in startable], default=math.inf), now)
            if len(startable) < count:
                may_start = {(job.id, job.version) for job in startable}
                for job in jobs:
                    if (job.id, job.version) not in may_start:
                        self._holding.settled(job)

    def _start(self, job: Job, now: float) -> float:
        """Start the job in a free slot. By when to look at it."""
        plan = self._plans.get(job.task) or self._plan(job)
        if plan is None:
            return math.inf
        current = CurrentJob(job, self._surroundings, plan.is_async)
        if plan.isolated or job.suspect:
            self._start_isolated(job, plan, current, now)
            return math.inf
        hard_deadline = now + plan.hard_timeout
        place = self._board.begin(job.id, job.version, hard_deadline)
        running = self.running[place] = Running(job, plan, current, place, now, now + plan.timeout, hard_deadline)
        if self._routine:
            self._tell_started(job)
        if plan.is_async:
            work, context = self._run_async(running), self._context.copy()
            if self._plain_tasks:  # with its name at once, which uvloop would make twice
                running.task = asyncio.Task(work, loop=self._loop, name=job.id, context=context)
            else:
                running.task = self._loop.create_task(work, name=job.id, context=context)
        else:
            call = partial(self._context.copy().run, self._handling.call_plain, plan.spec, job, current)
            try:
                self._threads.submit(call, partial(self._finish, running))
            except RuntimeError:
                self._loop.call_later(_NO_THREAD_PAUSE, self._finish, running, Released())
        return now + plan.first_limit

    def _start_isolated(self, job: Job, plan: _Plan, current: CurrentJob, now: float) -> None:
        place = self._board.take()
        running = self.running[place] = Running(job, plan, current, place, now, math.inf, math.inf, begun=False)
        if self._routine:
            self._tell_started(job)
        # By a callback, too: one that is cancelled before its first step never gets that far.
        running.task = self._loop.create_task(self._run_isolated(running), context=self._context.copy())
        running.task.add_done_callback(partial(self._ended, running), context=self._own_context)

    def _tell_started(self, job: Job) -> None:
        waited = max(0, (job.claimed_at or job.run_at) - job.run_at) / MICROSECONDS
        tell(
            self._listener,
            JobStarted(job.session_id or "", job.id, job.queue, job.task, job.attempt + 1, waited, job.correlation_id),
        )

    async def _run_async(self, running: Running) -> None:
        self._finish(running, await self._handling.call_async(running.plan.spec, running.job, running.current))

    async def _run_isolated(self, running: Running) -> None:
        limit = running.plan.hard_timeout
        hard = None if math.isinf(limit) else limit
        begun = partial(self._begin_isolated, running)
        self._finish(running, await self._isolation.run(running.job, running.current, hard, begun))

    def _begin_isolated(self, running: Running) -> None:
        now = self._monotonic()
        running.begun, running.started = True, now
        running.soft_deadline = now + running.plan.timeout
        # The hard limit is kept where the process can be killed alone.
        self._board.start(running.place, running.job.id, running.job.version, math.inf)
        self._watch_until(running.soft_deadline, now)

    def _ended(self, running: Running, task: asyncio.Task[None]) -> None:
        """The task is over. Usually the job has told its outcome before."""
        if self.running.get(running.place) is not running:
            return
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._finish(running, Released())
        else:
            failure = capture(error, at=self._ports.clock.now(), attempt=running.job.attempt + 1)
            self._finish(running, Failed(failure))

    def _finish(self, running: Running, outcome: Outcome) -> None:
        """The job has an outcome. This may run in the job's own context: nothing here may call anybody else's code."""
        if self.running.get(running.place) is not running:
            return  # it was left behind: its job is settled, and its place has another
        del self.running[running.place]
        self._finished += 1
        # Nobody hears of a success how long it took who does not hear of successes.
        quiet = outcome is NOTHING_RETURNED and not self._routine
        self._leave(running, outcome, 0.0 if quiet else self._monotonic() - running.started)
        if not self._turning:
            self._turn_soon()

    def _turn_soon(self) -> None:
        self._turning = True
        self._loop.call_soon(self._turn, context=self._own_context)

    def _turn(self) -> None:
        """Give the free slots to others, once for all jobs that have ended since the last time."""
        self._turning = False
        self._pump()
        self._freed()

    def _leave(self, running: Running, outcome: Outcome, seconds: float) -> None:
        self._board.end(running.place)
        if self._noted:
            self._noted.pop(running.job.lease, None)
        self._settler.add(running.job, outcome, running.plan.policy, seconds, running.cancel_asked)

    def _plan(self, job: Job) -> _Plan | None:
        try:
            spec = self._registry[job.task]
        except UnknownTask as error:
            tell(self._listener, TaskUnknown(job.session_id or "", job.id, job.queue, job.task))
            failure = capture(error, at=self._ports.clock.now(), attempt=job.attempt + 1)
            wait = min(2.0 ** min(job.snoozes, 10), _LONGEST_UNKNOWN_WAIT) * (0.5 + self._ports.random.fraction() / 2)
            outcome = Snoozed(wait, msgspec.structs.replace(failure, traceback=""))
            self._settler.add(job, outcome, self._settings.policy())
            return None
        options = spec.options
        timeout = math.inf if options.timeout is None else options.timeout
        hard_timeout = math.inf if options.hard_timeout is None else options.hard_timeout
        plan = self._plans[job.task] = _Plan(
            spec,
            spec.is_async,
            options.isolation == "process",
            timeout,
            hard_timeout,
            min(timeout, hard_timeout),
            self._settings.policy(options.backoff),
        )
        return plan

    # Limits.

    def _watch_until(self, deadline: float, now: float) -> None:
        if math.isinf(deadline):
            return
        wait = deadline - now
        when = self._loop.time() + wait
        if self._watch is None or when < self._watch.when():
            if self._watch is not None:
                self._watch.cancel()
            self._watch = self._loop.call_later(max(wait, 0), self._look, context=self._own_context)

    def _look(self) -> None:
        """Act on every deadline that has passed, and come back for the next."""
        self._watch = None
        now = self._ports.clock.monotonic()
        following = math.inf
        for running in list(self.running.values()):
            if running.hard_deadline <= now:
                self._leave_behind(running)
                continue
            if running.soft_deadline <= now:
                running.soft_deadline = math.inf
                self._ask_to_stop(running, Stop.TIMEOUT)
            following = min(following, running.soft_deadline, running.hard_deadline)
        self._watch_until(following, now)

    def _ask_to_stop(self, running: Running, why: Stop) -> None:
        if running.current.stop is None:
            running.current.stop = why
            if running.task is not None:
                # One that is cancelled before its first step never tells an outcome.
                running.task.add_done_callback(partial(self._ended, running), context=self._own_context)
                running.task.cancel()

    def _leave_behind(self, running: Running) -> None:
        """Past its hard limit: fail the job by its lease, give its slot to others, and have the process replaced."""
        job, limit = running.job, running.plan.hard_timeout
        del self.running[running.place]
        tell(self._listener, HandlerStuck(job.session_id or "", job.id, job.queue, job.task, limit))
        running.current.stop = running.current.stop or Stop.TIMEOUT
        if running.task is not None:
            self._abandoned.add(running.task)
            running.task.add_done_callback(self._abandoned.discard)
            running.task.cancel()
        self._leave(running, Failed(hard_timeout_failure(job, limit, self._ports)), limit)
        self._stuck()
        if not self._turning:
            self._turn_soon()

    # What others ask.

    def cancel(self, job_ids: Iterable[str]) -> None:
        """Somebody asked to cancel these jobs: tell those that run, and settle those that do not yet."""
        wanted = set(job_ids)
        for running in self.running.values():
            if running.job.id in wanted and not running.cancel_asked:
                running.cancel_asked = True
                self._ask_to_stop(running, Stop.CANCEL)
        for job in [job for job in self._buffer if job.id in wanted]:
            self._buffer.remove(job)
            self._release(job, cancel_asked=True)

    def release_unstarted(self) -> int:
        """Give back every job that waits for a slot, or for a process of its own."""
        for running in list(self.running.values()):
            if not running.begun:
                self._ask_to_stop(running, Stop.SHUTDOWN)
        return self._release_buffer()

    def _release_buffer(self) -> int:
        jobs = list(self._buffer)
        self._buffer.clear()
        return sum(self._release(job) for job in jobs)

    def find_ended(self) -> None:
        """Settle the jobs of tasks that are over without having told an outcome: somebody else's code has cancelled
        them before their first step. That is rare, so it is looked for, and costs nothing where it does not happen.
        """
        for running in list(self.running.values()):
            if running.task is not None and running.task.done():
                self._ended(running, running.task)

    def release_stale(self) -> int:
        """Give back what still waits for a slot though it should have had one long ago: the handlers became slow, and
        others may be idle. How many it was.
        """
        stale = self._buffer and self._monotonic() - self._last_fed > _STALE_AFTER
        return self._release_buffer() if stale else 0

    def _release(self, job: Job, *, cancel_asked: bool = False) -> bool:
        if not self._holding.withdraw(job):
            self._holding.settled(job)  # the heart was faster
            return False
        self._settler.add(job, Released(), RetryPolicy(), cancel_asked=cancel_asked)
        return True

    def stop_running(self, why: Stop) -> None:
        """Ask every handler to stop."""
        for running in list(self.running.values()):
            self._ask_to_stop(running, why)

    def abandon(self) -> None:
        """The session is closed: what waits here is others' now, and so is what runs, which is asked to stop."""
        self._buffer.clear()
        self.stop_running(Stop.LOST)

    def release_running(self) -> int:
        """Give back the jobs of handlers that did not stop when they were asked to. The process must end now."""
        left = list(self.running.values())
        self.running.clear()
        for running in left:
            self._leave(running, Released(), 0.0)
        return len(left)

    def progress_to_keep(self) -> list[CurrentJob]:
        """The jobs that told new progress since the last call."""
        noted = []
        while self._noted:  # threads go on adding: taking one by one loses none
            noted.append(self._noted.popitem()[1])
        return noted

    def _note(self, current: CurrentJob) -> None:
        self._noted[current.lease] = current

    async def close(self) -> None:
        """End threads and processes. Nothing runs any more."""
        if self._watch is not None:
            self._watch.cancel()
        self._threads.close()
        await self._isolation.close()
