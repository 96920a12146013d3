"""A producer that goes on through every fault, and notes what it was told about each of its jobs."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import msgspec

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.job import JobId, NewJob
from holdfast.ports import SYSTEM
from holdfast.store import Store
from holdfast.testing.history.events import Answer, AnyEvent, Enqueue
from holdfast.testing.history.recording import digest_of, recorded

EVERY = 0.02
Calls = Callable[[], Iterator[tuple[str, dict[str, Any]]]]
"""Which tasks to call, and with what, without end."""


def mixed() -> Iterator[tuple[str, dict[str, Any]]]:
    """Mostly quick ones, on the event loop and in threads; some that fail at first, some that put themselves off."""
    for number in itertools.count():
        if number % 10 == 3:
            yield "unreliable", {"number": number}
        elif number % 10 == 7:
            yield "later", {"number": number}
        else:
            yield ("quick" if number % 2 else "in_thread"), {"number": number, "text": f"job {number}"}


def with_long_ones(seconds: float) -> Calls:
    """The same, and one in twenty that takes so long."""

    def calls() -> Iterator[tuple[str, dict[str, Any]]]:
        for number, call in enumerate(mixed()):
            yield ("lasting", {"number": number, "seconds": seconds}) if number % 20 == 11 else call

    return calls


def new_job(task: str, arguments: dict[str, Any], **options: Any) -> NewJob:
    """A job as the handlers of `tests.chaos.program` expect it: they say with what they were called."""
    return NewJob(id=SYSTEM.ids.job_id(), task=task, payload=msgspec.json.encode(arguments), **options)


class Producer:
    """Enqueues one job after the other in a thread of its own, until the block ends or `stop`.

    What nobody could say about a job is asked again, with the same id, until somebody can, or the producer stops. With
    `intent`, it notes each job before it enqueues it, too, as unknown: for one that may be killed in between.
    """

    def __init__(
        self,
        store: Store,
        note: Callable[[AnyEvent], None],
        *,
        host: str = "producer",
        calls: Calls = mixed,
        every: float = EVERY,
        intent: bool = False,
    ) -> None:
        self._store = recorded(store, note, time.monotonic, lambda: host)
        self._note = note
        self._host = host
        self._calls = calls
        self._every = every
        self._intent = intent
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._produce, daemon=True)
        self.accepted: list[JobId] = []
        self.error: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """No more jobs. Repeating it is harmless. Raises what has ended the producer before, if anything."""
        self.abandon()
        if self.error is not None:
            raise self.error

    def abandon(self) -> None:
        """The same, whatever has happened."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _produce(self) -> None:
        try:
            for task, arguments in self._calls():
                if self._stopped.wait(self._every):
                    return
                self._enqueue(new_job(task, arguments))
        except BaseException as error:
            self.error = error

    def _enqueue(self, job: NewJob) -> None:
        if self._intent:
            self._note_intent(job)
        while True:
            try:
                self._store.insert_blocking([job])
            except OutcomeUnknown:
                if self._stopped.wait(self._every):
                    return
            except StoreUnavailable:
                self._stopped.wait(self._every)
                return
            else:
                self.accepted.append(job.id)
                return

    def _note_intent(self, job: NewJob) -> None:
        now = time.monotonic()
        self._note(
            Enqueue(
                at=now,
                began=now,
                host=self._host,
                answer=Answer.UNKNOWN,
                job_id=job.id,
                digest=digest_of(job),
                queue=job.queue,
                max_retries=job.max_retries,
            )
        )
