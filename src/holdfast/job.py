"""The values that travel: a new job, a stored job, the right to settle it. All frozen; none does any I/O.

Times are whole microseconds since 1970-01-01 UTC on the store's clock, durations whole microseconds.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

import msgspec
from msgspec.structs import force_setattr

from holdfast.errors import InvalidOption, shown

JobId = str
SessionId = str

DEFAULT_QUEUE = "default"
DEFAULT_PRIORITY = 5
DEFAULT_MAX_RETRIES = 3
DEFAULT_RETENTION = 7 * 24 * 3600 * 1_000_000
MOST_RETRIES = 1_000
LONGEST_DELAY = 10 * 366 * 24 * 3600 * 1_000_000
LATEST_TIME = 2**53 - 1
"""In the year 2255. Engines that keep times as floating-point numbers (Redis) are exact up to here."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


class State(StrEnum):
    """Where a job is. A delayed or retrying job is `ready` with a later `run_at`; `failed` is the dead-letter queue."""

    READY = "ready"
    IN_FLIGHT = "in_flight"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})


class Reason(StrEnum):
    """Why a job is in its state: the last transition that it made."""

    ENQUEUED = "enqueued"
    CLAIMED = "claimed"
    SUCCEEDED = "succeeded"
    RETRIED = "retried"
    EXHAUSTED = "exhausted"
    PERMANENT = "permanent"
    RELEASED = "released"
    SNOOZED = "snoozed"
    SNOOZED_OUT = "snoozed_out"
    LOST = "lost"
    CRASHED = "crashed"
    CANCELLED = "cancelled"
    REPLAYED = "replayed"


@lru_cache(maxsize=4096)
def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


def check_name(what: str, name: str) -> str:
    """The name, or `InvalidOption`: letters, digits, `_`, `.` and `-`, at most 128, the same rule on every engine."""
    if not isinstance(name, str) or len(name) > 128 or not _is_name(name):
        raise InvalidOption(
            f"{what} {shown(name)} is not a valid name: use 1 to 128 letters, digits, '_', '.' or '-', "
            f"not starting with '.' or '-'"
        )
    return name


def check_text(what: str, text: str, longest: int) -> str:
    """The text, or `InvalidOption` if it is empty, too long, or has control characters or lone surrogates."""
    if not isinstance(text, str) or not text or _UNPRINTABLE.search(text):
        raise InvalidOption(f"{what} {shown(text)} must be text, not empty, and without control characters")
    if len(text.encode()) > longest:
        raise InvalidOption(f"{what} is {len(text.encode())} bytes long; at most {longest} are allowed")
    return text


def check_whole(what: str, number: int, least: int, most: int) -> int:
    """The number, or `InvalidOption` if it is not a whole number within the bounds."""
    if type(number) is not int or not least <= number <= most:
        raise InvalidOption(f"{what} must be a whole number from {least} to {most}, not {shown(number)}")
    return number


def is_job_id(text: object) -> bool:
    """Whether a job could have this id: a UUID in lower case."""
    return isinstance(text, str) and _UUID.fullmatch(text) is not None


class Key(msgspec.Struct, frozen=True, gc=False):
    """An idempotency key: its text, the hash of what it stands for, and how long it is held."""

    text: str
    payload_hash: str
    window: int

    def __post_init__(self) -> None:
        """Refuse what not every engine could store."""
        check_text("key", self.text, 512)
        check_whole("key window in microseconds", self.window, 1, LONGEST_DELAY)


class NewJob(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job as its producer describes it. One that exists is valid: every field is checked when it is made.

    `payload` is a JSON object of named arguments. It becomes due `delay` after the insert, or at `run_at` if that is
    given and later than the insert.
    """

    id: JobId
    task: str
    payload: bytes
    task_version: str = "1"
    queue: str = DEFAULT_QUEUE
    share: str = ""
    priority: int = DEFAULT_PRIORITY
    delay: int = 0
    run_at: int | None = None
    max_retries: int = DEFAULT_MAX_RETRIES
    retention: int = DEFAULT_RETENTION
    key: Key | None = None
    correlation_id: str | None = None

    def __post_init__(self) -> None:
        """Refuse what not every engine could store."""
        if not is_job_id(self.id):
            raise InvalidOption(f"id {shown(self.id)} must be a UUID in lower case; ports.ids.job_id() makes one")
        if type(self.payload) is not bytes:
            raise InvalidOption(f"payload must be bytes of JSON, not a {type(self.payload).__name__}")
        check_name("task", self.task)
        check_name("version", self.task_version)
        check_name("queue", self.queue)
        check_whole("priority", self.priority, -100, 100)
        if self.share != "":
            check_text("share", self.share, 128)
        check_whole("delay in microseconds", self.delay, 0, LONGEST_DELAY)
        if self.run_at is not None:
            check_whole("run_at in microseconds", self.run_at, 0, LATEST_TIME)
        check_whole("max_retries", self.max_retries, 0, MOST_RETRIES)
        check_whole("retention in microseconds", self.retention, 0, LONGEST_DELAY)
        if self.correlation_id is not None:
            check_text("correlation_id", self.correlation_id, 256)


def another(template: NewJob, job_id: JobId, payload: bytes, key: Key | None) -> NewJob:
    """The template with an id of its own, another payload and its key. What was checked once is not checked again."""
    new: NewJob = template.__copy__()  # type: ignore[attr-defined]  # as copy.copy does, without looking for it
    force_setattr(new, "id", job_id)
    force_setattr(new, "payload", payload)
    force_setattr(new, "key", key)
    return new


class Lease(msgspec.Struct, frozen=True, gc=False):
    """The right to settle one claim. Session and version are both compared: the version rises with every claim and
    every replay of the job and never goes back.
    """

    job_id: JobId
    queue: str
    session_id: SessionId
    version: int


class Job(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A job as the store has it.

    `attempt` counts claims that started and have been settled; `failures` nacks; `crashes` crashes while it ran
    alone; `snoozes` snoozes. `suspect`: it was held by a worker that died, so it must run alone. `session_id` holds
    it, or held it last. `failure_history` is opaque to stores: see `holdfast.failures`.
    """

    id: JobId
    task: str
    payload: bytes
    task_version: str
    queue: str
    share: str
    priority: int
    state: State
    reason: Reason
    run_at: int
    created_at: int
    version: int
    session_id: SessionId | None
    attempt: int
    failures: int
    crashes: int
    snoozes: int
    suspect: bool
    cancel_asked: bool
    max_retries: int
    retention: int
    key: Key | None
    correlation_id: str | None
    claimed_at: int | None
    ended_at: int | None
    failure_history: bytes
    result: bytes | None
    progress: bytes | None

    @property
    def lease(self) -> Lease:
        """The lease of the job's current claim. Only meaningful while it is in flight."""
        return Lease(self.id, self.queue, self.session_id or "", self.version)


def enqueued(new: NewJob, now: int) -> Job:
    """The job that a store has after inserting `new` at that time."""
    return Job(
        id=new.id,
        task=new.task,
        payload=new.payload,
        task_version=new.task_version,
        queue=new.queue,
        share=new.share,
        priority=new.priority,
        state=State.READY,
        reason=Reason.ENQUEUED,
        run_at=due_at(new, now),
        created_at=now,
        version=0,
        session_id=None,
        attempt=0,
        failures=0,
        crashes=0,
        snoozes=0,
        suspect=False,
        cancel_asked=False,
        max_retries=new.max_retries,
        retention=new.retention,
        key=new.key,
        correlation_id=new.correlation_id,
        claimed_at=None,
        ended_at=None,
        failure_history=b"",
        result=None,
        progress=None,
    )


def due_at(new: NewJob, now: int) -> int:
    """When a job that is inserted now becomes due: never before now, so that nothing overtakes by an old date."""
    return now + new.delay if new.run_at is None else max(new.run_at, now)
