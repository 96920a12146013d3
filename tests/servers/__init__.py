"""Real private servers for tests: PostgreSQL, PgBouncer, MariaDB and Redis, on free loopback ports.

Each lives in a temporary folder. A server is a context manager; its data survives `kill` and `stop`, so a test may
crash it and `start` it again on the same port. It runs in a session of its own (Ctrl-C reaches the tests, not the
server), is only ever signalled by the process id that was started here, and is stopped by a small guard process if the
tests die without stopping it.

Redis comes alone, as a primary with replicas (`replicaof`), watched by a sentinel, and as a cluster.
"""

from __future__ import annotations

from tests.servers.mariadb import MariaDbServer
from tests.servers.postgres import PgBouncerServer, PostgresServer, find_postgres
from tests.servers.redis import RedisRefusedError, RedisServer, redis_command, wait_for_replica
from tests.servers.redis_cluster import RedisCluster, RedisClusterNode
from tests.servers.redis_sentinel import RedisSentinel
from tests.servers.server import (
    LOG_TAIL_LINES,
    SHUTDOWN_SECONDS,
    STARTUP_SECONDS,
    Server,
    ServerFailedError,
    ServerMissingError,
    find_program,
    free_port,
    guard_orphan,
    listener_pid,
    missing_server_policy,
    remove_folder,
)

__all__ = [
    "LOG_TAIL_LINES",
    "SHUTDOWN_SECONDS",
    "STARTUP_SECONDS",
    "MariaDbServer",
    "PgBouncerServer",
    "PostgresServer",
    "RedisCluster",
    "RedisClusterNode",
    "RedisRefusedError",
    "RedisSentinel",
    "RedisServer",
    "Server",
    "ServerFailedError",
    "ServerMissingError",
    "find_postgres",
    "find_program",
    "free_port",
    "guard_orphan",
    "listener_pid",
    "missing_server_policy",
    "redis_command",
    "remove_folder",
    "wait_for_replica",
]
