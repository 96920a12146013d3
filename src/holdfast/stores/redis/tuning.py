"""What an operator may tune of a Redis store."""

from __future__ import annotations

import msgspec

DURABILITIES = ("server", "aof", "replicas")
"""What an insert may wait for, beyond the server's answer."""


class Tuning(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds. `pool_size`: blocking connections at most."""

    block: float = 7.5
    heartbeat_ttl: float = 15.0
    max_retries: int = 3
    pool_size: int = 16
    min_idle: int = 0
