"""An application as users write it: at module level, on a store that cannot be opened here."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from holdfast import GiveUp, Holdfast, Retry, Snooze, Steps, current
from holdfast.events import Event

heard: list[Event] = []
done: list[Any] = []
"""What the handlers did, in that order."""
tenant: contextvars.ContextVar[str] = contextvars.ContextVar("tenant", default="nobody")

app = Holdfast("sqlite:////nowhere/to/be/found/jobs.db", on_event=heard.append)


@dataclass
class Address:
    street: str
    city: str


@app.task(queue="mail", priority="high")
def welcome(user_id: int, locale: str = "en") -> str:
    done.append(("welcome", user_id))
    return f"{locale}: welcome, user {user_id}"


@app.task(queue="mail")
async def newsletter(issue: int) -> int:
    await asyncio.sleep(0)
    done.append(("newsletter", issue))
    return issue * 2


@app.task
def parcel(to: Address, sent_at: datetime) -> Address:
    done.append(("parcel", to, sent_at))
    return to


@app.task
def bury(job_id: str, task: str, reason: str, error: str, arguments: dict[str, Any]) -> None:
    done.append(("bury", job_id, task, reason, error, arguments))


@app.task(max_retries=2, backoff=Steps((10, 60)), on_failed=bury)
def charge(order: int, fails: int = 99) -> str:
    done.append(("charge", order, current().attempt))
    if current().attempt <= fails:
        raise ConnectionError(f"attempt {current().attempt}")
    return "charged"


@app.task(max_retries=2, backoff=Steps((10, 60)), on_failed=bury)
async def acharge(order: int, fails: int = 99) -> str:
    await asyncio.sleep(0)
    return await asyncio.to_thread(contextvars.copy_context().run, charge, order, fails)


@app.task(max_retries=1)
def steer(how: str) -> str:
    done.append(("steer", how, current().attempt))
    match how:
        case "retry":
            raise Retry("busy", after=30)
        case "snooze":
            raise Snooze(45)
        case "give up":
            raise GiveUp("no such order")
    return how


@app.task
def fan_out(count: int) -> list[str]:
    """A plain handler that enqueues: by the blocking calls."""
    jobs = [welcome.enqueue(number) for number in range(count)]
    jobs += app.enqueue_many(welcome.job(number) for number in range(count, 2 * count))
    return [job.state.value for job in jobs]


@app.task
async def afan_out(count: int) -> list[str]:
    """A coroutine that enqueues plain functions and coroutines."""
    jobs = [await welcome.aenqueue(number) for number in range(count)]
    other = await newsletter.aenqueue(count)
    return [job.state.value for job in (*jobs, other)]


@app.task
def relay(left: int) -> None:
    """Plain, coroutine, plain, …: each enqueues the next."""
    done.append(("relay", left))
    if left:
        arelay.enqueue(left - 1)


@app.task
async def arelay(left: int) -> None:
    done.append(("arelay", left))
    if left:
        await relay.aenqueue(left - 1)


@app.task
def tick(n: int = 0) -> None:
    tick.enqueue(n + 1)


@app.task
async def atick(n: int = 0) -> None:
    await atick.aenqueue(n + 1)


@app.task
def remind(every: float) -> None:
    remind.options(delay=every).enqueue(every)


@app.task
def whose() -> str:
    return tenant.get()


@app.task
async def awhose() -> str:
    return tenant.get()


@app.task(timeout=0.05, max_retries=0)
def slow() -> str:
    while not current().cancelled:
        pass
    raise TimeoutError("stopped")


@app.task(timeout=0.05, max_retries=0)
async def aslow() -> str:
    await asyncio.sleep(60)
    return "never"


@app.task
def thread_name() -> str:
    return threading.current_thread().name


@app.task
def order_placed(order: int) -> str:
    """Settles itself in a transaction of its own. The connection is a stand-in: the kit takes any."""
    current().succeed_on(object(), {"order": order})
    if order < 0:
        raise ValueError("rolled back")
    return "returned"
