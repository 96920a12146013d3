"""What the tests of the worker share: stores that can be broken on purpose, ears, and applications that are closed."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from holdfast import EmbeddedWorker, Holdfast, Job, JobHandle, State, WorkerSettings
from holdfast.errors import NotFinished
from holdfast.events import Event
from holdfast.failures import decode_history
from holdfast.job import Lease
from holdfast.lifecycle import Applied, Move
from holdfast.store import Beat, Claimed, ClaimRequest, QueueCounts, Store
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import SqliteStore
from holdfast.worker.service import WorkerService

E = TypeVar("E", bound=Event)

ENGINES = ("memory", "sqlite")
PATIENCE = 20.0
"""How long a test waits for what must come, on a machine that has other things to do."""


def wait_until(condition: Callable[[], object], what: str, *, patience: float = PATIENCE) -> None:
    """Return when the condition holds; fail with `what` was waited for if it never does."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.005)


class Heard:
    """A listener. It keeps what it hears, and a test may wait for it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, event: Event) -> None:
        with self._changed:
            self.events.append(event)
            self._changed.notify_all()

    def of(self, kind: type[E], where: Callable[[E], bool] = lambda event: True) -> list[E]:
        """The events of that kind, oldest first."""
        return [event for event in list(self.events) if isinstance(event, kind) and where(event)]

    def wait_for(self, kind: type[E], where: Callable[[E], bool] = lambda event: True, *, count: int = 1) -> E:
        """The event number `count` of that kind, once it has been heard."""
        with self._changed:
            heard = self._changed.wait_for(lambda: len(self.of(kind, where)) >= count, PATIENCE)
            assert heard, f"never heard: {kind.__name__}"
            return self.of(kind, where)[count - 1]


class Tally:
    """Counts what handlers do, from whatever thread, and shows how many of a name ran at the same time."""

    def __init__(self) -> None:
        self.runs: Counter[object] = Counter()
        self.most_at_once: Counter[object] = Counter()
        self._now: Counter[object] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def running(self, name: object) -> Iterator[None]:
        with self._lock:
            self.runs[name] += 1
            self._now[name] += 1
            self.most_at_once[name] = max(self.most_at_once[name], self._now[name])
        try:
            yield
        finally:
            with self._lock:
                self._now[name] -= 1


class BrokenStore:
    """A store in front of a real one: it counts `claim` and `apply`, and fails or dawdles where a test says so.

    A fault is called before the call is carried out, or after it (then the reply is what gets lost). What it raises,
    the caller sees. Of the heart's own store only `beat` can be broken.
    """

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.applied: list[int] = []
        """How many moves each `apply` brought."""
        self.claims = 0
        self.claim_takes = self.apply_takes = 0.0
        """Seconds that a reply is on its way."""
        self.before_apply: Callable[[Sequence[Move]], None] = lambda moves: None
        self.after_apply: Callable[[Sequence[Move]], None] = lambda moves: None
        self.before_claim: Callable[[ClaimRequest], None] = lambda request: None
        self.after_claim: Callable[[Claimed], None] = lambda claimed: None
        self.before_note: Callable[[bytes], None] = lambda progress: None
        self.before_counts: Callable[[None], None] = lambda nothing: None
        self.before_beat: Callable[[str], None] = lambda session_id: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def claim(self, request: ClaimRequest) -> Claimed:
        self.claims += 1
        self.before_claim(request)
        claimed = await self._inner.claim(request)
        if self.claim_takes:
            await asyncio.sleep(self.claim_takes)
        self.after_claim(claimed)
        return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        self.applied.append(len(moves))
        self.before_apply(moves)
        answers = await self._inner.apply(moves)
        if self.apply_takes:
            await asyncio.sleep(self.apply_takes)
        self.after_apply(moves)
        return answers

    async def beat(self, session_id: str) -> Beat:
        self.before_beat(session_id)
        return await self._inner.beat(session_id)

    def beside(self) -> BrokenStore:
        beside = BrokenStore(self._inner.beside())
        beside.before_beat = lambda session_id: self.before_beat(session_id)  # noqa: PLW0108  # a test sets it later
        return beside

    async def note(self, lease: Lease, progress: bytes) -> Applied:
        self.before_note(progress)
        return await self._inner.note(lease, progress)

    async def counts(self) -> list[QueueCounts]:
        self.before_counts(None)
        return await self._inner.counts()

    async def __aenter__(self) -> BrokenStore:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._inner.__aexit__(*exc)


class Times:
    """A fault that raises the first `times` times, and says when it has."""

    def __init__(self, times: int, error: Callable[[], Exception]) -> None:
        self.left = times
        self._error = error
        self.over = threading.Event()

    def __call__(self, subject: object) -> None:
        if self.left > 0:
            self.left -= 1
            if self.left == 0:
                self.over.set()
            raise self._error()


class Bench:
    """One engine, and the applications and workers that a test has made on it."""

    def __init__(self, engine: str, folder: Path) -> None:
        self.engine = engine
        self.path = folder / "jobs.db"
        self.heard = Heard()
        self.tally = Tally()
        self._memory = MemoryStore()
        self._apps: list[Holdfast] = []
        self._workers: list[EmbeddedWorker] = []

    def store(self) -> Store:
        """A way to the jobs: always the same in memory, a new one on the same file with SQLite."""
        return self._memory if self.engine == "memory" else SqliteStore(self.path, durability="relaxed")

    def broken_store(self) -> BrokenStore:
        return BrokenStore(self.store())

    def app(self, store: Store | BrokenStore | None = None, **options: Any) -> Holdfast:
        """An application. All of a test's applications see the same jobs."""
        app = Holdfast(cast(Store, store or self.store()), **{"on_event": self.heard, **options})
        return self.keep(app)

    def app_like(self, app: Holdfast) -> Holdfast:
        """Another application with the same tasks."""
        other = self.app()
        for spec in app.tasks:
            other.task(name=spec.name)(spec.function)
        return other

    def keep(self, app: Holdfast) -> Holdfast:
        """Close it at the end."""
        self._apps.append(app)
        return app

    def work(self, app: Holdfast, **settings: Any) -> EmbeddedWorker:
        """A worker that is stopped at the end, if the test has not stopped it before."""
        worker = app.start_worker(WorkerSettings(**{"concurrency": 4, "poll": 0.5, "lease_ttl": 1.0, **settings}))
        self._workers.append(worker)
        return worker

    def close(self) -> None:
        for worker in self._workers:
            worker.stop(timeout=0)
        for app in self._apps:
            app.close()


def service_of(worker: EmbeddedWorker) -> WorkerService:
    """The machinery inside a worker."""
    assert worker._service is not None
    return worker._service


def stored(job: JobHandle[Any]) -> Job:
    """The job as the store has it now."""
    details = job.refresh().details
    assert details is not None
    return details


def ended(job: JobHandle[Any]) -> Job:
    """The job once it has ended, however it has."""
    try:
        job.result(timeout=PATIENCE)
    except NotFinished:
        raise
    except Exception:
        assert job.details is not None
    assert job.details is not None
    return job.details


def failed(job: JobHandle[Any]) -> tuple[str, str, str]:
    """Why the job is a dead letter: the reason, and the type and message of its last failure."""
    details = ended(job)
    assert details.state is State.FAILED, f"{details.state} ({details.reason})"
    last = decode_history(details.failure_history)[-1]
    return details.reason.value, last.type, last.message


def make_eager(worker: EmbeddedWorker) -> EmbeddedWorker:
    """As if it had run very many quick jobs: it fetches more than it has slots for."""
    service_of(worker)._runner._rate = 1e12
    return worker
