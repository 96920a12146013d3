"""What ends with its event loop: connections that would otherwise be left open in a loop that is closed.

asyncio leaves them to the garbage collector. uvloop closes them itself, with a warning for each, and waits for ever if
warnings are errors.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable


class LoopEnd:
    """Calls `close` when the event loop that `watch` was awaited on ends its generators, as every runner of loops does.

    Used from one event loop.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close
        self._until_then: AsyncGenerator[None, None] | None = None

    async def watch(self) -> None:
        """From now on. Repeating it is harmless."""
        if self._until_then is None:
            self._until_then = self._wait()
            await anext(self._until_then)

    async def _wait(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self._close()
