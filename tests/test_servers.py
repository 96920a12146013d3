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

import psycopg
import pytest
import redis

from tests import servers
from tests.servers import (
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


def test_the_shared_redis_answers(redis_server: RedisServer) -> None:
    assert ask_redis(redis_server.url) is True


@pytest.mark.parametrize(("kind", "ask", "answer"), [(PostgresServer, ask_postgres, 1), (RedisServer, ask_redis, True)])
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


@pytest.mark.parametrize("kind", [PostgresServer, RedisServer])
def test_a_server_that_cannot_start_says_why(kind: type[PostgresServer] | type[RedisServer]) -> None:
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


@pytest.mark.parametrize("kind", ["PostgresServer", "RedisServer"])
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
