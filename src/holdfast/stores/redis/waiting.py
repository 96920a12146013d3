"""Claims that wait in the server: each is sent behind a blocking wait for a token, on a connection of their own. So the
server carries it out with the wake-up, and who waits has the jobs after half a round trip.

When the connection is closed, the server drops what waits behind the blocked call. So a claim that is cancelled is not
carried out, unless it is too late for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from typing import Any

from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.ports import MICROSECONDS, Ports
from holdfast.store import Claimed, ClaimRequest
from holdfast.stores.redis.connections import Connections
from holdfast.stores.redis.tokens import Tokens
from holdfast.stores.redis.verbs import Share, Verbs
from holdfast.stores.redis.wire import Line, LineFailed, ReplyError

_FIRST_RETRY, _LAST_RETRY = 0.1, 5.0
_SHORTEST = 0.01
"""Seconds. To wait for less may mean to a server that it is to wait for ever."""


class RedisWaitingClaims:
    """See `WaitingClaims`. `claim` is the ordinary one, which also says what is in the way. `block`: seconds that one
    wait takes at most.
    """

    def __init__(
        self,
        connections: Connections,
        verbs: Verbs,
        claim: Callable[[ClaimRequest], Awaitable[Claimed]],
        *,
        queues: Collection[str],
        block: float,
        ports: Ports,
    ) -> None:
        self._connections = connections
        self._verbs = verbs
        self._claim = claim
        self._queues = queues
        self._block = block
        self._ports = ports
        self._tokens = Tokens(connections, verbs, ports)
        self._line: Line | None = None
        self._retry = _FIRST_RETRY

    async def close(self) -> None:
        """See `WaitingClaims.close`."""
        self._disconnect()
        await self._tokens.hand_over(self._queues)

    async def claim(self, request: ClaimRequest, *, due_in: int | None, seconds: float) -> Claimed:
        """See `WaitingClaims.claim`."""
        of_key = {self._verbs.layout.key(queue, "wake"): queue for queue in request.queues}
        line = await self._connect(next(iter(of_key)))
        wait = min(seconds, self._block)
        due = None
        if due_in is not None and due_in < wait * MICROSECONDS:
            wait = due_in / MICROSECONDS
            due = asyncio.ensure_future(self._offer_after(wait, request.queues))
        wait = max(_SHORTEST, round(wait, 3))
        shares = self._verbs.shares(request)
        try:
            taken, *replies = await line.ask(
                [("BLPOP", *of_key, wait), *(share.call.command for share in shares)],
                wait + self._connections.access.read_timeout,
            )
        except LineFailed as error:
            self._connections.dispatcher.topology.doubt()
            if error.sent:
                raise OutcomeUnknown(f"jobs may have been claimed: {error}") from error
            raise StoreUnavailable(f"{error}. Nothing was written") from error
        except BaseException:
            self._disconnect()
            raise
        finally:
            if due is not None:
                due.cancel()
        claimed = await self._connections.run(self._verbs.shared(request, shares, replies))
        if isinstance(taken, ReplyError):
            if not claimed.jobs:
                await self._pause(min(seconds, self._block))
        else:
            self._retry = _FIRST_RETRY
            if taken is not None:
                self._took(of_key[taken[0]], shares, replies)
        if claimed.due_in == 0 and not claimed.jobs:
            return await self._claim(request)
        return claimed

    async def _offer_after(self, seconds: float, queues: Collection[str]) -> None:
        """Bring about a token when a job is due: a server ends a blocking wait up to a tenth of a second late."""
        await self._ports.clock.sleep(seconds)
        with suppress(StoreError):  # the wait ends by itself, too
            await self._tokens.offer(queues)

    def _took(self, queue: str, shares: list[Share], replies: list[Any]) -> None:
        """The token is of no more use to anybody if the claim behind it has found the end of the queue."""
        for share, reply in zip(shares, replies, strict=True):
            if share.queue == queue and not isinstance(reply, ReplyError) and reply[0] == b"jobs" and reply[2] < 0:
                return
        self._tokens.taken(queue)

    async def _pause(self, most: float) -> None:
        """The server does not let us wait, or has changed its role: then it is asked from time to time."""
        self._disconnect()
        self._connections.dispatcher.topology.doubt()
        await self._ports.clock.sleep(min(most, self._retry * (0.5 + self._ports.random.fraction())))
        self._retry = min(2 * self._retry, _LAST_RETRY)

    async def _connect(self, key: bytes) -> Line:
        line = self._line
        if line is None or line.closed or line.place != self._connections.dispatcher.topology.place_of(key):
            self._disconnect()
            try:
                line = self._line = await self._connections.line_apart(key)
            except (LineFailed, ReplyError) as error:
                self._connections.dispatcher.topology.doubt()
                raise StoreUnavailable(f"{error}. Nothing was written") from error
        return line

    def _disconnect(self) -> None:
        if self._line is not None:
            self._line.close()
            self._line = None
