"""Any store, seen through a bad network: slow calls, lost requests, lost replies to calls that were done, hosts that
are cut off, and a store that is away for a while.

A caller is told `StoreUnavailable` only where nothing was done. Whatever else goes wrong is `OutcomeUnknown`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import aclosing
from typing import Any, Self, cast

import msgspec

from holdfast.errors import HoldfastError, OutcomeUnknown, StoreUnavailable
from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.testing.simulation.loop import NETWORK, SimulatedLoop, machine

FAULTY_METHODS = frozenset(
    name for name, verb in vars(Store).items() if inspect.iscoroutinefunction(verb) and not name.startswith("_")
)
_NOT_LATE = frozenset({"set_paused"})
"""Later, it would undo what was done in between: no engine carries it out after its caller has given up."""
_NOT_TWICE = frozenset({"set_paused", "insert"})
"""Nor an insert after its caller was told that the queue is full."""
_HANGS_WHILE_AWAY = 0.2
_LATEST = 2.0
"""How many deadlines after its caller gave up a late request may still arrive."""


class Faults(msgspec.Struct):
    """How bad the network is, and what it has done so far. Mutable: a scenario cuts hosts off, and heals all.

    The rates are chances for each call, `latency` mean seconds each way, `deadline` the seconds after which a caller
    gives up.
    """

    refused: float = 0.0
    """A transient error; nothing was done."""
    request_lost: float = 0.0
    """Nothing was done, and the caller waits for its deadline."""
    reply_lost: float = 0.0
    reply_late: float = 0.0
    """Done, and the caller waits for its deadline."""
    request_late: float = 0.0
    """Done only after the caller has given up."""
    request_twice: float = 0.0
    """Done, answered, and done once more later."""
    wakeup_lost: float = 0.0
    latency: float = 0.0
    deadline: float = 2.0
    away_until: float = 0.0
    restarts: int = 0
    cut: dict[str, float] = msgspec.field(default_factory=dict)
    """Until when each host is cut off."""
    on_the_way: int = 0
    """Requests that will still take effect, though nobody waits for them."""
    seen: Counter[str] = msgspec.field(default_factory=Counter)
    harm: int = 0
    """How many of those harmed a caller, and when the last one did."""
    harmed_at: float = 0.0

    def heal(self) -> None:
        """No faults from now on. What is on the way still arrives, and hosts are cut off until their time is over."""
        self.refused = self.request_lost = self.reply_lost = self.reply_late = 0.0
        self.request_late = self.request_twice = self.wakeup_lost = self.latency = 0.0
        self.away_until = 0.0

    def over_at(self) -> float:
        """When the last host is no longer cut off."""
        return max(self.cut.values(), default=0.0)

    def restart(self, now: float, away: float) -> None:
        """The store ends, and is back after so many seconds."""
        self.restarts += 1
        self.away_until = now + away
        self.harm, self.harmed_at = self.harm + 1, self.away_until

    def note(self, verb: str, fault: str, now: float) -> None:
        """Count what was done to a call."""
        self.seen[f"{verb}: {fault}"] += 1
        self.harm, self.harmed_at = self.harm + 1, max(self.harmed_at, now)


class FaultyStore:
    """Wraps every asynchronous verb of a store. Use `wrap` to get it typed as a `Store`."""

    def __init__(self, store: Store, faults: Faults, ports: Ports, loop: SimulatedLoop) -> None:
        self._store = store
        self._faults = faults
        self._ports = ports
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._store, name)
        if name in FAULTY_METHODS:
            found = self._faulty(name, found)
            setattr(self, name, found)
        return found

    def beside(self) -> Store:
        """Another connection, over the same bad network."""
        return wrap(self._store.beside(), self._faults, self._ports, self._loop)

    def waiting_claims(self, queues: Collection[str]) -> None:
        """See `Patient.waiting_claims`. None: those of the store would pass by all faults."""

    async def __aenter__(self) -> Self:
        """Open the store, without faults. Python looks these two up on the class, past `__getattr__`."""
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close the store, without faults."""
        await self._store.__aexit__(*exc)

    def _faulty(self, name: str, verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        faults = self._faults

        async def call(*args: Any, **kwargs: Any) -> Any:
            restarts = faults.restarts
            await self._travel()
            await self._reach(name)
            await self._lose_request(name, verb, args, kwargs)
            answer: Any
            try:
                answer = await verb(*args, **kwargs)
            except HoldfastError as error:
                answer = error
            if faults.request_twice and name not in _NOT_TWICE and self._chance() < faults.request_twice:
                faults.seen[f"{name}: request twice"] += 1
                self._deliver_later(verb, args, kwargs)
            await self._travel()
            await self._lose_reply(name, restarts)
            if isinstance(answer, HoldfastError):
                raise answer
            return answer

        return call

    # The way there.

    async def _travel(self) -> None:
        if self._faults.latency:
            await self._ports.clock.sleep(2 * self._faults.latency * self._chance())

    def _chance(self) -> float:
        return self._loop.chance.random()

    def _why_apart(self) -> str:
        """What keeps the caller from the store now, if anything does."""
        now = self._loop.time()
        if self._faults.away_until > now:
            return "store away"
        if self._faults.cut and self._faults.cut.get(machine(), 0.0) > now:
            return "cut off"
        return ""

    async def _reach(self, name: str) -> None:
        if not (apart := self._why_apart()):
            return
        self._faults.note(name, apart, self._loop.time())
        if self._chance() < _HANGS_WHILE_AWAY or apart == "cut off":
            await self._ports.clock.sleep(self._faults.deadline)
            raise OutcomeUnknown(f"simulated: no answer to {name} in time")
        raise StoreUnavailable(f"simulated: {name}: the store is away")

    async def _lose_request(
        self, name: str, verb: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        faults = self._faults
        if not (faults.refused or faults.request_lost or faults.request_late):
            return
        drawn, now = self._chance(), self._loop.time()
        if drawn < faults.refused:
            faults.note(name, "refused", now)
            raise StoreUnavailable(f"simulated: {name} was refused")
        drawn -= faults.refused
        if drawn < faults.request_lost:
            faults.note(name, "request lost", now)
        elif drawn < faults.request_lost + faults.request_late and name not in _NOT_LATE:
            faults.note(name, "request late", now)
            self._deliver_later(verb, args, kwargs)
        else:
            return
        await self._ports.clock.sleep(faults.deadline)
        raise OutcomeUnknown(f"simulated: no answer to {name} in time")

    def _deliver_later(
        self, verb: Callable[..., Awaitable[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Carry the request out some time later, whatever has become of its caller by then."""
        wait = (1 + _LATEST * self._chance()) * self._faults.deadline

        async def deliver() -> None:
            await asyncio.sleep(wait)
            try:
                await verb(*args, **kwargs)
            except HoldfastError:
                pass  # nobody hears of it
            finally:
                self._faults.on_the_way -= 1

        self._faults.on_the_way += 1
        self._loop.on_host(NETWORK + machine(), deliver())

    # The way back.

    async def _lose_reply(self, name: str, restarts: int) -> None:
        faults, now = self._faults, self._loop.time()
        if faults.restarts != restarts or self._why_apart():
            faults.note(name, "reply lost in a restart" if faults.restarts != restarts else "reply cut off", now)
            raise OutcomeUnknown(f"simulated: the connection was lost during {name}")
        if not (faults.reply_lost or faults.reply_late):
            return
        drawn = self._chance()
        if drawn < faults.reply_lost:
            faults.note(name, "reply lost", now)
            raise OutcomeUnknown(f"simulated: the reply to {name} was lost")
        if drawn - faults.reply_lost < faults.reply_late:
            faults.note(name, "reply late", now)
            await self._ports.clock.sleep(faults.deadline)
            raise OutcomeUnknown(f"simulated: no answer to {name} in time")

    async def wakeups(self, queues: Collection[str]) -> AsyncIterator[None]:
        """Those of the store, of which some are lost. They end with an error when the store was restarted."""
        restarts = self._faults.restarts
        async with aclosing(cast("Any", self._store.wakeups(queues))) as wakeups:
            async for _ in wakeups:
                if self._faults.restarts != restarts:
                    raise StoreUnavailable("simulated: the connection that listened was lost")
                if self._why_apart() or self._chance() < self._faults.wakeup_lost:
                    self._faults.seen["wake-up lost"] += 1
                    continue
                yield


def wrap(store: Store, faults: Faults, ports: Ports, loop: SimulatedLoop) -> Store:
    """The store behind the faults."""
    return cast(Store, FaultyStore(store, faults, ports, loop))
