"""`MysqlStore`: the port on a MySQL or MariaDB database. Every verb is one plan, run as one transaction."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Self, TypeVar

from holdfast.errors import ForeignConnection, InvalidOption, OutcomeUnknown, StoreUnavailable
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
    JobQuery,
    Page,
    QueueCounts,
    Session,
    SessionPage,
)
from holdfast.stores.guests import on_guest, require_blocking
from holdfast.stores.mysql.drive import adrive, drive
from holdfast.stores.mysql.examine import examine
from holdfast.stores.mysql.guest import AsyncGuestLine, GuestLine, identity, is_awaited, same_database
from holdfast.stores.mysql.migrate import UNLOCK, migrate, refuse_unsafe, require_current, shipped
from holdfast.stores.mysql.pace import TICK, Paces
from holdfast.stores.mysql.pool import MOST_BLOCKING, Pool
from holdfast.stores.mysql.server import server_from, tls_context
from holdfast.stores.mysql.sql import Plan
from holdfast.stores.mysql.steps import Call, MakePlan, Steps, transaction
from holdfast.stores.mysql.tables import Tables
from holdfast.stores.mysql.verbs import Verbs
from holdfast.stores.wakeups import WakeupHub, queues_fed

T = TypeVar("T")

Identity = tuple[Any, ...]

_DEEP_PATIENCE = 3600.0
"""Seconds for reading all of the data."""


class MysqlStore:
    """A `Store` in a MySQL or MariaDB database. Opens, and makes the tables, when it is first used.

    `netloc`: the middle of a URL, `user:password@host:port`. `namespace`: what the names of the tables begin with.
    `timeout` in seconds bounds every call. `ssl`: `on` encrypts, `verify` also asks who the server is, by the
    certificates in the file `ssl_ca` or the system's. `create=False`: a database without our tables is an error.
    """

    def __init__(
        self,
        netloc: str,
        database: str,
        *,
        namespace: str = "holdfast",
        timeout: float = 10.0,
        unix_socket: str | None = None,
        ssl: str = "off",
        ssl_ca: str | None = None,
        create: bool = True,
        ports: Ports = SYSTEM,
    ) -> None:
        if (
            not namespace.isascii()
            or not namespace.isidentifier()
            or namespace.lower() != namespace
            or len(namespace) > 40
        ):
            raise InvalidOption(
                f"namespace {namespace!r:.60} must be a name of lower-case letters, digits and '_', up to 40"
            )
        tls = tls_context("verify" if ssl_ca else ssl, ssl_ca)
        self._server = server_from(netloc, database, unix_socket=unix_socket, tls=tls, timeout=timeout, ports=ports)
        self._beside = partial(
            MysqlStore,
            netloc,
            database,
            namespace=namespace,
            timeout=timeout,
            unix_socket=unix_socket,
            ssl=ssl,
            ssl_ca=ssl_ca,
            create=create,
            ports=ports,
        )
        self._namespace = namespace
        self._create = create
        self._ports = ports
        self._verbs = Verbs(Tables(namespace))
        self._pool = Pool(self._server)
        self._hub = WakeupHub()
        self._paces = Paces(ports.clock)
        self._identity: Identity | None = None
        self._dropped = weakref.finalize(self, self._pool.close)
        self._dropped.atexit = False  # the process ends, and its connections with it
        with _stores_lock:
            _stores.add(self)

    def __repr__(self) -> str:
        return f"<MysqlStore {self._server.where}>"

    # Opening and closing.

    async def _open(self) -> Identity:
        if self._identity is None:
            await self._on_loop(self._make_tables, **_ALONE)
            self._identity = await self._on_loop(self._look_around, **_READ)
        return self._identity

    def _open_blocking(self) -> Identity:
        if self._identity is None:
            self._on_thread(self._make_tables, **_ALONE)
            self._identity = self._on_thread(self._look_around, **_READ)
        return self._identity

    def _make_tables(self) -> Plan[None]:
        where = self._server.where
        if self._create:
            yield from migrate(self._namespace, shipped(), where=where, wait=self._server.timeout / 2)
        else:
            yield from require_current(self._namespace, shipped(), where=where)

    def _look_around(self) -> Plan[Identity]:
        yield from refuse_unsafe(self._namespace, where=self._server.where)
        return (yield from identity())

    def close(self) -> None:
        """Close every connection. The store opens again if it is used again."""
        self._pool.close()

    async def __aenter__(self) -> Self:
        """Connect now, and make the tables if they are missing, instead of at the first use."""
        await self._open()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """See `close`."""
        await self._pool.aclose()

    def beside(self) -> MysqlStore:
        """See `Store.beside`."""
        return self._beside()

    def _after_fork_in_child(self) -> None:
        self._dropped.detach()
        self._pool.forget()
        self._pool = Pool(self._server)
        self._dropped = weakref.finalize(self, self._pool.close)
        self._dropped.atexit = False
        self._hub = WakeupHub()

    # Running plans.

    def _steps(self, make_plan: MakePlan[T], deadline: float, **how: Any) -> Steps[T]:
        # Every idle connection may be dead, and the one made after them is not.
        call = Call(self._server.where, deadline, self._ports, reconnects=MOST_BLOCKING + 1, **how)
        return transaction(make_plan, call)

    async def _on_loop(self, make_plan: MakePlan[T], *, patience: float | None = None, **how: Any) -> T:
        deadline = self._server.deadline(patience)
        async with self._pool.aline(deadline) as line:
            return await adrive(self._steps(make_plan, deadline, **how), line)

    def _on_thread(self, make_plan: MakePlan[T], **how: Any) -> T:
        deadline = self._server.deadline()
        with self._pool.line(deadline) as line:
            return drive(self._steps(make_plan, deadline, **how), line)

    async def _write(self, make_plan: MakePlan[T], ids: Sequence[JobId] = (), *, repeatable: bool = False) -> T:
        await self._open()
        try:
            return await self._on_loop(make_plan, repeatable=repeatable)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), ids) from error

    async def _alone(self, make_plan: MakePlan[T]) -> T:
        """Run a plan whose every statement is a transaction of its own, and may be repeated."""
        await self._open()
        return await self._on_loop(make_plan, repeatable=True, begin=(), commit=())

    async def _read(self, make_plan: MakePlan[T]) -> T:
        await self._open()
        return await self._on_loop(make_plan, **_READ)

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
        inserts = self._verbs.inserts
        make_plan = inserts.planner(jobs, limits or {})
        if checkpoint is not None:
            make_plan = partial(inserts.insert_from_source, jobs, limits or {}, checkpoint)
        inserted = await self._write(make_plan, [job.id for job in jobs])
        self._hub.notify({job.queue for job in jobs})
        return inserted

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """See `Store.insert_blocking`."""
        self._open_blocking()
        try:
            inserted = self._on_thread(self._verbs.inserts.planner(jobs, limits or {}))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [job.id for job in jobs]) from error
        self._hub.notify({job.queue for job in jobs})
        return inserted

    def insert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """See `Store.insert_on`."""
        require_blocking(connection, "ainsert_on")
        return self._write_on(connection, self._verbs.inserts.planner(jobs, limits or {}))

    async def ainsert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """See `Store.ainsert_on`."""
        return await self._awrite_on(connection, self._verbs.inserts.planner(jobs, limits or {}))

    # On a caller's connection.

    def _guest_call(self, deadline: float) -> Call:
        return Call(
            self._server.where,
            deadline,
            self._ports,
            begin=("SAVEPOINT holdfast",),
            commit=("RELEASE SAVEPOINT holdfast",),
            undo=("ROLLBACK TO SAVEPOINT holdfast", "RELEASE SAVEPOINT holdfast"),
        )

    def _guest_steps(self, make_plan: MakePlan[T]) -> Steps[T]:
        try:
            return (yield from transaction(make_plan, self._guest_call(self._server.deadline())))
        except OutcomeUnknown as error:  # only the caller commits, so nothing was
            raise StoreUnavailable(str(error)) from error

    def _compare(self, expected: Identity) -> Steps[None]:
        call = Call(self._server.where, self._server.deadline(), self._ports, **_READ)
        return transaction(lambda: same_database(expected, self._server.where), call)

    def _write_on(self, connection: object, make_plan: MakePlan[T]) -> T:
        line = GuestLine(connection, self._ports)
        expected = self._open_blocking()
        try:
            drive(self._compare(expected), line)
        except ForeignConnection:
            # Behind the same name there may be another server by now, where the caller already is.
            self._identity = self._on_thread(identity, **_READ)
            if self._identity == expected:
                raise
            drive(self._compare(self._identity), line)
        return drive(self._guest_steps(make_plan), line)

    async def _awrite_on(self, connection: object, make_plan: MakePlan[T]) -> T:
        if not is_awaited(connection):
            await self._open()
            return await on_guest(connection, lambda blocking: self._write_on(blocking, make_plan))
        line = AsyncGuestLine(connection, self._ports)
        expected = await self._open()
        try:
            await adrive(self._compare(expected), line)
        except ForeignConnection:
            self._identity = await self._on_loop(identity, **_READ)
            if self._identity == expected:
                raise
            await adrive(self._compare(self._identity), line)
        return await adrive(self._guest_steps(make_plan), line)

    # Sessions.

    async def open_session(self, session: Session) -> None:
        """See `Store.open_session`."""
        await self._write(lambda: self._verbs.sessions.open(session), repeatable=True)

    async def beat(self, session_id: SessionId) -> Beat:
        """See `Store.beat`."""
        return await self._alone(lambda: self._verbs.sessions.beat(session_id))

    async def held(self, session_id: SessionId) -> list[Job]:
        """See `Store.held`."""
        return await self._read(lambda: self._verbs.queries.held(session_id))

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        """See `Store.sessions`."""
        return await self._read(lambda: self._verbs.queries.sessions(cursor, limit))

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        """See `Store.close_session`."""
        return await self._write(lambda: self._verbs.sessions.close(session_id, if_beat))

    # The life of a claim.

    async def claim(self, request: ClaimRequest) -> Claimed:
        """See `Store.claim`."""
        pace = self._paces.of(request.queues)
        claimed = None
        if pace.quiet:
            claimed = await self._read(lambda: self._verbs.claims.look(request))
        if claimed is None:
            claimed = await self._write(lambda: self._verbs.claims.claim(request))
        pace.looked(found=bool(claimed.jobs))
        return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply`."""
        answers = await self._write(lambda: self._verbs.settlements.apply(moves), [move.job_id for move in moves])
        self._hub.notify(queues_fed(moves))
        return answers

    def apply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply_on`."""
        require_blocking(connection, "aapply_on")
        return self._write_on(connection, lambda: self._verbs.settlements.apply(moves))

    async def aapply_on(self, connection: object, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.aapply_on`."""
        return await self._awrite_on(connection, lambda: self._verbs.settlements.apply(moves))

    async def note(self, lease: Lease, progress: bytes) -> Applied:
        """See `Store.note`."""
        return await self._write(lambda: self._verbs.settlements.note(lease, progress), repeatable=True)

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        """See `Store.lost`."""
        return await self._read(lambda: self._verbs.queries.lost(limit, session_id))

    # Operators and keepers.

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        return await self._write(lambda: self._verbs.tending.request_cancel(job_ids), job_ids)

    async def set_paused(self, queue: str, paused: bool) -> None:
        """See `Store.set_paused`."""
        await self._write(lambda: self._verbs.tending.set_paused(queue, paused), repeatable=True)
        self._hub.notify({queue})

    async def prune(self, limit: int) -> int:
        """See `Store.prune`."""
        if not await self._read(self._verbs.tending.anything_to_prune):
            return 0
        return await self._write(lambda: self._verbs.tending.prune(limit))

    async def forget(self, job_ids: Sequence[JobId]) -> int:
        """See `Store.forget`."""
        return await self._write(lambda: self._verbs.tending.forget(job_ids), job_ids)

    # Reading.

    async def get(self, job_id: JobId) -> Job | None:
        """See `Store.get`."""
        return await self._read(lambda: self._verbs.queries.get(job_id))

    async def find(self, query: JobQuery) -> Page:
        """See `Store.find`."""
        return await self._read(lambda: self._verbs.queries.find(query))

    async def counts(self) -> list[QueueCounts]:
        """See `Store.counts`."""
        return await self._read(self._verbs.queries.counts)

    async def checkpoint(self, queue: str, name: str) -> str | None:
        """See `Store.checkpoint`."""
        return await self._read(lambda: self._verbs.queries.checkpoint(queue, name))

    async def now(self) -> int:
        """See `Store.now`."""
        return await self._read(self._verbs.queries.now)

    async def examine(self, *, deep: bool = False) -> list[Finding]:
        """See `Examinable.examine`."""
        look = partial(examine, self._verbs.tables, self._server.where, deep=deep)
        return await self._on_loop(look, patience=_DEEP_PATIENCE if deep else None, **_READ)

    async def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """See `Store.wakeups`. Within this process at once; the server tells nothing of others: once in a while."""
        pulse = asyncio.ensure_future(self._pulse(queues))
        try:
            async for wakeup in self._hub.waiting(queues):
                yield wakeup
        finally:
            pulse.cancel()
            with suppress(asyncio.CancelledError):
                await pulse

    async def _pulse(self, queues: Collection[str]) -> None:
        pace = self._paces.of(queues)
        await self._ports.clock.sleep(self._ports.random.fraction() * TICK)  # not all processes at the same moment
        while True:
            await self._ports.clock.sleep(TICK)
            if pace.is_time():
                self._hub.notify(queues)


_ALONE: dict[str, Any] = {"begin": (), "commit": (), "undo": (UNLOCK,), "repeatable": True}
"""How to run a plan that commits by itself."""
_READ: dict[str, Any] = {"begin": (), "commit": (), "undo": (), "repeatable": True}
"""How to run a plan that only reads: each statement sees one moment."""


# Forks: a child must neither use nor end the connections of its parent.

_stores: weakref.WeakSet[MysqlStore] = weakref.WeakSet()
_stores_lock = threading.Lock()


def _before_fork() -> None:
    _stores_lock.acquire()


def _after_fork_in_parent() -> None:
    _stores_lock.release()


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._after_fork_in_child()
    _stores_lock.release()


with suppress(AttributeError):  # where there is no fork
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
