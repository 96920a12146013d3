"""The checker: every invariant over one history, or over the endings of one workload on several engines.

No check judges how fast something was, except that what is left after the last fault has an end at some time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from holdfast.job import Job
from holdfast.testing.history.events import Ending, History
from holdfast.testing.history.executions import attempts, explained_duplicates, overlap, resources, shutdown
from holdfast.testing.history.facts import Facts
from holdfast.testing.history.kept import conservation, dead_letters, idempotency, integrity, no_loss, no_phantom
from holdfast.testing.history.leases import absorbing_ends, fencing, lease_succession, walk
from holdfast.testing.history.timing import backoff, bounded_liveness, never_early
from holdfast.testing.history.verdict import Violation

Check = Callable[[Facts], Iterator[Violation]]


CHECKS: tuple[Check, ...] = (
    no_loss,
    no_phantom,
    conservation,
    lease_succession,
    fencing,
    absorbing_ends,
    attempts,
    explained_duplicates,
    overlap,
    never_early,
    bounded_liveness,
    backoff,
    idempotency,
    dead_letters,
    integrity,
    shutdown,
    resources,
)


def check(history: History) -> list[Violation]:
    """Everything that is wrong with the history, by invariant."""
    facts = Facts(history)
    found = [violation for one in CHECKS for violation in one(facts)]
    if history.exact:
        found += walk(facts)
    judged = [violation for violation in found if violation.job_id not in history.rules.damaged]
    return sorted(judged, key=lambda violation: violation.invariant)


def compare_endings(endings: Mapping[str, Ending], describe: Callable[[Job], object]) -> list[Violation]:
    """Where the same workload ended differently: each engine beside the first, jobs told apart by `describe`."""
    counted = {engine: Counter(map(describe, ending.jobs)) for engine, ending in endings.items()}
    first, *others = counted
    found = []
    for engine in others:
        for what, count in (counted[engine] - counted[first]).items():
            found.append(Violation(20, "", f"{count} more on {engine} than on {first}: {what}"))
        for what, count in (counted[first] - counted[engine]).items():
            found.append(Violation(20, "", f"{count} more on {first} than on {engine}: {what}"))
    return found
