"""`SqliteStore`: the port on one SQLite file. Every write is one hop to the writer, every read one to the reader."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import msgspec

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.job import Job, JobId, Lease, NewJob, SessionId
from holdfast.lifecycle import Applied, Move
from holdfast.ports import SYSTEM, Ports
from holdfast.store import (
    Beat,
    CancelAnswer,
    Checkpoint,
    Claimed,
    ClaimRequest,
    DepthLimit,
    Finding,
    Inserted,
    InsertStatus,
    JobQuery,
    Page,
    QueueCounts,
    Session,
    SessionPage,
)
from holdfast.stores.guests import on_guest, require_blocking
from holdfast.stores.sqlite.examine import examine_file, examine_settings, examine_waiting
from holdfast.stores.sqlite.file import check_options, create_private, refuse_network_file_system
from holdfast.stores.sqlite.guest import GuestConnection, write_on
from holdfast.stores.sqlite.migrate import is_current, migrate, shipped
from holdfast.stores.sqlite.reader import Reader
from holdfast.stores.sqlite.settlements import prepare
from holdfast.stores.sqlite.verbs import Verbs
from holdfast.stores.sqlite.watcher import Commits, Watcher
from holdfast.stores.sqlite.writer import Writer, store_error
from holdfast.stores.threads import on_thread
from holdfast.stores.wakeups import WakeupHub, queues_fed

T = TypeVar("T")


class _Opened(msgspec.Struct, frozen=True, eq=False):
    """The connections of a store. They know nothing of it, so that a store that nobody uses any more can be closed."""

    writer: Writer
    reader: Reader

    def close(self) -> None:
        """Finish what is under way, then close both."""
        self.reader.close()
        self.writer.close()
        _open.discard(self)


class SqliteStore:
    """A `Store` in one file. Opens, and brings the schema up to date, when it is first used; closes when it is dropped.

    `durability="full"` (the default): an accepted job survives a power cut. `"relaxed"`: it survives a crash of the
    process, but the jobs of the last moments do not survive a power cut. `timeout` in seconds bounds every call.
    `create=False`: a file that does not exist is an error, not a new store.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        namespace: str = "holdfast",
        durability: str = "full",
        timeout: float = 10.0,
        create: bool = True,
        ports: Ports = SYSTEM,
    ) -> None:
        check_options(path, namespace=namespace, durability=durability, timeout=timeout)
        self.path = Path(path).absolute()
        self._durable, self._create = durability == "full", create
        self._namespace, self._timeout = namespace, timeout
        self._ports, self._clock = ports, ports.clock
        self._verbs = Verbs(namespace)
        self._hub = WakeupHub()
        self._opened: _Opened | None = None
        self._opening = threading.Lock()
        self._awaited: dict[asyncio.AbstractEventLoop, asyncio.Future[_Opened]] = {}
        self._dropped: weakref.finalize[[_Opened, Ports], SqliteStore] | None = None
        self._watcher = Watcher(self.path, self._hub, ports)
        with _stores_lock:
            _stores.add(self)

    def __repr__(self) -> str:
        return f"<SqliteStore {self.path}>"

    # Opening and closing.

    def _open(self) -> _Opened:
        opened = self._opened
        if opened is not None:  # after a fork it is None in the child: see below
            return opened
        with self._opening:
            if self._opened is None:
                self._opened = self._open_files()
                self._dropped = weakref.finalize(self, _close_dropped, self._opened, self._ports)
                self._dropped.atexit = False  # the process ends, and everything with it
            return self._opened

    async def _open_elsewhere(self) -> _Opened:
        """As `_open`, on a thread of its own: whoever holds the lock of the file must not stop the event loop."""
        loop = asyncio.get_running_loop()
        if (opening := self._awaited.get(loop)) is None:
            opening = self._awaited[loop] = on_thread(self._open, name="holdfast-sqlite-opener", ports=self._ports)
            opening.add_done_callback(lambda _: self._awaited.pop(loop, None))
        return await asyncio.shield(opening)  # several calls may wait for it; one that is cancelled stops no other

    def _open_files(self) -> _Opened:
        try:
            path = self.path.resolve()
            refuse_network_file_system(path)
            if self._create:
                create_private(path)
            elif not path.exists():
                raise StoreUnavailable(f"there is no database file {self.path}: `holdfast migrate` creates one")
        except (OSError, ValueError, RuntimeError) as error:  # a name too long, not encodable, or a loop of links
            raise StoreUnavailable(f"cannot open the database file {self.path}: {error}") from error
        try:
            writer = Writer(path, durable=self._durable, timeout=self._timeout, ports=self._ports)
            try:
                if not writer.peek(lambda db: is_current(db, self._namespace, shipped())):
                    writer.run(lambda db: migrate(db, self._namespace, shipped()))
                writer.begin_with(self._verbs.take_in)
                reader = Reader(path, timeout=self._timeout, ports=self._ports)
            except BaseException:
                writer.close()
                raise
        except sqlite3.Error as error:
            raise store_error(error, path) from error
        opened = _Opened(writer, reader)
        _open.add(opened)
        return opened

    def close(self) -> None:
        """Finish what is under way and close the file. The store opens again if it is used again."""
        with self._opening:
            opened, self._opened = self._opened, None
            if self._dropped is not None:
                self._dropped.detach()
        if opened is not None:
            opened.close()

    # Forks: see below.

    def _before_fork(self) -> None:
        self._kept_from_opening = self._opening.acquire(timeout=self._timeout)

    def _after_fork_in_parent(self) -> None:
        if self._kept_from_opening:
            self._opening.release()

    def _after_fork_in_child(self) -> None:
        if self._dropped is not None:
            self._dropped.detach()
        self._opened = None
        self._opening = threading.Lock()
        self._awaited = {}
        self._hub = WakeupHub()
        self._watcher.forget_after_fork()
        self._watcher = Watcher(self.path, self._hub, self._ports)

    def beside(self) -> SqliteStore:
        """See `Store.beside`: its own writer, reader and threads on the same file."""
        return SqliteStore(
            self.path,
            namespace=self._namespace,
            durability="full" if self._durable else "relaxed",
            timeout=self._timeout,
            create=self._create,
            ports=self._ports,
        )

    async def __aenter__(self) -> Self:
        """Open the file now, instead of at the first use."""
        await self._open_elsewhere()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """See `close`. It goes on if it is cancelled."""
        await on_thread(self.close, name="holdfast-sqlite-closer", ports=self._ports)

    async def _write(self, verb: Callable[[sqlite3.Connection], T]) -> T:
        opened = self._opened or await self._open_elsewhere()
        return await opened.writer.calls.submit(verb)

    async def _read(self, verb: Callable[[sqlite3.Connection], T]) -> T:
        opened = self._opened or await self._open_elsewhere()
        return await opened.reader.calls.submit(verb)

    # New jobs.

    async def insert(
        self,
        jobs: Sequence[NewJob],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
        checkpoint: Checkpoint | None = None,
        fresh: bool = False,
    ) -> list[Inserted]:
        """See `Store.insert`."""
        try:
            inserted = await self._write(
                lambda db: self._verbs.insert(db, jobs, self._clock.now(), limits or {}, checkpoint)
            )
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [job.id for job in jobs]) from error
        self._hub.notify({job.queue for job in jobs})
        return inserted

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """See `Store.insert_blocking`."""
        writer = (self._opened or self._open()).writer
        try:
            if len(jobs) == 1 and not limits and (job := jobs[0]).key is None:
                written = writer.run_statement(*self._verbs.insert_plain(job, self._clock.now(), fresh=fresh))
                inserted = [Inserted(job.id, InsertStatus.CREATED if written else InsertStatus.EXISTING)]
            else:
                inserted = writer.run(lambda db: self._verbs.insert(db, jobs, self._clock.now(), limits or {}))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [job.id for job in jobs]) from error
        if self._hub:
            self._hub.notify({job.queue for job in jobs})
        return inserted

    def insert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """See `Store.insert_on`."""
        require_blocking(connection, "aenqueue")
        return self._write_on(connection, lambda db: self._verbs.insert(db, jobs, self._clock.now(), limits or {}))

    async def ainsert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """See `Store.ainsert_on`."""
        return await on_guest(connection, lambda guest: self.insert_on(guest, jobs, limits=limits))

    def _write_on(self, connection: object, verb: Callable[[GuestConnection], T]) -> T:
        return write_on(connection, self.path, lambda: self._open().writer, self._verbs.take_in, verb)

    # Sessions.

    async def open_session(self, session: Session) -> None:
        """See `Store.open_session`."""
        await self._write(lambda db: self._verbs.open_session(db, session, self._clock.now()))

    async def beat(self, session_id: SessionId) -> Beat:
        """See `Store.beat`."""
        return await self._write(lambda db: self._verbs.beat(db, session_id, self._clock.now()))

    async def held(self, session_id: SessionId) -> list[Job]:
        """See `Store.held`."""
        return await self._read(lambda db: self._verbs.queries.held(db, session_id))

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        """See `Store.sessions`."""
        return await self._read(lambda db: self._verbs.queries.sessions(db, cursor, limit))

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        """See `Store.close_session`."""
        return await self._write(lambda db: self._verbs.close_session(db, session_id, if_beat, self._clock.now()))

    # The life of a claim.

    async def claim(self, request: ClaimRequest) -> Claimed:
        """See `Store.claim`."""
        return (await self._write(lambda db: self._verbs.claim(db, request, self._clock.now()))).claimed()

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply`."""
        prepared = prepare(moves)
        try:
            answers = await self._write(lambda db: self._verbs.apply_prepared(db, prepared, self._clock.now()))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [move.job_id for move in moves]) from error
        self._hub.notify(queues_fed(moves))
        return answers

    def apply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply_on`."""
        require_blocking(connection, "asucceed_on")
        return self._write_on(connection, lambda db: self._verbs.apply(db, moves, self._clock.now()))

    async def aapply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.aapply_on`."""
        return await on_guest(connection, lambda guest: self.apply_on(guest, moves))

    async def note(self, lease: Lease, progress: bytes) -> Applied:
        """See `Store.note`."""
        return await self._write(lambda db: self._verbs.note(db, lease, progress))

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        """See `Store.lost`."""
        return await self._read(lambda db: self._verbs.queries.lost(db, limit, session_id))

    # Operators and keepers.

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        return await self._write(lambda db: self._verbs.request_cancel(db, job_ids, self._clock.now()))

    async def set_paused(self, queue: str, paused: bool) -> None:
        """See `Store.set_paused`."""
        await self._write(lambda db: self._verbs.set_paused(db, queue, paused))
        self._hub.notify({queue})

    async def prune(self, limit: int) -> int:
        """See `Store.prune`."""
        return await self._write(lambda db: self._verbs.prune(db, self._clock.now(), limit))

    async def forget(self, job_ids: Sequence[JobId]) -> int:
        """See `Store.forget`."""
        return await self._write(lambda db: self._verbs.forget(db, job_ids))

    # Reading.

    async def get(self, job_id: JobId) -> Job | None:
        """See `Store.get`."""
        return await self._read(lambda db: self._verbs.queries.get(db, job_id))

    async def find(self, query: JobQuery) -> Page:
        """See `Store.find`."""
        return await self._read(lambda db: self._verbs.queries.find(db, query))

    async def counts(self) -> list[QueueCounts]:
        """See `Store.counts`."""
        return await self._read(lambda db: self._verbs.queries.counts(db, self._clock.now()))

    async def checkpoint(self, queue: str, name: str) -> str | None:
        """See `Store.checkpoint`."""
        return await self._read(lambda db: self._verbs.queries.checkpoint(db, queue, name))

    async def now(self) -> int:
        """See `Store.now`. The engine is embedded, so its clock is this machine's."""
        return self._clock.now()

    async def examine(self, *, deep: bool = False) -> list[Finding]:
        """See `Examinable.examine`."""
        ns = self._namespace
        look = partial(examine_file, self.path, ns, timeout=self._timeout, deep=deep)
        found = await on_thread(look, name="holdfast-sqlite-examiner", ports=self._ports)
        waiting = await self._read(lambda db: examine_waiting(db, ns, self._clock.now()))
        return [*await self._write(examine_settings), *found, waiting]

    # Wake-ups.

    async def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """See `Store.wakeups`. Inserts of this process wake at once, commits of others within milliseconds."""
        if self._opened is None:
            await self._open_elsewhere()
        self._watcher.begin(self._foreign_commits)
        async for wakeup in self._hub.waiting(queues):
            yield wakeup

    def _foreign_commits(self) -> Commits | None:
        opened = self._opened
        return None if opened is None else opened.writer.foreign_commits()


def _close_dropped(opened: _Opened, ports: Ports) -> None:
    """Close what a store left open that was dropped without `close`.

    On a thread of its own: a store is dropped anywhere, also on the writer's thread, or in the middle of a lock.
    """
    with contextlib.suppress(RuntimeError):  # no thread starts any more: the interpreter is about to end
        ports.spawner.thread(opened.close, "holdfast-sqlite-closer")


# Forks. SQLite cannot be carried over a fork, see `Writer.before_fork`: parent and child both open the file again.
# That holds for every open connection, whether or not its store still lives.

_stores: weakref.WeakSet[SqliteStore] = weakref.WeakSet()
_stores_lock = threading.Lock()
_open: set[_Opened] = set()
_over_fork: list[Reader | Writer] = []
_inherited: list[_Opened] = []


def _before_fork() -> None:
    _stores_lock.acquire()
    for store in _stores:
        store._before_fork()
    _over_fork[:] = [part for opened in tuple(_open) for part in (opened.reader, opened.writer) if part.before_fork()]


def _after_fork_in_parent() -> None:
    for part in _over_fork:
        part.after_fork()
    for store in _stores:
        store._after_fork_in_parent()
    _stores_lock.release()


def _after_fork_in_child() -> None:
    _inherited.extend(_open)  # what could not be closed must not be touched, not even to close it
    _open.clear()
    for store in _stores:
        store._after_fork_in_child()
    _stores_lock.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
