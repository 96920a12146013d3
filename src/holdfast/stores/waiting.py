"""The ready jobs of the memory engine: a line of due jobs per lane, a heap of scheduled jobs per queue.

Taking a job out of the middle is dear, so a cancelled job leaves its entry behind, to be skipped when it surfaces.
When such entries outnumber the jobs, everything is lined up anew. Nothing here is looked up by a job's id: with
hundreds of thousands of jobs each such look misses the processor's caches. Not thread-safe: the store holds a lock.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from itertools import count

from holdfast.job import Job
from holdfast.lanes import Lane

_Entry = tuple[int, str, int, Job]
"""Due time and id: a lane's order. A number of its own, so that jobs are never compared. The job."""

_ABANDONED_TOLERATED = 64


class Line:
    """Entries in order. Nearly all arrive in order and are only appended; a heap holds those that do not."""

    def __init__(self) -> None:
        self._in_order: deque[_Entry] = deque()
        self._strays: list[_Entry] = []

    def __len__(self) -> int:
        return len(self._in_order) + len(self._strays)

    def __iter__(self) -> Iterator[_Entry]:
        """All of them, in no order."""
        yield from self._in_order
        yield from self._strays

    def push(self, entry: _Entry) -> None:
        """Line it up."""
        if not self._in_order or entry > self._in_order[-1]:
            self._in_order.append(entry)
        else:
            heapq.heappush(self._strays, entry)

    def first(self) -> _Entry:
        """The first one. There must be one."""
        return self._strays[0] if self._a_stray_is_first() else self._in_order[0]

    def take(self, most: int) -> list[_Entry]:
        """Take up to so many, in order."""
        if self._strays:
            return [self._pop() for _ in range(min(most, len(self)))]
        popleft = self._in_order.popleft
        return [popleft() for _ in range(min(most, len(self._in_order)))]

    def _pop(self) -> _Entry:
        return heapq.heappop(self._strays) if self._a_stray_is_first() else self._in_order.popleft()

    def _a_stray_is_first(self) -> bool:
        return bool(self._strays) and (not self._in_order or self._strays[0] < self._in_order[0])


class WaitingJobs:
    """Who waits, in what order, and how many there are per queue."""

    def __init__(self) -> None:
        self._numbers = count()
        self._start_empty()

    def _start_empty(self) -> None:
        self.depth: defaultdict[str, int] = defaultdict(int)
        self.due: dict[Lane, Line] = {}
        self.scheduled: defaultdict[str, list[_Entry]] = defaultdict(list)
        self._count = 0
        self._abandoned: dict[int, Job] = {}
        """The jobs whose entries are left behind, by their identities as objects."""

    def add(self, job: Job, now: int) -> None:
        """Line the job up where it belongs at that time."""
        self._line_up((job.run_at, job.id, next(self._numbers), job), now)

    def _line_up(self, entry: _Entry, now: int) -> None:
        self.depth[entry[3].queue] += 1
        self._count += 1
        if entry[0] <= now:
            self._push_due(entry)
        else:
            heapq.heappush(self.scheduled[entry[3].queue], entry)

    def _push_due(self, entry: _Entry) -> None:
        job = entry[3]
        lane = Lane(job.queue, job.priority, job.share)
        if (line := self.due.get(lane)) is None:
            line = self.due[lane] = Line()
        line.push(entry)

    def remove(self, job: Job, now: int) -> None:
        """Forget a job that is ready no longer, leaving its entry behind. It must be the very object that was added."""
        self.depth[job.queue] -= 1
        self._count -= 1
        self._abandoned[id(job)] = job
        if len(self._abandoned) > self._count + _ABANDONED_TOLERATED:
            self._build_anew(now)

    def _build_anew(self, now: int) -> None:
        lines: list[Iterable[_Entry]] = [*self.due.values(), *self.scheduled.values()]
        entries = [entry for line in lines for entry in line if id(entry[3]) not in self._abandoned]
        self._start_empty()
        for entry in sorted(entries):
            self._line_up(entry, now)

    def _skipped(self, entry: _Entry) -> bool:
        """Whether the entry, which has just been taken, was left behind."""
        return self._abandoned.pop(id(entry[3]), None) is not None

    def promote(self, queue: str, now: int) -> None:
        """Move what has become due from the scheduled jobs into the lanes."""
        scheduled = self.scheduled[queue]
        while scheduled and scheduled[0][0] <= now:
            entry = heapq.heappop(scheduled)
            if not self._skipped(entry):
                self._push_due(entry)

    def lanes(self, queue: str) -> list[Lane]:
        """The lanes of the queue that have due jobs."""
        return [lane for lane, line in self.due.items() if lane.queue == queue and self._first_due(line) is not None]

    def _first_due(self, line: Line) -> int | None:
        """When the first job of the line became due; None if none is left. Drops abandoned entries before it."""
        while line:
            entry = line.first()
            if id(entry[3]) not in self._abandoned:
                return entry[0]
            self._skipped(*line.take(1))
        return None

    def _first_scheduled(self, heap: list[_Entry]) -> int | None:
        """The same for a heap of scheduled jobs."""
        while heap and id(heap[0][3]) in self._abandoned:
            self._skipped(heapq.heappop(heap))
        return heap[0][0] if heap else None

    def pull(self, lane: Lane, most: int) -> list[Job]:
        """Take up to `most` due jobs out of the lane, in its order."""
        if (line := self.due.get(lane)) is None:
            return []
        pulled: list[Job] = []
        while line and len(pulled) < most:
            taken = line.take(most - len(pulled))
            pulled += [entry[3] for entry in taken if not (self._abandoned and self._skipped(entry))]
        self.depth[lane.queue] -= len(pulled)
        self._count -= len(pulled)
        if not line:
            del self.due[lane]
        return pulled

    def next_due(self, queues: Collection[str]) -> int | None:
        """The earliest due time in these queues."""
        firsts = [self._first_due(line) for lane, line in self.due.items() if lane.queue in queues]
        firsts += [self._first_scheduled(self.scheduled[queue]) for queue in queues]
        return min((first for first in firsts if first is not None), default=None)
