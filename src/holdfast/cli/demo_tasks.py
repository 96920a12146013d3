"""The application of `holdfast demo`: tasks that succeed, take their time, fail, crash and are cancelled.

Worker processes import it as `holdfast.cli.demo_tasks:app`, like any other application. Two variables of the
environment say where its store is, and where the events go that the demo shows. The queues have names of their own, so
that a demo on a store that others use takes no job of theirs.
"""

from __future__ import annotations

import ctypes
import hashlib
import os

from holdfast.app import Holdfast
from holdfast.cli.demo_feed import listener
from holdfast.cli.demo_workers import EVENTS_VARIABLE, STORE_VARIABLE
from holdfast.config import JobSettings, Settings
from holdfast.policy import FullJitter
from holdfast.ports import SYSTEM
from holdfast.worker.context import current

MAIL, IMAGES, REPORTS, TROUBLE = "demo-mail", "demo-images", "demo-reports", "demo-trouble"

_SOON = FullJitter(base=0.2, max=1.0)

app = Holdfast(
    os.environ.get(STORE_VARIABLE, "sqlite:///holdfast-demo.db"),
    settings=Settings(jobs=JobSettings(retention=600)),
    on_event=listener(os.environ.get(EVENTS_VARIABLE)),
)


@app.task(queue=MAIL)
async def welcome(user_id: int) -> str:
    """A coroutine that succeeds: it runs on the worker's event loop."""
    await SYSTEM.clock.sleep(0.002)
    return f"welcome, user {user_id}"


@app.task(queue=MAIL, priority="high")
async def alert(user_id: int) -> str:
    """The same, before everything else that waits in its queue."""
    return f"user {user_id}, look at this"


@app.task(queue=IMAGES)
def thumbnail(image: int) -> str:
    """A plain function that succeeds: it runs on a thread."""
    return hashlib.sha256(image.to_bytes(8, "big") * 10_000).hexdigest()


@app.task(queue=REPORTS)
async def report(seconds: float) -> None:
    """A slow one, which tells how far it is."""
    for tenth in range(10):
        current().progress({"percent": tenth * 10})
        await SYSTEM.clock.sleep(seconds / 10)


@app.task(queue=REPORTS)
async def export(seconds: float) -> None:
    """A very slow one, which somebody cancels while it runs."""
    await SYSTEM.clock.sleep(seconds)


@app.task(queue=TROUBLE, backoff=_SOON)
async def flaky(failures: int) -> str:
    """Fails so many times, then succeeds."""
    if current().attempt <= failures:
        raise ConnectionError("the partner does not answer")
    return f"attempt {current().attempt} got through"


@app.task(queue=TROUBLE, backoff=_SOON, max_retries=2)
def poison(number: int) -> None:
    """Fails however often it is tried, and ends in the dead letters."""
    raise ValueError(f"document {number} is broken")


@app.task(queue=TROUBLE, backoff=_SOON)
def segfault() -> None:
    """Kills its process by reading where there is nothing, as a broken C extension would."""
    ctypes.string_at(0)


@app.task(queue=TROUBLE, backoff=_SOON)
def hard_exit() -> None:
    """Ends its process without a word to anybody."""
    os._exit(3)
