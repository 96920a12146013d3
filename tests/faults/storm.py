"""Everybody at the same rows at once: ten claimers, rescuers, bulk cancels, keyed inserts in opposite orders, replays.

Each of them has a store, an event loop and connections of its own, in two processes. Nobody handles an error: what a
store raises here is what user code would see.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor

import msgspec

from holdfast.errors import SessionClosed
from holdfast.failures import Failure
from holdfast.job import ENDED, Job, Key, NewJob, SessionId, State
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Applied, Failed, Move, Outcome, Released, Snoozed, Succeeded, cancel, replay, settle
from holdfast.policy import RetryPolicy, Steps
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, JobQuery, Session, Store, all_sessions
from holdfast.stores import open_store
from tests.faults.history import MOST_CRASHES, Told

CLAIMERS = 10
QUEUES = ("default", "other")
KEYS = 24
_NEW_KEYS_EVERY = 0.25
_DEEP = 800
"""Jobs that may wait before producers pause."""
_POLICY = RetryPolicy(backoff=Steps((0.01,)), max_crashes=MOST_CRASHES)
_ON_PURPOSE = Failure(at=0, attempt=1, type="OnPurpose", message="on purpose")
_HOUR = 3600 * 1_000_000

Role = Callable[[Store, Told, random.Random, Callable[[], bool]], Awaitable[None]]


def new_job(chance: random.Random, key: Key | None = None) -> NewJob:
    return NewJob(
        id=SYSTEM.ids.job_id(),
        task="storm",
        payload=b"{}",
        queue=chance.choice(QUEUES),
        priority=chance.choice((0, 5)),
        share=chance.choice(("", "a")),
        max_retries=1,
        key=key,
    )


async def open_session(store: Store) -> SessionId:
    session_id = SYSTEM.ids.session_id()
    await store.open_session(Session(id=session_id, queues=QUEUES))
    return session_id


# Workers.


async def claim_and_settle(store: Store, told: Told, chance: random.Random, going: Callable[[], bool]) -> None:
    """A worker that now and then dies: it forgets its session with all that it holds."""
    session_id = await open_session(store)
    turn = 0
    while going():
        turn += 1
        request = ClaimRequest(session_id=session_id, queues=QUEUES, limit=chance.randint(1, 25), turn=turn)
        try:
            jobs = (await store.claim(request)).jobs
        except SessionClosed:
            told.seen["session closed"] += 1
            session_id = await open_session(store)
            continue
        if chance.random() < 0.03:
            session_id = await open_session(store)
            continue
        await settle_all(store, jobs, chance)
        if chance.random() < 0.2 and not (await store.beat(session_id)).open:
            session_id = await open_session(store)
        if not jobs:
            await asyncio.sleep(0.005)


async def settle_all(store: Store, jobs: Sequence[Job], chance: random.Random) -> None:
    outcomes = [(job, _outcome(chance)) for job in jobs]
    moves = [_move(job, outcome, chance) for job, outcome in outcomes]
    chance.shuffle(moves)
    answers = dict(zip((move.job_id for move in moves), await store.apply(moves), strict=True))
    asked = [(job, outcome) for job, outcome in outcomes if answers[job.id] is Applied.CANCEL_ASKED]
    if asked:
        await store.apply([settle(job, outcome, _POLICY, SYSTEM.random, cancel_asked=True) for job, outcome in asked])


def _outcome(chance: random.Random) -> Outcome:
    return chance.choices(
        (
            Succeeded(b"1"),
            Failed(_ON_PURPOSE),
            Failed(_ON_PURPOSE, permanent=True),
            Released(),
            Snoozed(0, _ON_PURPOSE),
        ),
        (10, 3, 1, 2, 1),
    )[0]


def _move(job: Job, outcome: Outcome, chance: random.Random) -> Move:
    move = settle(job, outcome, _POLICY, SYSTEM.random)
    return msgspec.structs.replace(move, then=(new_job(chance),)) if move.to is State.FAILED else move


# Keepers and operators.


async def rescue(store: Store, told: Told, chance: random.Random, going: Callable[[], bool]) -> None:
    """A keeper with little patience, and an operator who takes living workers for dead."""
    keeper = Rescue(store, ports=SYSTEM, ttl=0.5, policy=_POLICY)
    while going():
        open_ids = [view.id for view in await all_sessions(store) if view.open]
        if open_ids and chance.random() < 0.7:
            told.seen["closed"] += await store.close_session(chance.choice(open_ids))
        told.seen["rescued"] += await keeper.one_pass()
        await store.prune(200)
        await asyncio.sleep(0.01)


async def cancel_many(store: Store, told: Told, chance: random.Random, going: Callable[[], bool]) -> None:
    """Hundreds at a time, in any order, while they are claimed and settled."""
    while going():
        page = await store.find(JobQuery(states=(State.READY, State.IN_FLIGHT), limit=400))
        jobs = list(page.jobs)
        chance.shuffle(jobs)
        answers = await store.request_cancel([job.id for job in jobs[:300]])
        told.seen.update(f"cancel {answer}" for answer in answers)
        waiting = [job for job in jobs[300:] if job.state is State.READY]
        if waiting:
            await store.apply([cancel(job) for job in waiting])
        await asyncio.sleep(0.05)


async def replay_many(store: Store, told: Told, chance: random.Random, going: Callable[[], bool]) -> None:
    """Bring back what has ended, in any order."""
    while going():
        page = await store.find(JobQuery(states=tuple(ENDED), limit=300))
        jobs = chance.sample(page.jobs, min(40, len(page.jobs)))
        if jobs:
            await store.apply([replay(job) for job in jobs])
        await store.counts()
        await asyncio.sleep(0.05)


# Producers.


async def produce(store: Store, told: Told, chance: random.Random, going: Callable[[], bool]) -> None:
    """Jobs without keys, some of them twice."""
    while going():
        if sum(count.ready for count in await store.counts()) < _DEEP:
            jobs = [new_job(chance) for _ in range(40)]
            await store.insert([*jobs, chance.choice(jobs)])
            await asyncio.to_thread(store.insert_blocking, [new_job(chance) for _ in range(5)])
        await asyncio.sleep(0.02)


async def produce_keyed(store: Store, told: Told, chance: random.Random, going: Callable[[], bool]) -> None:
    """The same keys again and again, by some callers from first to last, by others from last to first. All of them turn
    to new keys at the same moment.
    """
    while going():
        period = int(time.monotonic() / _NEW_KEYS_EVERY)
        keys = [f"{period} {number:02}" for number in range(KEYS)][:: chance.choice((1, -1))]
        hashed = chance.choices(("one", "another"), (9, 1))[0]
        await store.insert([new_job(chance, Key(key, hashed, _HOUR)) for key in keys])
        await asyncio.sleep(0.005)


# All of them.

_EACH_PROCESS: list[Role] = [
    *[claim_and_settle] * (CLAIMERS // 2),
    rescue,
    cancel_many,
    replay_many,
    produce,
    produce_keyed,
    produce_keyed,
]


def _storm_in_this_process(url: str, seconds: float, seed: int) -> Told:
    began = time.monotonic()

    def going() -> bool:
        return time.monotonic() < began + seconds

    def play(role: Role, told: Told, chance: random.Random) -> None:
        async def main() -> None:
            async with open_store(url, SYSTEM) as store:
                await role(told.noted(store), told, chance, going)

        try:
            asyncio.run(main())
        except BaseException as error:
            told.errors.append(f"{role.__name__}: {error!r}")

    all_told = [Told() for _ in _EACH_PROCESS]
    threads = [
        threading.Thread(target=play, args=(role, told, random.Random(f"{seed} {number}")))
        for number, (role, told) in enumerate(zip(_EACH_PROCESS, all_told, strict=True))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return _together(all_told)


def _together(all_told: Sequence[Told]) -> Told:
    whole = Told()
    for told in all_told:
        whole.add(told)
    return whole


def storm(url: str, seconds: float, seed: int) -> Told:
    """Let it rage for that long. What everybody was told."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as processes:
        futures = [processes.submit(_storm_in_this_process, url, seconds, seed + number) for number in range(2)]
        return _together([future.result() for future in futures])


async def tidy_up(store: Store) -> None:
    """Close every session, bring back what they held, and let everything that is left succeed."""
    keeper = Rescue(store, ports=SYSTEM, policy=_POLICY)
    for view in await all_sessions(store):
        await store.close_session(view.id)
    await keeper.one_pass()
    session_id = await open_session(store)
    while True:
        claimed = await store.claim(ClaimRequest(session_id=session_id, queues=QUEUES, limit=1000))
        if claimed.jobs:
            moves = [settle(job, Succeeded(b"1"), _POLICY, SYSTEM.random) for job in claimed.jobs]
            assert set(await store.apply(moves)) == {Applied.APPLIED}
        elif claimed.due_in is None:
            return
        else:
            await asyncio.sleep(claimed.due_in / 1_000_000)
