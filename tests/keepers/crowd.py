"""Many sessions, and a keeper of which the test sees how long it works and rests."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence

from holdfast.events import Event, KeeperFailed, SessionRescued
from holdfast.job import Job, SessionId
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Applied, Move
from holdfast.ports import Ports
from holdfast.store import Session, SessionPage
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock

TTL = 15.0
WORK = 0.2
"""What a pass may work, in seconds."""
PAGE = 100


class OwnTime(ManualClock):
    """Time that passes only while the keeper sleeps, and while the store works for it. `until` then, and no longer."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[tuple[float, float]] = []
        """When, and for how long."""
        self.until = 0.0

    async def sleep(self, seconds: float) -> None:
        self.slept.append((self.monotonic(), seconds))
        left = max(0.0, self.until - self.monotonic())
        self.advance(min(seconds, left))
        await asyncio.sleep(0)
        if seconds >= left:
            raise asyncio.CancelledError


class Dice:
    def __init__(self) -> None:
        self._random = random.Random(1)

    def fraction(self) -> float:
        return self._random.random()


class SlowStore(MemoryStore):
    """Each call of the keeper's takes its time. Workers that live beat on time, unless everything stands still."""

    def __init__(self, clock: OwnTime) -> None:
        super().__init__(ports=Ports(clock=clock))
        self.clock = clock
        self.alive: dict[SessionId, float] = {}
        """And when each beats next."""
        self.page_cost = self.close_cost = self.batch_cost = 0.001
        self.pages: list[tuple[float, str | None]] = []
        """When each was asked for, and from where on."""
        self.closed_at = 0.0
        self.batches: list[float] = []
        self.before_page: Callable[[int], None] = lambda number: None

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        await self._workers_beat()
        self.pages.append((self.clock.monotonic(), cursor))
        self.before_page(len(self.pages))
        self.clock.advance(self.page_cost)
        return await super().sessions(cursor=cursor, limit=limit)

    async def close_session(self, session_id: SessionId, *, if_beat: int | None = None) -> bool:
        self.clock.advance(self.close_cost)
        self.closed_at = self.clock.monotonic()
        return await super().close_session(session_id, if_beat=if_beat)

    async def lost(self, limit: int, *, session_id: SessionId | None = None) -> list[Job]:
        self.batches.append(self.clock.monotonic())
        self.clock.advance(self.batch_cost / 2)
        return await super().lost(limit, session_id=session_id)

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        self.clock.advance(self.batch_cost / 2)
        return await super().apply(moves)

    async def _workers_beat(self) -> None:
        now = self.clock.monotonic()
        for session_id, due in self.alive.items():
            if due <= now:
                await super().beat(session_id)
                self.alive[session_id] = now + TTL / 3


class ScatteredStore(SlowStore):
    """Pages as an engine that scans has them: empty ones, and sessions that are on two."""

    async def sessions(self, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        number = int(cursor or 0)
        views = sorted(self._sessions.values(), key=lambda view: view.id)
        begin = number // 2 * 50
        page = () if number % 2 else tuple(views[begin : begin + 75])
        return SessionPage(page, str(number + 1) if begin < len(views) else None)


class Crowd:
    """Many sessions, some alive, and a keeper with a time of its own."""

    def __init__(self, ttl: float = TTL, kind: type[SlowStore] = SlowStore) -> None:
        self.clock = OwnTime()
        self.store = kind(self.clock)
        self.events: list[Event] = []
        ports = Ports(clock=self.clock, random=Dice())
        self.keeper = Rescue(self.store, ports=ports, ttl=ttl, listener=self.events.append)

    async def add(self, count: int, *, prefix: str = "s", alive: bool = False) -> set[SessionId]:
        ids = {f"{prefix}{number:05d}" for number in range(count)}
        for session_id in sorted(ids):
            await self.store.open_session(Session(id=session_id))
            if alive:
                self.store.alive[session_id] = self.clock.monotonic() + TTL / 3 * (int(session_id[1:]) % 10) / 10
        return ids

    async def run(self, until: float) -> None:
        """Let the keeper run until that moment of its clock."""
        self.clock.until = until
        with contextlib.suppress(asyncio.CancelledError):
            await self.keeper.run()

    def rescued(self) -> list[SessionId]:
        return [event.session_id for event in self.events if isinstance(event, SessionRescued)]

    def failures(self) -> list[str]:
        return [event.error for event in self.events if isinstance(event, KeeperFailed)]

    def between_pages(self) -> list[float]:
        return [seconds for _, seconds in self.clock.slept if seconds < 0.05]

    def between_passes(self) -> list[float]:
        return [seconds for _, seconds in self.clock.slept if seconds >= 0.05]
