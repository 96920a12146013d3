"""`holdfast demo`: real workers on a real store, with jobs that succeed, fail, crash and are cancelled, to look at.

The demo enqueues; `holdfast worker` runs the jobs, in processes that some of them crash. In the end every job that was
accepted is looked up in the store.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from holdfast.app import Holdfast
from holdfast.cli.demo_feed import Feed
from holdfast.cli.demo_ledger import Ledger, latency
from holdfast.cli.demo_news import Newsroom
from holdfast.cli.demo_summary import Summary, write_summary
from holdfast.cli.demo_view import Moment, View, WorkerView, view
from holdfast.cli.demo_workers import EVENTS_VARIABLE, STORE_VARIABLE, Workers
from holdfast.cli.options import JsonOption
from holdfast.cli.wording import counted, masked
from holdfast.config import WorkerSettings
from holdfast.errors import HoldfastError, InvalidOption, StoreError
from holdfast.ports import SYSTEM
from holdfast.store import QueueCounts, all_sessions

_EVENTS = "events"
_CONCURRENCY = 10
_QUICK_TTL = 3.0
"""On a store of its own: a worker beats every second, and hears as soon that a running job is to be cancelled."""
_TICK = 0.02
_LOOK_AT_ALL_EVERY = 1.0
_START_DEADLINE = 30.0
_PATIENCE = 60.0
"""When no job has ended for so long, those that have not are lost."""


def demo(
    jobs: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Enqueue so many jobs, and wait until all have ended.")
    ] = None,
    processes: Annotated[int, typer.Option(min=1, max=64, help="How many worker processes.")] = 2,
    store: Annotated[
        str | None, typer.Option(metavar="URL", help="Use this store, and leave the jobs in it.  [default: a new one]")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Do not remove the new store at the end.")] = False,
    as_json: JsonOption = False,
) -> None:
    """See jobs succeed, fail, crash their processes and be cancelled, on workers of this machine, until Ctrl-C.

    In the end every accepted job is looked up in the store. The exit code is 0 if none was lost, also after Ctrl-C, and
    1 if one was; 130 if Ctrl-C came before all of --jobs had ended.
    """
    code = asyncio.run(_run(jobs, processes, store, keep=keep, as_json=as_json))
    if code:
        raise typer.Exit(code)


async def _run(jobs: int | None, processes: int, store: str | None, *, keep: bool, as_json: bool) -> int:
    """The demo in a folder of its own. The exit code."""
    signals = _Signals()
    folder = Path(tempfile.mkdtemp(prefix="holdfast-demo-"))
    try:
        url = store or f"sqlite:///{quote(str(folder / 'jobs.db'))}"
        async with _application(url, folder) as app:
            feed = Feed(folder / _EVENTS)
            # A store that was given may have other workers, and all who use it must agree about the TTL.
            ttl = _QUICK_TTL if store is None else WorkerSettings().lease_ttl
            workers = Workers(folder / "workers.log", processes=processes, concurrency=_CONCURRENCY, lease_ttl=ttl)
            try:
                with view(as_json=as_json) as shown:
                    show = _Show(app, feed, workers, signals, shown, url=masked(url), jobs=jobs, processes=processes)
                    await show.run()
            finally:
                await workers.stop(hurry=lambda: len(signals.heard) > 1)
                feed.close()
        summary = show.summary(kept=keep or store is not None)
        write_summary(summary, as_json=as_json)
    finally:
        if keep:
            (folder / _EVENTS).unlink(missing_ok=True)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    if summary.total.lost:
        return 1
    return 128 + signals.heard[0] if show.interrupted and jobs is not None else 0


def _application(url: str, folder: Path) -> Holdfast:
    """The demo's application in this process. Its workers import it from the same environment."""
    os.environ[STORE_VARIABLE] = url
    os.environ[EVENTS_VARIABLE] = str(folder / _EVENTS)
    from holdfast.cli.demo_tasks import app

    if app.store.beside() is app.store:
        raise InvalidOption("a store in memory cannot be shared with worker processes: use another store")
    return app


class _Signals:
    """Ctrl-C and its like, to be looked at. Made inside the event loop."""

    def __init__(self) -> None:
        self.heard: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self.heard.append, number)


class _Show:
    """From the start of the workers to the last job: one loop, step after step."""

    def __init__(
        self,
        app: Holdfast,
        feed: Feed,
        workers: Workers,
        signals: _Signals,
        shown: View,
        *,
        url: str,
        jobs: int | None,
        processes: int,
    ) -> None:
        from holdfast.cli.demo_mix import KINDS

        self._app = app
        self._feed = feed
        self._workers = workers
        self._signals = signals
        self._view = shown
        self._url = url
        self._jobs = jobs
        self._processes = processes
        self._ledger = Ledger(app.store, [kind.label for kind in KINDS], keep_ids=jobs is not None)
        self._newsroom = Newsroom()
        self._status = ""
        self._began_at = self._looked_at = 0.0
        self._showed_at = -shown.every
        self._seen = 0
        self.interrupted = False
        """Whether a signal came before everything was done."""

    async def run(self) -> None:
        """Start, enqueue until that is enough, stop the workers, and read every job once more."""
        from holdfast.cli.demo_producer import BURST, RATE, Producer

        self._status = f"starting {counted(self._processes, 'worker')}"
        while self._newsroom.ready < self._processes and not self._signals.heard:
            if self._newsroom.seconds > _START_DEADLINE:
                raise HoldfastError(f"the workers have not started within {_START_DEADLINE:g} s")
            await self._step()
        self._status = (
            f"{RATE:.0f} jobs a second, and bursts"
            if self._jobs is None
            else f"{self._jobs:,} jobs, as fast as they go"
        )
        self._began_at = self._newsroom.last_end = self._newsroom.seconds
        producer = Producer(self._app, self._ledger, self._jobs)
        while not self._signals.heard and not (producer.done and not self._ledger.open):
            if await producer.step():
                self._newsroom.say(f"a burst of {BURST} jobs", "cyan")
            await self._step()
            if self._jobs is not None and self._newsroom.seconds - self._newsroom.last_end > _PATIENCE:
                break  # they will not end any more: the audit finds them
        self.interrupted = bool(self._signals.heard) and not (producer.done and not self._ledger.open)
        self._status = "stopping"
        await self._hear()
        self._newsroom.stopping = True
        if self._signals.heard:
            await producer.cancel(list(self._ledger.open))
        await self._show(last=True)
        await self._workers.stop(hurry=lambda: len(self._signals.heard) > 1)
        await self._hear()
        await self._ledger.audit()

    def summary(self, *, kept: bool) -> Summary:
        """What there is to say at the end."""
        return Summary(
            tallies=self._ledger.tallies,
            seconds=self._newsroom.last_end - self._began_at,
            latency=latency(self._ledger.latencies),
            processes_died=self._newsroom.died,
            store=self._url,
            kept=kept,
            stopped=self.interrupted,
        )

    async def _step(self) -> None:
        self._workers.check()
        await self._hear()
        await self._show()
        await SYSTEM.clock.sleep(_TICK)

    async def _hear(self) -> None:
        """Listen to the workers, and look the jobs up that they say have ended; now and then all that are open."""
        ended = self._newsroom.hear(self._feed.take())
        now = self._newsroom.seconds
        if now - self._looked_at > _LOOK_AT_ALL_EVERY:
            self._looked_at = now
            ended = list(self._ledger.open)
        try:
            waits = await self._ledger.look(ended)
        except StoreError:
            waits = []  # whatever it was, the next look at all of them finds it
        seen = self._ledger.total.ended
        self._newsroom.count(seen - self._seen, waits)
        self._seen = seen

    # What is shown.

    async def _show(self, *, last: bool = False) -> None:
        now = self._newsroom.seconds
        if now - self._showed_at < self._view.every and not (last and self._view.live):
            return
        self._showed_at = now
        try:
            queues, workers = await self._counts(), await self._sessions()
        except StoreError:
            return  # the next will do
        newsroom = self._newsroom
        self._view.show(
            Moment(
                store=self._url,
                status=self._status,
                seconds=now,
                wanted=self._jobs,
                processes=self._processes,
                tally=self._ledger.total,
                processes_died=newsroom.died,
                rates=newsroom.rates,
                rate=newsroom.rate,
                latency=newsroom.latency,
                queues=queues,
                workers=workers,
                news=list(newsroom.news),
            )
        )

    async def _counts(self) -> list[QueueCounts]:
        found = {counts.queue: counts for counts in await self._app.acounts()}
        return [found.get(queue, QueueCounts(queue=queue)) for queue in self._app.tasks.queues()]

    async def _sessions(self) -> list[WorkerView]:
        store, ours = self._app.store, self._app.tasks.queues()
        now = await store.now()
        open_ones = [each for each in await all_sessions(store) if each.open and tuple(sorted(each.queues)) == ours]
        return [
            WorkerView(each.pid, now - each.opened_at, Counter(job.task for job in await store.held(each.id)))
            for each in sorted(open_ones, key=lambda each: each.opened_at)
        ]
