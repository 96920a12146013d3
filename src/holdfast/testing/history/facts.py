"""A history, sorted by job: what the checks look things up in."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from holdfast.job import Job, JobId, SessionId
from holdfast.lifecycle import Applied
from holdfast.testing.history.events import (
    Answer,
    AnyEvent,
    Cancel,
    Claim,
    Close,
    Effect,
    End,
    Enqueue,
    Fault,
    Healed,
    History,
    KeeperReady,
    Measured,
    Settle,
    Start,
    Stopped,
)

Lease = tuple[JobId, int]
"""A job, and the version of one claim of it."""

TOOK_EFFECT = (Applied.APPLIED, Applied.ALREADY)


class Facts:
    """The events of a history by kind and by job, each list in the order of the history."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.rules = history.rules
        self.stored: dict[JobId, Job] = {job.id: job for job in history.ending.jobs}
        self.enqueues: dict[JobId, list[Enqueue]] = defaultdict(list)
        self.accepted: dict[JobId, Enqueue] = {}
        """By the job that stands for it: the first answer that said so."""
        self.claims: dict[JobId, list[Claim]] = defaultdict(list)
        self.starts: dict[JobId, list[Start]] = defaultdict(list)
        self.ends: dict[Lease, End] = {}
        self.effects: Counter[Lease] = Counter()
        self.settles: dict[JobId, list[Settle]] = defaultdict(list)
        """All of them, refused ones too."""
        self.cancels: dict[JobId, list[Cancel]] = defaultdict(list)
        self.closes: dict[SessionId, Close] = {}
        self.faults: list[Fault] = []
        self.keepers: list[KeeperReady] = []
        self.stopped: list[Stopped] = []
        self.measured: list[Measured] = []
        self.healed: Healed | None = None
        self.followers: set[JobId] = set()
        """Jobs that were enqueued by a settlement."""
        for event in history.events:
            self._add(event)

    def _add(self, event: AnyEvent) -> None:
        match event:
            case Claim():
                self.claims[event.job_id].append(event)
            case Settle():
                self.settles[event.job_id].append(event)
                self.followers.update(event.then)
            case Start():
                self.starts[event.job_id].append(event)
            case End():
                self.ends[event.job_id, event.version] = event
            case Effect():
                self.effects[event.job_id, event.version] += 1
            case Enqueue():
                self.enqueues[event.job_id].append(event)
                if event.answer is Answer.OK:
                    self.accepted.setdefault(event.returned or event.job_id, event)
            case Cancel():
                self.cancels[event.job_id].append(event)
            case Close():
                self.closes.setdefault(event.session_id, event)
            case Fault():
                self.faults.append(event)
            case KeeperReady():
                self.keepers.append(event)
            case Stopped():
                self.stopped.append(event)
            case Measured():
                self.measured.append(event)
            case Healed():
                self.healed = event

    def applied(self, job_id: JobId) -> Iterator[Settle]:
        """The moves of the job that took effect with this very call."""
        return (settle for settle in self.settles.get(job_id, ()) if settle.applied is Applied.APPLIED)

    def digest(self, job_id: JobId) -> str:
        """What the job was enqueued with; empty if nobody noted it."""
        enqueues = self.enqueues.get(job_id)
        return enqueues[0].digest if enqueues else ""

    def harmed_before(self, at: float) -> bool:
        """Whether anything that was done to the run by then may have kept somebody from noting what he did."""
        return any(fault.at <= at for fault in self.faults)
