"""How each figure is measured: one contestant, one time. Every function returns figures by name, or raises."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.contestants import ContestantFailedError, Program
from benchmarks.marks import Marks
from benchmarks.processes import cpu_seconds, memory
from benchmarks.servers import Backend

LOOK = 0.004
START_SECONDS = 40.0
STALL_SECONDS = 20.0
ACK_SECONDS = 10.0
IDLE_SETTLES = 6.0
"""Longer than a third of the TTL: what a worker says once, with its first beat, is no part of a rate."""
LATENCY_LIMIT = 8.0

Figures = dict[str, float]


@dataclass
class Bench:
    """A contestant on its server, with the marks that its handlers make."""

    backend: Backend
    program: Program
    marks: Marks

    def clean(self) -> None:
        self.backend.clean()
        if not self.program.info.get("fills_itself"):
            self.program.call("setup")
        self.marks.clear()

    def enqueue(self, verb: str, count: int) -> Figures:
        """Jobs a second. What ours and the bare loops enqueue must be there afterwards.

        Peers are not asked: some of them show a job only when a worker has taken it. A drain counts theirs.
        """
        self.clean()
        answer = self.program.call(verb, count)
        if self.program.contestant.kind != "peer":
            there = self.backend.pending(self.program.info.get("pending"))
            if there is not None and there != count:
                raise ContestantFailedError(f"{self.program.contestant.name}: {verb} {count}: {there} are there")
        return {"rate": answer["n"] / answer["seconds"], "seconds": answer["seconds"], "n": count}

    def fill(self, count: int) -> float:
        """Enqueue so many; by the thousand if the library can. The seconds that took."""
        answer = self.program.call("enqueue_bulk" if self.program.can("enqueue_bulk") else "enqueue_one", count)
        return float(answer["seconds"])

    def drain(self, count: int, *, workers: int = 1, plain: bool = False) -> Figures:
        """Jobs a second from the first mark to the later of the last mark and the moment when nothing is pending.

        Fill and start-up do not count. A job that is left undone, or that ran twice, is an error.
        """
        self.clean()
        own = bool(self.program.info.get("fills_itself"))
        if not own:
            self.fill(count)
        counters = self.backend.counters()
        with self._working(workers, plain=plain, jobs=count if own else 0):
            before = self._until_first_mark()
            self._until_marks(count)
            ended = self._until_settled(count)
            after = self._cpu()
            used = memory(*self.program.pids)
            seconds = (ended - self.marks.at(0)) / 1e9
        if (ran := self.marks.count()) != count:
            raise ContestantFailedError(f"{self.program.contestant.name}: {ran} handlers ran for {count} jobs")
        made = {name: (now - counters[name]) / count for name, now in self.backend.counters().items()}
        return {
            "rate": count / seconds,
            "seconds": seconds,
            "n": count,
            "cpu": (after - before) * 10_000 / count,
            "rss": used.total,
            "rss_process": used.largest,
            **made,
        }

    def latency(self, count: int, idle_seconds: float) -> Figures:
        """Milliseconds from the enqueue call to the handler, one job at a time; and what the worker does when idle."""
        self.clean()
        figures: Figures = {}
        with self._working(1):
            self.program.call("latency", 1, LATENCY_LIMIT)  # it has started when it has run
            if idle_seconds:
                time.sleep(IDLE_SETTLES)
                figures |= self._idle(idle_seconds)
            answer = self.program.call("latency", count, LATENCY_LIMIT)
        return {"latency_p50": answer["p50"], "latency_p99": answer["p99"], **figures}

    def _idle(self, seconds: float) -> Figures:
        began = time.monotonic()
        used = cpu_seconds(*self.program.pids)
        with self.backend.counting() as seen:
            time.sleep(seconds)
        took = time.monotonic() - began
        figures = {"idle_cpu": 100 * (cpu_seconds(*self.program.pids) - used) / took}
        if seen:
            figures["idle"] = 60 * seen[0] / took
        return figures

    @contextmanager
    def _working(self, workers: int, *, plain: bool = False, jobs: int = 0) -> Iterator[None]:
        try:
            self.program.start_workers(workers, plain=plain, jobs=jobs)
            yield
        finally:
            self.program.stop_workers()

    def _cpu(self) -> float:
        return cpu_seconds(*self.program.pids) + self.backend.server_cpu()

    def _until_first_mark(self) -> float:
        """The CPU seconds that were used by then."""
        deadline = time.monotonic() + START_SECONDS
        used = self._cpu()
        while not self.marks.count():
            self.program.check_workers()
            if time.monotonic() > deadline:
                raise ContestantFailedError(f"{self.program.contestant.name}: no job ran within {START_SECONDS:.0f} s")
            time.sleep(LOOK)
            used = self._cpu()
        return used

    def _until_marks(self, count: int) -> None:
        seen, changed = 0, time.monotonic()
        while (now := self.marks.count()) < count:
            if now != seen:
                seen, changed = now, time.monotonic()
            self.program.check_workers()
            if time.monotonic() - changed > STALL_SECONDS:
                raise ContestantFailedError(f"{self.program.contestant.name}: {now} of {count} jobs ran, then none did")
            time.sleep(LOOK)

    def _until_settled(self, count: int) -> int:
        """When nothing was pending any more; the last mark, if that cannot be seen."""
        query: dict[str, Any] | None = self.program.info.get("pending")
        deadline = time.monotonic() + ACK_SECONDS
        while left := self.backend.pending(query):
            if time.monotonic() > deadline:
                raise ContestantFailedError(f"{self.program.contestant.name}: {left} of {count} jobs stayed pending")
            time.sleep(LOOK)
        last = self.marks.at(count - 1)
        return last if left is None else max(last, time.monotonic_ns())
