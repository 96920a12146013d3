"""The supervisor: starts worker processes, watches them, and cleans up after each that dies.

A process that ends by itself is replaced, and its jobs are back in their queues at once: the board that it shared with
us says which had started. Processes that hold a job past its hard limit are killed; those that have run many jobs or
grew large are replaced without haste. Nothing that a process leaves behind survives it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress

import msgspec

from holdfast.config import WorkerSettings
from holdfast.errors import HoldfastError
from holdfast.events import Listener, PartFailed, ProcessDied, ProcessKilled, ProcessRecycled, tell
from holdfast.policy import RetryPolicy
from holdfast.ports import Ports, Process
from holdfast.store import Store
from holdfast.worker.board import Board
from holdfast.worker.holding import ClaimKey
from holdfast.worker.isolated_process import how_it_ended, kill_and_reap
from holdfast.worker.isolation import program
from holdfast.worker.process_tree import (
    adopt_orphans,
    children_of,
    kill_strangers,
    marking,
    memory_of,
    reap_strangers,
)
from holdfast.worker.recovery import Death, recover
from holdfast.worker.settler import Follow

_LOOK_EVERY = 0.2
_HARD_LIMIT_MARGIN = 1.0
"""The process itself notices first, if it still can."""
_STOP_MARGIN = 25.0
"""A process confirms its last settlements through a short outage of the store."""
_STOP_AT_ONCE = 3.0
_JITTER = 0.1
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 30.0
_LONGEST_RECOVERY_PAUSE = 5.0
_BAD_CONFIGURATION = 2


# What is said to a process over its control pipe.
RETIRE, STOP, STOP_NOW = b"r", b"s", b"n"


class _Child(msgspec.Struct, eq=False):
    popen: Process
    mark: str
    board: Board
    control: int
    most_memory: float
    ended: bool = False
    leaving: bool = False
    kill_at: float | None = None
    killed: bool = False
    overdue: frozenset[ClaimKey] = frozenset()


class Supervisor:
    """Runs `settings.processes` workers of an application. Needs a process of its own: it adopts and kills orphans."""

    def __init__(
        self,
        store: Store,
        *,
        application: str,
        settings: WorkerSettings,
        arguments: tuple[str, ...],
        policy: Callable[[str], RetryPolicy],
        follow: Follow,
        ports: Ports,
        listener: Listener,
    ) -> None:
        self._store = store
        self._application = application
        self._settings = settings
        self._arguments = arguments
        self._policy = policy
        self._follow = follow
        self._ports = ports
        self._listener = listener
        self._children: list[_Child] = []
        self._recoveries: set[asyncio.Task[None]] = set()
        self._pause = 0.0
        self._not_before = 0.0
        self._stops = 0
        self._changed = asyncio.Event()
        self._failed = 0

    def stop(self) -> None:
        """Stop: once, and handlers may finish within the grace period; again, and they are given back at once."""
        self._stops += 1
        for child in self._children:
            if self._stops == 1:
                self._ask_to_stop(child, STOP, self._settings.grace + _STOP_MARGIN)
            else:
                self._ask_to_stop(child, STOP_NOW, _STOP_AT_ONCE)
        self._changed.set()

    async def run(self) -> int:
        """Supervise until stopped. The exit code: 0, or 2 if the processes cannot even start."""
        adopt_orphans()
        strangers = set(children_of(os.getpid()))  # whatever the application started when it was imported
        while not self._stops or self._children:
            self._start_missing()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_EVERY):
                    await self._changed.wait()
            self._changed.clear()
            for child in [child for child in self._children if child.ended]:
                self._bury(child, strangers)
            reap_strangers(self._known(strangers))
            self._enforce_limits()
        if self._recoveries:
            await asyncio.wait(self._recoveries, timeout=self._settings.lease_ttl)
        return self._failed

    # Starting.

    def _start_missing(self) -> None:
        while (
            not self._stops
            and sum(not child.leaving for child in self._children) < self._settings.processes
            and len(self._children) < 2 * self._settings.processes  # those that finish long jobs must not pile up
            and self._ports.clock.monotonic() >= self._not_before
        ):
            try:
                self._children.append(self._start())
            except (OSError, RuntimeError) as error:  # no memory, no processes, no files left: those that run go on
                self._pause_starting()
                told = f"{type(error).__name__}: {error}"
                tell(self._listener, PartFailed("", "supervisor", told, self._pause))

    def _pause_starting(self) -> None:
        self._pause = min(max(self._pause * 2, _FIRST_PAUSE), _LONGEST_PAUSE)
        self._not_before = self._ports.clock.monotonic() + self._pause * (0.5 + self._ports.random.fraction())

    def _start(self) -> _Child:
        with ExitStack() as theirs, ExitStack() as on_failure:
            board, board_fd = Board.create(self._settings.concurrency)
            theirs.callback(os.close, board_fd)
            on_failure.callback(board.close)
            listening, control = os.pipe()
            theirs.callback(os.close, listening)
            on_failure.callback(os.close, control)
            command = program("child", listening, self._application, str(board_fd), *self._arguments)
            mark = self._ports.ids.session_id()
            with marking(mark):
                popen = self._ports.spawner.process(command, [listening, board_fd])
            on_failure.callback(kill_and_reap, popen)
            child = _Child(popen, mark, board, control, self._most_memory())
            loop = asyncio.get_running_loop()

            def wait() -> None:
                popen.wait()
                with suppress(RuntimeError):  # we have ended ourselves
                    loop.call_soon_threadsafe(self._on_end, child)

            self._ports.spawner.thread(wait, f"holdfast-wait-{popen.pid}")
            on_failure.pop_all()
        return child

    def _most_memory(self) -> float:
        # Processes that started together must not be replaced together.
        limit = self._settings.max_memory
        return float("inf") if limit is None else limit * (1 - _JITTER * self._ports.random.fraction())

    def _on_end(self, child: _Child) -> None:
        child.ended = True
        self._changed.set()

    # Limits.

    def _enforce_limits(self) -> None:
        now = self._ports.clock.monotonic()
        for child in self._children:
            if child.ended or child.killed:
                continue
            overdue = frozenset(
                (started.job_id, started.version)
                for started in child.board.running()
                if started.hard_deadline + _HARD_LIMIT_MARGIN < now
            )
            if overdue:
                child.overdue = overdue
                self._kill(child, f"{len(overdue)} of its jobs ran past the hard limit")
            elif child.kill_at is not None and now > child.kill_at:
                self._kill(child, "it did not stop in time")
            elif child.board.is_leaving:
                child.leaving = True  # it has run its number of jobs, left a handler behind, or was told to
            elif not child.leaving and not self._stops:
                self._recycle_if_due(child)

    def _recycle_if_due(self, child: _Child) -> None:
        if (memory := memory_of(child.popen.pid)) >= child.most_memory:
            why = f"it uses {memory // 2**20} MiB of memory"
            tell(self._listener, ProcessRecycled(child.board.session_id, child.popen.pid, why))
            child.leaving = True
            self._say(child, RETIRE)

    def _ask_to_stop(self, child: _Child, word: bytes, wait: float) -> None:
        child.leaving = True
        kill_at = self._ports.clock.monotonic() + wait
        child.kill_at = kill_at if child.kill_at is None else min(child.kill_at, kill_at)
        self._say(child, word)

    def _say(self, child: _Child, word: bytes) -> None:
        with suppress(OSError):  # it has just ended
            os.write(child.control, word)

    def _kill(self, child: _Child, why: str) -> None:
        child.killed = child.leaving = True
        tell(self._listener, ProcessKilled(child.board.session_id, child.popen.pid, why))
        with suppress(ProcessLookupError):
            os.killpg(child.popen.pid, signal.SIGKILL)

    # Cleaning up.

    def _known(self, strangers: set[int]) -> set[int]:
        return {child.popen.pid for child in self._children} | strangers

    def _bury(self, child: _Child, strangers: set[int]) -> None:
        self._children.remove(child)
        code = child.popen.returncode
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.popen.pid, signal.SIGKILL)
        kill_strangers(self._known(strangers), {other.mark for other in self._children})
        os.close(child.control)
        was_ready = child.board.is_ready
        death = Death(child.board.session_id, how_it_ended(code), child.board.started(), child.killed, child.overdue)
        child.board.close()
        if was_ready:
            self._pause = 0.0
        else:
            self._pause_starting()
            if code == _BAD_CONFIGURATION and not self._stops:
                self._failed = _BAD_CONFIGURATION
                self.stop()
        stopped = code == 0 or (child.leaving and code == -signal.SIGTERM)  # told to before it could listen
        recovery = asyncio.ensure_future(self._recover(child.popen.pid, death, by_itself=not stopped))
        self._recoveries.add(recovery)
        recovery.add_done_callback(self._recoveries.discard)

    async def _recover(self, pid: int, death: Death, *, by_itself: bool) -> None:
        """Bring its jobs back, however long the store takes: until then a keeper may do it, and we find nothing."""
        pause = _FIRST_PAUSE / 5
        recovered = None
        while recovered is None:
            try:
                recovered = await recover(
                    self._store, death, policy=self._policy, follow=self._follow, ports=self._ports
                )
            except HoldfastError as error:
                tell(
                    self._listener, PartFailed(death.session_id, "recovery", f"{type(error).__name__}: {error}", pause)
                )
                await self._ports.clock.sleep(pause * (0.5 + self._ports.random.fraction()))
                pause = min(pause * 2, _LONGEST_RECOVERY_PAUSE)
        if by_itself and not death.killed:
            tell(
                self._listener,
                ProcessDied(death.session_id, pid, death.how, started=recovered.started, unstarted=recovered.unstarted),
            )
