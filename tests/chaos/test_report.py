"""What the report says about a history, and about several."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from holdfast.job import Reason, State
from holdfast.lifecycle import Applied
from holdfast.store import QueueCounts
from holdfast.testing.history.events import (
    Answer,
    AnyEvent,
    Claim,
    Effect,
    End,
    Ending,
    Enqueue,
    Fault,
    Healed,
    History,
    KeeperReady,
    Settle,
    Start,
)
from holdfast.testing.history.recording import digest_of
from tests.chaos.campaign import WORKERS_KILLED
from tests.chaos.report import add_result, read_results, rendered
from tests.chaos.result import Result, judged
from tests.unit.samples import claimed_job

JOB = claimed_job(
    id="a", queue="default", state=State.SUCCEEDED, reason=Reason.SUCCEEDED, version=2, attempt=2, key=None
)
DIGEST = digest_of(JOB)


def enqueue(job_id: str, answer: Answer) -> Enqueue:
    return Enqueue(
        at=1.0, began=0.9, host="p", job_id=job_id, digest=DIGEST, queue="default", max_retries=3, answer=answer
    )


def claim(version: int, host: str, at: float) -> Claim:
    return Claim(
        at=at,
        began=at - 0.1,
        host=host,
        session_id=f"s{version}",
        job_id="a",
        version=version,
        attempt=version - 1,
        run_at=0,
        claimed_at=1,
        digest=DIGEST,
    )


def settle(version: int, host: str, at: float, to: State, reason: Reason, applied: Applied) -> Settle:
    return Settle(
        at=at,
        began=at - 0.1,
        host=host,
        job_id="a",
        version=version,
        session_id=f"s{version}",
        to=to,
        reason=reason,
        attempt=version,
        failures=0,
        crashes=0,
        snoozes=0,
        delay=None,
        applied=applied,
        from_the_dead=reason is Reason.LOST,
    )


def ran(version: int, host: str, at: float) -> list[AnyEvent]:
    return [
        Start(at=at, host=host, job_id="a", version=version, digest=DIGEST),
        Effect(at=at, host=host, job_id="a", version=version),
        End(at=at, host=host, job_id="a", version=version),
    ]


EVENTS: tuple[AnyEvent, ...] = (
    KeeperReady(at=0.5, host="k"),
    enqueue("a", Answer.OK),
    enqueue("b", Answer.UNKNOWN),
    enqueue("c", Answer.FAILED),
    claim(1, "1", 2.0),
    *ran(1, "1", 2.1),
    Fault(at=3.0, kind="kill", victim="1"),
    settle(1, "k", 4.0, State.READY, Reason.LOST, Applied.APPLIED),
    claim(2, "2", 4.5),
    *ran(2, "2", 4.6),
    settle(2, "2", 5.0, State.SUCCEEDED, Reason.SUCCEEDED, Applied.APPLIED),
    settle(1, "1", 5.5, State.SUCCEEDED, Reason.SUCCEEDED, Applied.STALE),
    Healed(at=6.0),
)
HISTORY = History(events=EVENTS, ending=Ending(jobs=(JOB,), counts=(QueueCounts(queue="default", succeeded=1),)))


def test_what_is_counted() -> None:
    result = judged("cell", "sqlite", 1.0, HISTORY)
    assert result.violations == []
    assert (result.accepted, result.unknown, result.refused, result.lost, result.dead) == (1, 1, 1, 0, 0)
    assert (result.started_again, result.duplicated) == ({"worker killed": 1}, {"worker killed": 1})
    assert (result.stale, result.back, result.recovery) == (1, [1.0], [1.5])
    assert result.faults == {"kill": 1}
    assert result.good


def test_a_lost_job_is_no_good_result() -> None:
    result = judged("cell", "sqlite", 1.0, History(events=EVENTS, ending=Ending(jobs=(), counts=())))
    assert result.lost == 1
    assert any("accepted, and not in the store" in violation for violation in result.violations)
    assert not result.good


def test_the_causes_of_a_lost_lease() -> None:
    def why(fault: Fault) -> dict[str, int]:
        events = tuple(fault if isinstance(event, Fault) else event for event in EVENTS)
        return judged("cell", "sqlite", 1.0, replace(HISTORY, events=events)).started_again

    assert why(Fault(at=3.0, kind="pause", victim="1")) == {"worker paused": 1}
    assert why(Fault(at=3.0, kind="server killed", victim="redis")) == {"server away": 1}
    assert why(Fault(at=3.0, kind="kill", victim="somebody else")) == {"worker lost": 1}


def test_the_page(tmp_path: Path) -> None:
    good = judged(WORKERS_KILLED, "sqlite", 60.0, HISTORY)
    bad = replace(judged("hung up", "redis", 1.0, HISTORY), violations=["something is wrong"])
    for result in (good, good, bad):
        add_result(tmp_path, result)
    results: list[Result] = read_results(tmp_path)
    assert results == [good, good, bad]
    page = rendered(results)
    assert "| workers killed | sqlite | 2 | 2 | 2 | 0 | 0 | worker killed 2 | worker killed 2 | 2 | 0 |" in page
    assert "| F28 | hung up | redis | 1 | 1 |" in page
    assert "* hung up, redis: something is wrong" in page
    assert "None." not in page
    assert "None." in rendered([good])
