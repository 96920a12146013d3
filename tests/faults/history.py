"""What callers of a store were told while many of them worked on the same jobs, as a history.

It is judged by the checks of every history (`holdfast.testing.history`). Nobody is killed here and every call is
answered, so more must hold of it: nothing has happened that nobody was told of.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from holdfast.job import ENDED, JobId, Reason
from holdfast.lifecycle import Applied
from holdfast.store import Store
from holdfast.testing.history import History, Violation, check, read_ending, recorded
from holdfast.testing.history.events import AnyEvent, Cancel, Claim, Rules, Settle

MOST_CRASHES = 1000
_RULES = Rules(max_crashes=MOST_CRASHES)


class Told(msgspec.Struct):
    """What one caller was told, in this order; or several, one after the other."""

    events: list[AnyEvent] = msgspec.field(default_factory=list)
    errors: list[str] = msgspec.field(default_factory=list)
    seen: Counter[str] = msgspec.field(default_factory=Counter)
    """What is in no event."""

    def add(self, other: Told) -> None:
        """And what that one was told."""
        self.events += other.events
        self.errors += other.errors
        self.seen.update(other.seen)

    def noted(self, store: Store) -> Store:
        """The store, for this caller."""
        return recorded(store, self.events.append, time.monotonic, str)

    async def history(self, store: Store) -> History:
        """The history so far, with what is in the store now."""
        events = tuple(sorted(self.events, key=lambda event: event.at))
        return History(events=events, ending=await read_ending(store), rules=_RULES)


def judge(history: History) -> list[Violation]:
    """Everything that is wrong with a history in which every call was answered, when everything has ended."""
    return [*check(history), *_unheard_of(history)]


def _unheard_of(history: History) -> Iterator[Violation]:
    """Versions rise by one with every claim and every replay, each was handed out, each claim was settled; and a job
    has ended once more often than it was brought back.
    """
    rises: dict[JobId, list[int]] = defaultdict(list)
    claimed: Counter[tuple[JobId, int]] = Counter()
    settled: Counter[tuple[JobId, int]] = Counter()
    lives: Counter[JobId] = Counter()
    for event in history.events:
        match event:
            case Claim():
                rises[event.job_id].append(event.version)
                claimed[event.job_id, event.version] += 1
            case Settle() if event.applied is Applied.APPLIED:
                settled[event.job_id, event.version] += event.session_id is not None
                lives[event.job_id] += event.to in ENDED
                if event.reason is Reason.REPLAYED:
                    rises[event.job_id].append(event.version + 1)
                    lives[event.job_id] -= 1
            case Cancel() if event.ended:
                lives[event.job_id] += 1
    for job in history.ending.jobs:
        if sorted(rises[job.id]) != list(range(1, job.version + 1)):
            yield Violation(4, job.id, f"versions {sorted(rises[job.id])} were handed out, and it has {job.version}")
        if lives[job.id] != 1:
            yield Violation(6, job.id, f"it has ended {lives[job.id]} times more often than it was brought back")
    for (job_id, version), times in (claimed - settled).items():
        yield Violation(4, job_id, f"version {version} was claimed {times} times more often than it was settled")
