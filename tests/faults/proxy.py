"""A wire between worker processes and their server that can keep a request to itself for as long as a test likes."""

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
        self._lock = threading.Lock()
        self.held = threading.Event()
        """A request is being held."""
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
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._is_to_be_held(data):
                    self.held.set()
                    self._released.wait()
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
