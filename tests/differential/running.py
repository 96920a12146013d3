"""One workload on one engine, by the real worker: what callers were told, how every job ended, and the history."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from holdfast import Holdfast, Job, JobStillLive, KeyConflict, Task
from holdfast.failures import decode_history
from holdfast.job import JobId
from holdfast.lifecycle import Applied
from holdfast.store import InsertStatus, Store
from holdfast.testing.history import History, Violation, check, compare_endings, read_ending, recorded
from holdfast.testing.history.events import AnyEvent, Claim, Enqueue, Settle, Stopped
from tests.differential.application import RULES, WORKER, make_application
from tests.differential.workload import Action, Add, Cancel, Workload

PATIENCE = 120.0
"""Seconds for one phase. It takes a fraction of one."""


class Ran(msgspec.Struct, frozen=True):
    """What came of a workload. `answers`: what each action was told."""

    answers: tuple[str, ...]
    history: History


async def run(work: Workload, store: Store) -> Ran:
    """Ask everything, phase after phase, and let the real worker run it."""
    events: list[AnyEvent] = []
    noted = recorded(store, events.append, time.monotonic, str)
    app = make_application(noted, events.append)
    answers: list[str] = []
    latest: dict[int, JobId] = {}
    async with app:
        for phase in work.phases:
            answers += [await _ask(app, action, latest) for action in phase]
            async with _worker(app, events):
                await _until_all_has_ended(store, events)
        history = History(events=tuple(events), ending=await read_ending(store), rules=RULES)
    return Ran(tuple(answers), history)


@asynccontextmanager
async def _worker(app: Holdfast, events: list[AnyEvent]) -> AsyncIterator[None]:
    """A worker until the block ends, which then stops in order."""
    before = len(events)
    working = asyncio.create_task(app.arun_worker(WORKER))
    try:
        yield
    finally:
        working.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await working
        sessions = {event.session_id for event in events[before:] if isinstance(event, Claim)}
        events += [Stopped(at=time.monotonic(), session_id=session_id) for session_id in sessions]


async def _ask(app: Holdfast, action: Action, latest: dict[int, JobId]) -> str:
    if isinstance(action, Add):
        return await _add(app, action, latest)
    if action.label not in latest:
        return f"{action}: never created"
    if isinstance(action, Cancel):
        return f"{action}: {await app.acancel(latest[action.label])}"
    try:
        await app.areplay(latest[action.label])
    except (KeyConflict, JobStillLive) as error:
        return f"{action}: {type(error).__name__}"
    return f"{action}: replayed"


async def _add(app: Holdfast, add: Add, latest: dict[int, JobId]) -> str:
    task: Task[[int, list[str]], Any] = Task(app.tasks[add.task], app._client)
    call = task.options(
        queue=add.queue,
        share=add.share,
        priority=add.priority,
        delay=add.delay,
        max_retries=add.max_retries,
        key=add.key,
    )
    try:
        job = await call.aenqueue(add.label, list(add.steps))
    except KeyConflict:
        return f"{add.task} {add.label}: key conflict"
    latest[add.label] = job.id
    return f"{add.task} {add.label}: {'created' if job.created else 'existing'}"


async def _until_all_has_ended(store: Store, events: list[AnyEvent]) -> None:
    """Nothing waits or runs, every claim was settled, and what follows failures has arrived."""
    async with asyncio.timeout(PATIENCE):
        while True:
            counts = await store.counts()
            live = sum(count.ready + count.scheduled + count.in_flight for count in counts)
            ended = sum(count.succeeded + count.failed + count.cancelled for count in counts)
            applied = [event for event in events if isinstance(event, Settle) and event.applied is Applied.APPLIED]
            claims = sum(isinstance(event, Claim) for event in events)
            created = sum(isinstance(event, Enqueue) and event.status is InsertStatus.CREATED for event in events)
            followers = sum(len(settle.then) for settle in applied)
            settled = sum(settle.session_id is not None for settle in applied)
            if not live and claims == settled and ended == created + followers:
                return
            await asyncio.sleep(0.005)


# What is compared.


def describe(job: Job) -> object:
    """How a job ended, without what is different on purpose: ids and times, and how often it was claimed in vain."""
    return (
        job.task,
        job.payload.decode(),
        job.queue,
        job.share,
        job.priority,
        job.key.text if job.key else None,
        job.state.value,
        job.reason.value,
        f"attempt {job.attempt}, {job.failures} failures, {job.crashes} crashes, {job.snoozes} snoozes",
        tuple((failure.type, failure.message) for failure in decode_history(job.failure_history)),
        job.result,
    )


def judge(ran: dict[str, Ran]) -> list[Violation]:
    """Where engines differ, and what is wrong on each of them."""
    found = compare_endings({engine: one.history.ending for engine, one in ran.items()}, describe)
    first, *others = ran
    for engine in others:
        for here, there in zip(ran[first].answers, ran[engine].answers, strict=True):
            if here != there:
                found.append(Violation(20, "", f"{first} answered {here!r}, {engine} {there!r}"))
    for engine, one in ran.items():
        found += [Violation(fault.invariant, fault.job_id, f"{engine}: {fault.what}") for fault in check(one.history)]
    return found


async def compare(work: Workload, stores: dict[str, Callable[[], Store]]) -> tuple[dict[str, Ran], list[Violation]]:
    """The workload on all these engines, at the same time, and what is wrong."""
    results = await asyncio.gather(*(run(work, make()) for make in stores.values()))
    ran = dict(zip(stores, results, strict=True))
    return ran, judge(ran)
