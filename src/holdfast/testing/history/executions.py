"""Executions: what they cost (7), why there are several (8), when they may overlap (9); and a worker's end (23, 24)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

from holdfast.failures import decode_history
from holdfast.job import JobId, Reason, State
from holdfast.testing.history.events import Answer, Claim, Settle
from holdfast.testing.history.facts import TOOK_EFFECT, Facts
from holdfast.testing.history.verdict import Violation

_USES_AN_ATTEMPT = {Reason.SUCCEEDED, Reason.RETRIED, Reason.EXHAUSTED, Reason.PERMANENT}
_USES_NONE = {Reason.RELEASED, Reason.SNOOZED, Reason.SNOOZED_OUT}
_MAY_END_WHILE_IT_RUNS = {Reason.RELEASED, Reason.CANCELLED}


def attempts(facts: Facts) -> Iterator[Violation]:
    """A started claim uses an attempt, a released or snoozed one does not; limits end a job when they are reached."""
    for job_id in facts.settles:
        claims = {claim.version: claim for claim in facts.claims.get(job_id, ())}
        started = {start.version: start.at for start in facts.starts.get(job_id, ())}
        enqueues = facts.enqueues.get(job_id)
        for settle in facts.applied(job_id):
            claim = claims.get(settle.version)
            if claim and settle.session_id is not None:
                used = settle.attempt - claim.attempt
                ran = started.get(settle.version, settle.began) < settle.began
                if used != _attempts_used(settle, ran, used):
                    what = f"{settle.reason} with version {settle.version} used {used} attempts"
                    yield Violation(7, job_id, what)
                if ran and settle.reason is Reason.RELEASED and settle.host != claim.host:
                    what = f"version {settle.version} was given back by {settle.host} as if it had not started"
                    yield Violation(7, job_id, what)
            if enqueues and settle.reason is Reason.RETRIED and settle.failures > enqueues[0].max_retries:
                yield Violation(7, job_id, f"retried after {settle.failures} failures")
            if enqueues and settle.reason is Reason.EXHAUSTED and settle.failures <= enqueues[0].max_retries:
                yield Violation(7, job_id, f"exhausted after only {settle.failures} failures")
            crashed = settle.reason in (Reason.CRASHED, Reason.LOST)
            if crashed and settle.to is State.READY and settle.crashes >= facts.rules.max_crashes:
                yield Violation(7, job_id, f"back after {settle.crashes} crashes")
            if crashed and settle.to is State.FAILED and settle.crashes < facts.rules.max_crashes:
                yield Violation(7, job_id, f"failed after only {settle.crashes} crashes")
            if settle.reason is Reason.SNOOZED and settle.snoozes > facts.rules.max_snoozes:
                yield Violation(7, job_id, f"snoozed for the {settle.snoozes}th time")


def _attempts_used(settle: Settle, ran: bool, used: int) -> int:
    """How many it should be. Where nobody can know whether the job had started, both 0 and 1 are right."""
    if settle.reason in _USES_AN_ATTEMPT:
        return 1
    if settle.reason in _USES_NONE:
        return 0
    if settle.reason is Reason.CRASHED or (settle.reason is Reason.LOST and ran):
        return 1
    return min(max(used, 0), 1)


def explained_duplicates(facts: Facts) -> Iterator[Violation]:
    """A lease starts its job once, after its claim; and every start after the first has a cause."""
    for job_id, starts in facts.starts.items():
        claimed = {claim.version: claim.at for claim in facts.claims.get(job_id, ())}
        for version, times in Counter(start.version for start in starts).items():
            if times > 1:
                yield Violation(8, job_id, f"version {version} was started {times} times")
        for start in starts:
            if start.version not in claimed:
                yield Violation(8, job_id, f"version {start.version} was started, and nobody has claimed it")
            elif claimed[start.version] > start.at:
                yield Violation(8, job_id, f"version {start.version} was started before it was claimed")
        ordered = sorted(starts, key=lambda start: start.version)
        for before, after in pairwise(ordered):
            if before.version < after.version and not cause(facts, job_id, before.version, after.version, after.at):
                what = f"started with version {before.version}, and again with version {after.version}, without a cause"
                yield Violation(8, job_id, what)


def cause(facts: Facts, job_id: JobId, before: int, after: int, at: float) -> str:
    """Why a job that was started with version `before` was started again with version `after`; empty if there is none.

    What nobody heard of is a cause only after a fault, and only where not everything was noted.
    """
    for settle in facts.settles.get(job_id, ()):
        heard = settle.applied in TOOK_EFFECT or settle.answer is Answer.UNKNOWN
        if heard and before <= settle.version < after and settle.to is State.READY:
            return settle.reason.value
    if facts.history.exact:
        return ""
    job = facts.stored.get(job_id)
    for failure in decode_history(job.failure_history) if job else ():
        if failure.type in ("WorkerDied", "WorkerLost"):
            return failure.type
    return "not heard of" if facts.harmed_before(at) else ""


def overlap(facts: Facts) -> Iterator[Violation]:
    """Two executions of a job overlap only if the earlier one's lease was taken from it, or given back under way, or if
    its handler was left behind past its hard limit.
    """
    for job_id, starts in facts.starts.items():
        ordered = sorted(starts, key=lambda start: start.version)
        for before, after in pairwise(ordered):
            end = facts.ends.get((job_id, before.version))
            if end is None or end.at <= after.at:
                continue
            settles = [one for one in facts.applied(job_id) if one.version == before.version]
            taken = any(
                one.from_the_dead or one.reason in _MAY_END_WHILE_IT_RUNS or _was_left_behind(facts, one)
                for one in settles
            )
            unheard = not settles and not facts.history.exact and facts.harmed_before(after.at)
            if not taken and not unheard:
                what = f"version {after.version} ran while version {before.version} did, whose lease nobody had taken"
                yield Violation(9, job_id, what)


def _was_left_behind(facts: Facts, settle: Settle) -> bool:
    job = facts.stored.get(settle.job_id)
    failures = decode_history(job.failure_history) if job else ()
    return any(failure.type == "HardTimeout" and failure.attempt == settle.attempt for failure in failures)


def shutdown(facts: Facts) -> Iterator[Violation]:
    """A worker that has ended in order has settled or given back every claim, and closed its session.

    What a session held that was judged dead before is the keeper's to bring back, and not the worker's any more, also
    if both live on one host.
    """
    for stopped in facts.stopped:
        session_id = stopped.session_id
        if session_id in facts.history.ending.open_sessions:
            yield Violation(23, "", f"session {session_id} has stopped, and is still open")
        close = facts.closes.get(session_id)
        if close and close.judged and close.at <= stopped.at:
            continue
        for job_id, claims in facts.claims.items():
            for claim in claims:
                if claim.session_id == session_id and not _is_over(facts, claim, stopped.at):
                    what = f"version {claim.version} was not given back by session {session_id}, which has stopped"
                    yield Violation(23, job_id, what)


def _is_over(facts: Facts, claim: Claim, at: float) -> bool:
    return any(
        settle.version == claim.version and settle.applied is not None and settle.at <= at
        for settle in facts.settles.get(claim.job_id, ())
    )


def resources(facts: Facts) -> Iterator[Violation]:
    """Nothing has leaked."""
    for one in facts.measured:
        if one.after > one.before + one.slack:
            yield Violation(24, "", f"{one.what}: {one.before:g} before, {one.after:g} after ({one.host})")
