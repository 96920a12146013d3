"""The wire: one connection of an event loop that all its calls share, and one that blocks its thread.

Replies come in the order of the commands, so a call that nobody waits for any more does no harm: its reply is read and
dropped. A connection on which a reply is late is closed; what was sent on it may or may not have been carried out.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import hiredis
import msgspec

from holdfast.errors import InvalidOption
from holdfast.ports import Clock

Command = tuple[Any, ...]
_NOTHING = object()
_ONE = b":1\r\n"
"""The number 1 as it travels: what a job that was enqueued by itself is answered with, and many another call."""


class Place(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class ReplyError(Exception):
    """What the server said instead of an answer."""


class LineFailed(Exception):
    """No answer. `sent`: whether the server may have got the commands."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class Access(msgspec.Struct, frozen=True, kw_only=True):
    """How to connect. Times in seconds. Its repr does not show the password."""

    username: str = ""
    password: str = ""
    db: int = 0
    tls: ssl.SSLContext | None = None
    dial_timeout: float = 5.0
    read_timeout: float = 10.0
    write_timeout: float = 10.0

    def __repr__(self) -> str:
        return f"<Access of {self.username or 'nobody in particular'!r}>"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("username", self.username)]

    def greeting(self) -> list[Command]:
        """What to say first on a new connection."""
        said: list[Command] = []
        if self.password or self.username:
            said.append(("AUTH", self.username, self.password) if self.username else ("AUTH", self.password))
        if self.db:
            said.append(("SELECT", self.db))
        return said


def packed(commands: Sequence[Command]) -> bytes:
    """The commands as they travel. `InvalidOption` if one has a text in it that cannot."""
    try:
        if len(commands) == 1:
            alone: bytes = hiredis.pack_command(commands[0])
            return alone
        return b"".join([hiredis.pack_command(command) for command in commands])
    except UnicodeError as error:
        raise InvalidOption(f"a text cannot be stored: {error}") from error


def packed_start(words: Sequence[Any], more: int) -> bytes:
    """How a command of these words travels, up to where `more` words follow."""
    return b"*%d\r\n" % (len(words) + more) + packed([tuple(words)]).partition(b"\r\n")[2]


def unpacked(data: bytes) -> Command:
    """The command that travels like that, every word as bytes."""
    reader = hiredis.Reader()
    reader.feed(data)
    return tuple(cast("list[bytes]", reader.gets()))


def _new_reader() -> hiredis.Reader:
    return hiredis.Reader(replyError=ReplyError, notEnoughData=_NOTHING)


def _refused(replies: Sequence[Any]) -> str | None:
    return next((str(reply) for reply in replies if isinstance(reply, ReplyError)), None)


_Exchange = tuple[int, "asyncio.Future[list[Any]]", float]
"""How many replies there will be, who waits for them, and until when. A plain tuple: one is made for every call."""


class Line(asyncio.Protocol):
    """A connection of the running event loop. Any number of calls may be under way on it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.closed = False
        self.heard: Callable[[list[Any]], None] | None = None
        """Called with the replies to a call when they come, a turn of the loop before whoever waits for them runs."""
        self._loop = asyncio.get_running_loop()
        self._reader = _new_reader()
        self._under_way: deque[_Exchange] = deque()
        self._replies: list[Any] = []
        """Those to the first of them."""
        self._transport: asyncio.Transport | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0

    @classmethod
    async def open(cls, place: Place, access: Access) -> Line:
        """A new connection, introduced. `LineFailed` if that does not work in time."""
        loop = asyncio.get_running_loop()
        line: Line | None = None
        try:
            async with asyncio.timeout(access.dial_timeout):
                _, line = await loop.create_connection(
                    lambda: cls(place),
                    place.host,
                    place.port,
                    ssl=access.tls,
                    server_hostname=place.host if access.tls else None,
                )
                greeting = access.greeting()
                replies = await line.ask(greeting, access.dial_timeout) if greeting else []
        except (OSError, TimeoutError, LineFailed, UnicodeError) as error:
            if line is not None:
                line.close()
            raise LineFailed(f"cannot connect to {place}: {str(error) or type(error).__name__}", sent=False) from error
        except BaseException:
            if line is not None:
                line.close()
            raise
        if refusal := _refused(replies):
            line.close()
            raise ReplyError(refusal)
        return line

    async def ask(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """The replies, errors among them. `LineFailed` if they do not come in time."""
        return await self.send(packed(commands), len(commands), timeout)

    def send(self, data: bytes, count: int, timeout: float) -> asyncio.Future[list[Any]]:
        """The same for so many commands as they travel: they are sent now, and the future gets the replies."""
        if self.closed or self._transport is None:
            raise LineFailed(f"the connection to {self.place} is closed", sent=False)
        answer: asyncio.Future[list[Any]] = self._loop.create_future()
        deadline = self._loop.time() + timeout
        self._under_way.append((count, answer, deadline))
        if self._alarm is None or deadline < self._alarm_at:
            self._set_alarm(deadline)
        self._transport.write(data)
        return answer

    def _set_alarm(self, at: float) -> None:
        """One timer for all that is under way: most calls are answered long before, and need none of their own."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm, self._alarm_at = self._loop.call_at(at, self._look_for_late_ones), at

    def _look_for_late_ones(self) -> None:
        self._alarm = None
        if self._under_way:
            earliest = min(deadline for _, _, deadline in self._under_way)
            if earliest <= self._loop.time():
                self._fail(f"no answer from {self.place} within the deadline")
            else:
                self._set_alarm(earliest)

    async def ended(self, clock: Clock) -> None:
        """Wait until nothing is under way."""
        while under_way := [answer for _, answer, _ in self._under_way if not answer.done()]:
            await asyncio.wait(under_way)
            await clock.sleep(0)  # who got an answer may go on with another question

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See `asyncio.Protocol`."""
        self._transport = cast("asyncio.Transport", transport)  # that of another loop may not say that it is one
        raw = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        try:
            self._reader.feed(data)
            while (reply := self._reader.gets()) is not _NOTHING:
                count, answer, _ = self._under_way[0]
                self._replies.append(reply)
                if len(self._replies) == count:
                    replies, self._replies = self._replies, []
                    self._under_way.popleft()
                    if not answer.done():
                        answer.set_result(replies)
                    if self.heard is not None:
                        self.heard(replies)
        except (hiredis.ProtocolError, IndexError) as error:
            self._fail(f"{self.place} does not talk as a Redis server does: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._fail(f"the connection to {self.place} was lost: {exc or 'closed by the server'}")

    def _fail(self, message: str) -> None:
        self.closed = True
        self._stop_alarm()
        while self._under_way:
            _, answer, _ = self._under_way.popleft()
            if not answer.done() and not self._loop.is_closed():
                answer.set_exception(LineFailed(message, sent=True))
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close it, whatever is under way. To be called on its event loop, or when that has ended."""
        self.closed = True
        self._stop_alarm()
        if self._transport is not None and not self._loop.is_closed():
            self._transport.abort()

    def hang_up(self) -> None:
        """Close it so that the server hears of it at once, also if children that were forked have copies of it."""
        raw = None if self._transport is None else self._transport.get_extra_info("socket")
        if raw is not None:
            # A copy of our own: not every loop's socket can be shut down.
            with suppress(OSError), socket.socket(fileno=os.dup(raw.fileno())) as copy:
                copy.shutdown(socket.SHUT_RDWR)
        self.close()

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None


class BlockingLine:
    """A connection that one thread uses at a time. Its socket never blocks: who waits does so with a deadline."""

    def __init__(self, place: Place, access: Access, clock: Clock) -> None:
        self.place = place
        self._reader = _new_reader()
        self._access = access
        self._clock = clock
        try:
            self._socket = socket.create_connection(place, timeout=access.dial_timeout)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if access.tls is not None:
                self._socket = access.tls.wrap_socket(self._socket, server_hostname=place.host)
            self._socket.setblocking(False)
        except (OSError, UnicodeError) as error:
            raise LineFailed(f"cannot connect to {place}: {error}", sent=False) from error
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(self._socket, select.POLLIN)
        self._writable.register(self._socket, select.POLLOUT)
        if greeting := access.greeting():
            try:
                replies = self.ask(greeting, access.dial_timeout)
            except LineFailed as error:
                raise LineFailed(str(error), sent=False) from error
            if refusal := _refused(replies):
                self.close()
                raise ReplyError(refusal)

    def ask(self, commands: Sequence[Command], timeout: float) -> list[Any]:
        """As `Line.ask`. After a failure the connection is closed."""
        return self.exchange(packed(commands), len(commands), timeout)

    def exchange(
        self, data: bytes, count: int, timeout: float, meanwhile: Callable[[], object] | None = None
    ) -> list[Any]:
        """The same for so many commands as they travel. `meanwhile`: called when they are sent; the time for the
        replies begins after it.
        """
        replies: list[Any] = []
        try:
            self._send(data)
            if meanwhile is not None:
                meanwhile()
            deadline = self._clock.monotonic() + timeout
            if self._access.tls is None and not self._readable.poll(timeout * 1000):
                # The answer was hardly there yet, so it was waited for. With TLS it may be, and be read already.
                raise TimeoutError("timed out")
            received = self._received(deadline)
            if received == _ONE and count == 1:  # so the parser, which has nothing of it yet, need not be asked
                return [1]
            while True:
                self._reader.feed(received)
                while (reply := self._reader.gets()) is not _NOTHING:
                    replies.append(reply)
                if len(replies) >= count:
                    break
                received = self._received(deadline)
        except (OSError, hiredis.ProtocolError) as error:
            self.close()
            raise LineFailed(f"no answer from {self.place}: {error}", sent=True) from error
        except BaseException:
            self.close()  # interrupted: a reply may still be on its way
            raise
        if len(replies) > count or self._reader.has_data():
            self.close()
            raise LineFailed(f"{self.place} does not talk as a Redis server does: it answers unasked", sent=True)
        return replies

    def _send(self, data: bytes) -> None:
        rest: bytes | memoryview = data
        deadline = 0.0
        while True:
            wanted = self._writable
            try:
                sent = self._socket.send(rest)
                if sent == len(rest):
                    return
                rest = memoryview(rest)[sent:]
            except ssl.SSLWantReadError:
                wanted = self._readable
            except (BlockingIOError, ssl.SSLWantWriteError):
                pass
            deadline = deadline or self._clock.monotonic() + self._access.write_timeout
            self._wait(wanted, deadline)

    def _received(self, deadline: float) -> bytes:
        while True:
            wanted = self._readable
            try:
                if data := self._socket.recv(65536):
                    return data
                raise OSError("closed by the server")
            except ssl.SSLWantWriteError:
                wanted = self._writable
            except (BlockingIOError, ssl.SSLWantReadError):
                pass
            self._wait(wanted, deadline)

    def _wait(self, wanted: select.poll, deadline: float) -> None:
        left = deadline - self._clock.monotonic()
        if left <= 0 or not wanted.poll(left * 1000):
            raise TimeoutError("timed out")

    def is_alive(self) -> bool:
        """Whether it can be used: the server has sent nothing, such as the end of the connection."""
        if self._access.tls is None:
            return not self._readable.poll(0)
        try:
            self._socket.recv(1)  # b"": closed; anything else: nobody asked for it
            return False
        except ssl.SSLWantReadError:  # what came was of TLS itself, if anything
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close it."""
        self._socket.close()
