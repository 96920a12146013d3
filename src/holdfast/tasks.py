"""Tasks: the typed handle through which a registered function is enqueued, and the options of one call."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from enum import Enum
from functools import cached_property
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

import msgspec
from msgspec.structs import replace

from holdfast.batches import PreparedJob
from holdfast.client import Client, JobHandle
from holdfast.codec import payload_hash
from holdfast.config import Settings
from holdfast.errors import InvalidOption, UnknownTask, shown
from holdfast.events import Listener, PartFailed, tell
from holdfast.failures import decode_history
from holdfast.job import LONGEST_DELAY, Job, Key, NewJob, another
from holdfast.lifecycle import Move
from holdfast.ports import Ports, microseconds
from holdfast.registry import Registry, TaskSpec, check_seconds

P = ParamSpec("P")
R = TypeVar("R")

_LEAST_RETENTION = 60.0


class Payload(Enum):
    """The type of `PAYLOAD`."""

    PAYLOAD = "payload"


PAYLOAD = Payload.PAYLOAD
"""`key=PAYLOAD`: the task and its arguments are the key."""


class CallOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What one call says beyond its task. None: as the task says."""

    queue: str | None = None
    share: str | None = None
    priority: str | int | None = None
    max_retries: int | None = None
    retention: float | None = None
    delay: float | timedelta | None = None
    run_at: datetime | None = None
    key: str | Payload | None = None
    correlation_id: str | None = None
    connection: Any = None


def template(spec: TaskSpec, call: CallOptions, settings: Settings, ports: Ports) -> NewJob:
    """A job with everything that is the same for every call with these options, and without arguments."""
    task = spec.options
    delay, run_at = _due(call, ports)
    priority = _first_given(call.priority, task.priority, settings.queues.default_priority)
    retention = _first_given(call.retention, task.retention, settings.jobs.retention)
    return NewJob(
        id=ports.ids.job_id(),
        task=spec.name,
        payload=b"{}",
        task_version=task.version,
        queue=_first_given(call.queue, task.queue),
        share=_first_given(call.share, task.share),
        priority=settings.queues.priority(priority),
        delay=delay,
        run_at=run_at,
        max_retries=_first_given(call.max_retries, task.max_retries, settings.jobs.max_retries),
        # A minute at least: a call that is repeated because its reply was lost must still find the job.
        retention=microseconds(max(check_seconds("retention", retention, least=0), _LEAST_RETENTION)),
        correlation_id=call.correlation_id,
    )


def _first_given(*choices: Any) -> Any:
    return next(choice for choice in choices if choice is not None)


def _due(call: CallOptions, ports: Ports) -> tuple[int, int | None]:
    if call.delay is not None and call.run_at is not None:
        raise InvalidOption("give either delay or run_at, not both")
    if call.delay is not None:
        delay = call.delay.total_seconds() if isinstance(call.delay, timedelta) else call.delay
        return microseconds(check_seconds("delay", delay, least=0)), None
    if call.run_at is None:
        return 0, None
    if not isinstance(call.run_at, datetime) or call.run_at.utcoffset() is None:
        raise InvalidOption(
            f"run_at must be a datetime with a time zone, as in datetime.now(UTC), not {shown(call.run_at)}"
        )
    run_at = max(0, microseconds(call.run_at.timestamp()))
    # This process's clock only serves to catch a slip of the pen; the store's clock decides when the job is due.
    if run_at > ports.clock.now() + LONGEST_DELAY:
        raise InvalidOption(f"run_at {call.run_at.isoformat()} is more than ten years away")
    return 0, run_at


def _key(spec: TaskSpec, call: CallOptions, payload: bytes, settings: Settings) -> Key | None:
    unique = spec.options.unique
    key = PAYLOAD if call.key is None and unique else call.key
    if key is None:
        return None
    window = settings.jobs.key_window if isinstance(unique, bool) else unique
    digest = payload_hash(spec.name, spec.signature, payload)
    return Key(digest if isinstance(key, Payload) else key, digest, microseconds(window))


class Enqueuer(Generic[P, R]):
    """A task with the options of a call. mypy knows its arguments and, through the handle, its result."""

    def __init__(self, spec: TaskSpec, client: Client, call: CallOptions = CallOptions()) -> None:  # noqa: B008
        self.spec = spec
        self._client = client
        self._call = call

    def enqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue a call of the task; the job is safe when this returns. Blocking: see `aenqueue` for event loops."""
        return self._client.enqueue_blocking(self._prepare(args, kwargs), self._call.connection)

    async def aenqueue(self, *args: P.args, **kwargs: P.kwargs) -> JobHandle[R]:
        """Enqueue a call of the task; the job is safe when this returns."""
        return await self._client.enqueue(self._prepare(args, kwargs), self._call.connection)

    def job(self, *args: P.args, **kwargs: P.kwargs) -> PreparedJob[R]:
        """A call of the task for `enqueue_many`. Nothing is stored yet."""
        if self._call.connection is not None:
            raise InvalidOption("a prepared job has no connection of its own: pass connection= to enqueue_many")
        return self._prepare(args, kwargs)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PreparedJob[R]:
        """The job for one call: arguments bound, encoded and checked. No I/O."""
        signature, client = self.spec.signature, self._client
        payload = signature.encode_call(args, kwargs, client.settings.jobs.max_payload)
        key = _key(self.spec, self._call, payload, client.settings)
        return PreparedJob(another(self._template, client.ports.ids.job_id(), payload, key), signature)

    @cached_property
    def _template(self) -> NewJob:
        return template(self.spec, self._call, self._client.settings, self._client.ports)

    def options(
        self,
        *,
        queue: str | None = None,
        share: str | None = None,
        priority: str | int | None = None,
        max_retries: int | None = None,
        retention: float | None = None,
        delay: float | timedelta | None = None,
        run_at: datetime | None = None,
        key: str | Payload | None = None,
        correlation_id: str | None = None,
        connection: Any = None,
    ) -> Enqueuer[P, R]:
        """The same task with other options for the next calls. What is left out stays as it was."""
        given = {name: value for name, value in locals().items() if name != "self" and value is not None}
        return Enqueuer(self.spec, self._client, replace(self._call, **given))


class Task(Enqueuer[P, R]):
    """A registered function. Calling it runs it here and now; `enqueue` leaves it to a worker."""

    @property
    def name(self) -> str:
        """The name under which workers know the task."""
        return self.spec.name

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the function directly, as if it were no task."""
        return self.spec.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Task {self.name} on queue {self.spec.options.queue}>"


class TaskDecorator(Protocol):
    """What `@app.task(...)` gives back: a decorator for plain and coroutine functions."""

    @overload
    def __call__(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...


class FollowUps:
    """What is enqueued when a job fails for good: its task's `on_failed`, in the same step as the failure.

    The follow-up task takes, of these, the parameters that it names: `job_id`, `task`, `queue`, `reason`, `error`,
    `attempt` and `arguments` (those of the failed job).
    """

    _OFFERED = frozenset({"job_id", "task", "queue", "reason", "error", "attempt", "arguments"})

    def __init__(self, registry: Registry, client: Client, listener: Listener) -> None:
        self._registry = registry
        self._client = client
        self._listener = listener

    def check(self) -> None:
        """`InvalidOption` if a task names an `on_failed` that is not there, or that needs what nobody can give."""
        for spec in self._registry:
            if spec.options.on_failed is None:
                continue
            try:
                wanted = self._registry[spec.options.on_failed].signature.required
            except UnknownTask as error:
                raise InvalidOption(f"task {spec.name}: on_failed: {error}") from error
            if wanted - self._OFFERED:
                raise InvalidOption(
                    f"task {spec.options.on_failed} is the on_failed of {spec.name}, and needs "
                    f"{', '.join(sorted(wanted - self._OFFERED))}: it can take {', '.join(sorted(self._OFFERED))}"
                )

    def add(self, job: Job, move: Move) -> Move:
        """The move to `failed` with the follow-up in it, if the job's task has one.

        One that cannot be made (its arguments are too large, say) is left out, and told: the job must be settled.
        """
        try:
            return self._with_follow_up(job, move)
        except Exception as error:
            told = f"the on_failed of job {job.id} ({job.task}) cannot be enqueued: {type(error).__name__}: {error}"
            tell(self._listener, PartFailed(job.session_id or "", "on_failed", told, 0.0))
            return move

    def _with_follow_up(self, job: Job, move: Move) -> Move:
        try:
            name = self._registry[job.task].options.on_failed
            follow_up = None if name is None else self._registry[name]
        except UnknownTask:
            return move
        if follow_up is None:
            return move
        failures = decode_history(move.failure_history)
        offered: dict[str, Any] = {
            "job_id": job.id,
            "task": job.task,
            "queue": job.queue,
            "reason": move.reason.value,
            "error": f"{failures[-1].type}: {failures[-1].message}" if failures else "",
            "attempt": move.attempt,
        }
        if "arguments" in follow_up.signature.names:
            offered["arguments"] = msgspec.json.decode(job.payload)
        given = {name: value for name, value in offered.items() if name in follow_up.signature.names}
        call: Enqueuer[..., Any] = Enqueuer(follow_up, self._client, CallOptions(correlation_id=job.correlation_id))
        return replace(move, then=(call.job(**given).new,))
