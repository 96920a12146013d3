"""Pruning costs what there is to be pruned, not what is kept."""

from __future__ import annotations

from holdfast.ports import SYSTEM
from holdfast.store import Session
from tests.redis.helpers import empty, store_at
from tests.servers import RedisServer

SESSIONS = 100


def commands_so_far(server: RedisServer) -> int:
    return int(server.info("stats")["total_commands_processed"])


async def test_sessions_that_are_still_kept_cost_a_look_each_and_no_more(redis_server: RedisServer) -> None:
    async with store_at(f"{redis_server.url}?namespace=pruned", ports=SYSTEM) as store:
        for number in range(SESSIONS):
            await store.open_session(Session(id=f"s{number}", queues=("a", "b")))
            await store.close_session(f"s{number}")
        before = commands_so_far(redis_server)
        assert await store.prune(100) == 0
        assert commands_so_far(redis_server) - before < 1.5 * SESSIONS
    empty(redis_server.url, "pruned")
