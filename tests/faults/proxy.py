"""A wire between worker processes and their server that can keep a request to itself for as long as a test likes, or
lose the answer to it.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from types import TracebackType
from typing import Self


class Proxy:
    """Passes on what comes, in both directions. What it holds it passes on later, even if the client has gone."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._mark: re.Pattern[bytes] | None = None
        self._lost: re.Pattern[bytes] | None = None
        self._cut = False
        self._lock = threading.Lock()
        self.held = threading.Event()
        """A request is being held, or its answer was lost."""
        self._released = threading.Event()
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()
        self._listener.close()
        for end in self._sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def hold(self, mark: re.Pattern[bytes]) -> None:
        """Keep the next request with that in it, until `release`. All others pass."""
        self.held.clear()
        self._released.clear()
        self._mark = mark

    def release(self) -> None:
        """Pass on what is held."""
        self._mark = None
        self._released.set()

    def lose_reply(self, mark: re.Pattern[bytes], *, cut: bool) -> None:
        """Pass on the next request with that in it, but nothing that the server says on that connection from then on:
        it is cut, or nobody ever hears of it again.
        """
        self.held.clear()
        self._cut = cut
        self._lost = mark

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self._server_port))
                except OSError:
                    client.close()
                    continue
                self._sockets += [client, server]
                deaf = threading.Event()
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, target, deaf), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, deaf: threading.Event) -> None:
        """`deaf`: the client is not to hear anything any more."""
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._is_to_be_held(data):
                    self.held.set()
                    self._released.wait()
                elif self._is_to_be_unanswered(data):
                    deaf.set()
                elif deaf.is_set() and source.getpeername()[1] == self._server_port:
                    self.held.set()
                    if not self._cut:
                        continue
                    break
                # Who has gone hears nothing, but what he said still counts.
                with contextlib.suppress(OSError):
                    target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _is_to_be_held(self, data: bytes) -> bool:
        with self._lock:
            if self._mark is None or not self._mark.search(data):
                return False
            self._mark = None
            return True

    def _is_to_be_unanswered(self, data: bytes) -> bool:
        with self._lock:
            if self._lost is None or not self._lost.search(data):
                return False
            self._lost = None
            return True
