"""The connections of a store: one per server that all calls of an event loop share, and a pool for blocking calls.

They carry out what `dispatch.py` decides. None is shared over a fork.
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from holdfast.ports import Ports
from holdfast.stores.driving import drive, drive_async
from holdfast.stores.loop_end import LoopEnd
from holdfast.stores.redis.dispatch import LEAST_WAIT, Batch, Dispatcher, Verb, is_complete
from holdfast.stores.redis.topology import Pause, Result, Send
from holdfast.stores.redis.wire import Access, BlockingLine, Line, LineFailed, Place, ReplyError

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

    def run_blocking(self, verb: Verb[T]) -> T:
        """The same on the calling thread."""
        return drive(verb, self._execute_blocking)

    def _execute_blocking(self, batch: Batch) -> list[Any]:
        first = self.dispatcher.direct(batch)
        result: Result | None = None
        began = self._ports.clock.monotonic()
        if first is not None:
            result = self._exchange_blocking(first)
            if is_complete(result):
                return result
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

    def _exchange_blocking(self, send: Send) -> Result:
        timeout = send.timeout or self.access.read_timeout
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
            line = self._take(send)
            replies = line.ask(send.commands, timeout)
            self._idle.setdefault((send.place, send.plain), []).append(line)
            return replies
        except (LineFailed, ReplyError) as error:
            return error
        finally:
            self._slots.put(slot)

    def _take(self, send: Send) -> BlockingLine:
        idle = self._idle.get((send.place, send.plain), [])
        while idle:
            try:
                line = idle.pop()
            except IndexError:  # another thread was faster
                break
            if line.is_alive():
                return line
            line.close()
        return BlockingLine(send.place, self._plain if send.plain else self.access, self._ports.clock)

    def warm_up(self, place: Place, number: int) -> None:
        """Open so many blocking connections to the server, for calls to come."""
        idle = self._idle.setdefault((place, False), [])
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
            idle = [line for lines in self._idle.values() for line in lines]
            self._idle.clear()
            loops = list(self._loops.items())
        for line in idle:
            line.close()
        here = asyncio._get_running_loop()
        for loop, mine in loops:
            if loop is here or not loop.is_running():
                mine.close()
            else:
                loop.call_soon_threadsafe(mine.close)
