"""What is measured, as data: the name of each figure, its unit, and which way is better."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """One figure. `more`: whether more of it is better."""

    name: str
    title: str
    unit: str
    more: bool = True
    digits: int = 0

    def shown(self, value: float) -> str:
        return f"{value:,.{self.digits}f}"


FIGURES: Sequence[Figure] = (
    Figure("enqueue_one", "enqueue, one by one", "jobs/s"),
    Figure("enqueue_one_async", "enqueue, one by one, awaited", "jobs/s"),
    Figure("enqueue_bulk", "enqueue, in bulk", "jobs/s"),
    Figure("drain", "drain, one worker process", "jobs/s"),
    Figure("drain2", "drain, two worker processes", "jobs/s"),
    Figure("sync_drain", "drain, plain functions in threads", "jobs/s"),
    Figure("latency_p50", "latency, idle, p50", "ms", more=False, digits=2),
    Figure("latency_p99", "latency, idle, p99", "ms", more=False, digits=2),
    Figure("cpu", "processor, worker and server", "s per 10,000 jobs", more=False, digits=2),
    Figure("rss", "memory after a drain, all processes", "MB", more=False),
    Figure("rss_process", "memory after a drain, largest process", "MB", more=False),
    Figure("idle", "commands or queries of an idle worker", "a minute", more=False, digits=1),
    Figure("idle_cpu", "processor of an idle worker", "%", more=False, digits=2),
    Figure("growth", "claim and settle, backlog of 1,000,000 beside 1,000", "ratio", digits=2),
    Figure("snapshot", "claim and settle under a snapshot held for two minutes, beside before", "ratio", digits=2),
    Figure("wal_bytes", "WAL of a drain", "bytes a job", more=False),
    Figure("commits", "commits of a drain", "a job", more=False, digits=4),
    Figure("dead_rows", "dead rows of a drain", "a job", more=False, digits=2),
)
BY_NAME = {figure.name: figure for figure in FIGURES}

ENOUGH = 0.8
"""A measurement that lasts less than this part of what it should is too short to be a figure."""

MEASURED = ("enqueue", "enqueue_bulk", "drain", "drain2", "sync_drain", "latency", "growth", "snapshot")
"""What can be asked for: each brings one or several figures. CPU, memory and WAL come with `drain`, idle with
`latency`."""
