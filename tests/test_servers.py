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
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest
import redis

from tests import servers
from tests.servers import (
    MariaDbServer,
    PgBouncerServer,
    PostgresServer,
    RedisServer,
    Server,
    ServerFailedError,
    ServerMissingError,
    missing_server_policy,
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
