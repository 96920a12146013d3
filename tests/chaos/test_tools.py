"""The tools of the rig do what they say: the wire, the disk, the clock."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.clocks import WrongClock
from tests.chaos.disks import Disk, disk
from tests.chaos.proxy import Proxy
from tests.worker.programs import eventually

# The wire.


class Echo:
    """A server that answers every line with the same in capitals, and knows who is connected."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.heard: list[bytes] = []
        self.ended = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self._listener.accept()[0],), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError), client:
            while data := client.recv(65536):
                self.heard.append(data)
                client.sendall(data.upper())
        self.ended += 1


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxy(echo.port) as proxy:
        yield proxy


@pytest.fixture
def client(proxy: Proxy) -> Iterator[socket.socket]:
    """A connection through the proxy that has been used."""
    with connected(proxy) as client:
        yield client


@contextlib.contextmanager
def connected(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=60) as client:
        assert asked(client, b"hello") == b"HELLO"
        yield client


def asked(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    return client.recv(65536)


def is_silent(client: socket.socket) -> bool:
    """Nothing comes, not even an end."""
    client.settimeout(0.2)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(60)
    return False


def test_a_black_hole_keeps_connections_and_lets_nothing_through_until_it_is_over(
    echo: Echo, proxy: Proxy, client: socket.socket
) -> None:
    proxy.hold()
    client.sendall(b"anybody")
    new = socket.create_connection(("127.0.0.1", proxy.port), timeout=60)
    new.sendall(b"nobody")
    assert is_silent(client)
    assert is_silent(new)
    assert echo.heard == [b"hello"]
    proxy.pass_on()
    assert client.recv(100) == b"ANYBODY"
    assert new.recv(100) == b"NOBODY"
    new.close()


def test_dropped_replies_are_lost_while_requests_arrive(echo: Echo, proxy: Proxy, client: socket.socket) -> None:
    proxy.drop_replies()
    client.sendall(b"write this")
    eventually(lambda: b"write this" in echo.heard, "the request arrived")
    assert is_silent(client)
    proxy.pass_on()
    with pytest.raises(ConnectionResetError):  # it has missed something: it must not hear the next answer instead
        client.recv(100)
    with connected(proxy):
        pass


def test_the_reply_to_a_marked_request_is_lost_and_all_others_pass(
    echo: Echo, proxy: Proxy, client: socket.socket
) -> None:
    proxy.lose_reply(re.compile(b"commit"))
    with connected(proxy) as other:
        client.sendall(b"commit")
        assert proxy.lost.wait(60)
        assert echo.heard[-1] == b"commit"
        assert is_silent(client)
        assert asked(other, b"commit") == b"COMMIT"


def test_the_reply_to_the_commit_of_a_marked_request_is_lost(echo: Echo, proxy: Proxy, client: socket.socket) -> None:
    proxy.lose_reply(re.compile(b"insert"), re.compile(b"commit"))
    with connected(proxy) as other:
        assert asked(client, b"insert") == b"INSERT"
        assert asked(other, b"commit") == b"COMMIT"
        client.sendall(b"commit")
        assert proxy.lost.wait(60)
        assert echo.heard[-1] == b"commit"
        assert is_silent(client)


def test_a_reset_is_heard_as_such_and_an_end_as_an_end(echo: Echo, proxy: Proxy, client: socket.socket) -> None:
    with connected(proxy) as other:
        proxy.reset()
        for each in (client, other):
            with pytest.raises(ConnectionResetError):
                each.recv(100)
    with connected(proxy) as third:
        proxy.finish()
        assert third.recv(100) == b""
    eventually(lambda: echo.ended == 3, "the server has heard of it, too")


@pytest.mark.parametrize("kind", ["request_bytes", "reply_bytes"])
def test_connections_are_cut_after_so_many_bytes(echo: Echo, proxy: Proxy, client: socket.socket, kind: str) -> None:
    proxy.cut_after(**{kind: 7})
    assert asked(client, b"four") == b"FOUR"
    client.sendall(b"fives")
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while data := client.recv(100):
            received += data
    assert received in (b"", b"FIV")
    if kind == "request_bytes":
        eventually(lambda: echo.ended == 1, "the server has heard of it, too")
        assert b"".join(echo.heard) in (b"hellofourfiv", b"hellofour")
    assert proxy.cuts == 1


def test_half_open_connections(echo: Echo, proxy: Proxy, client: socket.socket) -> None:
    proxy.lose_servers()
    eventually(lambda: echo.ended == 1, "the server has lost its client")
    client.sendall(b"is anybody there")
    assert is_silent(client)
    with connected(proxy) as other:
        proxy.lose_clients()
        with pytest.raises(ConnectionResetError):
            other.recv(100)
    time.sleep(0.2)
    assert echo.ended == 1
    proxy.pass_on()
    eventually(lambda: echo.ended == 2, "and now the server knows")


def test_a_slow_wire_and_one_that_refuses(proxy: Proxy, client: socket.socket) -> None:
    proxy.slow_down(delay=0.05, jitter=0.01, bytes_per_second=1000)
    began = time.monotonic()
    assert asked(client, b"x" * 50) == b"X" * 50
    assert time.monotonic() - began >= 2 * (0.05 + 50 / 1000)
    proxy.pass_on()
    proxy.refuse()
    assert asked(client, b"still") == b"STILL"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))
    proxy.pass_on()
    with connected(proxy):
        pass


# The disk.


@pytest.fixture
def own_disk() -> Iterator[Disk]:
    with disk(32) as own:
        yield own


def test_a_power_cut_takes_what_was_not_flushed_and_nothing_else(own_disk: Disk) -> None:
    (own_disk.path / "kept").write_text("flushed")
    own_disk.flush()
    (own_disk.path / "gone").write_text("not flushed")
    with (own_disk.path / "synced").open("w") as file:
        file.write("flushed by its writer")
        file.flush()
        os.fsync(file.fileno())
    (own_disk.path / "gone too").write_text("not flushed")
    own_disk.cut_power()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        (own_disk.path / "late").write_text("no power")
    own_disk.restore_power()
    assert (own_disk.path / "kept").read_text() == "flushed"
    assert (own_disk.path / "synced").read_text() == "flushed by its writer"
    assert not (own_disk.path / "gone too").exists()


def test_a_full_disk_takes_nothing_until_there_is_space_again(own_disk: Disk) -> None:
    own_disk.fill()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        (own_disk.path / "more").write_bytes(b"x" * 100_000)
    own_disk.free()
    (own_disk.path / "more").write_bytes(b"x" * 100_000)


def test_a_read_only_disk(own_disk: Disk) -> None:
    own_disk.make_read_only()
    with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
        (own_disk.path / "more").touch()
    own_disk.make_writable()
    with (own_disk.path / "more").open("wb"), pytest.raises(OSError, match="busy"):
        own_disk.make_read_only()


def test_nothing_is_left_of_a_disk() -> None:
    with disk(32) as own:
        path = own.path
        child = subprocess.Popen(["sleep", "60"], cwd=path)  # somebody who still uses it
        own.cut_power()
        child.kill()
        child.wait()
    assert not path.parent.exists()
    assert str(path) not in Path("/proc/self/mountinfo").read_text()


# The clock.

_SAYS_THE_TIME = """
import sys, time
for line in sys.stdin:
    print(time.time(), time.monotonic(), flush=True)
"""


def test_a_clock_is_wrong_as_it_is_set_and_the_monotonic_one_is_right(tmp_path: Path) -> None:
    with WrongClock(tmp_path) as clock:
        program = subprocess.Popen(
            [sys.executable, "-c", _SAYS_THE_TIME],
            env={**os.environ, **clock.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert program.stdin
        assert program.stdout
        for seconds in (0, 3600, -3600, 300):
            clock.set(seconds)
            before = time.monotonic()
            program.stdin.write(b"now\n")
            program.stdin.flush()
            wall, monotonic = map(float, program.stdout.readline().split())
            assert wall - time.time() == pytest.approx(seconds, abs=60)
            assert before <= monotonic <= time.monotonic()
        program.kill()
        program.communicate()
        pid = program.pid
    assert not [left for left in Path("/dev/shm").glob("*faketime_*") if left.name.endswith(f"_{pid}")]
