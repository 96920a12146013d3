"""Time: never before a job is due (10), never for ever (11), and apart from each other (12)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from holdfast.job import ENDED, Reason, State
from holdfast.ports import MICROSECONDS
from holdfast.testing.history.facts import Facts
from holdfast.testing.history.verdict import Violation

_ROUNDING = 0.001
_MANY_RETRIES = 1000
_BUCKETS = 100
_MOST_IN_A_BUCKET = 0.05


def never_early(facts: Facts) -> Iterator[Violation]:
    """Nothing is claimed before it is due, by the store's clock; and its delays are as long as they were meant."""
    for job_id, claims in facts.claims.items():
        # By the version that the job had: since when at the earliest, and for how long it had to wait.
        ready_since: dict[int, tuple[float, int]] = {}
        enqueues = facts.enqueues.get(job_id)
        if enqueues:
            ready_since[0] = min(enqueue.began for enqueue in enqueues), enqueues[0].delay
        for settle in facts.applied(job_id):
            if settle.to is State.READY:
                raised = settle.reason is Reason.REPLAYED
                ready_since[settle.version + raised] = settle.began, settle.delay or 0
        for claim in claims:
            early = (claim.run_at - claim.claimed_at) / MICROSECONDS
            if early > facts.rules.set_back:
                yield Violation(10, job_id, f"version {claim.version} was claimed {early:.6f} s before it was due")
            since, delay = ready_since.get(claim.version - 1, (0.0, 0))
            waited = claim.at - since
            if facts.rules.steady_clock and waited < delay / MICROSECONDS - _ROUNDING:
                what = f"version {claim.version} was claimed after {waited:.3f} s, and not {delay / MICROSECONDS:.3f} s"
                yield Violation(10, job_id, what)


def bounded_liveness(facts: Facts) -> Iterator[Violation]:
    """What is left when the last fault is over comes to its end in bounded time."""
    if facts.healed is None:
        return
    latest = facts.healed.at + facts.rules.drained_within
    for job_id in facts.accepted:
        for settle in facts.applied(job_id):
            if settle.to in ENDED and settle.at > latest:
                yield Violation(11, job_id, f"it ended {settle.at - facts.healed.at:.1f} s after the last fault")


def backoff(facts: Facts) -> Iterator[Violation]:
    """Waits are within the bounds of the formula, and jobs that fail together do not come back together."""
    rule = facts.rules.backoff
    if rule is None:
        return
    waits: dict[float, list[float]] = defaultdict(list)
    for job_id in facts.settles:
        for settle in facts.applied(job_id):
            if settle.reason not in (Reason.RETRIED, Reason.CRASHED) or settle.to is not State.READY:
                continue
            end = facts.ends.get((job_id, settle.version))
            if end is not None and end.wished is not None:
                continue
            number = settle.failures if settle.reason is Reason.RETRIED else settle.crashes
            longest = min(rule.base * 2.0 ** (number - 1), rule.max)
            wait = (settle.delay or 0) / MICROSECONDS
            if wait > longest + _ROUNDING:
                yield Violation(12, job_id, f"waits {wait:.3f} s after failure {number}: {longest:.3f} s at most")
            waits[longest].append(wait)
    for longest, group in waits.items():
        if longest and len(group) >= _MANY_RETRIES:
            bucket, most = Counter(int(wait / longest * _BUCKETS) for wait in group).most_common(1)[0]
            if most > _MOST_IN_A_BUCKET * len(group):
                what = f"{most} of {len(group)} retries come within the same hundredth ({bucket}) of {longest:g} s"
                yield Violation(12, "", what)
