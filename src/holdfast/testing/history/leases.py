"""Leases: one after the other (4), worth nothing once they have ended (5), and none for a job that has ended (6).

Calls overlap: only what began after another was over is certainly later. In an exact history every effect has its
moment, and `walk` follows each job from state to state.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from holdfast.job import ENDED, JobId, Reason, SessionId, State
from holdfast.lifecycle import Applied
from holdfast.testing.history.events import Answer, Cancel, Claim, Close, Settle
from holdfast.testing.history.facts import TOOK_EFFECT, Facts
from holdfast.testing.history.verdict import Violation


def lease_succession(facts: Facts) -> Iterator[Violation]:
    """Each version is claimed once, later ones later, and none beyond the one that the job has at the end."""
    for job_id, claims in facts.claims.items():
        for version, times in Counter(claim.version for claim in claims).items():
            if times > 1:
                yield Violation(4, job_id, f"version {version} was claimed {times} times")
        newest: Claim | None = None  # of those that are over, the highest version
        for claim in claims:
            if newest and claim.version < newest.version and claim.began > newest.at:
                yield Violation(4, job_id, f"version {claim.version} was claimed after version {newest.version}")
            if newest is None or claim.version > newest.version:
                newest = claim
        job = facts.stored.get(job_id)
        if job and newest and newest.version > job.version:
            yield Violation(4, job_id, f"version {newest.version} was claimed, and at the end it is {job.version}")


def fencing(facts: Facts) -> Iterator[Violation]:
    """No move takes effect that bears a lease which has ended: by another move, a later claim, or its session's end."""
    for job_id, settles in facts.settles.items():
        applied = [settle for settle in settles if settle.applied is Applied.APPLIED]
        held = [settle for settle in applied if settle.session_id is not None]
        for version, times in Counter(settle.version for settle in held).items():
            if times > 1:
                yield Violation(5, job_id, f"the claim with version {version} was settled {times} times")
        claims = facts.claims.get(job_id, ())
        sessions = {claim.version: claim.session_id for claim in claims}
        for settle in held:
            later = next((one for one in claims if one.version > settle.version and one.at < settle.began), None)
            if later:
                what = f"{settle.reason} with version {settle.version} took effect after {later.version} was claimed"
                yield Violation(5, job_id, what)
            if sessions.get(settle.version, settle.session_id) != settle.session_id:
                yield Violation(5, job_id, f"version {settle.version} was settled by a session that never claimed it")
            close = facts.closes.get(settle.session_id or "")
            if close and close.at < settle.began and not settle.from_the_dead:
                what = f"{settle.reason} with version {settle.version} took effect after its session was closed"
                yield Violation(5, job_id, what)


def absorbing_ends(facts: Facts) -> Iterator[Violation]:
    """What has ended is claimed again only after a replay."""
    for job_id, settles in facts.settles.items():
        ends = [one for one in settles if one.applied is Applied.APPLIED and one.to in ENDED]
        replays = [
            one
            for one in settles
            if one.reason is Reason.REPLAYED and (one.answer is Answer.UNKNOWN or one.applied in TOOK_EFFECT)
        ]
        if len(ends) > 1 + len(replays):
            yield Violation(6, job_id, f"it ended {len(ends)} times, and was replayed {len(replays)} times")
        for end in ends:
            revived = any(replay.version >= end.version for replay in replays)
            for claim in facts.claims.get(job_id, ()):
                if claim.version > end.version and claim.began > end.at and not revived:
                    yield Violation(6, job_id, f"claimed with version {claim.version} after it had ended as {end.to}")


# Exact histories.


class _Standing(msgspec.Struct):
    """Where a job is, as its history says."""

    state: State = State.READY
    version: int = 0
    session_id: SessionId | None = None


def walk(facts: Facts) -> Iterator[Violation]:
    """Every job goes from state to state as the transitions say, and ends as the store says (4, 5, 6 and 3 in full)."""
    closed: set[SessionId] = set()
    standings: dict[JobId, _Standing] = defaultdict(_Standing)
    for event in facts.history.events:
        match event:
            case Claim():
                yield from _claimed(standings[event.job_id], event)
            case Settle() if event.applied is Applied.APPLIED:
                yield from _settled(standings[event.job_id], event, closed)
            case Cancel() if event.ended:
                standing = standings[event.job_id]
                if standing.state is not State.READY:
                    yield Violation(6, event.job_id, f"cancelled as if it were ready, while it was {standing.state}")
                standing.state = State.CANCELLED
            case Close():
                closed.add(event.session_id)
    for job_id, standing in standings.items():
        job = facts.stored.get(job_id)
        if job and (job.state, job.version) != (standing.state, standing.version):
            what = (
                f"{job.state} with version {job.version} in the store, and by its history {standing.state} "
                f"with version {standing.version}"
            )
            yield Violation(3, job_id, what)


def _claimed(standing: _Standing, claim: Claim) -> Iterator[Violation]:
    if standing.state in ENDED:
        yield Violation(6, claim.job_id, f"claimed while it was {standing.state}")
    elif standing.state is State.IN_FLIGHT:
        yield Violation(4, claim.job_id, f"claimed with version {claim.version} while {standing.version} was held")
    if claim.version != standing.version + 1:
        yield Violation(4, claim.job_id, f"version {claim.version} was claimed after {standing.version}")
    standing.state, standing.version, standing.session_id = State.IN_FLIGHT, claim.version, claim.session_id


def _settled(standing: _Standing, settle: Settle, closed: set[SessionId]) -> Iterator[Violation]:
    what = f"{settle.reason} with version {settle.version} took effect"
    if settle.version != standing.version:
        yield Violation(5, settle.job_id, f"{what} on version {standing.version}")
    elif settle.session_id is None:
        expected = ENDED if settle.reason is Reason.REPLAYED else {State.READY}
        if standing.state not in expected:
            yield Violation(6, settle.job_id, f"{what} while it was {standing.state}")
    elif standing.state is not State.IN_FLIGHT:
        yield Violation(6 if standing.state in ENDED else 5, settle.job_id, f"{what} while it was {standing.state}")
    elif settle.session_id != standing.session_id:
        yield Violation(5, settle.job_id, f"{what}, by a session that did not hold it")
    elif settle.from_the_dead and settle.session_id not in closed:
        yield Violation(4, settle.job_id, f"{what}: taken from a session that is open")
    standing.state = settle.to
    standing.version = settle.version + (settle.reason is Reason.REPLAYED)
