"""Settings: one frozen value per room. They enter once, are checked once, and travel as they are.

`Settings.parse` takes nested dictionaries, as a file or an environment gives them; an unknown key is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from holdfast.codec import DEFAULT_PAYLOAD_LIMIT
from holdfast.errors import InvalidOption, UnknownPriority, shown
from holdfast.job import DEFAULT_MAX_RETRIES, DEFAULT_RETENTION, LONGEST_DELAY, MOST_RETRIES, check_name, check_whole
from holdfast.policy import Backoff, FullJitter, RetryPolicy
from holdfast.ports import MICROSECONDS
from holdfast.store import DepthLimit

MOST_PRIORITY_LEVELS = 16


class QueueSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How jobs queue up. `max_depth` and `warn_depth` hold for every queue that `depths` does not name."""

    priorities: Mapping[str, int] = msgspec.field(default_factory=lambda: {"high": 0, "normal": 5, "low": 10})
    default_priority: str | int = "normal"
    max_depth: int | None = None
    warn_depth: int | None = None
    depths: Mapping[str, DepthLimit] = {}

    def __post_init__(self) -> None:
        """Refuse labels and limits that cannot work. Values made in code have not been through `Settings.parse`."""
        for name, mapping in (("priorities", self.priorities), ("depths", self.depths)):
            if not isinstance(mapping, Mapping):
                raise InvalidOption(f"{name} must be a mapping, not {shown(mapping)}")
        for label, level in self.priorities.items():
            check_name("priority label", label)
            check_whole(f"priority {label!r}", level, -100, 100)
        if len(set(self.priorities.values())) > MOST_PRIORITY_LEVELS:
            raise InvalidOption(f"at most {MOST_PRIORITY_LEVELS} priority levels may be in use")
        self.priority(self.default_priority)
        for queue, limit in self.depths.items():
            check_name("queue", queue)
            if not isinstance(limit, DepthLimit):
                raise InvalidOption(f"the depth of queue {queue!r} must be a DepthLimit, not {shown(limit)}")
        for limit in (DepthLimit(self.max_depth, self.warn_depth), *self.depths.values()):
            for name, depth in (("max_depth", limit.max_depth), ("warn_depth", limit.warn_depth)):
                if depth is not None:
                    check_whole(name, depth, 1, 10**12)

    def priority(self, priority: str | int) -> int:
        """The level of a label; a number stands for itself."""
        if isinstance(priority, str):
            try:
                return self.priorities[priority]
            except KeyError:
                raise UnknownPriority(
                    f"priority {shown(priority)} is not configured: use one of {', '.join(self.priorities)}, "
                    f"or a number from -100 to 100"
                ) from None
        return check_whole("priority", priority, -100, 100)

    def depth_limit(self, queue: str) -> DepthLimit | None:
        """The limits of a queue, or None if it has none."""
        limit = self.depths.get(queue) or DepthLimit(self.max_depth, self.warn_depth)
        return None if limit == DepthLimit() else limit


class JobSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a task inherits unless it says otherwise. Times in seconds."""

    max_retries: int = DEFAULT_MAX_RETRIES
    retention: float = DEFAULT_RETENTION / MICROSECONDS
    key_window: float = 24 * 3600.0
    max_payload: int = DEFAULT_PAYLOAD_LIMIT

    def __post_init__(self) -> None:
        """Refuse what no job could have."""
        check_whole("max_retries", self.max_retries, 0, MOST_RETRIES)
        check_whole("max_payload", self.max_payload, 2, 64 * 1024 * 1024)
        for name, seconds, least in (("retention", self.retention, 0), ("key_window", self.key_window, 1e-6)):
            if not isinstance(seconds, int | float) or not least <= seconds <= LONGEST_DELAY / MICROSECONDS:
                raise InvalidOption(f"{name} must be from {least} seconds to ten years, not {shown(seconds)}")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a worker process works. Times in seconds.

    `queues` empty: every queue that the application's tasks name. `concurrency`: how many handlers run at once.
    `poll`: how long a worker waits at most before it looks again, whatever wake-ups it heard. `lease_ttl`: after how
    long without a heartbeat a worker counts as dead; the same for every worker and keeper of a store. `grace`: how
    long running handlers may go on after the signal to stop. `max_jobs`, `max_memory` (bytes): a supervised process is
    replaced after so many jobs, or when it has grown so large, each with some jitter.
    """

    queues: tuple[str, ...] = ()
    concurrency: int = 10
    processes: int = 1
    poll: float = 5.0
    lease_ttl: float = 15.0
    grace: float = 30.0
    max_crashes: int = 3
    max_snoozes: int = 100
    max_jobs: int | None = None
    max_memory: int | None = None
    keepers: bool = True

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        for queue in self.queues:
            check_name("queue", queue)
        check_whole("concurrency", self.concurrency, 1, 10_000)
        check_whole("processes", self.processes, 1, 1_000)
        check_whole("max_crashes", self.max_crashes, 1, 1_000_000)
        check_whole("max_snoozes", self.max_snoozes, 0, 1_000_000)
        for name, seconds, least in (
            ("poll", self.poll, 0.01),
            ("lease_ttl", self.lease_ttl, 0.5),
            ("grace", self.grace, 0),
        ):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not least <= seconds <= 86_400:
                raise InvalidOption(f"{name} must be from {least:g} seconds to a day, not {shown(seconds)}")
        if self.max_jobs is not None:
            check_whole("max_jobs", self.max_jobs, 1, 10**12)
        if self.max_memory is not None:
            check_whole("max_memory in bytes", self.max_memory, 1024 * 1024, 10**15)

    def policy(self, backoff: Backoff = FullJitter()) -> RetryPolicy:  # noqa: B008
        """The limits of a job whose task has that backoff."""
        return RetryPolicy(backoff=backoff, max_crashes=self.max_crashes, max_snoozes=self.max_snoozes)


class RedisSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the Redis engine names its keys and connects. Other engines take no notice. Times in seconds.

    In a key name `{queue}` stands for the queue's hash tag, which a cluster demands, and `%s` for the worker's session;
    '' is the usual name. `queues`: the ready list of each priority, by label or number. `brpoplpush_timeout`: how long
    one blocking wait for jobs takes at most (None: half of the lease's TTL). A process has at most
    `pool_size_multiplier` blocking connections for each processor, and opens `min_idle_conns` at once. `max_retries`:
    how often a command is repeated that the server did not carry out.
    """

    processing_list_pattern: str = ""
    heartbeat_key_pattern: str = ""
    completed_list: str = ""
    dead_letter_list: str = ""
    queues: Mapping[str, str] = {}
    brpoplpush_timeout: float | None = None
    pool_size_multiplier: int = 10
    min_idle_conns: int = 0
    dial_timeout: float = 5.0
    read_timeout: float = 10.0
    write_timeout: float = 10.0
    max_retries: int = 3

    def __post_init__(self) -> None:
        """Refuse what could not work. What key names must look like, the engine knows."""
        names = (self.processing_list_pattern, self.heartbeat_key_pattern, self.completed_list, self.dead_letter_list)
        if not isinstance(self.queues, Mapping):
            raise InvalidOption(f"redis.queues must be a mapping, not {shown(self.queues)}")
        for name in (*names, *self.queues.values()):
            if not isinstance(name, str) or len(name) > 512 or not name.isprintable():
                raise InvalidOption(f"{shown(name)} is no name for a Redis key: use up to 512 printable characters")
        check_whole("pool_size_multiplier", self.pool_size_multiplier, 1, 1_000)
        check_whole("min_idle_conns", self.min_idle_conns, 0, 1_000)
        check_whole("redis.max_retries", self.max_retries, 0, 100)
        for what in ("dial_timeout", "read_timeout", "write_timeout", "brpoplpush_timeout"):
            seconds = getattr(self, what)
            if seconds is None and what == "brpoplpush_timeout":
                continue
            if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0.05 <= seconds <= 3600:
                raise InvalidOption(f"{what} must be from 0.05 seconds to an hour, not {shown(seconds)}")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set, by room."""

    queues: QueueSettings = QueueSettings()
    jobs: JobSettings = JobSettings()
    worker: WorkerSettings = WorkerSettings()
    redis: RedisSettings = RedisSettings()

    def __post_init__(self) -> None:
        """Refuse rooms that are none, such as a dictionary that `parse` would have understood."""
        for name, room, kind in (
            ("queues", self.queues, QueueSettings),
            ("jobs", self.jobs, JobSettings),
            ("worker", self.worker, WorkerSettings),
            ("redis", self.redis, RedisSettings),
        ):
            if not isinstance(room, kind):
                raise InvalidOption(f"{name} must be a {kind.__name__}, not {shown(room)}")
        if (block := self.redis.brpoplpush_timeout) is not None and block > self.worker.lease_ttl / 2:
            raise InvalidOption(
                f"redis.brpoplpush_timeout is {block:g} s: it must not be more than half of worker.lease_ttl, "
                f"{self.worker.lease_ttl / 2:g} s"
            )
        for label in self.redis.queues:
            self.queues.priority(int(label) if label.lstrip("-").isdigit() else label)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> Self:
        """Settings from nested dictionaries, or `InvalidOption` with the path of what does not fit."""
        try:
            return msgspec.convert(values, cls)
        except msgspec.ValidationError as error:
            raise InvalidOption(f"settings: {error}") from error
