"""A producer that goes on through every fault, and keeps what it was told about each of its jobs."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Self

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.job import Job, JobId, NewJob, State
from holdfast.ports import SYSTEM
from holdfast.store import Inserted, InsertStatus, Store
from tests.worker.programs import DEADLINE

_EVERY = 0.01


class Producer:
    """Enqueues one job after the other in a thread of its own, until the block ends."""

    def __init__(self, store: Store, task: str = "note", *, every: float = _EVERY) -> None:
        self.accepted: list[JobId] = []
        self.unknown: list[JobId] = []
        """Nobody could say whether they were stored."""
        self.refused: list[JobId] = []
        """They were not stored, as the store said."""
        self.error: BaseException | None = None
        self._store = store
        self._task = task
        self._every = every
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """No more jobs. Repeating it is harmless."""
        self._stopped.set()
        self._thread.join()

    def __str__(self) -> str:
        return f"{len(self.accepted)} accepted, {len(self.unknown)} unknown, {len(self.refused)} refused"

    def _produce(self) -> None:
        try:
            while not self._stopped.wait(self._every):
                self._enqueue(NewJob(id=SYSTEM.ids.job_id(), task=self._task, payload=b"{}"))
        except BaseException as error:
            self.error = error

    def urgent(self) -> JobId:
        """A job that comes before all others, as soon as one is accepted."""
        deadline = time.monotonic() + DEADLINE
        while True:
            assert time.monotonic() < deadline, f"nothing is accepted any more: {self}"
            job = NewJob(id=SYSTEM.ids.job_id(), task=self._task, payload=b"{}", priority=-1)
            if self._enqueue(job):
                return job.id
            self._stopped.wait(_EVERY)

    def _enqueue(self, job: NewJob) -> bool:
        """Whether it was accepted."""
        try:
            answers = self._store.insert_blocking([job])
        except OutcomeUnknown as error:
            self.unknown += error.ids
            return False
        except StoreUnavailable:
            self.refused.append(job.id)
            return False
        assert answers == [Inserted(job.id, InsertStatus.CREATED)]
        self.accepted.append(job.id)
        return True


def check_nothing_is_lost(producer: Producer, jobs: dict[JobId, Job]) -> None:
    """What was accepted is there, what was refused is not; of what is unknown, each may be there or not."""
    assert producer.error is None, repr(producer.error)
    assert [job_id for job_id in producer.accepted if job_id not in jobs] == []
    assert [job_id for job_id in producer.refused if job_id in jobs] == []


def check_promise(producer: Producer, jobs: dict[JobId, Job]) -> None:
    """The same, of jobs that are all of this producer, and every one has succeeded."""
    check_nothing_is_lost(producer, jobs)
    assert set(jobs) <= {*producer.accepted, *producer.unknown}
    assert {job.state for job in jobs.values()} == {State.SUCCEEDED}
