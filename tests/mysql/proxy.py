"""A wire between a client and the server that can be cut at the worst moment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit


class Proxy:
    """Passes bytes on, until it is told not to.

    `cut_at`: when the client sends this, the server still gets it, but the answer never arrives. `deaf`: bytes vanish.
    """

    def __init__(self, url: str) -> None:
        self._url = urlsplit(url)
        self.cut_at: bytes | None = None
        self.cuts = 0
        self.cut = asyncio.Event()
        self.deaf = False
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: Any = None

    @property
    def url(self) -> str:
        port = self._server.sockets[0].getsockname()[1]
        return f"mysql://{self._url.username}@127.0.0.1:{port}{self._url.path}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        try:
            yield self
        finally:
            self._server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        behind, ahead = await asyncio.open_connection(self._url.hostname, self._url.port)
        up = asyncio.create_task(self._pass_on(reader, ahead, writer))
        down = asyncio.create_task(self._pass_on(behind, writer, None))
        try:
            await asyncio.wait([up, down], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.sleep(0.05)  # the server finishes what it was sent
        except asyncio.CancelledError:
            pass  # the test is over
        finally:
            for part in (up, down):
                part.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            for end in (writer, ahead):
                end.close()

    async def _pass_on(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter | None
    ) -> None:
        while data := await reader.read(65536):
            if self.deaf:
                continue
            writer.write(data)
            await writer.drain()
            if client is not None and self.cut_at is not None and self.cut_at in data:
                self.cuts += 1
                self.cut.set()
                client.transport.abort()
                return
