"""What is kept: jobs (1, 2), each in one place (3), one for a key (13), with its reasons (19) and its payload (21)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from holdfast.failures import decode_history
from holdfast.job import ENDED, JobId, Reason, State
from holdfast.lifecycle import TRANSITIONS, Applied
from holdfast.testing.history.events import Answer, Enqueue
from holdfast.testing.history.facts import TOOK_EFFECT, Facts
from holdfast.testing.history.recording import digest_of
from holdfast.testing.history.verdict import Violation

_LEGAL = {(arrow.target, arrow.reason) for arrow in TRANSITIONS}
_FREES_KEY = (State.FAILED, State.CANCELLED)


def no_loss(facts: Facts) -> Iterator[Violation]:
    """What was accepted is there, and has ended; what has succeeded had its effect."""
    for job_id in facts.accepted:
        job = facts.stored.get(job_id)
        if job is None:
            yield Violation(1, job_id, "accepted, and not in the store")
        elif job.state not in ENDED:
            yield Violation(1, job_id, f"accepted, and still {job.state} at the end")
    for job_id in facts.starts:
        for settle in facts.settles.get(job_id, ()):
            done = settle.to is State.SUCCEEDED and settle.applied in (Applied.APPLIED, Applied.ALREADY)
            if done and not facts.effects[job_id, settle.version]:
                yield Violation(1, job_id, f"version {settle.version} succeeded without its effect")


def no_phantom(facts: Facts) -> Iterator[Violation]:
    """Nothing is stored, claimed or started that nobody enqueued, or whose enqueue has certainly failed."""
    for job_id in {*facts.stored, *facts.claims, *facts.starts}:
        enqueues = facts.enqueues.get(job_id)
        if job_id in facts.followers:
            continue
        if not enqueues:
            yield Violation(2, job_id, "nobody enqueued it")
        elif not any(_may_have_stored(enqueue) for enqueue in enqueues):
            yield Violation(2, job_id, "every call that enqueued it was told that nothing was written")


def _may_have_stored(enqueue: Enqueue) -> bool:
    if enqueue.answer is Answer.OK:
        return enqueue.returned in ("", enqueue.job_id)
    return enqueue.answer is Answer.UNKNOWN


def conservation(facts: Facts) -> Iterator[Violation]:
    """Each job is there once, in a state that a transition leads to, and the counts for people are the sum of them."""
    ending = facts.history.ending
    for job_id, times in Counter(job.id for job in ending.jobs).items():
        if times > 1:
            yield Violation(3, job_id, f"in the store {times} times")
    for job in ending.jobs:
        if (job.state, job.reason) not in _LEGAL:
            yield Violation(3, job.id, f"{job.state} because {job.reason}: no transition leads there")
    counted = Counter(
        {
            (count.queue, state): getattr(count, state) + (count.scheduled if state is State.READY else 0)
            for count in ending.counts
            for state in State
        }
    )
    there = Counter((job.queue, job.state) for job in ending.jobs)
    for queue, state in sorted({*counted, *there}):
        if counted[queue, state] != there[queue, state]:
            what = f"queue {queue!r}: {counted[queue, state]} counted as {state}, and {there[queue, state]} are there"
            yield Violation(3, "", what)


def idempotency(facts: Facts) -> Iterator[Violation]:
    """One key, one job: until that job has failed or was cancelled. Another payload never passes for the same."""
    by_key: dict[tuple[str, str], list[Enqueue]] = defaultdict(list)
    for enqueues in facts.enqueues.values():
        for enqueue in enqueues:
            if enqueue.key is not None and enqueue.answer is Answer.OK:
                by_key[enqueue.queue, enqueue.key].append(enqueue)
    if not facts.rules.keys_expire:
        for (_, key), enqueues in by_key.items():
            yield from _one_job_a_key(facts, key, sorted(enqueues, key=lambda enqueue: enqueue.at))
        holders = Counter(
            (job.queue, job.key.text) for job in facts.stored.values() if job.key and job.state not in _FREES_KEY
        )
        for (_, key), count in holders.items():
            if count > 1:
                yield Violation(13, "", f"{count} jobs hold the key {key!r}")
    for (_, key), enqueues in by_key.items():
        for enqueue in enqueues:
            if facts.digest(enqueue.returned) not in ("", enqueue.digest):
                yield Violation(13, enqueue.returned, f"it answers for another payload with the key {key!r}")


def _one_job_a_key(facts: Facts, key: str, enqueues: list[Enqueue]) -> Iterator[Violation]:
    for position, first in enumerate(enqueues):
        for second in enqueues[position + 1 :]:
            if second.returned != first.returned and not (
                _was_freed(facts, first.returned, second.at) or _was_freed(facts, second.returned, first.at)
            ):
                what = f"the key {key!r} was answered with this job and with {second.returned}"
                yield Violation(13, first.returned, what)
                return


def _was_freed(facts: Facts, job_id: JobId, by: float) -> bool:
    """Whether the job may have let its key go by then."""
    if any(one.ended or one.answer is Answer.UNKNOWN for one in facts.cancels.get(job_id, ()) if one.began <= by):
        return True
    for settle in facts.settles.get(job_id, ()):
        heard = settle.applied in TOOK_EFFECT or settle.answer is Answer.UNKNOWN
        if heard and settle.began <= by and settle.to in _FREES_KEY:
            return True
    job = facts.stored.get(job_id)
    return not facts.history.exact and job is not None and job.state in _FREES_KEY


def dead_letters(facts: Facts) -> Iterator[Violation]:
    """A job that failed for good says why, and has its payload."""
    for job in facts.stored.values():
        if job.state is State.FAILED and not decode_history(job.failure_history):
            yield Violation(19, job.id, f"failed ({job.reason}) without a word why")
        if job.reason is Reason.EXHAUSTED and job.failures <= job.max_retries:
            yield Violation(19, job.id, f"exhausted with {job.failures} failures of {job.max_retries} retries")


def integrity(facts: Facts) -> Iterator[Violation]:
    """What is stored, claimed and handed to the handler is what was enqueued, to the byte."""
    for job_id, enqueues in facts.enqueues.items():
        expected = enqueues[0].digest
        job = facts.stored.get(job_id)
        if job and digest_of(job) != expected:
            yield Violation(21, job_id, f"{job.state} with another payload than it was enqueued with")
        for seen in (*facts.claims.get(job_id, ()), *facts.starts.get(job_id, ())):
            if seen.digest not in ("", expected):
                yield Violation(21, job_id, f"version {seen.version} saw another payload than was enqueued")
