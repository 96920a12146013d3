"""What everybody shares in one run: the loop, the plan, the store behind its faults, and the history."""

from __future__ import annotations

from collections import Counter
from typing import cast

from msgspec.structs import replace

from holdfast.events import Event, KeeperFailed, PartFailed
from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.stores.memory import MemoryStore
from holdfast.testing.history import recorded
from holdfast.testing.history.events import AnyEvent, Fault, Healed
from holdfast.testing.simulation.faulty import Faults, wrap
from holdfast.testing.simulation.loop import HOST, SimulatedLoop, machine
from holdfast.testing.simulation.ports import SimulatedClock, StoreClock, simulated_ports
from holdfast.testing.simulation.sqlite import SimulatedFile, SteppedSqliteStore
from holdfast.testing.simulation.swarm import Engine, Plan, draw

_EXPECTED_ERRORS = ("StoreUnavailable", "OutcomeUnknown", "SessionClosed", "a look at all sessions took")
"""What a part of a worker or a keeper may fail with. Anything else is a defect."""


class Run:
    """One seed, from its plan to its history."""

    def __init__(self, seed: int, engine: Engine) -> None:
        self.loop = SimulatedLoop(seed)
        self.chance = self.loop.chance
        self.plan: Plan = draw(self.chance, engine)
        self.ports: Ports = simulated_ports(self.loop)
        self.clock = cast(SimulatedClock, self.ports.clock)
        self.store_clock = StoreClock(self.loop)
        self.faults: Faults = self.plan.faults
        self.events: list[AnyEvent] = []
        self.happenings: Counter[str] = Counter()
        self.surprises: list[str] = []
        """What no invariant is about, and yet must not happen: errors of our own code, hosts that end unasked."""
        self.healed_at: float | None = None
        """None while the run suffers."""
        self._over = False
        self._store_ports = replace(self.ports, clock=self.store_clock)
        self._file: SimulatedFile | None = None
        if engine is Engine.SQLITE:
            self._file = SimulatedFile()
            self.raw: Store = cast(Store, SteppedSqliteStore(self._file, self._store_ports))
        else:
            self.raw = MemoryStore(ports=self._store_ports)
            self._shared = self._behind_faults(self.raw)

    def store(self) -> Store:
        """The store as a host has it: recorded where it takes effect, and behind the faults of the network."""
        if self._file is None:
            return self._shared
        return self._behind_faults(cast(Store, SteppedSqliteStore(self._file, self._store_ports)))

    def _behind_faults(self, store: Store) -> Store:
        noted = recorded(store, self.note, self.loop.time, machine, effects_only=True)
        return wrap(noted, self.faults, self.ports, self.loop)

    # The history.

    def note(self, event: AnyEvent) -> None:
        """Add the event to the history."""
        if not self._over:
            self.events.append(event)

    def fault(self, kind: str, victim: str) -> None:
        """Note harm that the run itself does."""
        self.happenings[kind] += 1
        self.note(Fault(at=self.loop.time(), host="simulator", kind=kind, victim=victim))

    def happened(self, what: str) -> None:
        """Count something that belongs to no event."""
        if not self._over:
            self.happenings[what] += 1

    def hear(self, event: Event) -> None:
        """Listen to what workers and keepers tell. Their parts fail by faults of the store, and by nothing else."""
        if self._over:
            return
        self.happenings[type(event).__name__] += 1
        if isinstance(event, PartFailed | KeeperFailed) and not event.error.startswith(_EXPECTED_ERRORS):
            self.surprises.append(f"{HOST.get()}: {event}")

    def heal(self) -> None:
        """No more harm from here on."""
        self.healed_at = self.loop.time()
        self.note(Healed(at=self.healed_at, host="simulator"))

    def end(self) -> None:
        """Nothing counts from here on: what is left is dropped."""
        self._over = True

    def close(self) -> None:
        """Remove what the run has put on the disk."""
        if self._file is not None:
            self._file.close()
