"""What a session holds, as far as the worker knows: every claim whose end the store has not confirmed yet.

The event loop starts jobs; the heartbeat's thread gives back those that have not started when the loop is blocked.
Each claim goes one of the two ways, never both. Claims are told apart by job and version: a later claim of the same job
may begin while the reply about an earlier one is still on its way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from enum import Enum

from holdfast.job import Job

ClaimKey = tuple[str, int]


class _Fate(Enum):
    CLAIMED = 1
    STARTED = 2
    GIVEN_BACK = 3
    IN_DOUBT = 4
    """Given back, and nobody heard whether the store knows."""


class Holding:
    """The claims of one session. May be used from several threads."""

    def __init__(self) -> None:
        self._fates: dict[ClaimKey, _Fate] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many claims the store should count under the session, too."""
        return len(self._fates)

    def knows(self, job: Job) -> bool:
        """Whether the claim is known here."""
        return (job.id, job.version) in self._fates

    def take(self, jobs: Iterable[Job]) -> list[Job]:
        """Note new claims. Those that were given back before their reply arrived are left out."""
        taken = []
        claimed = _Fate.CLAIMED
        with self._lock:
            fates = self._fates
            for job in jobs:
                key = (job.id, job.version)
                if fates.setdefault(key, claimed) is claimed:
                    taken.append(job)
                else:
                    del fates[key]
        return taken

    def start(self, jobs: Iterable[Job]) -> list[Job]:
        """Those that may start, because nobody has given them back. One lock for all: this is on every job's way."""
        started = []
        claimed, now_started = _Fate.CLAIMED, _Fate.STARTED
        with self._lock:
            fates = self._fates
            for job in jobs:
                key = (job.id, job.version)
                if fates.get(key) is claimed:
                    fates[key] = now_started
                    started.append(job)
        return started

    def withdraw(self, job: Job) -> bool:
        """Whether the claim, which waits here for a slot, may be released: nobody has given it back before. From now
        on it never starts.
        """
        key = (job.id, job.version)
        with self._lock:
            if self._fates.get(key) is not _Fate.CLAIMED:
                return False
            self._fates[key] = _Fate.GIVEN_BACK
            return True

    def give_back(self, job: Job) -> bool:
        """Whether the claim may be released: it has not started, and from now on it never will."""
        key = (job.id, job.version)
        with self._lock:
            if self._fates.get(key) is _Fate.STARTED:
                return False
            self._fates[key] = _Fate.GIVEN_BACK
            return True

    def doubt(self, jobs: Iterable[Job]) -> None:
        """Nobody heard what became of these claims, which were to be released: `reconcile` shows."""
        with self._lock:
            for job in jobs:
                if self._fates.get((job.id, job.version)) is _Fate.GIVEN_BACK:
                    self._fates[job.id, job.version] = _Fate.IN_DOUBT

    def known(self) -> frozenset[ClaimKey]:
        """Every claim that is known now."""
        with self._lock:
            return frozenset(self._fates)

    def reconcile(self, held: Iterable[Job], before: frozenset[ClaimKey]) -> list[Job]:
        """The claims that the store counts under the session and nobody here has heard of, or that are still held
        though they were given back; they may be released.

        `before` is what was known before the store was asked: some of it may be settled by now. Must not be called
        while a claim is under way: its reply would not be known yet.
        """
        held = list(held)
        kept = {(job.id, job.version) for job in held}
        with self._lock:
            returned = (_Fate.GIVEN_BACK, _Fate.IN_DOUBT)
            gone = [key for key, fate in self._fates.items() if fate in returned and key not in kept]
            for key in gone:
                del self._fates[key]
        return [job for job in held if self._may_be_released(job, before) and self.give_back(job)]

    def _may_be_released(self, job: Job, before: frozenset[ClaimKey]) -> bool:
        key = (job.id, job.version)
        fate = self._fates.get(key)
        return fate is _Fate.IN_DOUBT or (fate is None and key not in before)

    def forget(self) -> None:
        """The session is closed: nothing of it is held any more."""
        with self._lock:
            self._fates.clear()

    def settled(self, job: Job) -> None:
        """The store has confirmed, or refused, the end of the claim."""
        self._fates.pop((job.id, job.version), None)

    def all_settled(self, jobs: Iterable[Job]) -> None:
        """The same of many."""
        forget = self._fates.pop
        for job in jobs:
            forget((job.id, job.version), None)
