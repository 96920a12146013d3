"""A server in front of a Redis server, or of none, that answers some commands itself: what a real one says seldom."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Self

import hiredis

FORWARD = object()
"""Let the server behind answer."""
NOTHING = object()
"""Do not answer at all."""

Answer = Callable[[list[bytes]], Any]


def error(text: str) -> bytes:
    """An error, as it travels."""
    return f"-{text}\r\n".encode()


def number(value: int) -> bytes:
    """A number, as it travels."""
    return f":{value}\r\n".encode()


def numbers(*values: int) -> bytes:
    """Several."""
    return f"*{len(values)}\r\n".encode() + b"".join(map(number, values))


def text(value: bytes) -> bytes:
    """A text, as it travels."""
    return b"$%d\r\n%b\r\n" % (len(value), value)


class FakeServer:
    """`with FakeServer(answer, behind=server.port) as fake: connect(fake.url)`. `answer` gets the words of each command
    and says FORWARD, NOTHING, or the reply as it travels. `commands` are the names of all that came.
    """

    def __init__(self, answer: Answer, *, behind: int = 0) -> None:
        self._answer = answer
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.commands: list[str] = []
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5)
        for each in self._open:
            each.close()

    def _start(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(connection)
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        reader = hiredis.Reader()
        behind: socket.socket | None = None
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                reader.feed(data)
                while (words := reader.gets()) is not False:
                    self.commands.append(words[0].decode().upper())
                    said = self._answer(words)
                    if said is NOTHING:
                        continue
                    if said is FORWARD:
                        if behind is None:
                            behind = socket.create_connection(("127.0.0.1", self._behind))
                            self._open.append(behind)
                        said = _relayed(behind, words)
                    connection.sendall(said)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


def _relayed(behind: socket.socket, words: list[bytes]) -> bytes:
    command: Any = tuple(words)
    behind.sendall(hiredis.pack_command(command))
    reader = hiredis.Reader()
    raw = b""
    while True:
        data = behind.recv(65536)
        if not data:
            raise ConnectionError("the server behind is gone")
        raw += data
        reader.feed(data)
        if reader.gets() is not False:
            return raw
