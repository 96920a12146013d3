"""`RedisStore`: the port on one Redis server, one found by sentinels, or a cluster. `Verbs` says what to ask,
`Connections` asks it.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, Self, TypeVar

import msgspec

from holdfast.errors import ForeignConnection, InvalidOption, OutcomeUnknown, SessionClosed, StoreUnavailable
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
from holdfast.stores.redis import opening, reading
from holdfast.stores.redis.connections import Connections
from holdfast.stores.redis.dispatch import Dispatcher, Verb
from holdfast.stores.redis.epoch import is_same, require_same
from holdfast.stores.redis.examine import examine
from holdfast.stores.redis.layout import Layout, Names
from holdfast.stores.redis.scripts import load_scripts
from holdfast.stores.redis.topology import Topology, slot_of
from holdfast.stores.redis.verbs import Verbs
from holdfast.stores.redis.waiting import RedisWaitingClaims
from holdfast.stores.redis.wakeups import Waiting
from holdfast.stores.redis.wire import Access
from holdfast.stores.threads import on_thread
from holdfast.stores.wakeups import WakeupHub, queues_fed

T = TypeVar("T")

DURABILITIES = ("server", "aof", "replicas")
_NO_TRANSACTIONS = (
    "Redis has no transactions that a caller could share: use SQLite, PostgreSQL or MySQL for connection="
)


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator may tune. Times in seconds. `pool_size`: blocking connections at most."""

    block: float = 7.5
    heartbeat_ttl: float = 15.0
    max_retries: int = 3
    pool_size: int = 16
    min_idle: int = 0


class RedisStore:
    """A `Store` on Redis, 6.2 or newer, or Valkey. Opens when it is first used.

    `names`: the keys that an operator chose, or None for those that the store has. `durability`: what an insert waits
    for beyond the server's answer: `aof`, until it is on disk; `replicas`, until one has it. `create=False`: a store
    that is not there is an error.
    """

    def __init__(
        self,
        topology: Topology,
        access: Access,
        *,
        namespace: str = "holdfast",
        names: Names | None = None,
        tuning: Tuning = Tuning(),  # noqa: B008
        durability: str = "server",
        create: bool = True,
        ports: Ports = SYSTEM,
    ) -> None:
        if durability not in DURABILITIES:
            raise InvalidOption(f"durability must be one of {', '.join(DURABILITIES)}, not {durability!r:.40}")
        self._arguments = (topology, access)
        self._options = {
            "namespace": namespace,
            "names": names,
            "tuning": tuning,
            "durability": durability,
            "create": create,
            "ports": ports,
        }
        self._names = names
        self._tuning = tuning
        self._durability = durability
        self._confirms_at_once = durability == "server"
        self._create = create
        self._ports = ports
        self._access = access
        self.topology = topology
        self._dispatcher = Dispatcher(
            topology, max_retries=tuning.max_retries, patience=access.read_timeout, ports=ports
        )
        self._verbs = Verbs(Layout(namespace, names or Names()), load_scripts(), together=not topology.cluster)
        self._hub = WakeupHub()
        self._opening = threading.Lock()
        self._opening_here: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[None]] = (
            weakref.WeakKeyDictionary()
        )
        self._opened = False
        self._connect()
        _stores.add(self)

    def __repr__(self) -> str:
        return f"<RedisStore {self.topology.shown}>"

    def _connect(self) -> None:
        self._connections = Connections(
            self._dispatcher, self._access, pool_size=self._tuning.pool_size, ports=self._ports
        )
        self._closer = weakref.finalize(self, self._connections.close)
        self._closer.atexit = False

    # Opening and closing.

    def _open(self) -> Verb[None]:
        layout = self._verbs.layout
        infos = yield from opening.inspect(self._dispatcher)
        if self.topology.cluster:
            layout.refuse_across_slots()  # before the store is laid out like that
        names = yield from opening.settle_layout(layout, self._names, create=self._create, where=self.topology.shown)
        if names != layout.names:
            layout.use(names)
            if self.topology.cluster:
                layout.refuse_across_slots()
        patience = self._access.read_timeout * 0.8
        self._dispatcher.confirmation = yield from opening.confirmation(
            self._durability, infos, self.topology.masters(), patience
        )
        if not self._verbs.epoch[0]:
            self._verbs.epoch = yield from opening.present_epoch(layout)
        if self._create and not self._verbs.epoch[0]:
            self._verbs.epoch = yield from opening.epoch(layout, self._verbs.scripts, "", self._ports.ids.session_id())
        self._opened = True

    def open_blocking(self) -> None:
        """Connect, and check that the server keeps what it is given."""
        if self._opened:
            return
        if not self._opening.acquire(timeout=self._access.read_timeout):
            raise StoreUnavailable(f"{self.topology.shown} is still being opened by another thread")
        try:
            if not self._opened:
                self._connections.run_blocking(self._open())
                self._warm_up()
        finally:
            self._opening.release()

    def _warm_up(self) -> None:
        for place in self.topology.masters():
            self._connections.warm_up(place, self._tuning.min_idle)

    async def _run(self, verb: Verb[T]) -> T:
        if not self._opened:
            # All who come meanwhile share one attempt and its end: nobody waits for others to try in vain, one by one.
            loop = asyncio.get_running_loop()
            opening_here = self._opening_here.get(loop)
            if opening_here is None:
                opening_here = self._opening_here[loop] = loop.create_task(self._open_on_loop())
                opening_here.add_done_callback(lambda _: self._opening_here.pop(loop, None))
            await asyncio.shield(opening_here)
        return await self._connections.run(verb)

    async def _open_on_loop(self) -> None:
        await self._connections.run(self._open())
        if self._tuning.min_idle:
            await on_thread(self._warm_up, name="holdfast-redis-warm-up", ports=self._ports)

    def close(self) -> None:
        """Close every connection. The store opens again if it is used again."""
        self._connections.close()

    async def __aenter__(self) -> Self:
        """Connect now, instead of at the first use."""
        await self._run(reading.now(self._verbs))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """See `close`. What is under way on this event loop ends before."""
        await self._connections.ended()
        self.close()

    def beside(self) -> RedisStore:
        """See `Store.beside`. It knows what this one knows of the store: if that changes, either notices."""
        other = RedisStore(*self._arguments, **self._options)  # type: ignore[arg-type]
        other._verbs = self._verbs
        return other

    def _after_fork_in_child(self) -> None:
        # The child must neither use nor close what the parent talks through.
        _inherited.append(self._connections)
        self._closer.detach()
        self._connect()
        self._hub = WakeupHub()
        self._opening = threading.Lock()

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
        try:
            short = checkpoint is None and self._confirms_at_once and self._opened
            put = self._verbs.put(jobs, limits) if short else None
            if put is not None and await self._connections.call(put):
                inserted = [Inserted(jobs[0].id, InsertStatus.CREATED)]
            else:
                inserted = await self._run(self._verbs.insert(jobs, limits, checkpoint))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [job.id for job in jobs]) from error
        if self._hub:
            self._hub.notify({job.queue for job in jobs})
        return inserted

    def insert_blocking(
        self, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None, fresh: bool = False
    ) -> list[Inserted]:
        """See `Store.insert_blocking`."""
        return self._insert_here(jobs, limits)

    def insert_while(
        self, jobs: Sequence[NewJob], meanwhile: Callable[[], object], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> list[Inserted]:
        """See `Overlapping.insert_while`."""
        return self._insert_here(jobs, limits, meanwhile)

    def _insert_here(
        self,
        jobs: Sequence[NewJob],
        limits: Mapping[str, DepthLimit] | None,
        meanwhile: Callable[[], object] | None = None,
    ) -> list[Inserted]:
        if not self._opened:
            self.open_blocking()
        try:
            put = self._verbs.put(jobs, limits) if self._confirms_at_once else None
            if put is not None and self._connections.call_blocking(put):
                inserted = [Inserted(jobs[0].id, InsertStatus.CREATED)]
            else:
                inserted = self._connections.run_blocking(self._verbs.insert(jobs, limits), meanwhile)
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [job.id for job in jobs]) from error
        if self._hub:
            self._hub.notify({job.queue for job in jobs})
        return inserted

    def insert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> NoReturn:
        """Always refused: there is no transaction to share."""
        raise ForeignConnection(_NO_TRANSACTIONS)

    async def ainsert_on(
        self, connection: object, jobs: Sequence[NewJob], *, limits: Mapping[str, DepthLimit] | None = None
    ) -> NoReturn:
        """Always refused, as `insert_on`."""
        raise ForeignConnection(_NO_TRANSACTIONS)

    # Sessions.

    async def open_session(self, session: Session) -> None:
        """See `Store.open_session`."""
        await self._run(self._verbs.register_anew(session.queues))
        await self._run(self._verbs.sessions.open(session))
        self._verbs.session_id = session.id

    async def beat(self, session_id: SessionId) -> Beat:
        """See `Store.beat`.

        `StoreReplaced` once, when the store was emptied or rolled back since: the session is closed then, so that what
        it holds by old leases cannot be mixed up with what is claimed from now on.
        """
        known = self._verbs.epoch
        ttl = self._verbs.sessions.sign_ttl(session_id, self._ports.clock.monotonic(), self._tuning.heartbeat_ttl)
        beat, count, found = await self._run(self._verbs.sessions.beat(session_id, ttl, known[0]))
        if beat.open or session_id == self._verbs.session_id:  # one that is not ours has nothing to close
            went_back = beat.open and count <= self._verbs.beats.get(session_id, 0)
            self._verbs.beats = {session_id: count}
            if found and is_same(known, found) and not went_back:
                self._verbs.epoch = found
                return beat
            try:
                await self._compare_epoch(session_id, went_back=went_back)
            except StoreUnavailable as error:
                why = str(error).removesuffix(". Nothing was written")
                raise OutcomeUnknown(f"the beat was counted; then, is it still the same store? {why}") from error
        return beat

    async def _compare_epoch(self, session_id: SessionId, *, went_back: bool = False) -> None:
        fresh, where = self._ports.ids.session_id(), self.topology.shown
        await require_same(self._run, self._verbs, session_id, fresh=fresh, where=where, went_back=went_back)

    async def held(self, session_id: SessionId) -> list[Job]:
        """See `Store.held`."""
        return await self._run(self._verbs.sessions.held(session_id))

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        """See `Store.sessions`."""
        return await self._run(self._verbs.sessions.page(cursor, limit))

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        """See `Store.close_session`."""
        return await self._run(self._verbs.sessions.close(session_id, if_beat))

    # The life of a claim.

    async def claim(self, request: ClaimRequest) -> Claimed:
        """See `Store.claim`. `StoreReplaced` as in `beat`: it is noticed before another session is opened."""
        try:
            return await self._run(self._verbs.claim(request))
        except SessionClosed:
            await self._compare_epoch(request.session_id)
            raise

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        """See `Store.apply`."""
        try:
            answers = await self._run(self._verbs.apply(moves))
        except OutcomeUnknown as error:
            raise OutcomeUnknown(str(error), [move.job_id for move in moves]) from error
        if fed := queues_fed(moves):
            self._hub.notify(fed)
        return answers

    def apply_on(self, connection: object, moves: Sequence[Move]) -> NoReturn:
        """Always refused: there is no transaction to share."""
        raise ForeignConnection(_NO_TRANSACTIONS)

    async def aapply_on(self, connection: object, moves: Sequence[Move]) -> NoReturn:
        """Always refused, as `apply_on`."""
        raise ForeignConnection(_NO_TRANSACTIONS)

    async def note(self, lease: Lease, progress: bytes) -> Applied:
        """See `Store.note`."""
        return await self._run(self._verbs.note(lease, progress))

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        """See `Store.lost`."""
        queues = await self._run(self._verbs.sessions.astray()) if session_id is None else None
        if queues is None:
            queues = await self._run(self._verbs.queues())
        return await self._run(self._verbs.sessions.lost(limit, queues, session_id))

    # Operators and keepers.

    async def request_cancel(self, job_ids: Sequence[JobId]) -> list[CancelAnswer]:
        """See `Store.request_cancel`."""
        return await self._run(self._verbs.request_cancel(job_ids))

    async def set_paused(self, queue: str, paused: bool) -> None:
        """See `Store.set_paused`."""
        await self._run(self._verbs.set_paused(queue, paused))
        self._hub.notify({queue})

    async def prune(self, limit: int) -> int:
        """See `Store.prune`."""
        return await self._run(self._verbs.prune(limit))

    async def forget(self, job_ids: Sequence[JobId]) -> int:
        """See `Store.forget`."""
        return await self._run(self._verbs.forget_jobs(job_ids))

    # Reading.

    async def get(self, job_id: JobId) -> Job | None:
        """See `Store.get`."""
        return await self._run(reading.get(self._verbs, job_id))

    async def find(self, query: JobQuery) -> Page:
        """See `Store.find`."""
        return await self._run(reading.find(self._verbs, query))

    async def counts(self) -> list[QueueCounts]:
        """See `Store.counts`."""
        return await self._run(reading.counts(self._verbs))

    async def checkpoint(self, queue: str, name: str) -> str | None:
        """See `Store.checkpoint`."""
        return await self._run(reading.checkpoint(self._verbs, queue, name))

    async def now(self) -> int:
        """See `Store.now`."""
        return await self._run(reading.now(self._verbs))

    async def examine(self, *, deep: bool = False) -> list[Finding]:
        """See `Examinable.examine`. `deep` asks for nothing more here."""
        return await self._run(examine(self._dispatcher, self._verbs, self._durability))

    def waiting_claims(self, queues: Collection[str]) -> RedisWaitingClaims | None:
        """See `Patient.waiting_claims`. A command names keys of one slot of a cluster."""
        if self.topology.cluster and len({slot_of(self._verbs.layout.key(queue, "wake")) for queue in queues}) > 1:
            return None
        block, ports = self._tuning.block, self._ports
        return RedisWaitingClaims(self._connections, self._verbs, self.claim, queues=queues, block=block, ports=ports)

    async def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """See `Store.wakeups`."""
        await self._run(reading.now(self._verbs))
        waiting = Waiting(self._connections, self._verbs, self._hub, block=self._tuning.block, ports=self._ports)
        blocked = asyncio.ensure_future(waiting.run(queues))
        try:
            async for wakeup in self._hub.waiting(queues):
                yield wakeup
        finally:
            blocked.cancel()
            with suppress(asyncio.CancelledError):
                await blocked


# Forks: the child gets connections of its own.

_stores: weakref.WeakSet[RedisStore] = weakref.WeakSet()
_inherited: list[Connections] = []


def _after_fork_in_child() -> None:
    for store in list(_stores):
        store._after_fork_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
