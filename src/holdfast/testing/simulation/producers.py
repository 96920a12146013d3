"""Those who enqueue, look, cancel, replay and pause, through the real client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from holdfast.app import Holdfast
from holdfast.client import JobHandle
from holdfast.errors import HoldfastError, StoreError
from holdfast.job import JobId, NewJob
from holdfast.store import Inserted, Store
from holdfast.testing.history.recording import note_of_insert
from holdfast.testing.simulation.handlers import QUEUES, Handlers
from holdfast.testing.simulation.loop import machine
from holdfast.testing.simulation.run import Run
from holdfast.testing.simulation.swarm import Conduct

_WAITS_FOR_RESULT = 0.05
_BATCH = 4
_TRIES = 4


class Told:
    """A store as producers have it: what they are told about their jobs is noted. Use `told` to get it typed."""

    def __init__(self, store: Store, run: Run) -> None:
        self._store = store
        self._run = run
        self._unanswered: dict[int, tuple[str, float, Sequence[NewJob]]] = {}
        """By the number of the call: who asked when for what."""
        self._calls = 0
        self.accepted: list[JobId] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def insert(self, jobs: Sequence[NewJob], **options: Any) -> list[Inserted]:
        """See `Store.insert`."""
        self._calls += 1
        call = self._calls
        self._unanswered[call] = machine(), self._run.loop.time(), jobs
        try:
            answers = await self._store.insert(jobs, **options)
        except HoldfastError as error:
            self._heard(call, [None] * len(jobs), error)
            raise
        self._heard(call, answers, None)
        return answers

    def note_unanswered(self) -> None:
        """Those who asked are dead, or were cancelled: what they asked for may have been done, or not."""
        for call, (_, _, jobs) in list(self._unanswered.items()):
            self._heard(call, [None] * len(jobs), None)

    def _heard(self, call: int, answers: Sequence[Inserted | None], error: HoldfastError | None) -> None:
        host, began, jobs = self._unanswered.pop(call)
        for job, inserted in zip(jobs, answers, strict=True):
            at = self._run.loop.time()
            self._run.note(note_of_insert(job, began=began, at=at, host=host, inserted=inserted, error=error))
            if inserted:
                self._run.happened(f"enqueue {inserted.status}")
                self.accepted.append(inserted.job_id)


def told(store: Store, run: Run) -> tuple[Store, Told]:
    """The store, noted for producers."""
    noted = Told(store, run)
    return cast(Store, noted), noted


class Producers:
    """What a producer does, one thing after the other."""

    def __init__(self, run: Run, app: Holdfast, handlers: Handlers, noted: Told) -> None:
        self._run = run
        self._app = app
        self._handlers = handlers
        self._noted = noted
        self._number = 0

    async def produce(self) -> None:
        """Enqueue jobs, and steer some of those that are there."""
        run, plan, chance = self._run, self._run.plan, self._run.chance
        for _ in range(plan.jobs // plan.producers):
            if chance.random() < plan.batch_rate:
                await self._enqueue_batch()
            else:
                await self._enqueue_one()
            await run.ports.clock.sleep(2 * plan.pause_between * chance.random())
            if self._noted.accepted:
                await self._steer(chance.choice(self._noted.accepted))

    async def _steer(self, job_id: JobId) -> None:
        plan, chance = self._run.plan, self._run.chance
        if chance.random() < plan.cancel_rate:
            await self._attempt("cancel", self._app.acancel(job_id))
        if chance.random() < plan.replay_rate:
            await self._attempt("replay", self._app.areplay(job_id))
        if chance.random() < plan.pause_queue_rate:
            queue = QUEUES[0]
            await self._attempt("pause", self._app.apause(queue))
            await self._run.ports.clock.sleep(chance.uniform(0.1, 1.0))
            await self._attempt("resume", self._app.aresume(queue))

    async def _attempt(self, what: str, asked: Any) -> Any:
        """What comes of it, counted. An error of our tree is an answer like others."""
        try:
            answer = await asked
        except HoldfastError as error:
            self._run.happened(f"{what}: {type(error).__name__}")
            return None
        self._run.happened(f"{what}: {answer}" if isinstance(answer, str) else what)
        return answer

    # Jobs.

    def _call(self) -> tuple[Any, int, Conduct]:
        """A task with the options of one call, and its arguments."""
        plan, chance = self._run.plan, self._run.chance
        key: str | None = None
        if plan.keys and chance.random() < 0.5:
            # A key comes with the same payload again, or with another one.
            which, number = chance.randrange(plan.keys), chance.choice([1, 1, 2])
            key, conduct = f"key-{which}", plan.conducts[which % len(plan.conducts)]
        else:
            self._number += 1
            number, conduct = self._number, chance.choice(plan.conducts)
        call = self._handlers.task_for(conduct, keyed=key is not None).options(
            queue=QUEUES[chance.randrange(plan.queues)],
            share=chance.choice(plan.shares),
            priority=chance.choice(plan.priorities),
            max_retries=chance.choice(plan.max_retries),
            delay=chance.choice(plan.delays),
            key=key,
        )
        return call, number, conduct

    async def _enqueue_one(self) -> None:
        call, number, conduct = self._call()
        handle = await self._attempt("enqueue", call.aenqueue(number, conduct.value))
        if handle is not None and self._run.chance.random() < _WAITS_FOR_RESULT:
            await self._wait_for_result(handle, number, conduct)

    async def _enqueue_batch(self) -> None:
        """Several in one call, repeated with the same ids until an answer comes: they cannot become more."""
        prepared = []
        for _ in range(_BATCH):
            call, number, conduct = self._call()
            prepared.append(call.job(number, conduct.value))
        for _ in range(_TRIES):
            try:
                await self._app.aenqueue_many(prepared)
            except StoreError:
                self._run.happened("batch repeated")
                continue
            except HoldfastError as error:
                self._run.happened(f"batch: {type(error).__name__}")
            return

    async def _wait_for_result(self, handle: JobHandle[Any], number: int, conduct: Conduct) -> None:
        result = await self._attempt("result", handle.aresult(timeout=2.0))
        if result is not None and result != number:
            self._run.surprises.append(f"job {handle.id} ({conduct}) was to return {number}, and returned {result!r}")
