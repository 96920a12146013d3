"""The application that is measured: one task, as a coroutine function or a plain one. `holdfast worker` imports it."""

from benchmarks.program import marker, plain, url
from holdfast import Holdfast

app = Holdfast(url())
mark = marker()

if plain():

    @app.task(queue="bench", name="noop")
    def noop(n: int, s: str) -> None:
        mark()

else:

    @app.task(queue="bench", name="noop")
    async def noop(n: int, s: str) -> None:
        mark()
