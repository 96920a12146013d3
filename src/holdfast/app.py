"""The composition root: the only file that sees every room. `Holdfast` puts a store, a client and tasks together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, ParamSpec, Self, TypeVar, overload

from msgspec.structs import replace

from holdfast.batches import PreparedJob
from holdfast.client import Client, JobHandle, JobPage
from holdfast.config import Settings, WorkerSettings
from holdfast.errors import InvalidOption, shown
from holdfast.events import Listener, ignore
from holdfast.job import JobId, State
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.retention import Retention
from holdfast.policy import Backoff, RetryPolicy
from holdfast.ports import SYSTEM, Ports
from holdfast.registry import Registry, TaskOptions
from holdfast.store import CancelAnswer, QueueCounts, Store
from holdfast.stores import open_store
from holdfast.sync import refuse_in_event_loop
from holdfast.tasks import FollowUps, Task, TaskDecorator
from holdfast.worker.board import Board
from holdfast.worker.embedded import EmbeddedWorker
from holdfast.worker.event_loop import run_until_signalled
from holdfast.worker.handling import Handling, Middleware
from holdfast.worker.isolation import IsolatedPool, find_application
from holdfast.worker.service import WorkerService
from holdfast.worker.supervisor import Supervisor

_importing = ContextVar("holdfast_importing", default="")


@contextmanager
def importing(name: str) -> Iterator[None]:
    """While a program of ours imports the application: what it starts there would start again in every process."""
    token = _importing.set(name)
    try:
        yield
    finally:
        _importing.reset(token)


def _refuse_while_importing(method: str) -> None:
    if name := _importing.get():
        raise InvalidOption(
            f"{method}() is called while {name} is imported, as every worker process does: put it under "
            f'`if __name__ == "__main__":`'
        )


P = ParamSpec("P")
R = TypeVar("R")


class Holdfast:
    """An application: one store, its tasks, and what a producer or operator does with them.

    Making one opens nothing; the store opens when it is first used. Every blocking method has a twin for event loops
    whose name begins with `a`.
    """

    def __init__(
        self,
        store: str | Store,
        *,
        settings: Settings | None = None,
        middleware: Sequence[Middleware] = (),
        on_event: Listener = ignore,
        ports: Ports = SYSTEM,
    ) -> None:
        if not isinstance(store, str) and not hasattr(store, "insert_blocking"):
            raise InvalidOption(
                f"Holdfast takes a store URL such as 'sqlite:///jobs.db', or a store, not {shown(store)}"
            )
        if not isinstance(settings, Settings | None):
            raise InvalidOption("settings must be a Settings value; Settings.parse makes one from dictionaries")
        self.store: Store = open_store(store, ports, settings=settings) if isinstance(store, str) else store
        self.settings = settings or Settings()
        self.tasks = Registry()
        self.handling = Handling(ports.clock, tuple(middleware), self.settings.jobs.max_payload)
        """How a worker calls the handlers."""
        self.listener = on_event
        self._ports = ports
        self._client = Client(self.store, settings=self.settings, ports=ports, listener=on_event)

    # Tasks.

    @overload
    def task(self, function: Callable[P, Coroutine[Any, Any, R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        function: None = None,
        /,
        *,
        name: str | None = ...,
        version: str = ...,
        queue: str = ...,
        share: str = ...,
        priority: str | int | None = ...,
        max_retries: int | None = ...,
        backoff: Backoff = ...,
        permanent: tuple[type[BaseException], ...] = ...,
        timeout: float | None = ...,
        hard_timeout: float | None = ...,
        isolation: Literal["process"] | None = ...,
        unique: bool | float = ...,
        retention: float | None = ...,
        on_failed: Task[..., Any] | str | None = ...,
    ) -> TaskDecorator: ...

    def task(
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        on_failed: Any = None,
        **options: Any,
    ) -> Any:
        """Register a function as a task: `@app.task`, or `@app.task(queue="mail", max_retries=5)`.

        The options are those of `TaskOptions`; `on_failed` is a task, or its name. An unknown priority, a name that
        is taken, or a parameter that JSON cannot fill is refused here, when the module is imported (an annotation
        that names a class further down: at the first call).
        """
        if on_failed is not None:
            options["on_failed"] = on_failed.name if isinstance(on_failed, Task) else on_failed
        if unknown := options.keys() - set(TaskOptions.__struct_fields__):
            raise InvalidOption(
                f"there is no task option {', '.join(sorted(unknown))}: there are name, "
                f"{', '.join(TaskOptions.__struct_fields__)}"
            )
        policy = TaskOptions(**options)
        if policy.priority is not None:
            self.settings.queues.priority(policy.priority)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            return Task(self.tasks.add(function, name, policy), self._client)

        return register if function is None else register(function)

    # Jobs.

    @overload
    async def aenqueue_many(self, calls: Iterable[PreparedJob[R]], *, connection: Any = None) -> list[JobHandle[R]]: ...

    @overload
    async def aenqueue_many(
        self, calls: Iterable[PreparedJob[R]], *, connection: Any = None, progress: Callable[[int], object]
    ) -> int: ...

    async def aenqueue_many(
        self,
        calls: Iterable[PreparedJob[R]],
        *,
        connection: Any = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[JobHandle[R]] | int:
        """Enqueue many calls (`task.job(...)`), a thousand in one round trip. `PartlyRefused` if some were refused.

        With `progress`, nothing is kept of a job that is stored: the callable is told after each round trip how many
        there are, and the answer is their number. So a million jobs take no more memory than a thousand.
        """
        batch = await self._client.enqueue_many(calls, connection, progress)
        return batch.handles() if progress is None else batch.number()

    @overload
    def enqueue_many(self, calls: Iterable[PreparedJob[R]], *, connection: Any = None) -> list[JobHandle[R]]: ...

    @overload
    def enqueue_many(
        self, calls: Iterable[PreparedJob[R]], *, connection: Any = None, progress: Callable[[int], object]
    ) -> int: ...

    def enqueue_many(
        self,
        calls: Iterable[PreparedJob[R]],
        *,
        connection: Any = None,
        progress: Callable[[int], object] | None = None,
    ) -> list[JobHandle[R]] | int:
        """Blocking twin of `aenqueue_many`."""
        batch = self._client.enqueue_many_blocking(calls, connection, progress)
        return batch.handles() if progress is None else batch.number()

    async def aget(self, job_id: JobId) -> JobHandle[Any]:
        """The job with that id, or `JobNotFound`."""
        return await self._client.get(job_id)

    def get(self, job_id: JobId) -> JobHandle[Any]:
        """Blocking twin of `aget`."""
        return self._client.portal.run("get", self.aget(job_id))

    async def afind(
        self,
        *,
        states: State | str | Iterable[State | str] = (),
        queue: str | None = None,
        task: str | None = None,
        correlation_id: str | None = None,
        cursor: JobId | None = None,
        limit: int = 100,
    ) -> JobPage:
        """Jobs that match, newest first. Pass a page's `next` as `cursor` for the page after it."""
        return await self._client.find(
            states=states, queue=queue, task=task, correlation_id=correlation_id, cursor=cursor, limit=limit
        )

    def find(
        self,
        *,
        states: State | str | Iterable[State | str] = (),
        queue: str | None = None,
        task: str | None = None,
        correlation_id: str | None = None,
        cursor: JobId | None = None,
        limit: int = 100,
    ) -> JobPage:
        """Blocking twin of `afind`."""
        return self._client.portal.run(
            "find",
            self.afind(
                states=states, queue=queue, task=task, correlation_id=correlation_id, cursor=cursor, limit=limit
            ),
        )

    async def acancel(self, job_id: JobId) -> CancelAnswer:
        """Cancel a waiting job at once, or ask the worker that holds it."""
        return await self._client.cancel(job_id)

    def cancel(self, job_id: JobId) -> CancelAnswer:
        """Blocking twin of `acancel`."""
        return self._client.portal.run("cancel", self.acancel(job_id))

    async def areplay(self, job_id: JobId) -> JobHandle[Any]:
        """Bring an ended job back to its queue."""
        return await self._client.replay(job_id)

    def replay(self, job_id: JobId) -> JobHandle[Any]:
        """Blocking twin of `areplay`."""
        return self._client.portal.run("replay", self.areplay(job_id))

    async def aforget(self, job_id: JobId) -> None:
        """Remove a job that has ended, dead letter or not, for good."""
        await self._client.forget(job_id)

    def forget(self, job_id: JobId) -> None:
        """Blocking twin of `aforget`."""
        self._client.portal.run("forget", self.aforget(job_id))

    # Queues.

    async def apause(self, queue: str) -> None:
        """Stop claims from a queue. What is in flight goes on; enqueuing goes on."""
        await self._client.pause(queue)

    def pause(self, queue: str) -> None:
        """Blocking twin of `apause`."""
        self._client.portal.run("pause", self.apause(queue))

    async def aresume(self, queue: str) -> None:
        """Let claims from a queue go on."""
        await self._client.resume(queue)

    def resume(self, queue: str) -> None:
        """Blocking twin of `aresume`."""
        self._client.portal.run("resume", self.aresume(queue))

    async def acounts(self) -> list[QueueCounts]:
        """Every queue that has jobs or is paused."""
        return await self._client.counts()

    def counts(self) -> list[QueueCounts]:
        """Blocking twin of `acounts`."""
        return self._client.portal.run("counts", self.acounts())

    # Workers.

    async def arun_worker(self, settings: WorkerSettings | None = None) -> bool:
        """Work in this event loop until cancelled; then finish what runs within the grace period. Cancelled again, give
        it back at once.
        """
        _refuse_while_importing("arun_worker")
        service = self.worker_service(settings or self.settings.worker)
        running = asyncio.ensure_future(service.run())
        cancelled: asyncio.CancelledError | None = None
        while not running.done():
            try:
                await asyncio.shield(running)
            except asyncio.CancelledError as error:
                if cancelled is not None:
                    service.stop_now()
                service.stop()
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return running.result()

    def run_worker(self, settings: WorkerSettings | None = None) -> bool:
        """Work in this process until SIGTERM or SIGINT; a second signal gives running jobs back at once.

        True if everything ended well within the grace period. `holdfast worker` does the same in several processes
        that are watched and replaced.
        """
        refuse_in_event_loop("run_worker")
        _refuse_while_importing("run_worker")
        return run_until_signalled(lambda: self.worker_service(settings or self.settings.worker))

    def start_worker(self, settings: WorkerSettings | None = None) -> EmbeddedWorker:
        """A worker in a daemon thread of this process, for small applications and tests. `stop` it at the end."""
        _refuse_while_importing("start_worker")
        chosen = settings or self.settings.worker
        return EmbeddedWorker(
            lambda listener: self.worker_service(chosen, listener=listener),
            self.store,
            queues=chosen.queues or self.tasks.queues(),
            refuse_new=getattr(self.store, "shutdown", None),
            ports=self._ports,
            listener=self.listener,
        )

    def worker_service(
        self,
        settings: WorkerSettings,
        *,
        listener: Listener | None = None,
        application: str | None = None,
        board: Board | None = None,
    ) -> WorkerService:
        """A worker for the running event loop: what the others here are made of. A `board` has a supervisor behind."""
        self._require_queues(settings)
        heard = listener or self.listener
        follow_ups = FollowUps(self.tasks, self._client, heard)
        follow_ups.check()
        rescue = Rescue(
            self.store,
            ports=self._ports,
            ttl=settings.lease_ttl,
            policy=settings.policy(),
            listener=heard,
            follow=follow_ups.add,
        )
        return WorkerService(
            store=self.store,
            registry=self.tasks,
            settings=settings,
            handling=self.handling,
            follow=follow_ups.add,
            keepers=[rescue.run, Retention(self.store, ports=self._ports, listener=heard).run],
            isolation=IsolatedPool(
                application or find_application(self, self.tasks), self.tasks, ports=self._ports, listener=heard
            ),
            board=board,
            supervised=board is not None,
            ports=self._ports,
            listener=heard,
        )

    def supervisor(
        self, application: str, settings: WorkerSettings, *, arguments: tuple[str, ...], listener: Listener
    ) -> Supervisor:
        """What runs workers of this application in processes and watches them. `arguments` go to each process."""
        follow_ups = FollowUps(self.tasks, self._client, listener)
        self._require_queues(settings)
        follow_ups.check()

        def policy(task: str) -> RetryPolicy:
            return settings.policy(self.tasks[task].options.backoff) if task in self.tasks else settings.policy()

        return Supervisor(
            self.store,
            application=application,
            settings=settings,
            arguments=arguments,
            policy=policy,
            follow=follow_ups.add,
            ports=self._ports,
            listener=listener,
        )

    def _require_queues(self, settings: WorkerSettings) -> None:
        if not (settings.queues or self.tasks.queues()):
            raise InvalidOption(
                "there is nothing to work on: the application has no tasks. Import the modules that define them where "
                "the application is loaded, or name the queues"
            )

    # Opening and closing.

    async def aopen(self) -> Self:
        """Open the store now, instead of at its first use."""
        await self.store.__aenter__()
        return self

    def open(self) -> Self:
        """Blocking twin of `aopen`."""
        return self._client.portal.run("open", self.aopen())

    async def aclose(self) -> None:
        """Finish what is under way and close the store. It opens again if it is used again."""
        await self.store.__aexit__(None, None, None)

    def close(self) -> None:
        """Blocking twin of `aclose`."""
        self._client.portal.run("close", self.aclose())
        self._client.portal.close()

    @contextmanager
    def replaced(self, store: Store, ports: Ports) -> Iterator[Client]:
        """Work on another store, with other ports, until the block ends: what `holdfast.testing` is built on.

        Every task of the application follows, since all enqueue through the client that this yields.
        """
        own = self.store, self._ports, self.handling
        self.store, self._ports, self.handling = store, ports, replace(self.handling, clock=ports.clock)
        self._client.use(store, ports)
        try:
            yield self._client
        finally:
            self.store, self._ports, self.handling = own
            self._client.use(self.store, self._ports)

    async def __aenter__(self) -> Self:
        return await self.aopen()

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()
