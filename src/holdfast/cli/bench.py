"""`holdfast bench`: how fast this store is from here. On a queue of its own, which is empty again afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import msgspec
import typer

from holdfast.app import Holdfast
from holdfast.cli.options import JsonOption, StoreArgument, application
from holdfast.cli.output import in_terminal, write_json, write_line
from holdfast.cli.wording import counted, masked, visible
from holdfast.config import WorkerSettings
from holdfast.errors import HoldfastError
from holdfast.job import State
from holdfast.ports import SYSTEM
from holdfast.store import JobQuery
from holdfast.tasks import Task

_TASK = "holdfast.bench"
_TEXT = "0123456789abcdef0123456789abcdef"
_CHUNK = 1_000
_CONCURRENCY = 100
_MOST_ONE_BY_ONE = 2_000
_MOST_LATENCIES = 200
_LONGEST_PHASE = 10.0
_PAUSE = 0.01
_LOOK_EVERY = 0.002
_PATIENCE = 30.0
_BAR = 32
_LIVE = (State.READY, State.IN_FLIGHT)

Advance = Callable[[int], None]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen. Rates in jobs a second, latencies in milliseconds from the enqueue call to the handler."""

    store: str
    jobs: int
    enqueue_one: float
    enqueue_bulk: float
    drain: float
    latency_p50_ms: float
    latency_p99_ms: float


def bench(
    store: StoreArgument,
    jobs: Annotated[
        int, typer.Option(metavar="N", min=100, max=1_000_000, help="How many jobs to enqueue in bulk and to drain.")
    ] = 20_000,
    as_json: JsonOption = False,
) -> None:
    """Measure this store: enqueue one by one and in bulk, drain, latency.

    Jobs go to a queue of a new name, on which no other worker works, and are removed in the end, also after Ctrl-C.
    Client and worker share this process. Not for a store that is busy: it takes all that the store can give.
    """
    measured = asyncio.run(_bench(store, jobs, shown=in_terminal() and not as_json))
    if as_json:
        write_json(msgspec.to_builtins(measured))
    else:
        _write(measured)


async def _bench(url: str, jobs: int, *, shown: bool) -> Measured:
    async with application(url) as app:
        bench = _Bench(app)
        try:
            with _progress(shown) as phase:
                one = await bench.enqueue_one(min(jobs, _MOST_ONE_BY_ONE), phase)
                bulk = await bench.enqueue_bulk(jobs, phase)
                async with bench.working():
                    drain = await bench.drain(phase)
                    latencies = await bench.latencies(min(jobs, _MOST_LATENCIES), phase)
        finally:
            await bench.remove()
    return Measured(
        store=masked(url),
        jobs=jobs,
        enqueue_one=round(one, 1),
        enqueue_bulk=round(bulk, 1),
        drain=round(drain, 1),
        latency_p50_ms=round(1000 * latencies[len(latencies) // 2], 3),
        latency_p99_ms=round(1000 * latencies[len(latencies) * 99 // 100], 3),
    )


Phase = Callable[[str, int], Advance]


class _Bench:
    """The measurements, on a queue that nobody else knows."""

    def __init__(self, app: Holdfast) -> None:
        self._app = app
        self._queue = f"holdfast-bench-{SYSTEM.ids.session_id()[:12]}"
        self._began: list[float] = []
        self._made = 0
        began, now = self._began, SYSTEM.clock.monotonic

        async def noop(n: int, s: str) -> None:
            began.append(now())

        self._task: Task[[int, str], None] = app.task(name=_TASK, queue=self._queue)(noop)

    async def enqueue_one(self, count: int, phase: Phase) -> float:
        """Jobs a second, one awaited call each."""
        advance = phase("enqueue, one by one", count)
        begun = SYSTEM.clock.monotonic()
        made = 0
        while made < count and (made < 10 or SYSTEM.clock.monotonic() - begun < _LONGEST_PHASE):
            await self._task.aenqueue(made, _TEXT)
            made += 1
            if made % 50 == 0:
                advance(made)
        self._made += made
        return made / (SYSTEM.clock.monotonic() - begun)

    async def enqueue_bulk(self, count: int, phase: Phase) -> float:
        """Jobs a second, a thousand a call."""
        advance = phase("enqueue, in bulk", count)
        begun = SYSTEM.clock.monotonic()
        await self._app.aenqueue_many((self._task.job(number, _TEXT) for number in range(count)), progress=advance)
        self._made += count
        return count / (SYSTEM.clock.monotonic() - begun)

    def working(self) -> _Working:
        """A worker of this queue alone, and without keepers: they would look after other queues, too."""
        settings = WorkerSettings(queues=(self._queue,), concurrency=_CONCURRENCY, keepers=False)
        return _Working(self._app, settings)

    async def drain(self, phase: Phase) -> float:
        """Jobs a second, from the first handler until none is pending. `HoldfastError` if some are left."""
        advance = phase("drain", self._made)
        await self._until_run(self._made, advance)
        deadline = SYSTEM.clock.monotonic() + _PATIENCE
        while await self._pending():
            if SYSTEM.clock.monotonic() > deadline:
                raise HoldfastError("the jobs have run, and were not settled: the drain is not counted")
            await SYSTEM.clock.sleep(_LOOK_EVERY)
        return self._made / (SYSTEM.clock.monotonic() - self._began[0])

    async def latencies(self, count: int, phase: Phase) -> list[float]:
        """Seconds from the call to the handler, one job at a time; the shortest first."""
        advance = phase("latency", count)
        seen: list[float] = []
        ends = SYSTEM.clock.monotonic() + _LONGEST_PHASE
        for number in range(count):
            before, called = len(self._began), SYSTEM.clock.monotonic()
            if called > ends and seen:
                break
            await self._task.aenqueue(number, _TEXT)
            await self._until_run(before + 1, lambda done: None)
            seen.append(self._began[-1] - called)
            advance(number + 1)
            await SYSTEM.clock.sleep(_PAUSE)
        return sorted(seen)

    async def _until_run(self, count: int, advance: Advance) -> None:
        seen, changed = len(self._began), SYSTEM.clock.monotonic()
        while len(self._began) < count:
            await SYSTEM.clock.sleep(_LOOK_EVERY)
            now = SYSTEM.clock.monotonic()
            if len(self._began) != seen:
                seen, changed = len(self._began), now
                advance(seen)
            elif now - changed > _PATIENCE:
                raise HoldfastError(f"{seen} of {counted(count, 'job')} ran, and then none within {_PATIENCE:.0f} s")

    async def _pending(self) -> int:
        counts = await self._app.acounts()
        return sum(one.ready + one.scheduled + one.in_flight for one in counts if one.queue == self._queue)

    async def remove(self) -> None:
        """Remove every job of this queue, ended or not. Jobs of other queues are never looked at."""
        cursor = None
        while True:
            page = await self._app.store.find(JobQuery(queue=self._queue, cursor=cursor, limit=_CHUNK))
            ids = [job.id for job in page.jobs]
            if ids:
                await self._app.store.request_cancel([job.id for job in page.jobs if job.state in _LIVE])
                await self._app.store.forget(ids)
            if page.next is None:
                return
            cursor = page.next


class _Working:
    """A worker while it is entered."""

    def __init__(self, app: Holdfast, settings: WorkerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __aenter__(self) -> None:
        self._service = self._app.worker_service(self._settings)
        self._running = asyncio.ensure_future(self._service.run())

    async def __aexit__(self, *error: object) -> None:
        self._service.stop()
        await self._running


@contextmanager
def _progress(shown: bool) -> Iterator[Phase]:
    """A bar for each phase in a terminal, and nothing elsewhere."""
    if not shown:
        yield lambda title, total: lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    with Progress(TextColumn("{task.description:<20}"), BarColumn(), MofNCompleteColumn(), transient=True) as progress:

        def phase(title: str, total: int) -> Advance:
            bar = progress.add_task(title, total=total)
            return lambda done: progress.update(bar, completed=done)

        yield phase


def _write(measured: Measured) -> None:
    write_line(f"{visible(measured.store)}, {counted(measured.jobs, 'job')}; client and worker in one process")
    rates = (
        ("enqueue, one by one", measured.enqueue_one),
        ("enqueue, in bulk", measured.enqueue_bulk),
        ("drain", measured.drain),
    )
    longest = max(rate for _, rate in rates)
    for title, rate in rates:
        bar = f"  {'█' * max(1, round(_BAR * rate / longest))}" if in_terminal() else ""
        write_line(f"{title:<20} {rate:>10,.0f} jobs/s{bar}")
    write_line(f"{'latency, p50':<20} {measured.latency_p50_ms:>10.2f} ms")
    write_line(f"{'latency, p99':<20} {measured.latency_p99_ms:>10.2f} ms")
