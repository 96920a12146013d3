"""A private sentinel that watches a private Redis."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tests.servers.redis import RedisRefusedError, RedisServer, fields, redis_command
from tests.servers.server import STARTUP_SECONDS, ServerFailedError


class RedisSentinel(RedisServer):
    """A private sentinel: `with RedisSentinel(primary) as sentinel: connect(sentinel.url)`.

    It alone decides (a quorum of one) that the primary is down, after half a second, and promotes a replica about half
    a second later. Start the replicas first: when `start` returns, it has spoken to all that the primary has. It needs
    10 s to notice one that comes later, or to make an old primary that is back a replica.

    A sentinel connects to a new primary once a second, so that half a second has a price: for a second after the
    promotion it may call the new primary down, or name the old one to clients that ask with SENTINEL MASTERS, as those
    of redis-py do; if there is a second replica, it may even promote that one. `wait_for_primary` waits until this is
    over. With `settings={"sentinel down-after-milliseconds mymaster": "1500"}` it does not happen, and the promotion
    takes 3.5 s.

    `settings` are lines of its file. Through a restart it keeps who is primary.
    """

    name = "redis-sentinel"

    def __init__(
        self,
        primary: RedisServer,
        name: str = "mymaster",
        *,
        settings: Mapping[str, str] | None = None,
        startup_seconds: float = STARTUP_SECONDS,
    ) -> None:
        super().__init__(settings=settings, startup_seconds=startup_seconds)
        self._primary = primary
        self.primary_name = name

    @property
    def url(self) -> str:
        return f"redis+sentinel://127.0.0.1:{self.port}/{self.primary_name}/0"

    @property
    def primary_port(self) -> int:
        """Where the sentinel sends clients now."""
        _, port = self.ask("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self.primary_name)
        return int(port)

    def wait_for_primary(self, server: RedisServer, seconds: float = 20.0) -> None:
        """Return when the sentinel has this server as its primary, is connected to it and finds nothing wrong."""
        deadline = time.monotonic() + seconds
        while True:
            seen = pairs(self.ask("SENTINEL", "MASTER", self.primary_name))
            if seen["port"] == str(server.port) == str(self.primary_port) and seen["flags"] == "master":
                return
            if time.monotonic() > deadline:
                raise ServerFailedError(f"{server.port} did not become the primary within {seconds:g} s: {seen}")
            time.sleep(0.02)

    def _command(self, folder: Path) -> list[str]:
        return [*super()._command(folder), "--sentinel"]

    def _own_settings(self) -> dict[str, str]:
        name = self.primary_name
        return {
            "port": str(self.port),
            "bind": "127.0.0.1",
            f"sentinel monitor {name}": f"127.0.0.1 {self._primary.port} 1",
            f"sentinel down-after-milliseconds {name}": "500",
            f"sentinel failover-timeout {name}": "3000",
        }

    def _answers(self, folder: Path, pid: int) -> bool:
        try:
            return self.info().get("process_id") == str(pid) and self._has_seen_all_replicas()
        except (OSError, RedisRefusedError):
            return False

    def _has_seen_all_replicas(self) -> bool:
        """It can promote only those that it has asked for their state."""
        try:
            expected = int(fields(redis_command(self.primary_port, "INFO", "replication"))["connected_slaves"])
        except (OSError, RedisRefusedError):
            return True  # the primary is down, or not open to us: nothing to compare with
        replicas = map(pairs, self.ask("SENTINEL", "REPLICAS", self.primary_name))
        seen = [each for each in replicas if each["flags"] == "slave" and each["master-link-status"] == "ok"]
        return len(seen) >= expected


def pairs(words: list[str]) -> dict[str, str]:
    """What a sentinel answers: a name, its value, the next name, ..."""
    return dict(zip(words[::2], words[1::2], strict=True))
