"""Bare Redis through redis-py: what the targets on Redis name as the bare loop. Two connections, batches of 250."""

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import redis
import redis.asyncio

from benchmarks.bare.loop import Taken, work
from benchmarks.bare.redis import (
    BULK,
    CLAIM,
    ENDED,
    ENQUEUE,
    HELD,
    JOBS,
    READY,
    SETTLE,
    BareRedis,
    new_record,
    payload_of,
)
from benchmarks.program import main, run_loop, url

BATCH = 250


class BareRedisPy(BareRedis):
    info: ClassVar[dict[str, Any]] = {
        **BareRedis.info,
        "lib": "bare loop (redis-py)",
        "version": redis.__version__,
        "settings": f"Lua scripts through redis-py, asyncio, two connections, batches of {BATCH}",
    }

    def _scripts(self) -> None:
        if not hasattr(self, "_client"):
            self._client = redis.Redis.from_url(url())
            self._one, self._many = self._client.register_script(ENQUEUE), self._client.register_script(BULK)

    def enqueue(self, number: int, text: str) -> None:
        self._scripts()
        self._one(keys=[JOBS, READY], args=new_record(number, text))

    async def open(self) -> None:
        self._awaited = redis.asyncio.Redis.from_url(url())
        self._one_awaited = self._awaited.register_script(ENQUEUE)

    async def aenqueue(self, number: int, text: str) -> None:
        await self._one_awaited(keys=[JOBS, READY], args=new_record(number, text))

    async def close(self) -> None:
        await self._awaited.aclose()

    def enqueue_many(self, numbers: range, text: str) -> None:
        self._scripts()
        self._many(keys=[JOBS, READY], args=[word for number in numbers for word in new_record(number, text)])

    def worker(self) -> None:
        run_loop(work(_Loop(), BATCH))


class _Loop:
    async def open(self) -> None:
        self._claim = redis.asyncio.Redis.from_url(url()).register_script(CLAIM)
        self._settle = redis.asyncio.Redis.from_url(url()).register_script(SETTLE)
        self._number = 0

    async def claim(self, limit: int) -> Sequence[Taken]:
        self._number += 1
        token = b"%d:%d" % (time.monotonic_ns(), self._number)
        found = await self._claim(keys=[READY, JOBS, HELD], args=[limit, token])
        return [Taken(id, token, payload_of(record)) for id, record in zip(*found, strict=True)] if found else []

    async def settle(self, jobs: Sequence[Taken]) -> int:
        words = [word for job in jobs for word in (job.id, job.version)]
        settled: int = await self._settle(keys=[READY, JOBS, HELD, ENDED], args=words)
        return settled


if __name__ == "__main__":
    main(BareRedisPy())
