"""Every invariant, with histories that keep it, and hand-made ones that do not: those are rejected, by its number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from holdfast.failures import Failure, append_failures
from holdfast.job import Job, Key, NewJob, Reason, State, enqueued
from holdfast.lifecycle import Applied
from holdfast.policy import FullJitter
from holdfast.store import InsertStatus, QueueCounts
from holdfast.testing.history import History, check, compare_endings, read_events
from holdfast.testing.history.events import (
    Answer,
    AnyEvent,
    Cancel,
    Claim,
    Close,
    Effect,
    End,
    Ending,
    Enqueue,
    Fault,
    Healed,
    Measured,
    Rules,
    Settle,
    Start,
    Stopped,
)
from holdfast.testing.history.recording import HistoryFile, digest_of
from holdfast.testing.history.verdict import NAMES

NEW = NewJob(id="00000001-0000-7000-8000-000000000001", task="t", payload=b'{"n": 1}')
OTHER = replace(NEW, id="00000002-0000-7000-8000-000000000002")
DIGEST = digest_of(NEW)
SECOND = 1_000_000
NOW = 1_800_000_000 * SECOND
BOOM = append_failures(b"", [Failure(NOW, 1, "ValueError", "boom")])


def stored(new: NewJob = NEW, **changes: Any) -> Job:
    return replace(
        enqueued(new, NOW), **{"state": State.SUCCEEDED, "reason": Reason.SUCCEEDED, "version": 1, **changes}
    )


def ending(*jobs: Job, counts: dict[str, int] | None = None, open_sessions: frozenset[str] = frozenset()) -> Ending:
    counted: dict[str, int] = {}
    for job in jobs:
        counted[job.state] = counted.get(job.state, 0) + 1
    totals = replace(QueueCounts(queue="default"), **(counted if counts is None else counts))
    return Ending(jobs=jobs, counts=(totals,), open_sessions=open_sessions)


def enqueue(at: float = 0.0, new: NewJob = NEW, **changes: Any) -> Enqueue:
    return Enqueue(
        **{
            "at": at,
            "began": at,
            "job_id": new.id,
            "digest": digest_of(new),
            "queue": "default",
            "max_retries": 3,
            "status": InsertStatus.CREATED,
            "returned": new.id,
            **changes,
        }
    )


def claim(at: float, version: int = 1, **changes: Any) -> Claim:
    return Claim(
        **{
            "at": at,
            "began": at,
            "host": "w",
            "session_id": "s",
            "job_id": NEW.id,
            "version": version,
            "attempt": version - 1,
            "run_at": NOW,
            "claimed_at": NOW + round(at * SECOND),
            "digest": DIGEST,
            **changes,
        }
    )


def settle(at: float, version: int = 1, reason: Reason = Reason.SUCCEEDED, **changes: Any) -> Settle:
    states = {Reason.SUCCEEDED: State.SUCCEEDED, Reason.EXHAUSTED: State.FAILED, Reason.CANCELLED: State.CANCELLED}
    return Settle(
        **{
            "at": at,
            "began": at,
            "job_id": NEW.id,
            "version": version,
            "session_id": "s",
            "to": states.get(reason, State.READY),
            "reason": reason,
            "attempt": version,
            "failures": 0 if reason is Reason.SUCCEEDED else 1,
            "crashes": 0,
            "snoozes": 0,
            "delay": None,
            "applied": Applied.APPLIED,
            **changes,
        }
    )


def start(at: float, version: int = 1, **changes: Any) -> Start:
    return Start(at=at, job_id=NEW.id, version=version, **changes)


def end(at: float, version: int = 1, **changes: Any) -> End:
    return End(at=at, job_id=NEW.id, version=version, **changes)


def effect(at: float, version: int = 1) -> Effect:
    return Effect(at=at, job_id=NEW.id, version=version)


def replayed(at: float, version: int) -> Settle:
    return settle(at, version, Reason.REPLAYED, session_id=None, attempt=version, delay=0)


def run(version: int, at: float) -> list[AnyEvent]:
    """A claim that succeeds."""
    return [claim(at, version), start(at + 0.1, version), effect(at + 0.2, version), end(at + 0.3, version)]


ONE_RUN: list[AnyEvent] = [enqueue(), *run(1, 1.0), settle(2.0)]
A_RETRY: list[AnyEvent] = [
    enqueue(),
    claim(1.0),
    start(1.1),
    end(1.2),
    settle(1.3, 1, Reason.RETRIED, delay=SECOND // 10),
    *run(2, 2.0),
    settle(3.0, 2),
]
TAKEN: list[AnyEvent] = [
    enqueue(),
    claim(1.0),
    start(1.1),
    Close(at=5.0, began=5.0, session_id="s"),
    settle(5.1, 1, Reason.LOST, from_the_dead=True),
    claim(6.0, 2, session_id="s2"),
    start(6.1, 2),
    effect(6.2, 2),
    end(6.3, 2),
    end(7.0, 1),
    settle(7.1, 1, applied=Applied.STALE),
    settle(7.2, 2, session_id="s2"),
]
STOPPED_THEN_RESCUED: list[AnyEvent] = [
    Stopped(at=1.5, session_id="s"),
    settle(2.0, 1, Reason.LOST, from_the_dead=True),
    claim(3.0, 2, session_id="s2"),
    start(3.1, 2),
    effect(3.2, 2),
    end(3.3, 2),
    settle(4.0, 2, session_id="s2"),
]


def history(
    events: list[AnyEvent], *jobs: Job, exact: bool = False, at_the_end: Ending | None = None, **rules: Any
) -> History:
    return History(
        events=tuple(events),
        ending=at_the_end or ending(*jobs),
        rules=Rules(**{"backoff": FullJitter(), **rules}),
        exact=exact,
    )


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(
    "good",
    [
        history(ONE_RUN, stored()),
        history(A_RETRY, stored(version=2)),
        history(TAKEN, stored(version=2)),
        # its own keeper had found that its heart stood still
        history(
            [
                enqueue(),
                claim(1.0),
                Close(at=1.4, began=1.4, host="w", session_id="s", judged=True),
                *STOPPED_THEN_RESCUED,
            ],
            stored(version=2),
        ),
        history([*ONE_RUN, replayed(3.0, 1), *run(3, 4.0), settle(5.0, 3)], stored(version=3)),
        history(
            [enqueue(), Cancel(at=1, began=1, job_id=NEW.id, ended=True)],
            stored(state=State.CANCELLED, reason=Reason.CANCELLED, version=0),
        ),
        history([enqueue(answer=Answer.UNKNOWN, status=None, returned="")]),
        history([enqueue(answer=Answer.FAILED, status=None, returned="")]),
    ],
)
def test_a_history_that_keeps_every_invariant_passes(good: History, exact: bool) -> None:
    assert [str(violation) for violation in check(replace(good, exact=exact))] == []


def retry(number: int, **changes: Any) -> Settle:
    return settle(1.3, 1, Reason.RETRIED, **{"failures": number, "delay": 0, **changes})


def keyed(new: NewJob, key: str = "k") -> NewJob:
    return replace(new, key=Key(key, "h", SECOND))


def many_retries(delay: Callable[[int], int]) -> list[AnyEvent]:
    events: list[AnyEvent] = []
    for number in range(1000):
        job_id = f"{number:08x}-0000-7000-8000-000000000001"
        new = replace(NEW, id=job_id)
        events += [enqueue(new=new), claim(1.0, job_id=job_id), retry(1, job_id=job_id, delay=delay(number))]
    return events


BAD: dict[str, tuple[int, History]] = {
    "accepted, and gone": (1, history([enqueue()])),
    "accepted, and never ended": (1, history([enqueue()], stored(state=State.READY, reason=Reason.ENQUEUED))),
    "succeeded without an effect": (1, history([enqueue(), claim(1.0), start(1.1), end(1.2), settle(2.0)], stored())),
    "succeeded, and only an earlier claim had its effect": (
        1,
        history([enqueue(), *run(1, 1.0), retry(1), claim(4.0, 2), start(4.1, 2), settle(5.0, 2)], stored(version=2)),
    ),
    "nobody enqueued it": (2, history([], stored())),
    "stored, though the call had failed": (2, history([enqueue(answer=Answer.FAILED, returned="")], stored())),
    "stored, though another job stands for it": (
        2,
        history(
            [enqueue(status=InsertStatus.EXISTING, returned=OTHER.id), enqueue(new=OTHER)], stored(), stored(OTHER)
        ),
    ),
    "claimed, and nobody enqueued it": (2, history([claim(1.0)])),
    "in the store twice": (3, history(ONE_RUN, stored(), stored())),
    "a state without a transition": (3, history(ONE_RUN, stored(reason=Reason.LOST))),
    "counted wrongly": (3, history(ONE_RUN, at_the_end=ending(stored(), counts={"succeeded": 2}))),
    "ended otherwise than its history": (
        3,
        history(ONE_RUN, stored(state=State.CANCELLED, reason=Reason.CANCELLED), exact=True),
    ),
    "one version claimed twice": (4, history([*ONE_RUN, claim(3.0, 1, session_id="s2")], stored())),
    "versions that go back": (4, history([enqueue(), claim(1.0, 2), claim(2.0, 1)], stored(version=2))),
    "a version beyond the job's own": (4, history([enqueue(), claim(1.0, 2)], stored(version=1))),
    "a version left out": (4, history([enqueue(), claim(1.0, 2), settle(2.0, 2)], stored(version=2), exact=True)),
    "claimed while it was held": (
        4,
        history([enqueue(), claim(1.0), claim(2.0, 2), settle(3.0, 2)], stored(version=2), exact=True),
    ),
    "taken from the living": (
        4,
        history(
            [enqueue(), claim(1.0), settle(2.0, 1, Reason.LOST, from_the_dead=True), claim(3.0, 2), settle(4.0, 2)],
            stored(version=2),
            exact=True,
        ),
    ),
    "settled twice": (5, history([*ONE_RUN, settle(3.0)], stored())),
    "settled with an old version": (
        5,
        history([enqueue(), claim(1.0), claim(2.0, 2, session_id="s2"), settle(3.0, 1)], stored(version=2)),
    ),
    "settled by a stranger": (5, history([enqueue(), *run(1, 1.0), settle(2.0, session_id="other")], stored())),
    "settled after its session was closed": (
        5,
        history([enqueue(), *run(1, 1.0), Close(at=1.5, began=1.5, session_id="s"), settle(2.0)], stored()),
    ),
    "settled when it was ready again": (
        5,
        history([enqueue(), *run(1, 1.0), retry(1), settle(2.0)], stored(), exact=True),
    ),
    "claimed after its end": (6, history([*ONE_RUN, *run(2, 3.0), settle(4.0, 2)], stored(version=2))),
    "ended twice": (6, history([*ONE_RUN, settle(3.0, 2, Reason.CANCELLED, session_id=None)], stored())),
    "cancelled as ready, while it ran": (
        6,
        history(
            [enqueue(), claim(1.0), Cancel(at=2, began=2, job_id=NEW.id, ended=True)],
            stored(state=State.CANCELLED, reason=Reason.CANCELLED),
            exact=True,
        ),
    ),
    "replayed before its end": (6, history([enqueue(), claim(1.0), replayed(2.0, 1)], stored(version=2), exact=True)),
    "a success that cost nothing": (7, history([enqueue(), *run(1, 1.0), settle(2.0, attempt=0)], stored())),
    "a release that cost an attempt": (
        7,
        history(
            [enqueue(), claim(1.0), settle(1.5, 1, Reason.RELEASED, attempt=1), *run(2, 2.0), settle(3.0, 2)],
            stored(version=2),
        ),
    ),
    "a crash that cost nothing": (
        7,
        history(
            [enqueue(), claim(1.0), start(1.1), settle(5.0, 1, Reason.LOST, attempt=0, from_the_dead=True)], stored()
        ),
    ),
    "given back by another process, though it had started": (
        7,
        history(
            [enqueue(), claim(1.0), start(1.1), settle(2.0, 1, Reason.RELEASED, attempt=0, host="supervisor")],
            stored(),
        ),
    ),
    "retried once too often": (7, history([enqueue(max_retries=2), claim(1.0), retry(3)], stored())),
    "given up too early": (
        7,
        history(
            [enqueue(), claim(1.0), settle(2.0, 1, Reason.EXHAUSTED, failures=3)],
            stored(state=State.FAILED, reason=Reason.EXHAUSTED, failures=4, failure_history=BOOM),
        ),
    ),
    "back after the last crash": (
        7,
        history([enqueue(), claim(1.0), settle(2.0, 1, Reason.CRASHED, crashes=3)], stored()),
    ),
    "dead before the last crash": (
        7,
        history([enqueue(), claim(1.0), settle(2.0, 1, Reason.CRASHED, crashes=1, to=State.FAILED)], stored()),
    ),
    "snoozed for ever": (
        7,
        history([enqueue(), claim(1.0), settle(2.0, 1, Reason.SNOOZED, attempt=0, snoozes=101)], stored()),
    ),
    "one lease started twice": (8, history([enqueue(), *run(1, 1.0), start(1.5), settle(2.0)], stored())),
    "started without a claim": (8, history([enqueue(), start(1.0)], stored())),
    "started before its claim": (8, history([enqueue(), start(0.5), claim(1.0)], stored())),
    "started again without a cause": (
        8,
        history([enqueue(), *run(1, 1.0), *run(2, 2.0), settle(3.0, 2)], stored(version=2)),
    ),
    "in an exact history, a fault is no cause": (
        8,
        history(
            [enqueue(), *run(1, 1.0), Fault(at=1.5, kind="kill"), *run(2, 2.0), settle(3.0, 2)],
            stored(version=2),
            exact=True,
        ),
    ),
    "ran twice at once, and nobody had lost the lease": (
        9,
        history(
            [
                enqueue(),
                claim(1.0),
                start(1.1),
                retry(1),
                claim(2.0, 2),
                start(2.1, 2),
                end(3.0, 1),
                effect(3.1, 2),
                settle(4.0, 2),
            ],
            stored(version=2),
        ),
    ),
    "claimed before it was due": (10, history([enqueue(), claim(1.0, run_at=NOW + 5 * SECOND)], stored())),
    "a delay that was too short": (10, history([enqueue(delay=5 * SECOND), *run(1, 1.0), settle(2.0)], stored())),
    "a backoff that was too short": (
        10,
        history([enqueue(), claim(1.0), retry(4, delay=3 * SECOND), claim(2.0, 2)], stored(version=2)),
    ),
    "an end that never came, nearly": (
        11,
        history([*ONE_RUN[:-1], Healed(at=1.5), settle(100.0)], stored(), drained_within=60.0),
    ),
    "a wait beyond its bound": (12, history([enqueue(), claim(1.0), retry(1, delay=SECOND)], stored())),
    "a crash's wait beyond its bound": (
        12,
        history([enqueue(), claim(1.0), settle(2.0, 1, Reason.CRASHED, crashes=1, delay=SECOND)], stored()),
    ),
    "a thousand that come back together": (12, history(many_retries(lambda number: SECOND // 4))),
    "one key, two jobs": (
        13,
        history([enqueue(key="k"), enqueue(1.0, OTHER, key="k")], stored(), stored(OTHER)),
    ),
    "one key, two jobs at once": (
        13,
        history([enqueue(2.0, key="k", began=0.0), enqueue(2.0, OTHER, key="k", began=0.0)], stored(), stored(OTHER)),
    ),
    "two holders of one key": (13, history([enqueue(), enqueue(new=OTHER)], stored(keyed(NEW)), stored(keyed(OTHER)))),
    "another payload passed for the same": (
        13,
        history(
            [
                enqueue(key="k"),
                enqueue(1.0, replace(OTHER, payload=b"{}"), key="k", returned=NEW.id, status=InsertStatus.EXISTING),
            ],
            stored(),
        ),
    ),
    "a dead letter without a reason": (19, history([enqueue()], stored(state=State.FAILED, reason=Reason.PERMANENT))),
    "exhausted, and not": (
        19,
        history([enqueue()], stored(state=State.FAILED, reason=Reason.EXHAUSTED, failures=1, failure_history=BOOM)),
    ),
    "stored with another payload": (21, history(ONE_RUN, stored(payload=b"{}"))),
    "claimed with another payload": (21, history([enqueue(), claim(1.0, digest="other")], stored())),
    "handled with another payload": (21, history([enqueue(), claim(1.0), start(1.1, digest="other")], stored())),
    "stopped, and still open": (
        23,
        history(
            [*ONE_RUN, Stopped(at=3.0, session_id="s")], at_the_end=ending(stored(), open_sessions=frozenset({"s"}))
        ),
    ),
    "stopped with a job in its hands": (
        23,
        history([*ONE_RUN[:-1], Stopped(at=1.5, session_id="s"), settle(2.0)], stored()),
    ),
    "stopped and closed by itself, with a job in its hands": (
        23,
        history(
            [enqueue(), claim(1.0), Close(at=1.4, began=1.4, session_id="s"), *STOPPED_THEN_RESCUED], stored(version=2)
        ),
    ),
    "stopped, and judged dead only after that": (
        23,
        history(
            [enqueue(), claim(1.0), *STOPPED_THEN_RESCUED, Close(at=1.9, began=1.9, session_id="s", judged=True)],
            stored(version=2),
        ),
    ),
    "a leak": (24, history([*ONE_RUN, Measured(at=9.0, what="connections", before=4, after=9, slack=2)], stored())),
}


@pytest.mark.parametrize("name", BAD)
def test_a_history_that_breaks_an_invariant_is_rejected_by_its_number(name: str) -> None:
    invariant, bad = BAD[name]
    assert invariant in {violation.invariant for violation in check(bad)}


def test_every_invariant_has_a_bad_history() -> None:
    assert {invariant for invariant, _ in BAD.values()} | {20} == set(NAMES)


def test_endings_are_compared_engine_by_engine() -> None:
    """Invariant 20."""
    same = {"memory": ending(stored()), "redis": ending(stored(OTHER))}

    def describe(job: Job) -> tuple[str, str]:
        return job.task, job.state

    assert compare_endings(same, describe) == []
    other = {**same, "sqlite": ending(stored(state=State.FAILED, reason=Reason.PERMANENT, failure_history=BOOM))}
    assert [(violation.invariant, violation.what) for violation in compare_endings(other, describe)] == [
        (20, "1 more on sqlite than on memory: ('t', <State.FAILED: 'failed'>)"),
        (20, "1 more on memory than on sqlite: ('t', <State.SUCCEEDED: 'succeeded'>)"),
    ]


@pytest.mark.parametrize(("failed", "broken"), [("HardTimeout", set()), ("ValueError", {9})])
def test_a_handler_that_was_left_behind_past_its_hard_limit_may_still_run(failed: str, broken: set[int]) -> None:
    once: list[AnyEvent] = [enqueue(), claim(1.0), start(1.1), retry(1)]
    again: list[AnyEvent] = [claim(2.0, 2), start(2.1, 2), end(3.0, 1), effect(3.1, 2), settle(4.0, 2)]
    job = stored(version=2, failure_history=append_failures(b"", [Failure(NOW, 1, failed, "too long")]))
    found = check(history([*once, *again], job))
    assert {violation.invariant for violation in found} & {9} == broken


def test_what_the_run_itself_has_spoilt_is_not_judged() -> None:
    spoilt = history(ONE_RUN, stored(payload=b"{}"))
    assert check(spoilt) != []
    assert check(replace(spoilt, rules=replace(spoilt.rules, damaged=frozenset({NEW.id})))) == []


def test_a_wished_delay_is_not_held_against_the_backoff() -> None:
    wished: list[AnyEvent] = [enqueue(), claim(1.0), start(1.1), end(1.2, wished=1.0), retry(1, delay=SECOND)]
    assert 12 not in {violation.invariant for violation in check(history(wished, stored()))}


def test_delays_are_not_judged_by_a_clock_that_jumps() -> None:
    early: list[AnyEvent] = [enqueue(delay=5 * SECOND), *run(1, 1.0), settle(2.0)]
    assert check(history(early, stored(), steady_clock=False)) == []


def test_events_survive_a_file(tmp_path: Path) -> None:
    file = HistoryFile(tmp_path / "a", durable=True)
    for event in TAKEN:
        file.note(event)
    file.close()
    with (tmp_path / "a").open("ab") as cut_off:
        cut_off.write(b'{"event":"start","at":')
    assert read_events([tmp_path / "a"]) == tuple(TAKEN)
    assert msgspec.json.decode(msgspec.json.encode(history(TAKEN, stored(version=2))), type=History) == history(
        TAKEN, stored(version=2)
    )
