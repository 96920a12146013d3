"""The state machine, from one table: `TABLE` says what follows from everything that can happen to a job."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.failures import Failure, decode_history
from holdfast.job import ENDED, Job, Reason, State
from holdfast.lifecycle import (
    TRANSITIONS,
    Applied,
    Crashed,
    Failed,
    KeyChange,
    Lost,
    Move,
    Outcome,
    Released,
    Snoozed,
    Standing,
    Succeeded,
    cancel,
    judge,
    replay,
    settle,
)
from holdfast.policy import LONGEST_BACKOFF, Backoff, Exponential, FullJitter, RetryPolicy, Steps
from tests.unit.samples import BROKEN, FixedRandom, claimed_job

NEWEST = Failure(at=1_700_000_000_000_001, attempt=7, type="OSError", message="newest")
LONGEST_DELAY = int(LONGEST_BACKOFF) * 1_000_000


class Guard(msgspec.Struct, frozen=True):
    """What a move compares, apart from the version, which every move compares."""

    sources: frozenset[State]
    session_id: str | None
    session_open: bool | None


HOLDER = Guard(frozenset({State.IN_FLIGHT}), "s1", True)
RESCUE = Guard(frozenset({State.IN_FLIGHT}), "s1", False)
CANCELLER = Guard(frozenset({State.READY}), None, None)
REPLAYER = Guard(frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED}), None, None)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. `claimed_job` begins with 6 attempts, 2 failures of 3 retries, 1 crash and 4 snoozes."""

    case: str
    act: Outcome | Callable[[Job], Move]
    job: dict[str, Any] = {}
    policy: RetryPolicy = RetryPolicy()
    cancel_asked: bool = False
    # what must follow
    to: State
    reason: Reason
    counts: tuple[int, int, int, int]
    """Attempts, failures, crashes, snoozes."""
    suspect: bool = False
    delay: tuple[float, float] | None = None
    """Seconds, at the lowest and at the highest throw of the dice. None: the job keeps its place, or has none."""
    new_failures: int = 0
    result: bytes | None = None
    key: KeyChange = KeyChange.KEEP
    guard: Guard = HOLDER
    despite_cancel: bool = False
    raise_version: bool = False

    def before(self) -> Job:
        """The job to which it happens."""
        return claimed_job(**self.job)

    def move(self, dice: float = 0.5) -> Move:
        """What the lifecycle makes of it."""
        if callable(self.act):
            return self.act(self.before())
        return settle(self.before(), self.act, self.policy, FixedRandom(dice), cancel_asked=self.cancel_asked)


R, F, S, C = State.READY, State.FAILED, State.SUCCEEDED, State.CANCELLED
FREE, KEEP, TAKE = KeyChange.FREE, KeyChange.KEEP, KeyChange.TAKE
NO_WAIT, LONGEST = (0, 0), (LONGEST_BACKOFF, LONGEST_BACKOFF)


def failed(**how: Any) -> Failed:
    return Failed(NEWEST, **how)


def retried(case: str, wait: tuple[float, float], **given_: Any) -> Row:
    """A nack with retries left; only the wait differs."""
    given_.setdefault("act", failed())
    return Row(case=case, to=R, reason=Reason.RETRIED, counts=(7, 3, 1, 4), delay=wait, new_failures=1, **given_)


def snoozed(case: str, seconds: float, wait: tuple[float, float], **given_: Any) -> Row:
    """A snooze within its limit; only the wait differs."""
    act = Snoozed(seconds, NEWEST)
    return Row(case=case, act=act, to=R, reason=Reason.SNOOZED, counts=(6, 2, 1, 5), delay=wait, **given_)


def raises(failures: int) -> float:
    raise RuntimeError(failures)


SUSPECT = {"suspect": True}
LAST_CRASH = {"suspect": True, "crashes": 2}
ALL_SNOOZED = {"snoozes": 100}

ENDS_OF_A_CLAIM = [
    # ack
    Row(
        case="ack",
        act=Succeeded(b"7"),
        to=S,
        reason=Reason.SUCCEEDED,
        counts=(7, 2, 1, 4),
        result=b"7",
        despite_cancel=True,
    ),
    Row(
        case="ack, result not kept",
        act=Succeeded(failure=NEWEST),
        to=S,
        reason=Reason.SUCCEEDED,
        counts=(7, 2, 1, 4),
        new_failures=1,
        despite_cancel=True,
    ),
    Row(
        case="ack of a suspect",
        act=Succeeded(),
        job=SUSPECT,
        to=S,
        reason=Reason.SUCCEEDED,
        counts=(7, 2, 1, 4),
        despite_cancel=True,
    ),
    # nack, retries left
    retried("nack: third failure, full jitter", (0, 2)),
    retried("nack of a suspect: it ran alone and lived", (0, 2), job=SUSPECT),
    retried("nack: jitter is capped", (0, 1.5), policy=RetryPolicy(backoff=FullJitter(0.5, 1.5))),
    retried("nack: exponential", (90, 90), policy=RetryPolicy(backoff=Exponential(10, 3, 1000))),
    retried("nack: steps", (300, 300), policy=RetryPolicy(backoff=Steps((5, 30, 300)))),
    retried("nack: steps, the last repeats", (30, 30), policy=RetryPolicy(backoff=Steps((5, 30)))),
    retried("nack: callable", (4.5, 4.5), policy=RetryPolicy(backoff=lambda n: n * 1.5)),
    retried("nack: callable raises", (0, 2), policy=RetryPolicy(backoff=raises)),
    retried("nack: callable answers NaN", (0, 2), policy=RetryPolicy(backoff=lambda n: math.nan)),
    retried("nack: callable answers inf", LONGEST, policy=RetryPolicy(backoff=lambda n: math.inf)),
    retried("nack: retry_after wins", (7, 7), act=failed(retry_after=7)),
    retried("nack: retry_after, half a microsecond", NO_WAIT, act=failed(retry_after=0.000_000_4)),
    retried("nack: retry_after 0", NO_WAIT, act=failed(retry_after=0)),
    retried("nack: retry_after negative", NO_WAIT, act=failed(retry_after=-1)),
    retried("nack: retry_after NaN", NO_WAIT, act=failed(retry_after=math.nan)),
    retried("nack: retry_after inf", LONGEST, act=failed(retry_after=math.inf)),
    retried("nack: retry_after -inf", NO_WAIT, act=failed(retry_after=-math.inf)),
    retried("nack: retry_after beyond floats", LONGEST, act=failed(retry_after=10**400)),
    # nack, no retries left
    Row(
        case="nack: exhausted",
        act=failed(),
        job={"failures": 3},
        to=F,
        reason=Reason.EXHAUSTED,
        counts=(7, 4, 1, 4),
        new_failures=1,
        key=FREE,
    ),
    Row(
        case="nack: exhausted, no retries at all",
        act=failed(),
        job={"failures": 0, "max_retries": 0},
        to=F,
        reason=Reason.EXHAUSTED,
        counts=(7, 1, 1, 4),
        new_failures=1,
        key=FREE,
    ),
    Row(
        case="nack: exhausted, retry_after does not help",
        act=failed(retry_after=5),
        job={"failures": 3},
        to=F,
        reason=Reason.EXHAUSTED,
        counts=(7, 4, 1, 4),
        new_failures=1,
        key=FREE,
    ),
    Row(
        case="nack: permanent, retries left",
        act=failed(permanent=True),
        to=F,
        reason=Reason.PERMANENT,
        counts=(7, 3, 1, 4),
        new_failures=1,
        key=FREE,
    ),
    Row(
        case="nack: permanent and exhausted",
        act=failed(permanent=True, retry_after=5),
        job={"failures": 3},
        to=F,
        reason=Reason.PERMANENT,
        counts=(7, 4, 1, 4),
        new_failures=1,
        key=FREE,
    ),
    # release
    Row(case="release", act=Released(), to=R, reason=Reason.RELEASED, counts=(6, 2, 1, 4)),
    Row(
        case="release of a suspect",
        act=Released(),
        job=SUSPECT,
        to=R,
        reason=Reason.RELEASED,
        counts=(6, 2, 1, 4),
        suspect=True,
    ),
    # snooze
    snoozed("snooze", 60, (60, 60)),
    snoozed("snooze of a suspect", 60, (60, 60), job=SUSPECT, suspect=True),
    snoozed("snooze 0", 0, NO_WAIT),
    snoozed("snooze negative", -5, NO_WAIT),
    snoozed("snooze NaN", math.nan, NO_WAIT),
    snoozed("snooze inf", math.inf, LONGEST),
    snoozed("snooze: the last one allowed", 1, (1, 1), policy=RetryPolicy(max_snoozes=5)),
    Row(
        case="snooze beyond the limit",
        act=Snoozed(60, NEWEST),
        job=ALL_SNOOZED,
        to=F,
        reason=Reason.SNOOZED_OUT,
        counts=(6, 2, 1, 101),
        new_failures=1,
        key=FREE,
    ),
    Row(
        case="snooze beyond a limit of none",
        act=Snoozed(60, NEWEST),
        job={"snoozes": 0},
        policy=RetryPolicy(max_snoozes=0),
        to=F,
        reason=Reason.SNOOZED_OUT,
        counts=(6, 2, 1, 1),
        new_failures=1,
        key=FREE,
    ),
    # its own process died
    Row(
        case="crashed alone",
        act=Crashed(NEWEST),
        to=R,
        reason=Reason.CRASHED,
        counts=(7, 2, 2, 4),
        suspect=True,
        delay=(0, 1),
        new_failures=1,
    ),
    Row(
        case="crashed alone, at the limit",
        act=Crashed(NEWEST),
        job=LAST_CRASH,
        to=F,
        reason=Reason.CRASHED,
        counts=(7, 2, 3, 4),
        suspect=True,
        new_failures=1,
        key=FREE,
    ),
    # lease lost
    Row(
        case="lost, not started",
        act=Lost(NEWEST, started=False),
        to=R,
        reason=Reason.LOST,
        counts=(6, 2, 1, 4),
        guard=RESCUE,
    ),
    Row(
        case="lost, not started, suspect at the limit",
        act=Lost(NEWEST, started=False),
        job=LAST_CRASH,
        to=R,
        reason=Reason.LOST,
        counts=(6, 2, 2, 4),
        suspect=True,
        guard=RESCUE,
    ),
    *(
        row
        for started in (True, None)
        for row in (
            Row(
                case=f"lost, started {started}: with others, so it becomes suspect",
                act=Lost(NEWEST, started=started),
                to=R,
                reason=Reason.LOST,
                counts=(7, 2, 1, 4),
                suspect=True,
                new_failures=1,
                guard=RESCUE,
            ),
            Row(
                case=f"lost, started {started}: with others, below the limit by one",
                act=Lost(NEWEST, started=started),
                job={"crashes": 2},
                to=R,
                reason=Reason.LOST,
                counts=(7, 2, 2, 4),
                suspect=True,
                new_failures=1,
                guard=RESCUE,
            ),
            Row(
                case=f"lost, started {started}: alone",
                act=Lost(NEWEST, started=started),
                job=SUSPECT,
                to=R,
                reason=Reason.LOST,
                counts=(7, 2, 2, 4),
                suspect=True,
                new_failures=1,
                guard=RESCUE,
            ),
            Row(
                case=f"lost, started {started}: alone, at the limit",
                act=Lost(NEWEST, started=started),
                job=LAST_CRASH,
                to=F,
                reason=Reason.CRASHED,
                counts=(7, 2, 3, 4),
                suspect=True,
                new_failures=1,
                key=FREE,
                guard=RESCUE,
            ),
            Row(
                case=f"lost, started {started}: alone, limit of one",
                act=Lost(NEWEST, started=started),
                job={"suspect": True, "crashes": 0},
                policy=RetryPolicy(max_crashes=1),
                to=F,
                reason=Reason.CRASHED,
                counts=(7, 2, 1, 4),
                suspect=True,
                new_failures=1,
                key=FREE,
                guard=RESCUE,
            ),
        )
    ),
]


def asked_to_cancel(row: Row) -> Iterator[Row]:
    """The same end after somebody asked to cancel: as the worker heard it, and as the store told it with the job."""
    ended = row if row.to is S else replace(row, to=C, reason=Reason.CANCELLED, delay=None, key=FREE)
    ended = replace(ended, despite_cancel=True)
    yield replace(ended, case=f"cancel heard, then {row.case}", cancel_asked=True)
    yield replace(ended, case=f"cancel known, then {row.case}", job={**row.job, "cancel_asked": True})


TABLE = [
    *ENDS_OF_A_CLAIM,
    *(asked for row in ENDS_OF_A_CLAIM for asked in asked_to_cancel(row)),
    Row(
        case="cancel",
        act=cancel,
        job={"state": R, "reason": Reason.RETRIED, **SUSPECT},
        to=C,
        reason=Reason.CANCELLED,
        counts=(6, 2, 1, 4),
        suspect=True,
        key=FREE,
        guard=CANCELLER,
        despite_cancel=True,
    ),
    *(
        Row(
            case=f"replay of {state}{'' if key else ' without a key'}",
            act=replay,
            job={
                "state": state,
                "reason": reason,
                **SUSPECT,
                **({} if key else {"key": None}),
                "result": b"old",
            },
            to=R,
            reason=Reason.REPLAYED,
            counts=(6, 0, 0, 0),
            delay=NO_WAIT,
            key=TAKE if key else KEEP,
            guard=REPLAYER,
            despite_cancel=True,
            raise_version=True,
        )
        for state, reason in ((F, Reason.EXHAUSTED), (C, Reason.CANCELLED), (S, Reason.SUCCEEDED))
        for key in (True, False)
    ),
]

every_row = pytest.mark.parametrize("row", TABLE, ids=[row.case for row in TABLE])


def microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)


# What follows.


@every_row
def test_state_reason_and_counters(row: Row) -> None:
    move = row.move()
    assert (move.to, move.reason) == (row.to, row.reason)
    assert (move.attempt, move.failures, move.crashes, move.snoozes) == row.counts
    assert move.suspect is row.suspect
    assert move.result == row.result
    assert move.then == ()


@every_row
def test_delay(row: Row) -> None:
    lowest, highest = row.move(dice=0.0).delay, row.move(dice=1.0).delay
    if row.delay is None:
        assert lowest is None
        assert highest is None
    else:
        assert (lowest, highest) == (microseconds(row.delay[0]), microseconds(row.delay[1]))
        assert type(lowest) is int


@every_row
def test_history_grows_at_its_end(row: Row) -> None:
    assert decode_history(row.move().failure_history) == [BROKEN] + [NEWEST] * row.new_failures


@every_row
def test_key(row: Row) -> None:
    assert row.move().key_change is row.key


@every_row
def test_guard_fields(row: Row) -> None:
    move = row.move()
    assert (move.job_id, move.queue, move.version) == ("01900000-0000-7000-8000-000000000001", "mail", 9)
    assert Guard(move.sources, move.session_id, move.session_open) == row.guard
    assert move.despite_cancel is row.despite_cancel
    assert move.raise_version is row.raise_version


def test_every_kind_of_end_is_in_the_table() -> None:
    kinds = {type(row.act) for row in ENDS_OF_A_CLAIM}
    assert kinds == {Succeeded, Failed, Released, Snoozed, Crashed, Lost}


def test_only_failed_and_cancelled_jobs_free_their_key_and_only_a_replay_takes_it_back() -> None:
    for row in TABLE:
        move = row.move()
        assert (move.key_change is FREE) == (move.to in {F, C})
        assert (move.key_change is TAKE) == (move.reason is Reason.REPLAYED and row.before().key is not None)


# The table and the diagram are the same machine.


def arrows(move: Move) -> set[tuple[State | None, State, Reason]]:
    return {(source, move.to, move.reason) for source in move.sources}


DRAWN = {(arrow.source, arrow.target, arrow.reason) for arrow in TRANSITIONS}
BY_THE_STORE = {(None, State.READY, Reason.ENQUEUED), (State.READY, State.IN_FLIGHT, Reason.CLAIMED)}


@every_row
def test_every_move_is_drawn(row: Row) -> None:
    assert arrows(row.move()) <= DRAWN


def test_everything_drawn_is_made_by_some_move_except_enqueue_and_claim() -> None:
    made = {arrow for row in TABLE for arrow in arrows(row.move())}
    assert made == DRAWN - BY_THE_STORE
    assert made.isdisjoint(BY_THE_STORE)


def test_nothing_is_drawn_twice() -> None:
    assert len(DRAWN) == len(TRANSITIONS)
    assert all(arrow.trigger for arrow in TRANSITIONS)


def test_every_state_and_every_reason_is_drawn() -> None:
    assert {arrow.target for arrow in TRANSITIONS} == set(State)
    assert {arrow.reason for arrow in TRANSITIONS} == set(Reason)


# The guard.

OTHER_SESSION = "s2"


def fitting(row: Row, **changes: Any) -> Standing:
    """A standing for which the row's guard holds, with changes."""
    holds = Standing(
        state=min(row.guard.sources),
        reason=Reason.ENQUEUED,
        version=9,
        session_id="s1",
        session_open=bool(row.guard.session_open),
        cancel_asked=False,
    )
    return replace(holds, **changes)


def settled(row: Row, **changes: Any) -> Standing:
    """The standing that the row's move leaves behind, with changes."""
    left = fitting(row, state=row.to, reason=row.reason, version=9 + row.raise_version)
    return replace(left, **changes)


def other_reason(row: Row) -> Reason:
    return next(reason for reason in Reason if reason is not row.reason)


A = Applied
Situation = Callable[[Row], Standing | None]
SITUATIONS: dict[str, tuple[Situation, Callable[[Row], Applied]]] = {
    "as it should be": (fitting, lambda row: A.APPLIED),
    "no such job": (lambda row: None, lambda row: A.GONE),
    "claimed again since": (lambda row: fitting(row, version=10), lambda row: A.STALE),
    "an older version": (lambda row: fitting(row, version=8), lambda row: A.STALE),
    "in another session's hands": (
        lambda row: fitting(row, session_id=OTHER_SESSION),
        lambda row: A.STALE if row.guard.session_id else A.APPLIED,
    ),
    "in nobody's hands": (
        lambda row: fitting(row, session_id=None),
        lambda row: A.STALE if row.guard.session_id else A.APPLIED,
    ),
    "session open": (
        lambda row: fitting(row, session_open=True),
        lambda row: A.STALE if row.guard.session_open is False else A.APPLIED,
    ),
    "session closed": (
        lambda row: fitting(row, session_open=False),
        lambda row: A.STALE if row.guard.session_open is True else A.APPLIED,
    ),
    "cancel asked": (
        lambda row: fitting(row, cancel_asked=True),
        lambda row: A.APPLIED if row.despite_cancel else A.CANCEL_ASKED,
    ),
    "cancel asked, but the session is wrong": (
        lambda row: fitting(row, cancel_asked=True, session_id=OTHER_SESSION),
        lambda row: A.STALE if row.guard.session_id else A.APPLIED,
    ),
    "cancel asked, but the version is wrong": (
        lambda row: fitting(row, cancel_asked=True, version=10),
        lambda row: A.STALE,
    ),
    "done before": (settled, lambda row: A.ALREADY),
    "done before, session closed since": (
        lambda row: settled(row, session_open=False),
        lambda row: A.ALREADY,
    ),
    "done before, session open": (lambda row: settled(row, session_open=True), lambda row: A.ALREADY),
    "done before, cancel asked meanwhile": (
        lambda row: settled(row, cancel_asked=True),
        lambda row: A.ALREADY,
    ),
    "done before by another session": (
        lambda row: settled(row, session_id=OTHER_SESSION),
        lambda row: A.STALE if row.guard.session_id else A.ALREADY,
    ),
    "done before, other version": (
        lambda row: settled(row, version=10 + row.raise_version),
        lambda row: A.STALE,
    ),
    "in the target state for another reason": (
        lambda row: settled(row, reason=other_reason(row)),
        lambda row: A.STALE,
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_judge(situation: str) -> None:
    standing_of, expected = SITUATIONS[situation]
    verdicts = {row.case: judge(row.move(), standing_of(row)) for row in TABLE}
    assert verdicts == {row.case: expected(row) for row in TABLE}


@pytest.mark.parametrize("state", State)
def test_a_move_applies_in_its_source_states_and_is_stale_in_every_other(state: State) -> None:
    verdicts = {row.case: judge(row.move(), fitting(row, state=state, reason=other_reason(row))) for row in TABLE}
    assert verdicts == {row.case: Applied.APPLIED if state in row.guard.sources else Applied.STALE for row in TABLE}


@every_row
def test_judge_in_every_standing_that_can_be_written_down(row: Row) -> None:
    """Not an example but all of them: which standings get which answer, said as sets instead of as conditions."""
    versions, sessions = (8, 9, 10, 11), ("s1", OTHER_SESSION, None)
    both = (True, False)
    everything = set(product(State, Reason, versions, sessions, both, both))
    own = {row.guard.session_id} if row.guard.session_id else set(sessions)
    open_ = both if row.guard.session_open is None else (row.guard.session_open,)

    already = set(product({row.to}, {row.reason}, {9 + row.raise_version}, own, both, both))
    holds = set(product(row.guard.sources, Reason, {9}, own, open_, both)) - already
    asked = set() if row.despite_cancel else {standing for standing in holds if standing[-1]}

    move = row.move()
    answers: dict[Applied, set[Any]] = {answer: set() for answer in Applied}
    for standing in everything:
        answers[judge(move, Standing(*standing))].add(standing)
    assert answers == {
        Applied.APPLIED: holds - asked,
        Applied.ALREADY: already,
        Applied.STALE: everything - holds - already,
        Applied.GONE: set(),
        Applied.CANCEL_ASKED: asked,
        Applied.KEY_TAKEN: set(),
    }


# Whatever happens, in whatever order.

numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers()
outcomes = st.one_of(
    st.just(Succeeded(b"1")),
    st.builds(Failed, st.just(NEWEST), permanent=st.booleans(), retry_after=st.none() | st.none() | numbers),
    st.just(Released()),
    st.builds(Snoozed, numbers, st.just(NEWEST)),
    st.builds(Lost, st.just(NEWEST), started=st.sampled_from((True, False, None))),
)
backoffs: st.SearchStrategy[Backoff] = st.one_of(
    st.just(FullJitter()),
    st.just(Exponential(max=LONGEST_BACKOFF)),
    st.just(Steps((1, LONGEST_BACKOFF))),
    numbers.map(lambda answer: lambda n: answer),
    st.just(raises),
)
policies = st.builds(
    RetryPolicy,
    backoff=backoffs,
    max_crashes=st.integers(1, 4),
    max_snoozes=st.integers(0, 4),
)
dice = st.builds(FixedRandom, st.floats(0, 1, exclude_max=True))


def written(job: Job, move: Move) -> Job:
    """The job after a store has carried out the move."""
    names = ("reason", "attempt", "failures", "crashes", "snoozes", "suspect", "failure_history", "result")
    fields = {name: getattr(move, name) for name in names}
    return replace(job, state=move.to, version=job.version + move.raise_version, **fields)


def enqueued(max_retries: int) -> Job:
    return claimed_job(
        state=R,
        reason=Reason.ENQUEUED,
        version=0,
        session_id=None,
        attempt=0,
        failures=0,
        crashes=0,
        snoozes=0,
        max_retries=max_retries,
        failure_history=b"",
    )


def claimed(job: Job) -> Job:
    return replace(job, state=State.IN_FLIGHT, reason=Reason.CLAIMED, version=job.version + 1, session_id="s1")


@settings(deadline=None)
@given(st.data(), policies, dice, st.integers(0, 5), st.lists(outcomes, max_size=30))
def test_bounds_hold_through_a_whole_life(
    data: st.DataObject, policy: RetryPolicy, random: FixedRandom, max_retries: int, life: list[Outcome]
) -> None:
    job = enqueued(max_retries)
    for outcome in life:
        if job.state in ENDED:
            before, move = job, replay(job)
        elif data.draw(st.integers(0, 19)) == 0:
            before, move = job, cancel(job)
        else:
            before = claimed(job)
            asked = data.draw(st.booleans())
            move = settle(before, outcome, policy, random, cancel_asked=asked)
        standing = Standing(before.state, before.reason, before.version, "s1", move.session_open is True, False)
        assert judge(move, standing) is Applied.APPLIED
        assert (before.state, move.to, move.reason) in DRAWN

        job = written(before, move)
        assert job.attempt >= before.attempt
        assert job.attempt - before.attempt <= 1
        assert job.version >= before.version
        assert job.failures <= max_retries + 1
        assert job.crashes <= policy.max_crashes
        assert job.snoozes <= policy.max_snoozes + 1
        assert len(decode_history(job.failure_history)) <= 10
        if move.delay is not None:
            assert type(move.delay) is int
            assert 0 <= move.delay <= LONGEST_DELAY
            assert job.state is State.READY
        if job.state is State.READY:
            assert job.failures <= max_retries
            assert job.crashes < policy.max_crashes
            assert job.snoozes <= policy.max_snoozes


@settings(deadline=None)
@given(outcomes, policies, dice, st.booleans())
def test_no_end_of_a_claim_raises_and_every_end_repeated_is_already(
    outcome: Outcome, policy: RetryPolicy, random: FixedRandom, asked: bool
) -> None:
    before = claimed_job()
    move = settle(before, outcome, policy, random, cancel_asked=asked)
    after = written(before, move)
    left = Standing(after.state, after.reason, after.version, after.session_id, True, False)
    assert judge(move, left) is Applied.ALREADY
    again = claimed(after)
    reclaimed = Standing(again.state, again.reason, again.version, again.session_id, True, False)
    assert judge(move, reclaimed) is Applied.STALE


@given(st.integers(0, 20))
def test_a_job_that_always_fails_is_attempted_once_more_than_it_has_retries(max_retries: int) -> None:
    job, settlements = enqueued(max_retries), 0
    while job.state not in ENDED:
        before = claimed(job)
        job = written(before, settle(before, failed(), RetryPolicy(), FixedRandom(0.5)))
        settlements += 1
    assert (job.state, job.reason) == (F, Reason.EXHAUSTED)
    assert settlements == job.attempt == job.failures == max_retries + 1


@given(st.integers(1, 9))
def test_a_job_that_always_crashes_ends_at_one_crash_among_others_and_the_limit_of_crashes_alone(
    limit: int,
) -> None:
    job = enqueued(max_retries=3)
    while job.state not in ENDED:
        before = claimed(job)
        job = written(before, settle(before, Lost(NEWEST), RetryPolicy(max_crashes=limit), FixedRandom(0.5)))
    assert (job.state, job.reason) == (F, Reason.CRASHED)
    assert (job.attempt, job.crashes, job.failures) == (limit + 1, limit, 0)


def test_a_replayed_job_has_all_its_retries_again() -> None:
    dead = claimed_job(state=F, reason=Reason.EXHAUSTED, failures=4)
    back = claimed(written(dead, replay(dead)))
    assert settle(back, failed(), RetryPolicy(), FixedRandom(0.5)).reason is Reason.RETRIED


def test_no_lease_from_before_a_replay_fits_after_it() -> None:
    """The claim that a replayed job gets never has a version that an old claim had."""
    old = claimed_job()
    nack = settle(old, failed(permanent=True), RetryPolicy(), FixedRandom(0.5))
    back = claimed(written(old, replay(written(old, nack))))
    assert back.version > old.version
    standing = Standing(back.state, back.reason, back.version, back.session_id, True, False)
    assert judge(nack, standing) is Applied.STALE
