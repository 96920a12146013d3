"""The simulation's time, chance and ids: all drawn from the loop, none from the machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from holdfast.ports import Ports, microseconds
from holdfast.testing.simulation.loop import SimulatedLoop, machine

_EPOCH = 1_800_000_000 * 1_000_000


class SimulatedClock:
    """Virtual time as each host sees it: its wall clock may be wrong, and its monotonic one begins anywhere."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.skew: dict[str, float] = {}
        """By how many seconds the wall clock of a host is wrong."""
        self.origin: dict[str, float] = {}
        """What the monotonic clock of a host showed when the simulation began."""

    def now(self) -> int:
        """The host's wall clock, wrong by its skew."""
        return _EPOCH + microseconds(self._loop.time() + self.skew.get(machine(), 0.0))

    def monotonic(self) -> float:
        """Virtual seconds, from the origin of the host."""
        return self._loop.time() + self.origin.get(machine(), 0.0)

    async def sleep(self, seconds: float) -> None:
        """Virtual sleep."""
        await asyncio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        """No thread may block here."""
        raise RuntimeError("a blocking pause inside the simulation")


class StoreClock(SimulatedClock):
    """The clock of the store's own machine, whoever calls. `jumped` is how far it was set forward or back, in all."""

    jumped = 0.0

    def now(self) -> int:
        """The store's wall clock."""
        return _EPOCH + microseconds(self._loop.time() + self.jumped)

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._loop.time()


class SimulatedRandom:
    """Chance from the seed."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self.fraction = loop.chance.random
        """The next number of the seed."""


class SimulatedIds:
    """Ids from the seed, in the order of their making."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._count = 0

    def job_id(self) -> str:
        """Shaped like a UUIDv7."""
        self._count += 1
        return f"{self._count:08x}-0000-7000-8000-{self._loop.chance.getrandbits(48):012x}"

    def session_id(self) -> str:
        """128 bits."""
        return f"{self._loop.chance.getrandbits(128):032x}"


class NoThreads:
    """Refuses to start threads and processes: their order could not be replayed."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Always an error."""
        raise RuntimeError(f"thread {name!r} inside the simulation")

    def event_loop(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """The heartbeat of a worker: a part of its host, which goes on while the worker's own loop is blocked."""
        self._loop.start_heart(main())

    def process(self, command: Sequence[str], fds: Sequence[int]) -> NoReturn:
        """Always an error."""
        raise RuntimeError(f"process {command[0]!r} inside the simulation")


def simulated_ports(loop: SimulatedLoop) -> Ports:
    """The ports of every simulated host."""
    return Ports(
        clock=SimulatedClock(loop),
        random=SimulatedRandom(loop),
        ids=SimulatedIds(loop),
        spawner=NoThreads(loop),
    )
