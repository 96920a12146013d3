"""What came of a run, in numbers: what the report is made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from holdfast.job import JobId, State
from holdfast.lifecycle import Applied
from holdfast.testing.history import History, check
from holdfast.testing.history.events import Answer, Fault
from holdfast.testing.history.executions import cause
from holdfast.testing.history.facts import Facts

KILLS = "kill"
"""How the name of a fault begins that ends a process: its victim is that process."""
_PAUSES = "pause"
_SERVER = "server"
_MOST_TOLD = 20


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one cell, or one slice of a campaign, on one engine."""

    cell: str
    engine: str
    seconds: float
    faults: dict[str, int]
    """How often harm was done, by kind."""
    accepted: int
    unknown: int
    """Nobody was ever told whether these were stored."""
    refused: int
    lost: int
    """Accepted, and not there at the end, or not ended."""
    dead: int
    """Ended as dead letters."""
    started_again: dict[str, int]
    """Starts after the first of a job, by cause."""
    duplicated: dict[str, int]
    """Effects after the first of a job, by cause."""
    stale: int
    """Settlements that came too late, and were refused."""
    back: list[float]
    """Seconds until a killed worker's job was back in its queue; from its death, or when a keeper looked, if later."""
    recovery: list[float]
    """The same until it was claimed again."""
    violations: list[str]
    finished_at: float = 0.0

    @property
    def good(self) -> bool:
        """Whether every promise was kept."""
        return not self.violations and not self.lost


def judged(cell: str, engine: str, seconds: float, history: History) -> Result:
    """What came of this history."""
    facts = Facts(history)
    violations = [str(violation) for violation in check(history)]
    again, doubled = Counter[str](), Counter[str]()
    for job_id in facts.starts:
        for why, had_effect in _later_starts(facts, job_id):
            again[why] += 1
            doubled[why] += had_effect
    answers = {job_id: {one.answer for one in enqueues} for job_id, enqueues in facts.enqueues.items()}
    by_id = [answers for job_id, answers in answers.items() if job_id not in facts.accepted]
    recovered = list(_recovery(facts))
    settles = [settle for settles in facts.settles.values() for settle in settles]
    return Result(
        cell=cell,
        engine=engine,
        seconds=round(seconds, 2),
        faults=dict(Counter(fault.kind for fault in facts.faults)),
        accepted=len(facts.accepted),
        unknown=sum(Answer.UNKNOWN in answers for answers in by_id),
        refused=sum(answers == {Answer.FAILED} for answers in by_id),
        lost=sum(
            job_id not in facts.stored or facts.stored[job_id].state in (State.READY, State.IN_FLIGHT)
            for job_id in facts.accepted
        ),
        dead=sum(job.state is State.FAILED for job in facts.stored.values()),
        started_again=dict(again),
        duplicated={why: count for why, count in doubled.items() if count},
        stale=sum(settle.applied is Applied.STALE for settle in settles),
        back=[round(back, 3) for back, _ in recovered],
        recovery=[round(again, 3) for _, again in recovered],
        violations=violations[:_MOST_TOLD]
        + [f"and {len(violations) - _MOST_TOLD} more"] * (len(violations) > _MOST_TOLD),
    )


def _later_starts(facts: Facts, job_id: JobId) -> Iterator[tuple[str, bool]]:
    """Every start after the first: why it was, and whether the job had had its effect before and had it again."""
    starts = sorted(facts.starts[job_id], key=lambda start: start.version)
    acted = bool(facts.effects[job_id, starts[0].version])
    hosts = {claim.version: claim.host for claim in facts.claims.get(job_id, ())}
    for before, after in pairwise(starts):
        acts = bool(facts.effects[job_id, after.version])
        why = cause(facts, job_id, before.version, after.version, after.at)
        yield _plainly(facts, why, hosts.get(before.version, before.host), after.at), acted and acts
        acted = acted or acts


def _plainly(facts: Facts, why: str, host: str, by: float) -> str:
    """The cause, and if it was that a lease was lost, what had happened to its holder."""
    if why not in ("lost", "WorkerDied", "WorkerLost", "not heard of"):
        return why or "none"
    before = [fault for fault in facts.faults if fault.at <= by]
    for kind, name in ((KILLS, "worker killed"), (_PAUSES, "worker paused")):
        if any(fault.victim == host and fault.kind.startswith(kind) for fault in before):
            return name
    if any(fault.kind.startswith(_SERVER) for fault in before):
        return "server away"
    return "worker lost"


def _recovery(facts: Facts) -> Iterator[tuple[float, float]]:
    """For every claim that a killed worker left open: how long until its job was back, and until the next claim."""
    died: dict[str, Fault] = {}
    for fault in facts.faults:
        if fault.kind.startswith(KILLS):
            died.setdefault(fault.victim, fault)
    for job_id, claims in facts.claims.items():
        settled = {one.version: one for one in facts.applied(job_id)}
        by_version = {claim.version: claim for claim in claims}
        for claim in claims:
            death = died.get(claim.host)
            again = by_version.get(claim.version + 1)
            settle = settled.get(claim.version)
            if death is None or again is None or again.at < death.at or (settle and settle.host == claim.host):
                continue
            keepers = [one.at for one in facts.keepers if one.host not in died or died[one.host].at > again.at]
            since = max(death.at, min(keepers, default=death.at))
            back = min(settle.at, again.at) if settle else again.at
            yield max(0.0, back - since), max(0.0, again.at - since)
