"""Bare Redis: three scripts through hiredis, the driver that the Redis engine uses, without a client library."""

import asyncio
import socket
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar
from urllib.parse import urlsplit

import hiredis
import uuid_utils

from benchmarks.bare.loop import Taken, work
from benchmarks.program import Program, main, run_loop, url

RECORD = b'604800000000\t5\t\t\n{"task":"noop"}\n{"n":%d,"s":"%s"}'
READY, JOBS, HELD, ENDED = (f"{{bench}}:{name}" for name in ("ready", "jobs", "held", "ended"))

ENQUEUE = """
local now = redis.call('TIME')
redis.call('HSET', KEYS[1], ARGV[1], now[1] .. now[2] .. '\\t' .. ARGV[2])
return redis.call('RPUSH', KEYS[2], ARGV[1])"""
BULK = """
local ids = {}
local now = redis.call('TIME')
for at = 1, #ARGV, 2 do
    ids[#ids + 1] = ARGV[at]
    ARGV[at + 1] = now[1] .. now[2] .. '\\t' .. ARGV[at + 1]
end
redis.call('HSET', KEYS[1], unpack(ARGV))
return redis.call('RPUSH', KEYS[2], unpack(ids))"""
CLAIM = """
local ids = redis.call('LPOP', KEYS[1], ARGV[1])
if not ids then return {} end
local held = {}
for _, id in ipairs(ids) do held[#held + 1] = id; held[#held + 1] = ARGV[2] end
redis.call('HSET', KEYS[3], unpack(held))
return {ids, redis.call('HMGET', KEYS[2], unpack(ids))}"""
SETTLE = """
local ids = {}
for at = 1, #ARGV, 2 do ids[#ids + 1] = ARGV[at] end
local tokens = redis.call('HMGET', KEYS[3], unpack(ids))
local ended = {}
for at, id in ipairs(ids) do if tokens[at] == ARGV[2 * at] then ended[#ended + 1] = id end end
if #ended > 0 then
    redis.call('HDEL', KEYS[3], unpack(ended))
    redis.call('HDEL', KEYS[2], unpack(ended))
    redis.call('LPUSH', KEYS[4], unpack(ended))
    redis.call('LTRIM', KEYS[4], 0, 999)
end
return #ended"""


def _place() -> tuple[str, int]:
    parts = urlsplit(url())
    return parts.hostname or "127.0.0.1", parts.port or 6379


class Blocking:
    """One command after another on a socket."""

    def __init__(self) -> None:
        self._socket = socket.create_connection(_place())
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader(notEnoughData=Ellipsis)

    def ask(self, *command: Any) -> Any:
        self._socket.sendall(hiredis.pack_command(command))
        while (reply := self._reader.gets()) is Ellipsis:
            self._reader.feed(self._socket.recv(65536))
        if isinstance(reply, hiredis.HiredisError):
            raise reply
        return reply


class Line(asyncio.Protocol):
    """The same on an event loop."""

    def __init__(self) -> None:
        self._reader = hiredis.Reader(notEnoughData=Ellipsis)
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self.transport: Any = None

    @classmethod
    async def open(cls) -> "Line":
        _, line = await asyncio.get_running_loop().create_connection(cls, *_place())
        return line

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data)
        while (reply := self._reader.gets()) is not Ellipsis:
            self._waiting.popleft().set_result(reply)

    async def ask(self, *command: Any) -> Any:
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append(answer)
        self.transport.write(hiredis.pack_command(command))
        reply = await answer
        if isinstance(reply, hiredis.HiredisError):
            raise reply
        return reply


class BareRedis(Program):
    info: ClassVar[dict[str, Any]] = {
        "lib": "bare loop (hiredis)",
        "version": hiredis.__version__,
        "settings": "Lua scripts through hiredis, batches of 500",
        "durability": "a token is compared at the end; nobody rescues",
        "threads": False,
        "pending": {"redis": [["HLEN", JOBS]]},
    }

    def setup(self) -> None:
        Blocking().ask("FLUSHALL")

    def _script(self, text: str) -> Any:
        self._line = Blocking()
        return self._line.ask("SCRIPT", "LOAD", text)

    def enqueue(self, number: int, text: str) -> None:
        if not hasattr(self, "_line"):
            self._enqueue = self._script(ENQUEUE)
        self._line.ask("EVALSHA", self._enqueue, 2, JOBS, READY, *new_record(number, text))

    async def open(self) -> None:
        self._async = await Line.open()
        self._enqueue = await self._async.ask("SCRIPT", "LOAD", ENQUEUE)

    async def aenqueue(self, number: int, text: str) -> None:
        await self._async.ask("EVALSHA", self._enqueue, 2, JOBS, READY, *new_record(number, text))

    async def close(self) -> None:
        self._async.transport.close()

    def enqueue_many(self, numbers: range, text: str) -> None:
        if not hasattr(self, "_line"):
            self._bulk = self._script(BULK)
        jobs = [word for number in numbers for word in new_record(number, text)]
        self._line.ask("EVALSHA", self._bulk, 2, JOBS, READY, *jobs)

    def worker(self) -> None:
        run_loop(work(_Loop()))


def new_record(number: int, text: str) -> tuple[str, bytes]:
    return str(uuid_utils.uuid7()), RECORD % (number, text.encode())


def payload_of(record: bytes) -> bytes:
    return record.rsplit(b"\n", 1)[1]


class _Loop:
    async def open(self) -> None:
        self._claims, self._settles = await Line.open(), await Line.open()
        self._claim = await self._claims.ask("SCRIPT", "LOAD", CLAIM)
        self._settle = await self._settles.ask("SCRIPT", "LOAD", SETTLE)
        self._number = 0

    async def claim(self, limit: int) -> Sequence[Taken]:
        self._number += 1
        token = b"%d:%d" % (time.monotonic_ns(), self._number)
        found = await self._claims.ask("EVALSHA", self._claim, 3, READY, JOBS, HELD, limit, token)
        if not found:
            return []
        return [Taken(id, token, payload_of(record)) for id, record in zip(*found, strict=True)]

    async def settle(self, jobs: Sequence[Taken]) -> int:
        words = [word for job in jobs for word in (job.id, job.version)]
        settled: int = await self._settles.ask("EVALSHA", self._settle, 4, READY, JOBS, HELD, ENDED, *words)
        return settled


if __name__ == "__main__":
    main(BareRedis())
