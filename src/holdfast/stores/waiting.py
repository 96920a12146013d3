"""The ready jobs of the memory engine: a heap of due jobs per lane, a heap of scheduled jobs per queue.

Taking a job out of the middle of a heap is dear, so a cancelled job leaves its entry behind, to be skipped when it
surfaces. When such entries outnumber the jobs, the heaps are built anew. Not thread-safe: the store holds a lock.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection

from holdfast.job import Job, JobId
from holdfast.lanes import Lane

_Entry = tuple[int, JobId]
"""Due time and id: a lane's order."""

_ABANDONED_TOLERATED = 64


class WaitingJobs:
    """Who waits, in what order, and how many there are per queue."""

    def __init__(self) -> None:
        self._start_empty()

    def _start_empty(self) -> None:
        self.depth: defaultdict[str, int] = defaultdict(int)
        self.due: dict[Lane, list[_Entry]] = {}
        self.scheduled: defaultdict[str, list[_Entry]] = defaultdict(list)
        self._jobs: dict[JobId, Job] = {}
        self._entries: dict[JobId, _Entry] = {}
        self._abandoned = 0

    def add(self, job: Job, now: int) -> None:
        """Line the job up where it belongs at that time."""
        self._jobs[job.id] = job
        self.depth[job.queue] += 1
        entry = self._entries[job.id] = (job.run_at, job.id)
        if job.run_at <= now:
            self._push_due(job, entry)
        else:
            heapq.heappush(self.scheduled[job.queue], entry)

    def _push_due(self, job: Job, entry: _Entry) -> None:
        heapq.heappush(self.due.setdefault(Lane(job.queue, job.priority, job.share), []), entry)

    def remove(self, job: Job, now: int) -> None:
        """Forget a job that is ready no longer, leaving its entry behind."""
        self._forget(job)
        self._abandoned += 1
        if self._abandoned > len(self._jobs) + _ABANDONED_TOLERATED:
            self._build_anew(now)

    def _forget(self, job: Job) -> None:
        self.depth[job.queue] -= 1
        del self._jobs[job.id]
        del self._entries[job.id]

    def _build_anew(self, now: int) -> None:
        jobs = list(self._jobs.values())
        self._start_empty()
        for job in jobs:
            self.add(job, now)

    def _current(self, entry: _Entry) -> Job | None:
        """The job that an entry stands for, unless it was abandoned."""
        return self._jobs[entry[1]] if self._entries.get(entry[1]) is entry else None

    def _has_jobs(self, heap: list[_Entry]) -> bool:
        """Whether anything but abandoned entries is in the heap. Drops those that lie on top."""
        while heap and not self._current(heap[0]):
            heapq.heappop(heap)
        return bool(heap)

    def promote(self, queue: str, now: int) -> None:
        """Move what has become due from the scheduled jobs into the lanes."""
        scheduled = self.scheduled[queue]
        while scheduled and scheduled[0][0] <= now:
            entry = heapq.heappop(scheduled)
            if job := self._current(entry):
                self._push_due(job, entry)

    def lanes(self, queue: str) -> list[Lane]:
        """The lanes of the queue that have due jobs."""
        return [lane for lane, heap in self.due.items() if lane.queue == queue and self._has_jobs(heap)]

    def pull(self, lane: Lane, most: int) -> list[Job]:
        """Take up to `most` due jobs out of the lane, in its order."""
        heap = self.due.get(lane, [])
        pulled: list[Job] = []
        jobs, entries = self._jobs, self._entries
        while heap and len(pulled) < most:
            entry = heapq.heappop(heap)
            if entries.get(entry[1]) is entry:
                del entries[entry[1]]
                pulled.append(jobs.pop(entry[1]))
        self.depth[lane.queue] -= len(pulled)
        if not heap:
            self.due.pop(lane, None)
        return pulled

    def next_due(self, queues: Collection[str]) -> int | None:
        """The earliest due time in these queues."""
        heaps = [heap for lane, heap in self.due.items() if lane.queue in queues]
        heaps += [self.scheduled[queue] for queue in queues]
        return min((heap[0][0] for heap in heaps if self._has_jobs(heap)), default=None)
