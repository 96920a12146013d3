"""The connections of a store: one per server that all calls of an event loop share, and a pool for blocking calls.

They carry out what `dispatch.py` decides. None is shared over a fork.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from holdfast.ports import Ports
from holdfast.stores.driving import Overlaps, drive_async
from holdfast.stores.loop_end import LoopEnd
from holdfast.stores.redis.dispatch import LEAST_WAIT, Batch, Call, Dispatcher, Packed, Verb, is_complete
from holdfast.stores.redis.topology import Pause, Result, Send
from holdfast.stores.redis.wire import Access, BlockingLine, Line, LineFailed, Place, ReplyError, packed

T = TypeVar("T")


class _OfLoop:
    """The connections of one event loop, each by its place and kind."""

    def __init__(self) -> None:
        self.lines: dict[tuple[Place, bool, bool], Line] = {}
        self.opening: dict[tuple[Place, bool, bool], asyncio.Task[Line]] = {}
        self.end = LoopEnd(self.close)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()
        self.lines.clear()


class Connections:
    """All connections of a store. `run` and `run_blocking` carry out a verb."""

    def __init__(self, dispatcher: Dispatcher, access: Access, *, pool_size: int, ports: Ports) -> None:
        self.dispatcher = dispatcher
        self.access = access
        self._ports = ports
        self._plain = msgspec.structs.replace(access, username="", password="", db=0)
        self._lock = threading.Lock()
        self._loops: dict[asyncio.AbstractEventLoop, _OfLoop] = {}
        self._idle: dict[tuple[Place, bool], list[BlockingLine]] = {}
        self._slots: SimpleQueue[None] = SimpleQueue()  # a semaphore that costs a tenth of that in `threading`
        for _ in range(pool_size):
            self._slots.put(None)
        self._pool_size = pool_size
        self._overlaps = Overlaps(pool_size // 2)

    # On an event loop.

    async def run(self, verb: Verb[T]) -> T:
        """Carry out the verb."""
        return await drive_async(verb, self.execute)

    async def execute(self, batch: Batch) -> list[Any]:
        """The replies to a batch. A single group of calls, the usual case, goes out without a task of its own."""
        first = self.dispatcher.direct(batch)
        result: Result | None = None
        began = self._ports.clock.monotonic()
        if first is not None:
            result = await self._exchange(first)
            if is_complete(result):
                return result
        return await self._execute_from(batch, first, result, began)

    async def call(self, call: Packed) -> Any:
        """The reply to a single call: what `execute` answers, with less on the way there."""
        place = self.dispatcher.topology.place_of(call.key)
        if place is None:
            return (await self.execute(call.batch()))[0]
        began = self._ports.clock.monotonic()
        result: Result
        try:
            line = self._of_loop().lines.get((place, False, False))
            if line is None or line.closed:
                line = await self.line(place)
            result = await line.send(call.data, 1, self.access.read_timeout)
            if type(reply := result[0]) is not ReplyError:
                return reply
        except (LineFailed, ReplyError) as error:
            result = error
        batch = call.batch()
        return (await self._execute_from(batch, Send(place, (batch.calls[0].command,)), result, began))[0]

    async def _execute_from(self, batch: Batch, first: Send | None, result: Result | None, began: float) -> list[Any]:
        """Go on from what came of the first attempt, if there was one."""
        steps = self.dispatcher.execute(batch, first, result, began)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    await self._ports.clock.sleep(step.seconds)
                    step = next(steps)
                elif len(step) == 1:
                    step = steps.send([await self._exchange(step[0])])
                else:
                    step = steps.send(await asyncio.gather(*map(self._exchange, step)))
        except StopIteration as end:
            answers: list[Any] = end.value
            return answers
        finally:
            steps.close()

    async def _exchange(self, send: Send) -> Result:
        try:
            line = self._of_loop().lines.get((send.place, send.plain, send.apart))
            if line is None or line.closed:
                line = await self.line(send.place, plain=send.plain, apart=send.apart)
            return await line.ask(send.commands, send.timeout or self.access.read_timeout)
        except (LineFailed, ReplyError) as error:
            return error

    async def line(self, place: Place, *, plain: bool = False, apart: bool = False) -> Line:
        """The loop's connection to that server, opened if need be. All who want it meanwhile share one attempt."""
        mine = self._of_loop()
        kind = (place, plain, apart)
        line = mine.lines.get(kind)
        if line is not None and not line.closed:
            return line
        opening = mine.opening.get(kind)
        if opening is None:
            opening = mine.opening[kind] = asyncio.ensure_future(self._opened(mine, kind))
            opening.add_done_callback(lambda _: mine.opening.pop(kind, None))
        return await asyncio.shield(opening)

    async def line_apart(self, key: bytes) -> Line:
        """A connection to the server that has the key, the caller's own to use and to close: for calls that block."""
        # Any command finds the server, wherever it is now.
        await self.execute(Batch([Call(("EXISTS", key), key)], writes=False))
        place = self.dispatcher.topology.place_of(key)
        if place is None:
            raise LineFailed("the server has just gone", sent=False)
        return await Line.open(place, self.access)

    async def _opened(self, mine: _OfLoop, kind: tuple[Place, bool, bool]) -> Line:
        place, plain, _ = kind
        await mine.end.watch()
        line = mine.lines[kind] = await Line.open(place, self._plain if plain else self.access)
        return line

    def _of_loop(self) -> _OfLoop:
        loop = asyncio.get_running_loop()
        mine = self._loops.get(loop)
        if mine is None:
            with self._lock:
                for ended in [other for other in self._loops if other.is_closed()]:
                    self._loops.pop(ended)
                mine = self._loops.setdefault(loop, _OfLoop())
        return mine

    # On the calling thread.

    def run_blocking(self, verb: Verb[T], meanwhile: Callable[[], object] | None = None) -> T:
        """The same on the calling thread. `meanwhile` is called when something durable has been sent, if possible."""
        return self._overlaps.drive(verb, self._execute_blocking, meanwhile)

    def _execute_blocking(self, batch: Batch, meanwhile: Callable[[], object] | None = None) -> list[Any]:
        first = self.dispatcher.direct(batch)
        result: Result | None = None
        began = self._ports.clock.monotonic()
        if first is not None:
            result = self._exchange_blocking(first, meanwhile if batch.durable else None)
            if is_complete(result):
                return result
            if meanwhile is not None:  # what was done meanwhile is not to be held against the server
                began = self._ports.clock.monotonic()
        return self._execute_blocking_from(batch, first, result, began)

    def call_blocking(self, call: Packed) -> Any:
        """As `call`, on the calling thread."""
        place = self.dispatcher.topology.place_of(call.key)
        if place is None:
            return self._execute_blocking(call.batch())[0]
        began = self._ports.clock.monotonic()
        result = self._converse(place, False, call.data, 1, self.access.read_timeout)
        if type(result) is list and type(reply := result[0]) is not ReplyError:
            return reply
        batch = call.batch()
        return self._execute_blocking_from(batch, Send(place, (batch.calls[0].command,)), result, began)[0]

    def _execute_blocking_from(
        self, batch: Batch, first: Send | None, result: Result | None, began: float
    ) -> list[Any]:
        """As `_execute_from`, on the calling thread."""
        steps = self.dispatcher.execute(batch, first, result, began)
        try:
            step = next(steps)
            while True:
                if isinstance(step, Pause):
                    self._ports.clock.pause(step.seconds)
                    step = next(steps)
                else:
                    step = steps.send([self._exchange_blocking(send) for send in step])
        except StopIteration as end:
            answers: list[Any] = end.value
            return answers
        finally:
            steps.close()

    def _exchange_blocking(self, send: Send, meanwhile: Callable[[], object] | None = None) -> Result:
        timeout = send.timeout or self.access.read_timeout
        data, count = packed(send.commands), len(send.commands)
        return self._converse(send.place, send.plain, data, count, timeout, meanwhile)

    def _converse(
        self,
        place: Place,
        plain: bool,
        data: bytes,
        count: int,
        timeout: float,
        meanwhile: Callable[[], object] | None = None,
    ) -> Result:
        """Send so many commands, and wait for their replies, on a connection that nobody else uses meanwhile."""
        try:
            slot = self._slots.get_nowait()
        except Empty:
            began = self._ports.clock.monotonic()
            try:
                slot = self._slots.get(timeout=timeout)
            except Empty:
                return LineFailed(f"all {self._pool_size} blocking connections are in use", sent=False)
            timeout = max(LEAST_WAIT, timeout - (self._ports.clock.monotonic() - began))
        try:
            idle = self._idle.get((place, plain)) or self._idle_at(place, plain)
            line = _alive(idle) or BlockingLine(place, self._plain if plain else self.access, self._ports.clock)
            replies = line.exchange(data, count, timeout, meanwhile)
            idle.append(line)
            return replies
        except (LineFailed, ReplyError) as error:
            return error
        finally:
            self._slots.put(slot)

    def _idle_at(self, place: Place, plain: bool) -> list[BlockingLine]:
        """The blocking connections that nobody uses now: always the same list."""
        return self._idle.setdefault((place, plain), [])

    def warm_up(self, place: Place, number: int) -> None:
        """Open so many blocking connections to the server, for calls to come."""
        idle = self._idle_at(place, plain=False)
        with suppress(LineFailed, ReplyError):  # whoever needs one opens it, and is told
            while len(idle) < min(number, self._pool_size):
                idle.append(BlockingLine(place, self.access, self._ports.clock))

    # The end.

    async def ended(self) -> None:
        """Wait for what is under way on this event loop, but no longer than for one answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self.access.read_timeout):
                for line in list(self._of_loop().lines.values()):
                    await line.ended(self._ports.clock)

    def close(self) -> None:
        """Close what is idle on the calling thread's side, and the lines of every event loop."""
        with self._lock:
            idle = list(self._idle.values())
            loops = list(self._loops.items())
        for lines in idle:
            while line := _popped(lines):
                line.close()
        here = asyncio._get_running_loop()
        for loop, mine in loops:
            if loop is here or not loop.is_running():
                mine.close()
            else:
                loop.call_soon_threadsafe(mine.close)


def _popped(idle: list[BlockingLine]) -> BlockingLine | None:
    try:
        return idle.pop()
    except IndexError:  # none is left, or another thread was faster
        return None


def _alive(idle: list[BlockingLine]) -> BlockingLine | None:
    """One of them that can be used, taken out. Those that cannot are closed."""
    try:
        while not (line := idle.pop()).is_alive():
            line.close()
    except IndexError:  # none is left, or another thread was faster
        return None
    return line
