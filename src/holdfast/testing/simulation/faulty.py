"""Any store, seen through a bad network: slow calls, lost requests, and lost replies to calls that were done."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Self, cast

import msgspec

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.ports import Ports
from holdfast.store import Store

FAULTY_METHODS = frozenset(
    name for name, verb in vars(Store).items() if inspect.iscoroutinefunction(verb) and not name.startswith("_")
)


class Faults(msgspec.Struct):
    """How bad the network is, and what it has done so far. Mutable: a scenario turns it off to heal."""

    request_lost: float = 0.0
    reply_lost: float = 0.0
    latency: float = 0.0
    """Mean seconds, each way."""
    seen: Counter[str] = msgspec.field(default_factory=Counter)

    def heal(self) -> None:
        """No faults from now on."""
        self.request_lost = self.reply_lost = self.latency = 0.0


class FaultyStore:
    """Wraps every asynchronous verb of a store. Use `wrap` to get it typed as a `Store`."""

    def __init__(self, store: Store, faults: Faults, ports: Ports) -> None:
        self._store = store
        self._faults = faults
        self._ports = ports

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._store, name)
        return self._faulty(name, verb) if name in FAULTY_METHODS else verb

    def beside(self) -> Store:
        """Another connection, over the same bad network."""
        return wrap(self._store.beside(), self._faults, self._ports)

    async def __aenter__(self) -> Self:
        """Open the store, without faults. Python looks these two up on the class, past `__getattr__`."""
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close the store, without faults."""
        await self._store.__aexit__(*exc)

    def _faulty(self, name: str, verb: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def call(*args: Any, **kwargs: Any) -> Any:
            await self._travel()
            if self._ports.random.fraction() < self._faults.request_lost:
                self._faults.seen[f"{name}: request lost"] += 1
                raise StoreUnavailable(f"simulated: the request {name} was lost")
            answer = await verb(*args, **kwargs)
            await self._travel()
            if self._ports.random.fraction() < self._faults.reply_lost:
                self._faults.seen[f"{name}: reply lost"] += 1
                raise OutcomeUnknown(f"simulated: the reply to {name} was lost")
            return answer

        return call

    async def _travel(self) -> None:
        if self._faults.latency:
            await self._ports.clock.sleep(2 * self._faults.latency * self._ports.random.fraction())


def wrap(store: Store, faults: Faults, ports: Ports) -> Store:
    """The store behind the faults."""
    return cast(Store, FaultyStore(store, faults, ports))
