"""The simulation's time, chance and ids: all drawn from the loop, none from the machine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from holdfast.ports import Ports
from holdfast.testing.simulation.loop import HOST, SimulatedLoop

_EPOCH = 1_800_000_000 * 1_000_000


class SimulatedClock:
    """Virtual time; each host may see it shifted."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self.skew: dict[str, float] = {}

    def now(self) -> int:
        """The host's wall clock, wrong by its skew."""
        return _EPOCH + round((self._loop.time() + self.skew.get(HOST.get(), 0.0)) * 1_000_000)

    def monotonic(self) -> float:
        """Virtual seconds."""
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        """Virtual sleep."""
        await asyncio.sleep(seconds)

    def pause(self, seconds: float) -> None:
        """No thread may block here."""
        raise RuntimeError("a blocking pause inside the simulation")


class StoreClock(SimulatedClock):
    """The clock of the store's own machine, whoever calls."""

    def now(self) -> int:
        """Never skewed: stores own time."""
        return _EPOCH + round(self._loop.time() * 1_000_000)


class SimulatedRandom:
    """Chance from the seed."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop

    def fraction(self) -> float:
        """The next number of the seed."""
        return self._loop.chance.random()


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

    def thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        """Always an error."""
        raise RuntimeError(f"thread {name!r} inside the simulation")

    def event_loop(self, main: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        """A task of the same host: on the simulated machine, too, it goes on while others wait."""
        asyncio.get_running_loop().create_task(main(), name=name)

    def process(self, command: Sequence[str], fds: Sequence[int]) -> NoReturn:
        """Always an error."""
        raise RuntimeError(f"process {command[0]!r} inside the simulation")


def simulated_ports(loop: SimulatedLoop) -> Ports:
    """The ports of every simulated host."""
    return Ports(
        clock=SimulatedClock(loop),
        random=SimulatedRandom(loop),
        ids=SimulatedIds(loop),
        spawner=NoThreads(),
    )
