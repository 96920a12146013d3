"""From one claimed job to its outcome: decode, enter the middleware, call, and turn whatever happens into a value.

Handlers are foreign code: nothing that they raise, not even `SystemExit`, gets past here.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, ExitStack
from typing import Any

import msgspec

from holdfast.codec import DEFAULT_PAYLOAD_LIMIT, encode_result
from holdfast.errors import InvalidOption, InvalidPayload
from holdfast.failures import RESULT_NOT_KEPT, Failure, capture
from holdfast.job import Job
from holdfast.lifecycle import Failed, HandlerOutcome, Released, Snoozed, Succeeded
from holdfast.ports import Clock, Ports
from holdfast.registry import TaskSpec
from holdfast.signals import GiveUp, Retry, Snooze
from holdfast.worker.context import CurrentJob, Stop, enter

Middleware = Callable[[CurrentJob], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
"""Called once per job. What it returns is entered before the handler and left after it, whatever happened."""

NOTHING_RETURNED = Succeeded()
"""What most handlers make of their job: they return, and return nothing."""


class Handling(msgspec.Struct, frozen=True):
    """How handlers are called here. One for all jobs of a process."""

    clock: Clock
    middleware: Sequence[Middleware] = ()
    max_result: int = DEFAULT_PAYLOAD_LIMIT

    async def call_async(self, spec: TaskSpec, job: Job, current: CurrentJob) -> HandlerOutcome:
        """Run a coroutine function on this loop. The calling task is the job's own: cancelling it stops the job."""
        enter(current)
        try:
            if not self.middleware:
                return self._succeeded(await called(spec, job), job)
            arguments = spec.signature.decode(job.payload)  # first: what it does not fit opens nothing
            returned, result = False, None
            async with AsyncExitStack() as stack:
                for opened in self._opened(current):
                    if isinstance(opened, AbstractAsyncContextManager):
                        await stack.enter_async_context(opened)
                    else:
                        stack.enter_context(opened)
                result = await spec.function(**arguments)
                returned = True
            return self._succeeded(result, job) if returned else self._swallowed(job, current)
        except BaseException as error:
            return self.outcome_of(error, spec, job, current)

    def call_plain(self, spec: TaskSpec, job: Job, current: CurrentJob) -> HandlerOutcome:
        """Run a plain function on this thread, in a context of its own."""
        enter(current)
        try:
            if not self.middleware:
                return self._succeeded(called(spec, job), job)
            arguments = spec.signature.decode(job.payload)  # first: what it does not fit opens nothing
            returned, result = False, None
            with ExitStack() as stack:
                for opened in self._opened(current):
                    if isinstance(opened, AbstractAsyncContextManager) and not isinstance(
                        opened, AbstractContextManager
                    ):
                        raise InvalidOption(
                            f"task {job.task} is a plain function, and a middleware opened an asynchronous "
                            f"{type(opened).__name__} for it: let the middleware look at `job.is_async`"
                        )
                    stack.enter_context(opened)
                result = spec.function(**arguments)
                returned = True
            return self._succeeded(result, job) if returned else self._swallowed(job, current)
        except BaseException as error:
            return self.outcome_of(error, spec, job, current)

    def _opened(self, current: CurrentJob) -> Any:
        return (middleware(current) for middleware in self.middleware)

    def _succeeded(self, result: Any, job: Job) -> HandlerOutcome:
        if result is None:
            return NOTHING_RETURNED
        try:
            return Succeeded(encode_result(result, self.max_result))
        except Exception as error:
            if inspect.iscoroutine(result):
                result.close()
                raise InvalidOption(
                    f"{job.task} returned a coroutine that nobody awaits: make it `async def`"
                ) from None
            # Its effects have happened, so the job must not run again for the sake of what it returned.
            failure = capture(error, at=self.clock.now(), attempt=job.attempt + 1)
            return Succeeded(None, msgspec.structs.replace(failure, type=RESULT_NOT_KEPT, traceback=""))

    def _swallowed(self, job: Job, current: CurrentJob) -> HandlerOutcome:
        """A middleware's `__exit__` answered True: the error is gone, and so is the result."""
        if current.stop is Stop.SHUTDOWN:
            return Released()
        message = "a middleware suppressed the error of the handler"
        return Failed(Failure(self.clock.now(), job.attempt + 1, "SwallowedError", message))

    def outcome_of(self, error: BaseException, spec: TaskSpec, job: Job, current: CurrentJob) -> HandlerOutcome:
        """What follows from an exception that a handler, its middleware or its arguments raised."""
        if current.stop is Stop.SHUTDOWN:
            return Released()
        at, attempt = self.clock.now(), job.attempt + 1
        if isinstance(error, asyncio.CancelledError) and current.stop is not None:
            return Failed(stopped(current.stop, spec, at, attempt))
        failure = capture(error, at=at, attempt=attempt)
        if isinstance(error, Snooze):
            return Snoozed(error.seconds, failure)
        if isinstance(error, Retry):
            return Failed(failure, retry_after=error.after)
        return Failed(failure, permanent=isinstance(error, (GiveUp, InvalidPayload, *spec.options.permanent)))


def called(spec: TaskSpec, job: Job) -> Any:
    """What the function returns for the job's arguments."""
    signature = spec.signature
    if signature.all_given:
        return spec.function(*signature.decode_in_order(job.payload))
    return spec.function(**signature.decode(job.payload))


def stopped(stop: Stop, spec: TaskSpec, at: int, attempt: int) -> Failure:
    """The failure of a handler that ended because it was told to."""
    if stop is Stop.TIMEOUT:
        return Failure(
            at, attempt, "TimeoutError", f"the handler ran longer than its timeout of {spec.options.timeout:g} s"
        )
    return Failure(at, attempt, "CancelledError", f"the handler was stopped: {stop.value}")


def hard_timeout_failure(job: Job, limit: float, ports: Ports) -> Failure:
    """The failure of a job that ran past its hard limit."""
    message = f"the handler ran past its hard limit of {limit:g} s and did not stop"
    return Failure(ports.clock.now(), job.attempt + 1, "HardTimeout", message)
