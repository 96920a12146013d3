"""The driver's connections as the store uses them: what is asked of one, and how long its answer is waited for."""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable
from functools import cached_property
from typing import Any, Generic, TypeVar

import psycopg
from psycopg.abc import PQGen
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow
from psycopg.waiting import Ready, Wait

from holdfast.stores.postgres.direct import Direct, Prepared, answer
from holdfast.stores.postgres.query import Query

RV = TypeVar("RV")

_MOST_READS_IN_A_TURN = 64
_TIME_TO_CANCEL = 0.5
"""Seconds beyond the deadline to ask the server not to go on with a statement that nobody waits for any more."""

Rows = list[tuple[Any, ...]]


class AsyncLink(psycopg.AsyncConnection[TupleRow]):
    """A connection of an event loop. Whoever gives up a statement asks the server to stop it, and does not wait until
    it has: the driver would, for ten seconds beyond any deadline. The connection is of no use afterwards.
    """

    patience: float | None = None
    """Seconds after which the wait for an answer ends with `TimeoutError`."""

    async def ask(self, query: Query | Direct) -> Rows:
        """The rows that the statement answers with."""
        if isinstance(query, Direct):
            return [(await self.wait(answer(self.pgconn, self._made_ready, query)),)]
        cursor = await self.execute(query.text, query.values, binary=True)
        return await cursor.fetchall() if cursor.description else []

    @cached_property
    def _made_ready(self) -> Prepared:
        return Prepared()

    @cached_property
    def ear(self) -> select.poll:
        """See `_ear_of`."""
        return _ear_of(self)

    async def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        try:
            return await _waited(gen, self, self.patience if timeout is None else timeout)
        except (asyncio.CancelledError, TimeoutError):
            if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                with contextlib.suppress(psycopg.Error, OSError):
                    await self.cancel_safe(timeout=_TIME_TO_CANCEL)
            raise


async def _waited(gen: PQGen[RV], connection: AsyncLink, timeout: float | None) -> RV:
    """What the driver's generator comes to. The driver's own loop looks ten times a second whether it should end: ours
    is ended from outside, or by one timer.
    """
    loop = asyncio.get_running_loop()
    socket = connection.pgconn.socket
    deadline = None if timeout is None else loop.time() + timeout
    try:
        awaited = next(gen)
        state: Ready = Ready.NONE
        while True:
            # The driver reads 16 kB at a time. What has arrived is read without a turn of the loop for each of them,
            # but others on the loop want their turn, too.
            for _ in range(_MOST_READS_IN_A_TURN):
                if not (state == Ready.R and awaited == Wait.R and connection.ear.poll(0)):
                    break
                awaited = gen.send(state)
            ready: asyncio.Future[Ready] = loop.create_future()
            timer = None if deadline is None else loop.call_at(deadline, _is_ready, ready, Ready.NONE)
            try:
                if awaited & Wait.R:
                    loop.add_reader(socket, _is_ready, ready, Ready.R)
                if awaited & Wait.W:
                    loop.add_writer(socket, _is_ready, ready, Ready.W)
                state = await ready
            finally:
                if timer is not None:
                    timer.cancel()
                if awaited & Wait.R:
                    loop.remove_reader(socket)
                if awaited & Wait.W:
                    loop.remove_writer(socket)
            if state == Ready.NONE:
                raise TimeoutError
            awaited = gen.send(state)
    except StopIteration as end:
        outcome: RV = end.value
        return outcome
    except TimeoutError:
        raise
    except OSError as error:
        raise psycopg.OperationalError("connection socket closed") from error


def _is_ready(awaited: asyncio.Future[Ready], state: Ready) -> None:
    if not awaited.done():
        awaited.set_result(state)


class BlockingLink(psycopg.Connection[TupleRow]):
    """A blocking connection that waits for no answer longer than `patience`."""

    patience: float | None = None
    meanwhile: Callable[[], object] | None = None
    """Called once, when the next statement has been sent, before its answer is waited for."""

    def ask(self, query: Query | Direct) -> Rows:
        """The rows that the statement answers with."""
        if isinstance(query, Direct):
            return [(self.wait(answer(self.pgconn, self._made_ready, query)),)]
        cursor = self.execute(query.text, query.values, binary=True)
        return cursor.fetchall() if cursor.description else []

    @cached_property
    def _made_ready(self) -> Prepared:
        return Prepared()

    @cached_property
    def ear(self) -> select.poll:
        """See `_ear_of`."""
        return _ear_of(self)

    def wait(self, gen: PQGen[RV], interval: float = 0.1, timeout: float | None = None) -> RV:
        patience = self.patience if timeout is None else timeout
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is None:
            return super().wait(gen, interval, patience)
        statement = _InTwoParts(gen)
        super().wait(statement.sending(), interval, patience)
        meanwhile()
        return super().wait(statement.answered(), interval, patience)

    def throw_away(self) -> None:
        """Close it. If the server is still busy with a statement, ask it to stop."""
        if self.pgconn.transaction_status == TransactionStatus.ACTIVE:
            with contextlib.suppress(psycopg.Error, OSError):
                self.cancel_safe(timeout=_TIME_TO_CANCEL)
        self.pgconn.finish()


class _InTwoParts(Generic[RV]):
    """The driver's generator, to be waited for twice: until all is sent, and until it is answered."""

    def __init__(self, gen: PQGen[RV]) -> None:
        self._gen = gen
        self._awaited = Wait.W
        self._ended: StopIteration | None = None

    def sending(self) -> PQGen[None]:
        try:
            self._awaited = next(self._gen)
            while self._awaited & Wait.W:
                self._awaited = self._gen.send((yield self._awaited))
        except StopIteration as end:
            self._ended = end

    def answered(self) -> PQGen[RV]:
        try:
            while self._ended is None:
                self._awaited = self._gen.send((yield self._awaited))
        except StopIteration as end:
            self._ended = end
        outcome: RV = self._ended.value
        return outcome


def is_alive(connection: AsyncLink | BlockingLink) -> bool:
    """Whether an idle connection can be used: not closed, and the server has sent nothing, such as its farewell."""
    if connection.closed:
        return False
    with contextlib.suppress(ValueError, OSError, psycopg.Error):
        return not connection.ear.poll(0)
    return False


def _ear_of(connection: AsyncLink | BlockingLink) -> select.poll:
    """What hears whether the server has sent something."""
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN | select.POLLERR | select.POLLHUP)
    return poll
