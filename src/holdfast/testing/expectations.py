"""What was enqueued, as a test speaks of it: values to look at, expectations to hold them against, and messages that
say what was enqueued instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TypedDict

import msgspec

from holdfast.config import Settings
from holdfast.errors import InvalidOption, InvalidPayload, shown
from holdfast.job import Job, JobId, State
from holdfast.ports import MICROSECONDS, microseconds
from holdfast.registry import TaskSpec
from holdfast.tasks import PAYLOAD, Payload
from holdfast.testing.frozen import moment

_MOST_SHOWN = 20


class Enqueued(msgspec.Struct, frozen=True):
    """A job that was enqueued during the test."""

    job: Job
    """As it was at that moment."""
    arguments: dict[str, Any]
    """As the handler receives them: decoded by its annotations, its defaults filled in."""
    state: State
    """Where it is now."""
    on_connection: bool
    """Whether it was enqueued in a transaction of the caller's (`connection=`)."""

    @property
    def id(self) -> JobId:
        """The job's id."""
        return self.job.id

    @property
    def task(self) -> str:
        """The name of the task."""
        return self.job.task

    @property
    def queue(self) -> str:
        """The queue that it went to."""
        return self.job.queue

    @property
    def priority(self) -> int:
        """Its priority, as a number."""
        return self.job.priority

    @property
    def delay(self) -> float:
        """In how many seconds it was to become due."""
        return (self.job.run_at - self.job.created_at) / MICROSECONDS

    @property
    def run_at(self) -> datetime:
        """When it was to become due."""
        return moment(self.job.run_at)

    @property
    def key(self) -> str | None:
        """Its idempotency key."""
        return self.job.key.text if self.job.key else None

    @property
    def correlation_id(self) -> str | None:
        """Its correlation id."""
        return self.job.correlation_id

    def __str__(self) -> str:
        given = ", ".join(f"{name}={shown(value)}" for name, value in self.arguments.items())
        told = [f"{self.task}({given}) on queue {self.queue}"]
        if self.job.run_at != self.job.created_at:
            told.append(f"in {self.delay:g} s")
        if self.key is not None:
            told.append(f"key {shown(self.key)}")
        if self.on_connection:
            told.append("on a connection")
        return ", ".join(told)


def arguments_of(spec: TaskSpec, payload: bytes) -> dict[str, Any]:
    """The arguments as the handler receives them, or as JSON has them if they do not fit it."""
    try:
        given = spec.signature.decode(payload)
    except InvalidPayload:
        return dict(msgspec.json.decode(payload))
    parameters = inspect.signature(spec.function).parameters
    return {name: given.get(name, parameter.default) for name, parameter in parameters.items()}


class Expected(TypedDict, total=False):
    """What a test may say about a job that it expects: the vocabulary of `.options`, and the arguments."""

    arguments: Mapping[str, Any]
    queue: str
    share: str
    priority: str | int
    delay: float | timedelta
    run_at: datetime
    key: str | Payload
    correlation_id: str


class Expectation(msgspec.Struct, frozen=True, kw_only=True):
    """Which jobs a test means. None: any."""

    task: str | None = None
    queue: str | None = None
    share: str | None = None
    priority: int | None = None
    delay: float | timedelta | None = None
    run_at: datetime | None = None
    key: str | Payload | None = None
    correlation_id: str | None = None
    arguments: Mapping[str, Any] = {}

    def differences(self, enqueued: Enqueued) -> list[str]:
        """What is otherwise with a job of the task; none if it is meant."""
        job, found = enqueued.job, []
        for name, expected in self.arguments.items():
            if name not in enqueued.arguments:
                found.append(f"{name} is not given")
            elif not expected == enqueued.arguments[name]:  # noqa: SIM201 - matchers may only define __eq__
                found.append(f"{name} is {shown(enqueued.arguments[name])}, not {shown(expected)}")
        for what, actual, wanted in (
            ("queue", job.queue, self.queue),
            ("share", job.share, self.share),
            ("priority", job.priority, self.priority),
            ("correlation_id", job.correlation_id, self.correlation_id),
        ):
            if wanted is not None and actual != wanted:
                found.append(f"{what} is {shown(actual)}, not {shown(wanted)}")
        if self.delay is not None:
            delay = self.delay.total_seconds() if isinstance(self.delay, timedelta) else self.delay
            if microseconds(delay) != job.run_at - job.created_at:
                found.append(f"delay is {enqueued.delay:g} s, not {delay:g} s")
        if self.run_at is not None and self.run_at != enqueued.run_at:
            found.append(f"run_at is {enqueued.run_at.isoformat()}, not {self.run_at.isoformat()}")
        if self.key is not None:
            wanted = (job.key.payload_hash if job.key else "its payload") if self.key is PAYLOAD else self.key
            if enqueued.key != wanted:
                found.append(f"key is {shown(enqueued.key)}, not {shown(wanted)}")
        return found

    def meets(self, enqueued: Enqueued) -> bool:
        """Whether the job is meant."""
        return self.task in (None, enqueued.task) and not self.differences(enqueued)

    def __str__(self) -> str:
        told = [f"{name}={shown(value)}" for name, value in self.arguments.items()]
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name not in ("task", "arguments") and value is not None:
                told.append(f"{name}={shown(value)}")
        return (self.task or "a job") + (f" with {', '.join(told)}" if told else "")


def expectation(task: TaskSpec | None, expected: Expected, settings: Settings) -> Expectation:
    """The expectation, or `InvalidOption` for what no job could meet: an argument that the task does not have, say."""
    names = expected.get("arguments", {}).keys()
    if task is not None and (unknown := names - task.signature.names):
        raise InvalidOption(
            f"task {task.name} has no parameter {', '.join(sorted(map(repr, unknown)))}: "
            f"it has {', '.join(sorted(task.signature.names)) or 'none'}"
        )
    options: dict[str, Any] = {**expected}
    if "priority" in options:
        options["priority"] = settings.queues.priority(options["priority"])
    return Expectation(task=None if task is None else task.name, **options)


def listed(enqueued: Sequence[Enqueued], expectation: Expectation) -> str:
    """What was enqueued, line by line, with a word on each job of the task that is meant."""
    if not enqueued:
        return "Nothing was enqueued."
    lines = []
    for number, job in enumerate(enqueued[:_MOST_SHOWN], 1):
        remark = ""
        if expectation.task == job.task:
            differences = expectation.differences(job)
            remark = f"  <- {'; '.join(differences) if differences else 'this one'}"
        lines.append(f"  {number}. {job}{remark}")
    if len(enqueued) > _MOST_SHOWN:
        lines.append(f"  … and {len(enqueued) - _MOST_SHOWN} more")
    return "\n".join(["Enqueued were:", *lines])


def how_often(count: int) -> str:
    """How often, in words."""
    return "once" if count == 1 else f"{count} times"
