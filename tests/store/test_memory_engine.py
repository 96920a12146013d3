"""What only the memory store has: lines and heaps, snapshot, purge, shutdown, capacity, a blocking wait."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from holdfast.errors import QueueClosed
from holdfast.job import Job, State
from holdfast.lifecycle import Applied, Succeeded
from holdfast.ports import SYSTEM, microseconds
from holdfast.store import Checkpoint, DepthLimit, InsertStatus, all_sessions
from holdfast.stores.memory import MemoryStore
from holdfast.stores.waiting import Line
from holdfast.testing.suite import Rig
from tests.store.harnesses import MemoryHarness
from tests.unit.samples import claimed_job

SOON = 10.0
QUEUE = "default"


@pytest.fixture
def harness() -> MemoryHarness:
    return MemoryHarness()


@pytest.fixture
def store(harness: MemoryHarness) -> MemoryStore:
    return harness.store


@pytest.fixture
def rig(harness: MemoryHarness) -> Rig:
    return Rig(harness, harness.store)


# What is due and what is scheduled (seed 000, 2 to 6).


async def test_due_jobs_and_scheduled_jobs_lie_apart(rig: Rig, store: MemoryStore) -> None:
    await rig.add_many(2)
    await rig.add_many(3, delay=rig.steps(1))
    assert [len(heap) for heap in store._waiting.due.values()] == [2]
    assert len(store._waiting.scheduled[QUEUE]) == 3


async def test_a_claim_first_promotes_what_has_become_due(rig: Rig, store: MemoryStore) -> None:
    due = await rig.add(delay=rig.steps(1), priority=0)
    later = await rig.add(delay=rig.steps(3))
    await rig.wait(1)
    assert await rig.claim_ids(await rig.session(), 9) == [due]
    assert [entry[1] for entry in store._waiting.scheduled[QUEUE]] == [later]
    assert store._waiting.due == {}


async def test_a_future_job_of_high_priority_starves_nobody(rig: Rig) -> None:
    await rig.add_many(100, priority=-100, delay=rig.steps(5))
    plain = await rig.add(priority=100)
    assert await rig.claim_ids(await rig.session()) == [plain]


async def test_named_priorities_of_the_seed_are_served_in_their_order(rig: Rig) -> None:
    ids = {label: await rig.add(priority=value) for label, value in (("low", 10), ("normal", 5), ("high", 0))}
    assert await rig.claim_ids(await rig.session()) == [ids["high"], ids["normal"], ids["low"]]


async def test_empty_lanes_are_dropped(rig: Rig, store: MemoryStore) -> None:
    for share in range(50):
        await rig.add(share=f"s{share}")
    assert len(await rig.claim(await rig.session(), 50)) == 50
    assert store._waiting.due == {}


@pytest.mark.parametrize("strays", [0.0, 0.1, 1.0])
def test_a_line_is_in_order_however_it_was_filled(strays: float) -> None:
    """Beside a sorted list, with entries taken out in between."""
    random = Random(strays)
    line, expected, job = Line(), list[tuple[int, str, int, Job]](), claimed_job()
    for number in range(2000):
        due = random.randrange(2000) if random.random() < strays else number
        entry = (due, f"{number:04}", number, job)
        line.push(entry)
        insort(expected, entry)
        if random.random() < 0.4:
            assert line.first() == expected[0]
            most = random.randrange(1, 4)
            assert line.take(most) == expected[:most]
            del expected[:most]
        assert len(line) == len(expected)
    assert sorted(line) == expected
    assert line.take(len(expected) + 1) == expected
    assert not line


# Cancelled entries.


async def test_heaps_are_compacted_after_many_cancels(rig: Rig, store: MemoryStore) -> None:
    kept = await rig.add_many(10)
    for _ in range(20):
        await rig.store.request_cancel(await rig.add_many(50, delay=rig.steps(100)))
        await rig.store.request_cancel(await rig.add_many(50, priority=9))
    entries = sum(map(len, store._waiting.due.values())) + sum(map(len, store._waiting.scheduled.values()))
    assert entries <= 2 * len(kept) + 100
    assert await rig.claim_ids(await rig.session()) == kept


async def test_the_depth_stays_true_through_a_compaction(rig: Rig, store: MemoryStore) -> None:
    """The job whose cancel sets off the compaction must not be counted as waiting."""
    kept = 3
    await rig.add_many(kept)
    for _ in range(300):
        await rig.store.request_cancel([await rig.add()])
        assert sum(store._waiting.depth.values()) == kept
    new = [rig.new(), rig.new()]
    answers = await store.insert(new, limits={QUEUE: DepthLimit(max_depth=kept + 1)})
    assert [answer.status for answer in answers] == [InsertStatus.CREATED, InsertStatus.FULL]
    assert store.snapshot()["depth"] == kept + 1


async def test_a_job_that_takes_the_id_and_the_time_of_a_forgotten_one_is_claimed_itself(rig: Rig) -> None:
    """The old entry, of a job that was cancelled and forgotten, is equal in time, id and version."""
    job_id = await rig.add(payload=b'{"n":1}')
    await rig.store.request_cancel([job_id])
    assert await rig.store.forget([job_id]) == 1
    await rig.add(id=job_id, payload=b'{"n":2}')
    [job] = await rig.claim(await rig.session(), 9)
    assert (job.id, job.payload) == (job_id, b'{"n":2}')


async def test_a_cancelled_and_replayed_job_is_claimed_once(rig: Rig) -> None:
    """Its old heap entry is no second job."""
    job_id = await rig.add()
    for _ in range(5):
        await rig.store.request_cancel([job_id])
        assert await rig.replay(job_id) is Applied.APPLIED
    assert await rig.claim_ids(await rig.session()) == [job_id]


# Snapshot and purge (seed 000, 10 and 11).


async def test_snapshot_counts_waiting_jobs(rig: Rig, store: MemoryStore) -> None:
    assert store.snapshot() == {"depth": 0, "ready": 0, "scheduled": 0, "shutdown": False}
    await rig.add_many(3)
    await rig.add_many(2, queue="other", delay=rig.steps(1))
    await rig.take()
    assert store.snapshot() == {"depth": 4, "ready": 2, "scheduled": 2, "shutdown": False}
    await rig.wait(1)
    assert store.snapshot() == {"depth": 4, "ready": 4, "scheduled": 0, "shutdown": False}


async def test_purge_drops_everything_and_opens_again(rig: Rig, store: MemoryStore) -> None:
    await rig.add_many(3, key=None)
    await rig.add(key=rig.key(), delay=rig.steps(1))
    session = await rig.session()
    await rig.take(session)
    await store.set_paused(QUEUE, True)
    await store.insert([], checkpoint=Checkpoint(QUEUE, "c", None, "1"))
    store.shutdown()
    store.purge()
    assert store.snapshot() == {"depth": 0, "ready": 0, "scheduled": 0, "shutdown": False}
    assert await rig.dump() == []
    assert await store.counts() == []
    assert await all_sessions(store) == []
    assert await store.checkpoint(QUEUE, "c") is None
    new = await rig.add(key=rig.key("k", "other"))
    assert (await rig.take()).id == new


# Shutdown guard (seed 000, 3 and 4).


async def test_a_store_that_was_shut_down_takes_no_new_jobs(rig: Rig, store: MemoryStore) -> None:
    waiting = await rig.add()
    store.shutdown()
    assert store.snapshot()["shutdown"]
    with pytest.raises(QueueClosed):
        await store.insert([rig.new()])
    with pytest.raises(QueueClosed):
        store.insert_blocking([rig.new()])
    with pytest.raises(QueueClosed):
        await store.insert([], checkpoint=Checkpoint(QUEUE, "c", None, "1"))
    assert [job.id for job in await rig.dump()] == [waiting]


async def test_after_a_shutdown_what_is_there_runs_to_its_end(rig: Rig, store: MemoryStore) -> None:
    """Claims, retries and following jobs go on: the store can be drained."""
    await rig.add()
    store.shutdown()
    session = await rig.session()
    assert await rig.nack(await rig.take(session)) is Applied.APPLIED
    await rig.wait(1)
    following = rig.new()
    move = replace(rig.move(await rig.take(session), Succeeded()), then=(following,))
    assert await rig.apply(move) is Applied.APPLIED
    assert await rig.claim_ids(session) == [following.id]


# Capacity guard (seed 000, 3).


async def test_capacity_bounds_the_waiting_jobs_of_all_queues(harness: MemoryHarness) -> None:
    store = MemoryStore(ports=harness.ports, capacity=3)
    rig = Rig(harness, store)
    await rig.add()
    await rig.add(queue="other", delay=rig.steps(1))
    answers = await store.insert([rig.new(), rig.new()])
    assert [answer.status for answer in answers] == [InsertStatus.CREATED, InsertStatus.FULL]
    await rig.take()
    assert [answer.status for answer in await store.insert([rig.new()])] == [InsertStatus.CREATED]
    checkpoint = Checkpoint(QUEUE, "c", None, "1")
    assert [answer.status for answer in await store.insert([rig.new()], checkpoint=checkpoint)] == [InsertStatus.FULL]
    assert await store.checkpoint(QUEUE, "c") is None


async def test_capacity_never_refuses_what_was_accepted(harness: MemoryHarness) -> None:
    """A retry, a release and a following job come from accepted work: they are kept, beyond the capacity."""
    store = MemoryStore(ports=harness.ports, capacity=1)
    rig = Rig(harness, store)
    await rig.add()
    session = await rig.session()
    first = await rig.take(session)
    await rig.add()
    second = await rig.take(session)
    await rig.add()
    assert await rig.release(first) is Applied.APPLIED
    following = rig.new()
    assert await rig.apply(replace(rig.move(second, Succeeded()), then=(following,))) is Applied.APPLIED
    assert await rig.state(following.id) is State.READY
    assert store.snapshot()["depth"] == 3


# The blocking wait (seed 000, 2 and 4), on the real clock.


class _Waiting:
    """A thread in `wait_until_due` that counts how often it looks."""

    def __init__(self, store: MemoryStore, timeout: float, queues: tuple[str, ...] = (QUEUE,)) -> None:
        self.looks = 0
        self.answer: bool | None = None
        self._began = threading.Event()
        look: Callable[..., int | None] = store._waiting.next_due

        def counted(queues: list[str]) -> int | None:
            self.looks += 1
            self._began.set()
            return look(queues)

        store._waiting.next_due = counted  # type: ignore[method-assign, assignment]
        self._thread = threading.Thread(target=self._wait, args=(store, queues, timeout))
        self._thread.start()
        assert self._began.wait(SOON)

    def _wait(self, store: MemoryStore, queues: tuple[str, ...], timeout: float) -> None:
        self.answer = store.wait_until_due(queues, timeout)

    def result(self) -> bool | None:
        self._thread.join(SOON)
        assert not self._thread.is_alive()
        return self.answer


def _new_job(rig: Rig, **fields: object) -> None:
    rig.store.insert_blocking([rig.new(**fields)])


@pytest.fixture
def real() -> Rig:
    return Rig(MemoryHarness(), MemoryStore(ports=SYSTEM))


def _store(rig: Rig) -> MemoryStore:
    assert isinstance(rig.store, MemoryStore)
    return rig.store


def test_a_due_job_is_not_waited_for(real: Rig) -> None:
    _new_job(real)
    assert _store(real).wait_until_due([QUEUE], SOON)


def test_the_wait_ends_with_an_insert(real: Rig) -> None:
    waiting = _Waiting(_store(real), SOON)
    _new_job(real)
    assert waiting.result() is True


def test_the_wait_ends_when_a_scheduled_job_is_due_without_busy_polling(real: Rig) -> None:
    _new_job(real, delay=microseconds(0.15))
    began = time.monotonic()
    waiting = _Waiting(_store(real), SOON)
    assert waiting.result() is True
    assert 0.1 <= time.monotonic() - began < SOON
    assert waiting.looks <= 4


def test_an_earlier_job_shortens_the_wait(real: Rig) -> None:
    _new_job(real, delay=microseconds(3600))
    waiting = _Waiting(_store(real), SOON)
    _new_job(real, delay=microseconds(0.01))
    assert waiting.result() is True


def test_the_wait_has_a_timeout(real: Rig) -> None:
    _new_job(real, queue="other")
    assert _store(real).wait_until_due([QUEUE], 0.01) is False
    assert _store(real).wait_until_due([QUEUE], 0) is False


def test_a_shutdown_ends_the_wait_of_an_empty_store(real: Rig) -> None:
    waiting = _Waiting(_store(real), SOON)
    _store(real).shutdown()
    assert waiting.result() is False


def test_after_a_shutdown_scheduled_jobs_are_still_waited_for(real: Rig) -> None:
    _new_job(real, delay=microseconds(0.05))
    _store(real).shutdown()
    assert _store(real).wait_until_due([QUEUE], SOON) is True
    assert _store(real).wait_until_due(["other"], SOON) is False


async def test_a_released_job_ends_the_wait(real: Rig) -> None:
    await real.add()
    job = await real.take()
    waiting = _Waiting(_store(real), SOON)
    await real.release(job)
    assert waiting.result() is True


async def test_a_paused_queue_is_waited_for_without_polling_until_it_is_resumed(real: Rig) -> None:
    await real.add()
    await real.store.set_paused(QUEUE, True)
    assert _store(real).wait_until_due([QUEUE], 0.01) is False
    waiting = _Waiting(_store(real), SOON)
    await real.store.set_paused(QUEUE, False)
    assert waiting.result() is True
    assert waiting.looks <= 3


# Nothing grows with what is over.


async def test_nothing_is_left_of_what_was_pruned(rig: Rig, store: MemoryStore) -> None:
    for _ in range(20):
        session = await rig.session()
        await rig.add(key=rig.key(steps=1), retention=0)
        await rig.ack(await rig.take(session))
        await store.held(session)
        await store.close_session(session)
        await rig.wait(2)
    await rig.harness.age_closed_sessions(2 * 3600)
    while await store.prune(7):
        pass
    assert (store._jobs, store._keys, store._sessions, store._waiting.due) == ({}, {}, {}, {})
    assert not store._held
