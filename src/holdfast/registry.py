"""What a process knows about its tasks: each function with its policy, by name. Clients and workers both read it.

A task's name is the key by which a worker finds its function. It is looked up here, never imported.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec

from holdfast.codec import Signature
from holdfast.errors import InvalidOption, UnknownTask, shown
from holdfast.job import LONGEST_DELAY, MOST_RETRIES, check_name, check_text, check_whole
from holdfast.policy import Backoff, Exponential, FullJitter, Steps


class TaskOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the jobs of a task are queued, retried and bounded. None: as the settings say. Times in seconds."""

    version: str = "1"
    queue: str = "default"
    share: str = ""
    priority: str | int | None = None
    max_retries: int | None = None
    backoff: Backoff = FullJitter()
    permanent: tuple[type[BaseException], ...] = ()
    timeout: float | None = 300.0
    hard_timeout: float | None = None
    isolation: Literal["process"] | None = None
    unique: bool | float = False
    retention: float | None = None
    on_failed: str | None = None

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        check_name("version", self.version)
        check_name("queue", self.queue)
        if self.share != "":
            check_text("share", self.share, 128)
        if self.max_retries is not None:
            check_whole("max_retries", self.max_retries, 0, MOST_RETRIES)
        for what, limit in (("timeout", self.timeout), ("hard_timeout", self.hard_timeout)):
            if limit is not None:
                check_seconds(what, limit, least=0.001)
        if self.isolation not in (None, "process"):
            raise InvalidOption(f"isolation must be 'process' or None, not {shown(self.isolation)}")
        if self.unique is not True and self.unique is not False:
            check_seconds("unique", self.unique, least=0.001)
        if self.retention is not None:
            check_seconds("retention", self.retention, least=0)
        if not (callable(self.backoff) or isinstance(self.backoff, FullJitter | Exponential | Steps)):
            raise InvalidOption("backoff must be a policy value or a callable from failures to seconds")
        if not isinstance(self.permanent, tuple) or not all(
            isinstance(kind, type) and issubclass(kind, BaseException) for kind in self.permanent
        ):
            raise InvalidOption(f"permanent must be a tuple of exception types, not {shown(self.permanent)}")
        if self.on_failed is not None:
            check_name("on_failed", self.on_failed)


class TaskSpec(msgspec.Struct, frozen=True):
    """A function as the registry knows it."""

    name: str
    function: Callable[..., Any]
    signature: Signature
    options: TaskOptions

    @property
    def is_async(self) -> bool:
        """Whether the function is a coroutine function."""
        return inspect.iscoroutinefunction(self.function)


def check_seconds(what: str, seconds: float, *, least: float) -> float:
    """The number of seconds, or `InvalidOption` if it is none, or less than `least`, or more than ten years."""
    most = LONGEST_DELAY / 1_000_000
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not least <= seconds <= most:
        raise InvalidOption(f"{what} must be a number of seconds from {least:g} to {most:.0f}, not {shown(seconds)}")
    return seconds


class Registry:
    """The tasks that this process knows, by name."""

    def __init__(self) -> None:
        self._specs: dict[str, TaskSpec] = {}

    def add(self, function: Callable[..., Any], name: str | None, options: TaskOptions) -> TaskSpec:
        """Register a function. `InvalidOption` if its name is taken or its parameters cannot travel."""
        if not inspect.isroutine(function):
            raise InvalidOption(f"@task goes on a function, not on {shown(function)}")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise InvalidOption(f"{function.__qualname__} is a generator: calling it would not run its body")
        name = check_name("task", getattr(function, "__name__", "") if name is None else name)
        if name in self._specs:
            raise InvalidOption(
                f"there is a task {name!r} already ({self._specs[name].function.__module__}): pass another name="
            )
        signature = Signature(function)
        signature.check()
        spec = TaskSpec(name, function, signature, options)
        self._specs[name] = spec
        return spec

    def __getitem__(self, name: str) -> TaskSpec:
        try:
            return self._specs[name]
        except KeyError:
            raise UnknownTask(
                f"no task {shown(name)} is registered here; known are: {', '.join(sorted(self._specs)) or 'none'}"
            ) from None

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[TaskSpec]:
        return iter(self._specs.values())

    def queues(self) -> tuple[str, ...]:
        """Every queue that a task names."""
        return tuple(sorted({spec.options.queue for spec in self}))
