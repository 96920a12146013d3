"""The composition root: the only file that sees every room. `Holdfast` puts a store, a client and tasks together."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Literal, ParamSpec, Self, TypeVar, overload

from holdfast.client import Client, JobHandle, JobPage, PreparedJob
from holdfast.config import Settings
from holdfast.errors import InvalidOption, shown
from holdfast.events import Listener, ignore
from holdfast.job import JobId, State
from holdfast.policy import Backoff
from holdfast.ports import SYSTEM, Ports
from holdfast.registry import Registry, TaskOptions
from holdfast.store import CancelAnswer, QueueCounts, Store
from holdfast.stores import open_store
from holdfast.tasks import Task, TaskDecorator

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
        on_event: Listener = ignore,
        ports: Ports = SYSTEM,
    ) -> None:
        if not isinstance(store, str) and not hasattr(store, "insert_blocking"):
            raise InvalidOption(
                f"Holdfast takes a store URL such as 'sqlite:///jobs.db', or a store, not {shown(store)}"
            )
        if not isinstance(settings, Settings | None):
            raise InvalidOption("settings must be a Settings value; Settings.parse makes one from dictionaries")
        self.store: Store = open_store(store, ports) if isinstance(store, str) else store
        self.settings = settings or Settings()
        self.tasks = Registry()
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
        policy = TaskOptions(**options)
        if policy.priority is not None:
            self.settings.queues.priority(policy.priority)

        def register(function: Callable[..., Any]) -> Task[..., Any]:
            return Task(self.tasks.add(function, name, policy), self._client)

        return register if function is None else register(function)

    # Jobs.

    async def aenqueue_many(self, calls: Iterable[PreparedJob[R]], *, connection: Any = None) -> list[JobHandle[R]]:
        """Enqueue many calls (`task.job(...)`), a thousand in one round trip. `PartlyRefused` if some were refused."""
        return await self._client.enqueue_many(calls, connection)

    def enqueue_many(self, calls: Iterable[PreparedJob[R]], *, connection: Any = None) -> list[JobHandle[R]]:
        """Blocking twin of `aenqueue_many`."""
        return self._client.enqueue_many_blocking(calls, connection)

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

    async def __aenter__(self) -> Self:
        return await self.aopen()

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()
