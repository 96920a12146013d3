"""The private servers of the tests: they start, answer, survive a crash, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
import redis
from redis.crc import key_slot

from tests import servers
from tests.servers import (
    MariaDbServer,
    PgBouncerServer,
    PostgresServer,
    RedisCluster,
    RedisClusterNode,
    RedisSentinel,
    RedisServer,
    Server,
    ServerFailedError,
    ServerMissingError,
    missing_server_policy,
    wait_for_replica,
)


def ask_postgres(url: str) -> object:
    with psycopg.connect(url, connect_timeout=5) as connection:
        row = connection.execute("SELECT 1").fetchone()
    assert row is not None
    return row[0]


def connect_mariadb(url: str) -> pymysql.connections.Connection[pymysql.cursors.Cursor]:
    where = urlsplit(url)
    assert where.hostname is not None
    assert where.username is not None
    return pymysql.connect(
        host=where.hostname,
        port=where.port or 0,
        user=where.username,
        database=where.path.removeprefix("/"),
        connect_timeout=5,
    )


def ask_mariadb(url: str) -> object:
    with connect_mariadb(url) as connection, connection.cursor() as cursor:
        cursor.execute("SELECT 1")
        row = cursor.fetchone()
    assert row is not None
    return row[0]


def ask_redis(url: str) -> object:
    with redis.Redis.from_url(url, socket_timeout=5) as client:
        return client.ping()


def connect_redis(server: RedisServer, **options: Any) -> redis.Redis:
    return redis.Redis(port=server.port, decode_responses=True, socket_timeout=5, **options)


def connect_cluster(cluster: RedisCluster) -> redis.RedisCluster:
    return redis.RedisCluster(host="127.0.0.1", port=cluster.nodes[0].port, decode_responses=True, socket_timeout=5)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def test_the_shared_postgres_answers(postgres_server: PostgresServer) -> None:
    assert ask_postgres(postgres_server.url) == 1
    assert ask_postgres(postgres_server.socket_url) == 1


def test_the_shared_pgbouncer_answers(pgbouncer_server: PgBouncerServer) -> None:
    assert ask_postgres(pgbouncer_server.url) == 1


def test_the_shared_mariadb_answers(mariadb_server: MariaDbServer) -> None:
    assert ask_mariadb(mariadb_server.url) == 1


def test_the_shared_redis_answers(redis_server: RedisServer) -> None:
    assert ask_redis(redis_server.url) is True


@pytest.mark.parametrize(
    ("kind", "ask", "answer"),
    [(PostgresServer, ask_postgres, 1), (MariaDbServer, ask_mariadb, 1), (RedisServer, ask_redis, True)],
)
def test_a_server_is_gone_after_its_block(kind: type[Server], ask: Callable[[str], object], answer: object) -> None:
    with missing_server_policy():
        server = kind()
    with server:
        assert ask(server.url) == answer
        pid, port, folder = server.pid, server.port, server.folder
        assert alive(pid)
        assert listening(port)
    assert not alive(pid)
    assert not listening(port)
    assert not folder.exists()
    assert not server.running


def test_postgres_keeps_port_and_data_through_a_crash() -> None:
    with missing_server_policy():
        server = PostgresServer()
    with server:
        url = server.url
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            ask_postgres(url)
        server.start()
        assert server.url == url
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT answer FROM kept").fetchone() == (42,)


def test_mariadb_keeps_port_and_data_through_a_crash() -> None:
    with missing_server_policy():
        server = MariaDbServer()
    with server:
        url = server.url
        with connect_mariadb(url) as connection, connection.cursor() as cursor:
            cursor.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        server.kill()
        with pytest.raises(pymysql.OperationalError):
            ask_mariadb(url)
        server.start()
        assert server.url == url
        with connect_mariadb(url) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT answer FROM kept")
            assert cursor.fetchone() == (42,)


def test_the_user_of_mariadb_may_make_users_with_fewer_rights(mariadb_server: MariaDbServer) -> None:
    with connect_mariadb(mariadb_server.url) as connection, connection.cursor() as cursor:
        cursor.execute("CREATE USER guest@localhost, guest@127.0.0.1")
        cursor.execute("GRANT SELECT ON test.* TO guest@localhost, guest@127.0.0.1")
    guest_url = mariadb_server.url.replace("holdfast", "guest")
    assert ask_mariadb(guest_url) == 1
    with (
        connect_mariadb(guest_url) as connection,
        connection.cursor() as cursor,
        pytest.raises(pymysql.OperationalError, match="CREATE command denied"),
    ):
        cursor.execute("CREATE TABLE refused (id INT)")


def test_pgbouncer_is_gone_after_its_block(postgres_server: PostgresServer) -> None:
    with missing_server_policy():
        server = PgBouncerServer(postgres_server)
    with server:
        assert ask_postgres(server.url) == 1
        pid, port, folder = server.pid, server.port, server.folder
    assert not alive(pid)
    assert not listening(port)
    assert not folder.exists()
    assert ask_postgres(postgres_server.url) == 1


def test_pgbouncer_starts_again_on_its_port(postgres_server: PostgresServer) -> None:
    with missing_server_policy():
        server = PgBouncerServer(postgres_server)
    with server:
        url = server.url
        server.kill()
        with pytest.raises(psycopg.OperationalError):
            ask_postgres(url)
        server.start()
        assert server.url == url
        assert ask_postgres(url) == 1


def test_two_clients_of_pgbouncer_share_a_connection_one_transaction_after_the_other(
    postgres_server: PostgresServer,
) -> None:
    with missing_server_policy():
        server = PgBouncerServer(postgres_server, settings={"default_pool_size": "1"})
    with server, psycopg.connect(server.url) as first, psycopg.connect(server.url) as second:
        backends = set()
        for client in (first, second):
            backends.add(client.execute("SELECT pg_backend_pid()").fetchone())
            client.commit()
    assert len(backends) == 1


def test_pgbouncer_without_its_port_is_not_handed_out(postgres_server: PostgresServer) -> None:
    with missing_server_policy():
        server = PgBouncerServer(postgres_server, startup_seconds=0.5)
    server.port = postgres_server.port
    with pytest.raises(ServerFailedError, match="pgbouncer"), server:
        pytest.fail("its clients would talk to somebody else")
    assert not server.running


def test_redis_starts_again_on_its_port() -> None:
    with missing_server_policy():
        server = RedisServer()
    with server:
        url = server.url
        server.stop()
        assert not server.running
        with pytest.raises(redis.ConnectionError):
            ask_redis(url)
        server.start()
        assert server.url == url
        assert ask_redis(url) is True


def test_redis_with_a_file_keeps_port_and_data_through_a_crash() -> None:
    settings = {
        "appendonly": "yes",
        "appendfsync": "always",
        "maxmemory": "64mb",
        "client-output-buffer-limit": "pubsub 1mb 1mb 60",
    }
    with missing_server_policy():
        server = RedisServer(settings=settings)
    with server:
        url = server.url
        with connect_redis(server) as client:
            client.set("kept", 42)
            assert client.config_get("maxmemory") == {"maxmemory": str(64 * 2**20)}
        assert "pubsub 1048576 1048576 60" in server.ask("CONFIG", "GET", "client-output-buffer-limit")[1]
        server.kill()
        with pytest.raises(redis.ConnectionError):
            ask_redis(url)
        server.start()
        assert server.url == url
        with connect_redis(server) as client:
            assert client.get("kept") == "42"


@pytest.mark.parametrize("password", [None, "secret"])
def test_redis_is_handed_out_when_it_has_read_its_data(password: str | None) -> None:
    # With everysec, the server answers before it writes, while a flush is under way.
    settings = {"appendonly": "yes", "appendfsync": "always", "key-load-delay": "100"}  # so many microseconds for each
    if password is not None:
        settings["requirepass"] = password
    with missing_server_policy():
        server = RedisServer(settings=settings)
    with server, connect_redis(server, password=password) as client:
        with client.pipeline(transaction=False) as pipeline:
            for _ in range(5000):
                pipeline.incr("counted")
            pipeline.execute()
        server.kill()
        server.start()
        # A client of redis-py would hide it: it tries again for a while.
        assert "DB loaded from append only file" in (server.folder / "server.log").read_text()
        assert client.get("counted") == "5000"


def test_redis_with_an_acl_file_knows_only_the_users_in_it(tmp_path: Path) -> None:
    users = tmp_path / "users.acl"
    users.write_text("user default off\nuser worker on >secret ~jobs:* &* +@all\n")
    with missing_server_policy():
        server = RedisServer(settings={"aclfile": str(users)})
    with server:
        for _ in range(2):
            with pytest.raises(redis.AuthenticationError):
                ask_redis(server.url)
            with connect_redis(server, username="worker", password="secret") as client:
                client.set("jobs:1", "mine")
                with pytest.raises(redis.exceptions.NoPermissionError):
                    client.set("other", "not mine")
            server.kill()
            server.start()


def test_a_replica_has_what_was_written_before(redis_server: RedisServer) -> None:
    replica = RedisServer(settings={"replicaof": f"127.0.0.1 {redis_server.port}"})
    with replica, connect_redis(redis_server) as client, connect_redis(replica) as copy:
        for number in range(20):
            client.set("servers:copied", number)
            wait_for_replica(redis_server, replica, 10)
            assert copy.get("servers:copied") == str(number)


def test_a_server_that_is_no_replica_does_not_catch_up(redis_server: RedisServer) -> None:
    with RedisServer() as stranger, pytest.raises(ServerFailedError, match=r"did not catch up within 0\.2 s"):
        wait_for_replica(redis_server, stranger, 0.2)


def test_a_sentinel_promotes_the_replica_of_a_killed_primary() -> None:
    with missing_server_policy():
        primary = RedisServer()
    with primary, RedisServer(settings={"replicaof": f"127.0.0.1 {primary.port}"}) as replica:
        with connect_redis(primary) as client:
            client.set("kept", 42)
        wait_for_replica(primary, replica, 10)
        with RedisSentinel(primary) as sentinel:
            assert sentinel.url == f"redis+sentinel://127.0.0.1:{sentinel.port}/mymaster/0"
            assert sentinel.primary_port == primary.port
            primary.kill()
            sentinel.wait_for_primary(replica)
            asked = redis.Sentinel([("127.0.0.1", sentinel.port)])  # type: ignore[no-untyped-call]
            with asked, asked.master_for("mymaster") as client:  # type: ignore[no-untyped-call]
                client.set("written", 43)
                assert client.get("kept") == b"42"
            for server in (sentinel, replica):  # both remember, in their files
                server.kill()
                server.start()
            assert sentinel.primary_port == replica.port
            assert replica.info("replication")["role"] == "master"


def test_the_shared_redis_cluster_takes_keys_in_every_slot(redis_cluster: RedisCluster) -> None:
    keys: dict[int, str] = {}
    number = 0
    while len(keys) < 16_384:
        number += 1
        key = f"servers:{number}"
        keys.setdefault(key_slot(key.encode()), key)
    with connect_cluster(redis_cluster) as client:
        client.mset_nonatomic(dict.fromkeys(keys.values(), "here"))
        assert client.mget_nonatomic(list(keys.values())) == ["here"] * 16_384
        found = [len(node.ask("KEYS", "servers:*")) for node in redis_cluster.nodes]
        client.delete(*keys.values())
    assert sum(found) == 16_384
    assert max(found) - min(found) <= 1


def test_a_cluster_is_gone_after_its_block_and_its_killed_nodes_come_back() -> None:
    with missing_server_policy():
        cluster = RedisCluster(settings={"appendonly": "yes"})
    with cluster:
        url = cluster.url
        assert url == "redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in cluster.nodes)
        with connect_cluster(cluster) as client:
            client.set("kept", 42)
        owner = cluster.owner("kept")
        owner.kill()
        with pytest.raises(ServerFailedError, match=r"not whole after 0\.1 s"):
            cluster.wait(0.1)
        owner.start()
        cluster.wait()
        for node in cluster.nodes:
            node.kill()
        cluster.start()
        assert cluster.url == url
        assert cluster.owner("kept") is owner
        with connect_cluster(cluster) as client:
            assert client.get("kept") == "42"
        left = [(node.pid, node.port, node.folder) for node in cluster.nodes]
    for pid, port, folder in left:
        assert not alive(pid)
        assert not listening(port)
        assert not folder.exists()


def test_a_replica_in_a_cluster_takes_over() -> None:
    with missing_server_policy():
        cluster = RedisCluster(masters=3, replicas=1)
    with cluster, connect_cluster(cluster) as client:
        client.set("kept", 42)
        client.wait(1, 5000, target_nodes=client.get_node_from_key("kept"))
        owner = cluster.owner("kept")
        owner.kill()
        cluster.wait()
        assert cluster.owner("kept") in cluster.nodes[3:]
        assert client.get("kept") == "42"
        owner.start()
        cluster.wait()
        assert owner.info("replication")["role"] == "slave"


def test_a_node_too_old_to_choose_its_bus_port_has_a_free_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.servers.redis_cluster.redis_version", lambda binary: (6, 2))
    with missing_server_policy():
        node = RedisClusterNode()
    with node:
        assert "cluster-port" not in (node.folder / f"{node.port}.conf").read_text()
        assert listening(node.port + 10_000)


@pytest.mark.parametrize("kind", [PostgresServer, MariaDbServer, RedisServer])
def test_a_server_that_cannot_start_says_why(
    kind: type[PostgresServer] | type[MariaDbServer] | type[RedisServer],
) -> None:
    with missing_server_policy():
        server = kind(settings={"no_such_setting": "1"})
    with pytest.raises(ServerFailedError, match="no_such_setting"):
        server.start()
    folder = server.folder
    server.close()
    assert not folder.exists()


def test_a_server_that_never_answers_is_killed_at_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with missing_server_policy():
        server = RedisServer(startup_seconds=0.3)
    launched: list[int] = []

    def never(self: RedisServer, folder: Path, pid: int) -> bool:
        launched.append(pid)
        return False

    monkeypatch.setattr(RedisServer, "_answers", never)
    with pytest.raises(ServerFailedError, match=r"did not answer within 0\.3 s"), server:
        pytest.fail("a server that never answers must not be handed out")
    assert launched
    assert not alive(launched[-1])


@pytest.mark.parametrize("kind", ["PostgresServer", "MariaDbServer", "RedisServer"])
def test_a_server_ends_when_the_tests_are_killed(kind: str) -> None:
    with missing_server_policy():
        getattr(servers, kind)()
    script = (
        "import os, signal\n"
        f"from tests.servers import {kind}\n"
        f"server = {kind}()\n"
        "server.start()\n"
        "print(server.pid, server.folder, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parent.parent,
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL
    pid, folder = run.stdout.split()
    try:
        assert eventually(lambda: not alive(int(pid)))
    finally:
        servers.remove_folder(Path(folder))


@pytest.mark.parametrize(
    ("ci", "skip", "expected"),
    [
        ("", "", ServerMissingError),
        ("true", "1", ServerMissingError),
        ("true", "", ServerMissingError),
        ("", "1", pytest.skip.Exception),
    ],
)
def test_a_missing_server_fails_unless_skipping_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, ci: str, skip: str, expected: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("HOLDFAST_SKIP_SERVERS", skip)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(expected, match="Redis is not installed"), missing_server_policy():
        RedisServer()
