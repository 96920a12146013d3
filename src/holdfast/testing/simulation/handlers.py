"""The tasks of a run, and what their handlers do: what each job's argument says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from holdfast.app import Holdfast
from holdfast.signals import GiveUp, Retry, Snooze
from holdfast.tasks import Task
from holdfast.testing.history.events import Effect, End, Start
from holdfast.testing.history.recording import digest
from holdfast.testing.simulation.loop import HOST, machine
from holdfast.testing.simulation.run import Run
from holdfast.testing.simulation.swarm import Conduct
from holdfast.worker.context import current

QUEUES = ("first", "second")
NEWEST_TASK = "followed"
"""What workers that are out of date do not know."""
TIMEOUT = 0.6
HARD_TIMEOUT = 1.4
_PAYLOAD_LIMIT = 65_536
_LIMITED = (Conduct.OVERTIME, Conduct.STUBBORN)


class _HasNoRemedy(Exception):
    """What a task may declare permanent."""


class Handlers:
    """Registers the tasks with the application.

    `crash` ends the process in which a handler runs, or its host; `ambush` may befall its host.
    """

    def __init__(self, run: Run, app: Holdfast, crash: Callable[[str], None], ambush: Callable[[str], None]) -> None:
        self._run = run
        self._app = app
        self._crash = crash
        self._ambush = ambush
        backoff = run.plan.backoff
        self._epilogue = app.task(name="epilogue", queue=QUEUES[0], backoff=backoff)(self._after_failure)
        options: dict[str, Any] = {"queue": QUEUES[0], "backoff": backoff, "permanent": (_HasNoRemedy,)}
        self._ordinary = app.task(name="ordinary", **options)(self._perform)
        self._limited = app.task(name="limited", timeout=TIMEOUT, hard_timeout=HARD_TIMEOUT, **options)(self._perform)
        self._isolated = app.task(name="isolated", isolation="process", hard_timeout=HARD_TIMEOUT, **options)(
            self._perform
        )
        self._followed = app.task(name=NEWEST_TASK, on_failed=self._epilogue, **options)(self._perform)

    def task_for(self, conduct: Conduct, *, keyed: bool) -> Task[..., Any]:
        """A task for a job of that conduct. With a key it is always the same one: a key stands for a task, too."""
        if conduct in _LIMITED:
            return self._limited
        if keyed:
            return self._ordinary
        return self._run.chance.choice([self._ordinary, self._ordinary, self._isolated, self._followed])

    # What the handlers do.

    async def _perform(self, number: int, conduct: str) -> Any:
        began = self._start(number=number, conduct=conduct)
        wished: float | None = None
        try:
            return await self._conduct(Conduct(conduct), number)
        except Retry as retry:
            wished = retry.after
            raise
        finally:
            self._end(began, wished)

    async def _after_failure(self, job_id: str, reason: str) -> None:
        began = self._start(job_id=job_id, reason=reason)
        self._effect()
        self._end(began)

    async def _conduct(self, conduct: Conduct, number: int) -> Any:
        run, chance, ttl = self._run, self._run.chance, self._run.plan.ttl
        run.happened(f"handler: {conduct}")
        if chance.random() < 0.5:
            current().progress(number)
        match conduct:
            case Conduct.SLOW:
                await self._sleep(chance.uniform(0.05, 0.5))
            case Conduct.LONG:
                await self._sleep(0.2 * ttl)
                self._ambush(machine())
                await self._sleep(chance.uniform(1.0, 2.3) * ttl)
            case Conduct.FLAKY if chance.random() < 0.5:
                await self._sleep(chance.choice([0.0, 0.1]))
                raise RuntimeError("failed by chance")
            case Conduct.FAIL:
                raise RuntimeError("fails always")
            case Conduct.GIVE_UP:
                raise GiveUp
            case Conduct.PERMANENT:
                raise _HasNoRemedy
            case Conduct.RETRY_AFTER if chance.random() < 0.7:
                raise Retry(after=chance.choice([0.0, 0.4, 1.5]))
            case Conduct.SNOOZE if chance.random() < 0.5:
                raise Snooze(chance.choice([0.0, 0.4]))
            case Conduct.SNOOZE_ALWAYS:
                raise Snooze(0.1)
            case Conduct.OVERTIME:
                await self._sleep(TIMEOUT + 0.3)
            case Conduct.STUBBORN:
                await self._sleep_through(HARD_TIMEOUT + 0.5)
            case Conduct.DEAF:
                await self._sleep_through(chance.uniform(0.1, 1.5) * ttl)
            case Conduct.BLOCKING:
                longest = 0.3 if run.healed_at else chance.choice([0.3, 1.5 * ttl, 2.5])
                run.loop.block(HOST.get(), longest)
                await self._sleep(0.0)
            case Conduct.CRASH if chance.random() < 0.7:
                self._crash(HOST.get())
                await self._sleep(0.0)  # nothing of this host goes on
            case Conduct.PARENT:
                await self._ordinary.aenqueue(number, Conduct.SUCCEED.value)
        self._effect()
        return object() if conduct is Conduct.BAD_RESULT else number

    async def _sleep(self, seconds: float) -> None:
        await self._run.ports.clock.sleep(seconds)

    async def _sleep_through(self, seconds: float) -> None:
        """Sleep, and let nobody cut it short."""
        until = self._run.loop.time() + seconds
        while (left := until - self._run.loop.time()) > 0:
            try:
                await self._sleep(left)
            except asyncio.CancelledError:
                continue

    # What they note.

    def _start(self, **arguments: Any) -> float:
        """Note what the handler was called with. When that was."""
        job, at = current(), self._run.loop.time()
        signature = self._app.tasks[job.task].signature
        seen = digest(job.task, signature.encode(signature.bind((), arguments), _PAYLOAD_LIMIT))
        lease = job.lease
        self._run.note(Start(at=at, host=machine(), job_id=lease.job_id, version=lease.version, digest=seen))
        return at

    def _effect(self) -> None:
        lease, at = current().lease, self._run.loop.time()
        self._run.note(Effect(at=at, host=machine(), job_id=lease.job_id, version=lease.version))

    def _end(self, began: float, wished: float | None = None) -> None:
        """Note that it is over: unless it is past its hard limit, and the worker has left it behind long since."""
        lease, at = current().lease, self._run.loop.time()
        limit = self._app.tasks[current().task].options.hard_timeout
        if limit is None or at < began + limit:
            self._run.note(End(at=at, host=machine(), job_id=lease.job_id, version=lease.version, wished=wished))
