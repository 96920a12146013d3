"""The servers that the cells of one run share: one of each engine, started when it is first asked for."""

from __future__ import annotations

import contextlib
import itertools
from types import TracebackType
from typing import Self

from tests.faults.engines import ENGINES
from tests.servers import Server, ServerFailedError

_numbers = itertools.count(1)


class Fleet:
    """Cells run one after the other, so one may kill its server, if it starts it again."""

    def __init__(self) -> None:
        self._servers: dict[str, Server] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for engine in list(self._servers):
            self.discard(engine)

    def server(self, engine: str) -> Server:
        """The server of that engine, running, with the durability that it ships with (Redis: as its guide says)."""
        if engine in self._servers and not self._servers[engine].running:
            try:
                self._servers[engine].start()
            except ServerFailedError:
                self.discard(engine)
        if engine not in self._servers:
            server = ENGINES[engine].start()
            server.__enter__()
            self._servers[engine] = server
        return self._servers[engine]

    def discard(self, engine: str) -> None:
        """The next one who asks gets a new server."""
        if (server := self._servers.pop(engine, None)) is not None:
            with contextlib.suppress(ServerFailedError):
                server.close()

    @staticmethod
    def database_name() -> str:
        """A name that no other rig of this run has."""
        return f"chaos_{next(_numbers)}"
