"""The state machine: what follows from what happened. Pure, and the only file that names a transition.

`settle` turns the outcome of a claim into a `Move`; `cancel` and `replay` are the operator's moves. A `Move` is a
guarded write, complete as data: a store asks `judge` whether the guard holds (or states the same guard in its own
language), writes the fields, and decides nothing. The diagram in `docs/reference/lifecycle.md` is generated from
`TRANSITIONS`.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import replace

from holdfast.failures import Failure, append_failures
from holdfast.job import ENDED, Job, JobId, NewJob, Reason, SessionId, State
from holdfast.policy import LONGEST_BACKOFF, RetryPolicy, backoff_seconds
from holdfast.ports import Random, microseconds


class Transition(msgspec.Struct, frozen=True):
    """One arrow of the diagram. `source` is None for a job that does not exist yet."""

    source: State | None
    target: State
    reason: Reason
    trigger: str


TRANSITIONS = (
    Transition(None, State.READY, Reason.ENQUEUED, "enqueue"),
    Transition(State.READY, State.IN_FLIGHT, Reason.CLAIMED, "claim"),
    Transition(State.IN_FLIGHT, State.SUCCEEDED, Reason.SUCCEEDED, "ack"),
    Transition(State.IN_FLIGHT, State.READY, Reason.RETRIED, "nack, retries left"),
    Transition(State.IN_FLIGHT, State.FAILED, Reason.EXHAUSTED, "nack, no retries left"),
    Transition(State.IN_FLIGHT, State.FAILED, Reason.PERMANENT, "nack, permanent error"),
    Transition(State.IN_FLIGHT, State.READY, Reason.RELEASED, "release"),
    Transition(State.IN_FLIGHT, State.READY, Reason.SNOOZED, "snooze"),
    Transition(State.IN_FLIGHT, State.FAILED, Reason.SNOOZED_OUT, "snooze, beyond the limit"),
    Transition(State.IN_FLIGHT, State.READY, Reason.LOST, "lease lost"),
    Transition(State.IN_FLIGHT, State.READY, Reason.CRASHED, "crash alone"),
    Transition(State.IN_FLIGHT, State.FAILED, Reason.CRASHED, "crash alone or lease lost, at the crash limit"),
    Transition(State.IN_FLIGHT, State.CANCELLED, Reason.CANCELLED, "cancel asked, then any end but ack"),
    Transition(State.READY, State.CANCELLED, Reason.CANCELLED, "cancel"),
    Transition(State.FAILED, State.READY, Reason.REPLAYED, "replay"),
    Transition(State.CANCELLED, State.READY, Reason.REPLAYED, "replay"),
    Transition(State.SUCCEEDED, State.READY, Reason.REPLAYED, "replay"),
)


# What can happen to a claim.


class Succeeded(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The handler returned. `failure` says why the result could not be kept, if it could not."""

    result: bytes | None = None
    failure: Failure | None = None


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The handler raised. `permanent`: do not retry. `retry_after` (seconds) wins over the backoff."""

    failure: Failure
    permanent: bool = False
    retry_after: float | None = None


class Released(msgspec.Struct, frozen=True, tag=True):
    """The worker gives the job back unharmed: shutdown, or it never started. It keeps its place and its attempts."""


class Snoozed(msgspec.Struct, frozen=True, tag=True):
    """The handler, or the worker for it, wants the job later. Costs no attempt; bounded by `max_snoozes`."""

    seconds: float
    failure: Failure


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """The process in which the job ran alone died. The worker, and so the session, lives."""

    failure: Failure


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The session that held the job is closed. `started` is None when nobody is left to know."""

    failure: Failure
    started: bool | None = None


HandlerOutcome = Succeeded | Failed | Released | Snoozed
"""What a handler can make of its job."""

Outcome = HandlerOutcome | Crashed | Lost


class KeyChange(StrEnum):
    """What a move does to the job's idempotency key."""

    KEEP = "keep"
    FREE = "free"
    TAKE = "take"


class Move(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One guarded write. Built only here.

    Guard: the job is in one of `sources`; `version` and `session_id` (None: not compared) are its own; its session is
    open, or closed, as `session_open` says (None: not compared); and nobody has asked to cancel it, unless
    `despite_cancel`. A move out of `in_flight` always names its session. Write: everything else. `delay` None keeps the
    job's place in its lane.
    """

    job_id: JobId
    queue: str
    sources: frozenset[State]
    version: int
    session_id: SessionId | None
    session_open: bool | None
    despite_cancel: bool
    to: State
    reason: Reason
    attempt: int
    failures: int
    crashes: int
    snoozes: int
    suspect: bool
    failure_history: bytes
    delay: int | None = None
    result: bytes | None = None
    raise_version: bool = False
    key_change: KeyChange = KeyChange.KEEP
    then: tuple[NewJob, ...] = ()


class Applied(StrEnum):
    """What became of a move."""

    APPLIED = "applied"
    ALREADY = "already"
    """A move with this lease, target and reason was applied before: most likely this one, whose reply was lost. As good
    as applied."""
    STALE = "stale"
    """The guard does not hold: somebody else decided about the job. Nothing was written."""
    GONE = "gone"
    """There is no such job any more."""
    CANCEL_ASKED = "cancel_asked"
    """Somebody asked to cancel the job since it was claimed. Nothing was written: settle again, knowing that."""
    KEY_TAKEN = "key_taken"
    """The job cannot come back: its idempotency key belongs to another job now. Nothing was written."""


class Standing(msgspec.Struct, frozen=True, gc=False):
    """What a guard is compared with: a job's present situation in its store."""

    state: State
    reason: Reason
    version: int
    session_id: SessionId | None
    session_open: bool
    cancel_asked: bool


_IN_FLIGHT = frozenset({State.IN_FLIGHT})
_READY = frozenset({State.READY})
_FREES_KEY = frozenset({State.FAILED, State.CANCELLED})
_APPLIED = Applied.APPLIED
"""For what is done with every job: looking up a member of an enumeration costs as much as a comparison."""
_ACK = Move(
    job_id="",
    queue="",
    sources=_IN_FLIGHT,
    version=0,
    session_id=None,
    session_open=True,
    despite_cancel=True,
    to=State.SUCCEEDED,
    reason=Reason.SUCCEEDED,
    attempt=0,
    failures=0,
    crashes=0,
    snoozes=0,
    suspect=False,
    failure_history=b"",
)
"""What is the same for every job that succeeded. Nearly all do, so their move is not put together field by field."""


def settle(job: Job, outcome: Outcome, policy: RetryPolicy, random: Random, *, cancel_asked: bool = False) -> Move:
    """The move that follows when the claim `job` ends with `outcome`.

    Ack beats a cancel that was asked; every other end of a job that was to be cancelled is `cancelled`.
    """
    if isinstance(outcome, Succeeded):
        history = job.failure_history
        return replace(
            _ACK,
            job_id=job.id,
            queue=job.queue,
            version=job.version,
            session_id=job.session_id,
            attempt=job.attempt + 1,
            failures=job.failures,
            crashes=job.crashes,
            snoozes=job.snoozes,
            failure_history=append_failures(history, (outcome.failure,)) if outcome.failure else history,
            result=outcome.result,
        )
    cancel_asked = cancel_asked or job.cancel_asked
    to, reason = State.READY, Reason.RELEASED
    attempt, failures, crashes, snoozes, suspect = (
        job.attempt,
        job.failures,
        job.crashes,
        job.snoozes,
        job.suspect,
    )
    delay: int | None = None
    new_failures: tuple[Failure, ...] = ()

    match outcome:
        case Failed():
            attempt, failures, suspect, new_failures = attempt + 1, failures + 1, False, (outcome.failure,)
            if outcome.permanent:
                to, reason = State.FAILED, Reason.PERMANENT
            elif failures > job.max_retries:
                to, reason = State.FAILED, Reason.EXHAUSTED
            else:
                reason = Reason.RETRIED
                wait = outcome.retry_after
                delay = _delay(backoff_seconds(policy.backoff, failures, random) if wait is None else wait)
        case Released():
            pass
        case Snoozed():
            snoozes, delay = snoozes + 1, _delay(outcome.seconds)
            reason = Reason.SNOOZED
            if snoozes > policy.max_snoozes:
                to, reason, new_failures = State.FAILED, Reason.SNOOZED_OUT, (outcome.failure,)
        case Crashed():
            attempt, crashes, suspect, new_failures = attempt + 1, crashes + 1, True, (outcome.failure,)
            reason, delay = Reason.CRASHED, _delay(backoff_seconds(policy.backoff, crashes, random))
            if crashes >= policy.max_crashes:
                to = State.FAILED
        case Lost():
            reason = Reason.LOST
            if outcome.started is not False:
                attempt, new_failures = attempt + 1, (outcome.failure,)
                if job.suspect:  # it ran alone, so the crash was its own
                    crashes += 1
                    if crashes >= policy.max_crashes:
                        to, reason = State.FAILED, Reason.CRASHED
                suspect = True

    if cancel_asked:
        to, reason = State.CANCELLED, Reason.CANCELLED
    return Move(
        job_id=job.id,
        queue=job.queue,
        sources=_IN_FLIGHT,
        version=job.version,
        session_id=job.session_id,
        session_open=not isinstance(outcome, Lost),
        despite_cancel=cancel_asked,
        to=to,
        reason=reason,
        attempt=attempt,
        failures=failures,
        crashes=crashes,
        snoozes=snoozes,
        suspect=suspect,
        failure_history=append_failures(job.failure_history, new_failures),
        delay=delay if to is State.READY else None,
        key_change=KeyChange.FREE if to in _FREES_KEY else KeyChange.KEEP,
    )


def cancel(job: Job) -> Move:
    """The move that cancels a job that nobody holds."""
    return _operator_move(job, _READY, to=State.CANCELLED, reason=Reason.CANCELLED, key_change=KeyChange.FREE)


def replay(job: Job) -> Move:
    """The move that brings an ended job back, as it was enqueued. Its version rises, so no old lease fits it again."""
    return _operator_move(
        job,
        ENDED,
        to=State.READY,
        reason=Reason.REPLAYED,
        key_change=KeyChange.TAKE if job.key else KeyChange.KEEP,
        delay=0,
        raise_version=True,
    )


def _operator_move(
    job: Job,
    sources: frozenset[State],
    *,
    to: State,
    reason: Reason,
    key_change: KeyChange,
    delay: int | None = None,
    raise_version: bool = False,
) -> Move:
    starts_over = to is State.READY
    return Move(
        job_id=job.id,
        queue=job.queue,
        sources=sources,
        version=job.version,
        session_id=None,
        session_open=None,
        despite_cancel=True,
        to=to,
        reason=reason,
        attempt=job.attempt,
        failures=0 if starts_over else job.failures,
        crashes=0 if starts_over else job.crashes,
        snoozes=0 if starts_over else job.snoozes,
        suspect=False if starts_over else job.suspect,
        failure_history=job.failure_history,
        delay=delay,
        raise_version=raise_version,
        key_change=key_change,
    )


def judge(move: Move, standing: Standing | None) -> Applied:
    """Whether the move's guard holds for a job in that standing. The one definition of every guard."""
    if standing is None:
        return Applied.GONE
    own_session = move.session_id is None or standing.session_id == move.session_id
    if (
        own_session
        and standing.state is move.to
        and standing.reason is move.reason
        and standing.version == move.version + move.raise_version
    ):
        return Applied.ALREADY
    if not (
        own_session
        and standing.state in move.sources
        and standing.version == move.version
        and (move.session_open is None or standing.session_open is move.session_open)
    ):
        return Applied.STALE
    if standing.cancel_asked and not move.despite_cancel:
        return Applied.CANCEL_ASKED
    return _APPLIED


def _delay(seconds: float) -> int:
    # A handler or a server's Retry-After may ask for anything, NaN included: the job must not be stuck for it.
    return microseconds(min(seconds, LONGEST_BACKOFF)) if seconds > 0 else 0
