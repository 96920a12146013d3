"""The ready jobs of the memory engine: a line of due jobs per lane, a heap of scheduled jobs per queue.

Taking a job out of the middle is dear, so a cancelled job leaves its entry behind, to be skipped when it surfaces.
When such entries outnumber the jobs, everything is lined up anew. Not thread-safe: the store holds a lock.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection

from holdfast.job import Job, JobId
from holdfast.lanes import Lane

_Entry = tuple[int, JobId]
"""Due time and id: a lane's order."""

_ABANDONED_TOLERATED = 64


class Line:
    """Entries in order. Nearly all arrive in order and are only appended; a heap holds those that do not."""

    def __init__(self) -> None:
        self._in_order: deque[_Entry] = deque()
        self._strays: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._in_order) + len(self._strays)

    def push(self, entry: _Entry) -> None:
        """Line it up."""
        if not self._in_order or entry > self._in_order[-1]:
            self._in_order.append(entry)
        else:
            heapq.heappush(self._strays, entry)

    def first(self) -> _Entry:
        """The first one. There must be one."""
        return self._strays[0] if self._a_stray_is_first() else self._in_order[0]

    def pop(self) -> _Entry:
        """Take the first one. There must be one."""
        # Looked at here, too: for nearly every entry there are no strays.
        return heapq.heappop(self._strays) if self._strays and self._a_stray_is_first() else self._in_order.popleft()

    def _a_stray_is_first(self) -> bool:
        return bool(self._strays) and (not self._in_order or self._strays[0] < self._in_order[0])


class WaitingJobs:
    """Who waits, in what order, and how many there are per queue."""

    def __init__(self) -> None:
        self._start_empty()

    def _start_empty(self) -> None:
        self.depth: defaultdict[str, int] = defaultdict(int)
        self.due: dict[Lane, Line] = {}
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
        lane = Lane(job.queue, job.priority, job.share)
        if (line := self.due.get(lane)) is None:
            line = self.due[lane] = Line()
        line.push(entry)

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

    def promote(self, queue: str, now: int) -> None:
        """Move what has become due from the scheduled jobs into the lanes."""
        scheduled = self.scheduled[queue]
        while scheduled and scheduled[0][0] <= now:
            entry = heapq.heappop(scheduled)
            if job := self._current(entry):
                self._push_due(job, entry)

    def lanes(self, queue: str) -> list[Lane]:
        """The lanes of the queue that have due jobs."""
        return [lane for lane, line in self.due.items() if lane.queue == queue and self._first_due(line) is not None]

    def _first_due(self, line: Line) -> int | None:
        """When the first job of the line became due; None if none is left. Drops abandoned entries before it."""
        while line:
            entry = line.first()
            if self._current(entry):
                return entry[0]
            line.pop()
        return None

    def _first_scheduled(self, heap: list[_Entry]) -> int | None:
        """The same for a heap of scheduled jobs."""
        while heap and not self._current(heap[0]):
            heapq.heappop(heap)
        return heap[0][0] if heap else None

    def pull(self, lane: Lane, most: int) -> list[Job]:
        """Take up to `most` due jobs out of the lane, in its order."""
        if (line := self.due.get(lane)) is None:
            return []
        pulled: list[Job] = []
        jobs, entries, pop = self._jobs, self._entries, line.pop
        while line and len(pulled) < most:
            entry = pop()
            if entries.get(entry[1]) is entry:
                del entries[entry[1]]
                pulled.append(jobs.pop(entry[1]))
        self.depth[lane.queue] -= len(pulled)
        if not line:
            del self.due[lane]
        return pulled

    def next_due(self, queues: Collection[str]) -> int | None:
        """The earliest due time in these queues."""
        firsts = [self._first_due(line) for lane, line in self.due.items() if lane.queue in queues]
        firsts += [self._first_scheduled(self.scheduled[queue]) for queue in queues]
        return min((first for first in firsts if first is not None), default=None)
