"""What a history tells besides right and wrong: what happened how often, why jobs ran again, how soon."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from holdfast.job import JobId
from holdfast.lifecycle import Applied
from holdfast.testing.history.events import Claim, Enqueue, Fault, History, Settle
from holdfast.testing.history.executions import cause
from holdfast.testing.history.facts import Facts

KILL = "kill"
"""How the kind of every fault begins that ends a process without its knowing."""


def happenings(history: History) -> Counter[str]:
    """How often each kind of event, answer and fault is in the history: what a run must show that it has met."""
    counted: Counter[str] = Counter()
    for event in history.events:
        match event:
            case Enqueue():
                counted[f"enqueue {event.status or event.answer}"] += 1
            case Settle():
                counted[f"{event.reason} {event.applied or event.answer}"] += 1
            case Fault():
                counted[event.kind] += 1
            case _:
                counted[type(event).__name__.lower()] += 1
    return counted


def duplicates(history: History) -> Counter[str]:
    """Every start of a job after its first, by its cause; "unexplained" is a violation."""
    facts = Facts(history)
    counted: Counter[str] = Counter()
    for job_id, starts in facts.starts.items():
        ordered = sorted(starts, key=lambda start: start.version)
        for before, after in pairwise(ordered):
            counted[cause(facts, job_id, before.version, after.version, after.at) or "unexplained"] += 1
    return counted


def refused(history: History) -> int:
    """How many moves came too late, and changed nothing."""
    return sum(isinstance(event, Settle) and event.applied is Applied.STALE for event in history.events)


def recoveries(history: History) -> list[float]:
    """For each claim that a killed process left behind: seconds until the job was claimed again, from the later of the
    kill and a keeper being ready. A process is known by its `host`, which is also the `victim` of its kill.
    """
    facts = Facts(history)
    killed = {fault.victim: fault.at for fault in facts.faults if fault.kind.startswith(KILL)}
    found = []
    for job_id, claims in facts.claims.items():
        ordered = sorted(claims, key=lambda claim: claim.version)
        for left, again in pairwise(ordered):
            at = killed.get(left.host)
            if at is not None and again.at > at and not _was_settled(facts, job_id, left, at):
                found.append(again.at - _when_somebody_looks(facts, killed, at))
    return found


def _was_settled(facts: Facts, job_id: JobId, claim: Claim, by: float) -> bool:
    return any(
        settle.version == claim.version and settle.at <= by and settle.host == claim.host
        for settle in facts.applied(job_id)
    )


def _when_somebody_looks(facts: Facts, killed: dict[str, float], at: float) -> float:
    """That moment, if a keeper lives on beyond it, or else when the next one is ready."""
    for keeper in facts.keepers:
        if killed.get(keeper.host, float("inf")) > at:
            return max(at, keeper.at)
    return at
