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

_FIRST_PAUSE, _LAST_PAUSE = 0.1, 1.0
"""Seconds before each ordinary claim, while no claim can wait in the server."""
_SHORTEST = 0.01
"""Seconds. To wait for less may mean to a server that it is to wait for ever."""
_LATEST = 3.0
"""Seconds by which the answer may be late. Nobody asks for jobs meanwhile, so it is less than for other calls."""
_UNUSED = 5.0
"""Seconds. A connection that nothing was sent on for longer may have been forgotten by what lies between, silently."""


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
        self._used_at = 0.0
        self._next_pause = _FIRST_PAUSE

    async def close(self) -> None:
        """See `WaitingClaims.close`."""
        self._disconnect()
        await self._tokens.hand_over(self._queues)

    async def claim(self, request: ClaimRequest, *, due_in: int | None, seconds: float) -> Claimed:
        """See `WaitingClaims.claim`."""
        of_key = {self._verbs.layout.key(queue, "wake"): queue for queue in request.queues}
        longest = min(seconds, self._block)
        wait = longest if due_in is None else min(longest, due_in / MICROSECONDS)
        line = await self._connect(next(iter(of_key)))
        if line is None:
            return await self._claim_after_a_pause(request, wait)
        shares = self._verbs.shares(request)
        due = asyncio.ensure_future(self._offer_after(wait, request.queues)) if wait < longest else None
        blocked = max(_SHORTEST, round(wait, 3))
        try:
            taken, *replies = await line.ask(
                [("BLPOP", *of_key, blocked), *(share.call.command for share in shares)],
                blocked + min(_LATEST, self._connections.access.read_timeout),
            )
        except LineFailed as error:
            await self._pause(wait)
            if error.sent:
                raise OutcomeUnknown(f"jobs may have been claimed: {error}") from error
            raise StoreUnavailable(f"{error}. Nothing was written") from error
        except BaseException:
            self._disconnect()
            raise
        finally:
            if due is not None:
                due.cancel()
        self._used_at = self._ports.clock.monotonic()
        claimed = await self._connections.run(self._verbs.shared(request, shares, replies))
        if not isinstance(taken, ReplyError):
            self._next_pause = _FIRST_PAUSE
            if taken is not None:
                self._took(of_key[taken[0]], shares, replies)
        elif not claimed.jobs:  # the server does not let us wait, or has changed its role
            return await self._claim_after_a_pause(request, wait)
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

    async def _claim_after_a_pause(self, request: ClaimRequest, most: float) -> Claimed:
        """Where no claim can wait, jobs are asked for from time to time."""
        await self._pause(most)
        claimed = await self._claim(request)
        if claimed.jobs:
            self._next_pause = _FIRST_PAUSE
        return claimed

    async def _pause(self, most: float) -> None:
        """A little longer each time, so many seconds at most."""
        self._disconnect()
        self._connections.dispatcher.topology.doubt()
        await self._ports.clock.sleep(min(most, self._next_pause * (0.5 + self._ports.random.fraction())))
        self._next_pause = min(2 * self._next_pause, _LAST_PAUSE)

    async def _connect(self, key: bytes) -> Line | None:
        """The connection of the claims that wait. None: it is not to be had, though others may be."""
        line = self._line
        place = self._connections.dispatcher.topology.place_of(key)
        unused = self._ports.clock.monotonic() - self._used_at > _UNUSED
        if line is None or line.closed or line.place != place or unused:
            self._disconnect()
            try:
                line = self._line = await self._connections.line_apart(key)
            except (LineFailed, ReplyError):
                return None
        return line

    def _disconnect(self) -> None:
        if self._line is not None:
            self._line.hang_up()
            self._line = None
