"""`PostgresStore`: the port on a PostgreSQL database. `Verbs` says what to ask, `Connections` asks it."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

import psycopg

from holdfast.errors import InvalidOption, OutcomeUnknown, StoreUnavailable, shown
from holdfast.job import Job, JobId, Lease, NewJob, SessionId, State
from holdfast.lifecycle import Applied, Move
from holdfast.ports import MICROSECONDS, SYSTEM, Ports
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
from holdfast.stores.postgres.connections import Connections, Server, said
from holdfast.stores.postgres.examine import examine
from holdfast.stores.postgres.guest import Guests
from holdfast.stores.postgres.listener import Announcer, Listener, sounds
from holdfast.stores.postgres.lookback import LookBack
from holdfast.stores.postgres.migrate import is_current, migrate, refuse_unsafe, require_current
from holdfast.stores.postgres.query import Verb
from holdfast.stores.postgres.verbs import CHECKPOINT_MOVED, QUEUE_IS_FULL, Verbs
from holdfast.stores.threads import on_thread
from holdfast.stores.wakeups import WakeupHub, queues_fed

T = TypeVar("T")

_FULL_COUNT_EVERY = 12
_MIGRATION_TAKES_AT_MOST = 600.0
_NAMESPACE = re.compile(r"[a-z_][a-z0-9_]{0,39}")


class PostgresStore:
    """A `Store` in a PostgreSQL database, 13 or newer. Opens, and makes the tables, when it is first used.

    `url`: as libpq takes it, without our own options. `namespace`: what the names of the tables begin with. `timeout`
    in seconds bounds every statement. `notify=False`: no wake-ups between processes, polling alone. `create=False`: a
    database without our tables is an error.
    """

    def __init__(
        self,
        url: str,
        *,
        namespace: str = "holdfast",
        timeout: float = 10.0,
        notify: bool = True,
        create: bool = True,
        ports: Ports = SYSTEM,
    ) -> None:
        if not _NAMESPACE.fullmatch(namespace):
            raise InvalidOption(
                f"namespace {shown(namespace)} must be a letter and then up to 39 letters, digits or '_', in lower case"
            )
        if not 0.1 <= timeout <= 3600:
            raise InvalidOption(f"timeout must be 0.1 to 3600 seconds, not {timeout!r:.40}")
        self._url = url
        self._options = {"namespace": namespace, "timeout": timeout, "notify": notify, "create": create, "ports": ports}
        self._ports = ports
        self._create = create
        self.server = Server(_conninfo(url), shown=_shown(url), timeout=timeout, ports=ports)
        self._connections = Connections(self.server)
        self._verbs = Verbs(namespace)
        self._guests = Guests(namespace, self.server.shown)
        self._announcer = Announcer(ports, on=notify)
        self._notify = notify
        self._hub = WakeupHub()
        self._looks: dict[tuple[str, ...], LookBack] = {}
        self._counted: dict[SessionId, tuple[int, int]] = {}
        self._opening = threading.Lock()
        self._identity: str | None = None
        self._closer = weakref.finalize(self, self._connections.close)
        self._closer.atexit = False
        _stores.add(self)

    def __repr__(self) -> str:
        return f"<PostgresStore {self.server.shown}>"

    # Opening and closing.

    def open_blocking(self) -> str:
        """Make the tables if they are missing, and check their version. The identity of the database."""
        if not self._opening.acquire(timeout=_MIGRATION_TAKES_AT_MOST):
            raise StoreUnavailable(f"{self.server.shown} is still being opened by another thread")
        try:
            identity = self._identity
            if identity is None:
                namespace = self._verbs.namespace
                connection = self.server.connect_blocking()
                try:
                    if not self._create:
                        require_current(connection, namespace, where=self.server.shown)
                    elif not is_current(connection, namespace, where=self.server.shown):
                        connection.patience = _MIGRATION_TAKES_AT_MOST
                        migrate(connection, namespace, where=self.server.shown)
                        connection.patience = self.server.timeout
                    refuse_unsafe(connection, where=self.server.shown)
                    row = connection.execute(f"SELECT id FROM {namespace}_identity".encode()).fetchone()  # noqa: S608
                except psycopg.Error as error:
                    raise StoreUnavailable(f"cannot open {self.server.shown}: {said(error)}") from error
                finally:
                    connection.throw_away()
                identity = str(row[0]) if row else ""
                self._identity = identity
            return identity
        finally:
            self._opening.release()

    async def _opened(self) -> str:
        if self._identity is not None:
            return self._identity
        return await on_thread(self.open_blocking, name="holdfast-postgres-opener", ports=self._ports)

    def close(self) -> None:
        """Close every connection. The store opens again if it is used again."""
        self._connections.close()

    async def __aenter__(self) -> Self:
        """Connect now, and make the tables if they are missing, instead of at the first use."""
        await self._opened()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """See `close`."""
        self.close()

    def beside(self) -> PostgresStore:
        """See `Store.beside`."""
        store = PostgresStore(self._url, **self._options)  # type: ignore[arg-type]
        store._looks = self._looks  # what one of them gives back, the claims of the other look for
        return store

    def _after_fork_in_child(self) -> None:
        # The child must neither use nor close what the parent talks through: psycopg leaves it alone there.
        _inherited.append(self._connections)
        self._closer.detach()
        self._connections = Connections(self.server)
        self._closer = weakref.finalize(self, self._connections.close)
        self._closer.atexit = False
        self._hub = WakeupHub()
        self._announcer = Announcer(self._ports, on=self._notify)  # another thread may have held its lock
        self._opening = threading.Lock()

    async def _run(self, verb: Verb[T]) -> T:
        if self._identity is None:
            await self._opened()
        return await self._connections.run(verb)

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
        if checkpoint is not None:
            checkpoint.require(jobs, checkpoint.was)
        queues = {job.queue for job in jobs}
        try:
            tell = self._announcer.queues(queues)
            inserted = await self._insert_fresh(jobs, limits, tell) if fresh and checkpoint is None else None
            if inserted is None:
                inserted = await self._run(self._verbs.insert(jobs, limits, tell, checkpoint))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [job.id for job in jobs]) from error
        except psycopg.Error as error:
            if error.sqlstate == QUEUE_IS_FULL:
                return [Inserted(job.id, InsertStatus.FULL) for job in jobs]
            if error.sqlstate == CHECKPOINT_MOVED and checkpoint is not None:
                raise checkpoint.conflict() from None
            raise
        self._hub.notify(queues)
        return inserted

    async def _insert_fresh(
        self, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit] | None, tell: Sequence[str]
    ) -> list[Inserted] | None:
        single = self._verbs.single(jobs, limits, tell)
        if single is None:
            return None
        if self._identity is None:
            await self._opened()
        return self._verbs.inserted(jobs, await self._connections.call(single))

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """See `Store.insert_blocking`."""
        return self._insert_here(jobs, limits, fresh=fresh)

    def insert_while(
        self,
        jobs: Sequence[NewJob],
        meanwhile: Callable[[], object],
        *,
        limits: Mapping[str, DepthLimit] | None = None,
    ) -> list[Inserted]:
        """See `Overlapping.insert_while`."""
        return self._insert_here(jobs, limits, meanwhile=meanwhile)

    def _insert_here(
        self,
        jobs: Sequence[NewJob],
        limits: Mapping[str, DepthLimit] | None,
        *,
        fresh: bool = False,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Inserted]:
        if self._identity is None:
            self.open_blocking()
        queues = {job.queue for job in jobs}
        try:
            tell = self._announcer.queues(queues)
            single = self._verbs.single(jobs, limits, tell) if fresh else None
            inserted = None
            if single is not None:
                inserted = self._verbs.inserted(jobs, self._connections.call_blocking(single))
            if inserted is None:
                inserted = self._connections.run_blocking(self._verbs.insert(jobs, limits, tell), meanwhile)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [job.id for job in jobs]) from error
        if self._hub:
            self._hub.notify(queues)
        return inserted

    def insert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """See `Store.insert_on`. Workers are woken by the commit."""
        return self._guests.run(connection, self.open_blocking(), self._insert_verb(jobs, limits), instead="aenqueue")

    async def ainsert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """See `Store.ainsert_on`."""
        return await self._guests.arun(connection, await self._opened(), self._insert_verb(jobs, limits))

    def _insert_verb(self, jobs: Sequence[NewJob], limits: Mapping[str, DepthLimit] | None) -> Verb[list[Inserted]]:
        # Told of in any case: nobody knows when the caller commits.
        return self._verbs.insert(jobs, limits, sorted({job.queue for job in jobs}) if self._notify else [])

    # Sessions.

    async def open_session(self, session: Session) -> None:
        """See `Store.open_session`."""
        await self._run(self._verbs.open_session(session))

    async def beat(self, session_id: SessionId) -> Beat:
        """See `Store.beat`.

        What the session holds is counted from the oldest claim that the last beat found, or from a little before that
        beat: further back, there is nothing left but traces. A claim that takes effect later than that is found by the
        full count of every `_FULL_COUNT_EVERY`th beat.
        """
        number, since = self._counted.get(session_id, (0, 0))
        beat, now, oldest = await self._run(self._verbs.beat(session_id, since if number % _FULL_COUNT_EVERY else 0))
        if beat.open:
            settled = now - round(2 * self.server.timeout * MICROSECONDS)
            self._counted[session_id] = (number + 1, settled if oldest is None else min(oldest, settled))
        else:
            self._counted.pop(session_id, None)
        return beat

    async def held(self, session_id: SessionId) -> list[Job]:
        """See `Store.held`."""
        return await self._run(self._verbs.held(session_id))

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        """See `Store.sessions`."""
        return await self._run(self._verbs.sessions(cursor, limit))

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        """See `Store.close_session`."""
        return await self._run(self._verbs.close_session(session_id, if_beat))

    # The life of a claim.

    async def claim(self, request: ClaimRequest) -> Claimed:
        """See `Store.claim`."""
        queues = tuple(sorted(request.queues))
        look = self._looks.get(queues)
        if look is None:
            look = self._looks[queues] = LookBack(self._ports.clock)
        return await self._run(self._verbs.claim(request, look))

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply`."""
        fed, back = queues_fed(moves), _queues_fed_behind(moves)
        try:
            answers = await self._run(self._verbs.apply(moves, self._announcer.queues(fed, back)))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [move.job_id for move in moves]) from error
        finally:
            if back:  # or may have come
                self._came_back(back)
        if fed:
            self._hub.notify(fed)
        return answers

    def _came_back(self, queues: Collection[str] | None) -> None:
        for look in list(self._looks.values()):
            look.forget_place(queues)

    def apply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply_on`."""
        return self._guests.run(connection, self.open_blocking(), self._apply_verb(moves), instead="asucceed_on")

    async def aapply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.aapply_on`."""
        return await self._guests.arun(connection, await self._opened(), self._apply_verb(moves))

    def _apply_verb(self, moves: Sequence[Move]) -> Verb[list[Applied]]:
        tell = sounds(queues_fed(moves), _queues_fed_behind(moves)) if self._notify else []
        return self._verbs.apply(moves, tell)

    async def note(self, lease: Lease, progress: bytes) -> Applied:
        """See `Store.note`."""
        return await self._run(self._verbs.note(lease, progress))

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        """See `Store.lost`."""
        return await self._run(self._verbs.lost(limit, session_id))

    # Operators and keepers.

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        return await self._run(self._verbs.request_cancel(job_ids))

    async def set_paused(self, queue: str, paused: bool) -> None:
        """See `Store.set_paused`."""
        await self._run(self._verbs.set_paused(queue, paused, self._announcer.queues({queue})))
        self._hub.notify({queue})

    async def prune(self, limit: int) -> int:
        """See `Store.prune`."""
        return await self._run(self._verbs.prune(limit))

    async def forget(self, job_ids: Sequence[JobId]) -> int:
        """See `Store.forget`."""
        return await self._run(self._verbs.forget(job_ids))

    # Reading.

    async def get(self, job_id: JobId) -> Job | None:
        """See `Store.get`."""
        return await self._run(self._verbs.reading.get(job_id))

    async def find(self, query: JobQuery) -> Page:
        """See `Store.find`."""
        return await self._run(self._verbs.reading.find(query))

    async def counts(self) -> list[QueueCounts]:
        """See `Store.counts`."""
        return await self._run(self._verbs.reading.counts())

    async def checkpoint(self, queue: str, name: str) -> str | None:
        """See `Store.checkpoint`."""
        return await self._run(self._verbs.reading.checkpoint(queue, name))

    async def now(self) -> int:
        """See `Store.now`."""
        return await self._run(self._verbs.reading.now())

    async def examine(self, *, deep: bool = False) -> list[Finding]:
        """See `Examinable.examine`. `deep` asks for nothing more here: the server checks its own pages."""
        look = partial(examine, self.server, self._verbs.namespace)
        return await on_thread(look, name="holdfast-postgres-examiner", ports=self._ports)

    async def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """See `Store.wakeups`."""
        await self._opened()
        listener = Listener(self.server, self._verbs.namespace, self._hub, self._came_back)
        listening = asyncio.ensure_future(listener.run() if self._notify else listener.pulse())
        try:
            async for wakeup in self._hub.waiting(queues):
                yield wakeup
        finally:
            listening.cancel()
            with suppress(asyncio.CancelledError):
                await listening


def _queues_fed_behind(moves: Collection[Move]) -> set[str]:
    """The queues in which these moves put jobs back to their old place."""
    ready = State.READY
    return {move.queue for move in moves if move.to is ready and move.delay is None}


def _conninfo(url: str) -> dict[str, Any]:
    try:
        return {name: value for name, value in psycopg.conninfo.conninfo_to_dict(url).items() if value is not None}
    except psycopg.ProgrammingError:
        # The driver's own message may quote the part with the password in it.
        raise InvalidOption(
            "the store URL cannot be read: it is postgresql://user:password@host:port/database, with special "
            "characters escaped, as %40 for @"
        ) from None


def _shown(url: str) -> str:
    """The database for messages, without the password."""
    info = _conninfo(url)
    host = info.get("host") or "localhost"
    return f"postgresql://{host}:{info.get('port', 5432)}/{info.get('dbname', '')}"


# Forks: the child gets connections of its own.

_stores: weakref.WeakSet[PostgresStore] = weakref.WeakSet()
_inherited: list[Connections] = []


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
