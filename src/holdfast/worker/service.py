"""The worker as a whole, and the one place where the order of starting and stopping is written.

Starting: the session, then the heartbeat, then the settler, the keepers and the claimer. Stopping: no more claims, give
back what has not started, let handlers finish within the grace period, stop and give back the rest, confirm every
settlement, end the heartbeat, close the session.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import TypeVar

from holdfast.config import WorkerSettings
from holdfast.errors import HoldfastError, StoreError, StoreUnavailable
from holdfast.events import Listener, PartFailed, ProcessRecycled, WorkerStarted, WorkerStopped, tell
from holdfast.job import SessionId
from holdfast.ports import Ports
from holdfast.registry import Registry
from holdfast.store import Session, Store
from holdfast.worker.board import Board
from holdfast.worker.claimer import Claimer
from holdfast.worker.context import Stop
from holdfast.worker.event_loop import end_in_forks, no_longer_in_forks
from holdfast.worker.handling import Handling
from holdfast.worker.heart import Heart
from holdfast.worker.holding import Holding
from holdfast.worker.runner import Isolation, Runner
from holdfast.worker.settler import Follow, Settler

T = TypeVar("T")

Loop = Callable[[], Awaitable[None]]
"""A background loop: runs until it is cancelled, and is started again when it fails."""

_TICK_EVERY = 0.25
_PROGRESS_EVERY = 0.5
_TIME_TO_CLEAN_UP = 1.0
"""Seconds that handlers have to end after they were asked to."""
_LAST_CALL = 1.0
"""Seconds for the store to answer when there is no time to wait."""
_SETTLE_DEADLINE = 15.0
_FIRST_PAUSE = 0.1
_JITTER = 0.1
_LONGEST_PAUSE = 5.0


class _Wish(IntEnum):
    """What somebody wants of a worker. It only ever grows."""

    NOTHING = 0
    RETIRE = 1
    STOP = 2
    STOP_NOW = 3


class WorkerService:
    """One worker session after another in one event loop. `run` once; `stop` from that loop, as often as you like."""

    def __init__(
        self,
        *,
        store: Store,
        registry: Registry,
        settings: WorkerSettings,
        handling: Handling,
        follow: Follow,
        keepers: Sequence[Loop],
        isolation: Isolation,
        board: Board | None = None,
        supervised: bool = False,
        ports: Ports,
        listener: Listener,
    ) -> None:
        self._store = store
        self._settings = settings
        self._ports = ports
        self._listener = listener
        self._keepers = keepers
        self._supervised = supervised
        self._wish = _Wish.NOTHING
        # With jitter: processes that started together must not be replaced together.
        limit = settings.max_jobs if supervised else None
        self._most_jobs = math.inf if limit is None else limit * (1 - _JITTER * ports.random.fraction())
        self._ended = False
        self._changed = asyncio.Event()
        self._stop_asked = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._queues = settings.queues or registry.queues()
        self._board = board or Board.private(settings.concurrency)
        self._holding = Holding()
        self.settler = Settler(
            store, self._holding, ports=ports, listener=listener, follow=follow, settled=self._on_change
        )
        self._runner = Runner(
            store=store,
            registry=registry,
            settings=settings,
            handling=handling,
            holding=self._holding,
            board=self._board,
            settler=self.settler,
            isolation=isolation,
            ports=ports,
            listener=listener,
            freed=self._on_change,
            stuck=self._on_stuck,
        )
        self._claimer = Claimer(
            store=store,
            queues=self._queues,
            runner=self._runner,
            settler=self.settler,
            holding=self._holding,
            poll=settings.poll,
            introduce=self._introduce,
            announce=self._board.open_session,
            opened=self._on_session,
            ports=ports,
            listener=listener,
        )
        self._heart = Heart(
            store.beside(),
            ttl=settings.lease_ttl,
            holding=self._holding,
            board=self._board,
            loop=asyncio.get_running_loop(),
            lost=self._claimer.session_lost,
            cancel=self._runner.cancel,
            reconcile=self._claimer.reconcile,
            on_loop=self._on_loop,
            ports=ports,
            listener=listener,
        )

    # What others ask.

    @property
    def worker_id(self) -> SessionId:
        """The present session."""
        return self._claimer.session_id

    @property
    def idle(self) -> bool:
        """Nothing is held, and the last claim left nothing that was due. More may have come since: ask the store."""
        return self._claimer.empty and not self._holding and not self.settler

    def retire(self) -> None:
        """Claim no more, and stop when what runs has finished, however long that takes."""
        self._wish_for(_Wish.RETIRE)

    def stop(self) -> None:
        """Claim no more; what runs may finish within the grace period, and is given back then."""
        self._wish_for(_Wish.STOP)

    def stop_now(self) -> None:
        """Give back what runs, and stop."""
        self._wish_for(_Wish.STOP_NOW)

    def _wish_for(self, wish: _Wish) -> None:
        self._wish = max(self._wish, wish)
        self._board.leave()
        self._runner.stopping = True
        self._claimer.stop()
        self._stop_asked.set()
        self._on_change()

    # What the parts tell.

    def _introduce(self, session_id: SessionId) -> Session:
        return Session(id=session_id, host=socket.gethostname()[:128], pid=os.getpid(), queues=self._queues)

    def _on_session(self, session_id: SessionId) -> None:
        self._heart.session_id = session_id
        self._changed.set()

    def _on_change(self) -> None:
        self._changed.set()
        if self._board.done >= self._most_jobs and not self._wish:
            why = f"it has run {self._board.done} jobs"
            tell(self._listener, ProcessRecycled(self.worker_id, os.getpid(), why))
            self.retire()
        if self._runner.wanted or self._wish:
            self._claimer.wake()

    def _on_stuck(self) -> None:
        if self._supervised:
            self.retire()  # the supervisor starts a fresh process, and the stuck handler ends with this one

    def _on_loop(self) -> tuple[str, ...]:
        """The tasks whose handlers are on the event loop. Called from the heart's thread."""
        return tuple(
            sorted({running.job.task for running in list(self._runner.running.values()) if running.plan.is_async})
        )

    # The life of the worker.

    async def run(self) -> bool:
        """Work until stopped. True if everything ended well within the grace period.

        Cancelled, it ends at once: the heartbeat stops, and a keeper brings back what it held.
        """
        end_in_forks(asyncio.get_running_loop())
        try:
            return await self._work()
        except asyncio.CancelledError:
            self._end()
            await self._runner.close()  # or whoever cancelled us would wait for isolated handlers that do not stop
            raise
        finally:
            self._end()

    async def _work(self) -> bool:
        await self._open_store()
        self._tick()
        claiming = self._spawn("claimer", self._claimer.run, lambda: self._claimer.answered)
        self._heart.start()
        self._spawn("settler", self.settler.run)
        self._spawn("progress", self._keep_progress)
        self._spawn("wake-ups", self._claimer.listen)
        for number, keeper in enumerate(self._keepers if self._settings.keepers else ()):
            self._spawn(f"keeper {number}", keeper)
        while not self._wish and not self.worker_id:
            await self._wait_for_change(1.0)
        if self.worker_id:
            tell(self._listener, WorkerStarted(self.worker_id, self._queues, self._settings.concurrency))
        self._board.ready()
        await self._stop_asked.wait()
        while self._wish is _Wish.RETIRE and (self._runner.running or not claiming.done()):
            self._runner.release_unstarted()
            await self._wait_for_change(_TICK_EVERY)
        return await self._shut_down(claiming)

    async def _open_store(self) -> None:
        """One that cannot be opened is the caller's to hear of. A supervisor has opened it before: it comes back."""
        pause = _FIRST_PAUSE
        while True:
            try:
                await self._store.__aenter__()
                return
            except StoreUnavailable as error:
                if not self._supervised or self._wish:
                    raise
                retry_in = pause * (0.5 + self._ports.random.fraction())
                tell(self._listener, PartFailed("", "start", f"{type(error).__name__}: {error}", retry_in))
                await self._wait_for_change(retry_in)
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def _shut_down(self, claiming: asyncio.Task[None]) -> bool:
        clock, settings = self._ports.clock, self._settings
        self._runner.release_unstarted()
        deadline = clock.monotonic() + settings.grace
        while (self._runner.running or not claiming.done()) and self._wish < _Wish.STOP_NOW:
            left = deadline - clock.monotonic()
            if left <= 0:
                break
            await self._wait_for_change(min(left, _TICK_EVERY))
            self._runner.release_unstarted()  # a claim that was under way may have brought some
        self._runner.release_unstarted()
        clean = not self._runner.running
        if not clean:
            self._runner.stop_running(Stop.SHUTDOWN)
            deadline = clock.monotonic() + _TIME_TO_CLEAN_UP
            while self._runner.running and clock.monotonic() < deadline and self._wish < _Wish.STOP_NOW:
                await self._wait_for_change(0.05)
            await clock.sleep(0.01)  # for coroutines that end at once when they are cancelled
            self._runner.release_running()
        if claiming.done():
            with suppress(StoreError, TimeoutError):  # then a keeper finds them
                async with asyncio.timeout(_LAST_CALL):
                    await self._claimer.clear_up()
        await self._confirm_settlements()
        self._end()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._runner.close()
        with suppress(HoldfastError, TimeoutError):  # whoever looks next finds the session dead
            async with asyncio.timeout(_LAST_CALL):
                if self.worker_id:
                    await self._claimer.close_session()
        counts = self.settler.counts
        ended = counts["succeeded"], counts["failed"], counts["released"]
        tell(self._listener, WorkerStopped(self.worker_id, clean, *ended))
        return clean

    async def _confirm_settlements(self) -> None:
        """Wait for the store to take them, but not for ever, and not for long if somebody says stop once more."""
        clock = self._ports.clock
        deadline = clock.monotonic() + _SETTLE_DEADLINE
        while self.settler and clock.monotonic() < deadline:
            if self._wish is _Wish.STOP_NOW:
                deadline = min(deadline, clock.monotonic() + _LAST_CALL)
            await self._wait_for_change(0.05)

    def _end(self) -> None:
        """End the heartbeat and every background loop. Repeating it is harmless."""
        self._ended = True
        self._heart.stop()
        for task in self._tasks:
            task.cancel()
        no_longer_in_forks(asyncio.get_running_loop())

    def _spawn(self, name: str, part: Loop, progress: Callable[[], int] = int) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._keep_running(name, part, progress), name=f"holdfast {name}")
        task.add_done_callback(lambda _: self._on_change())
        self._tasks.append(task)
        return task

    async def _keep_running(self, name: str, part: Loop, progress: Callable[[], int]) -> None:
        """Run a part until it returns; start it again, a little later each time, when it fails without any progress."""
        pause = _FIRST_PAUSE
        while True:
            began, reached = self._ports.clock.monotonic(), progress()
            try:
                await part()
                return
            except Exception as error:
                if progress() != reached or self._ports.clock.monotonic() - began > _LONGEST_PAUSE:
                    pause = _FIRST_PAUSE
                retry_in = pause * (0.5 + self._ports.random.fraction())
                tell(self._listener, PartFailed(self.worker_id, name, f"{type(error).__name__}: {error}", retry_in))
                if self._wish and name == "claimer":
                    return
                await self._ports.clock.sleep(retry_in)
                pause = min(pause * 2, _LONGEST_PAUSE)

    async def _wait_for_change(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()

    def _tick(self) -> None:
        """Show that the event loop runs."""
        if self._ended:
            return
        asyncio.get_running_loop().call_later(_TICK_EVERY, self._tick)
        self._board.tick(self._ports.clock.monotonic())
        self._runner.release_stale()
        self._runner.find_ended()

    async def _keep_progress(self) -> None:
        while True:
            await self._ports.clock.sleep(_PROGRESS_EVERY)
            for current in self._runner.progress_to_keep():
                if current.latest_progress is not None:
                    with suppress(StoreError):  # the next one comes soon, and the newest is all that counts
                        await self._store.note(current.lease, current.latest_progress)
