"""A server that stands still for longer than the TTL (SIGSTOP), and goes on.

Nobody is taken for dead for it, nothing is lost, and meanwhile no call waits for longer than it may.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from holdfast.errors import StoreError
from holdfast.job import NewJob, State
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session, Store
from holdfast.stores import open_store
from tests.faults.engines import ON_SQL, Database
from tests.faults.producer import Producer, check_promise
from tests.faults.stage import ServerStage
from tests.faults.test_server_killed import (
    RESUMED_WITHIN,
    check_nobody_was_taken_for_dead,
    time_until_work_goes_on,
    wait_for_progress,
)
from tests.worker.programs import TTL

PAUSE = 2 * TTL
IMPATIENT, PATIENT = 1.0, 10.0


@pytest.mark.parametrize("timeout", [IMPATIENT, PATIENT])
def test_a_pause_of_the_server_makes_nobody_look_dead(tmp_path: Path, own_database: Database, timeout: float) -> None:
    database = own_database
    with ServerStage(tmp_path, database, timeout=timeout) as stage:
        supervisor = stage.supervisor(processes=2, concurrency=5)
        keeper = stage.keeper()
        held = [stage.enqueue("hold", gate="end") for _ in range(3)]
        with Producer(stage.store) as producer:
            wait_for_progress(stage, 25)
            for job_id in held:
                stage.wait_for_entry(job_id)
            sessions = stage.open_sessions()
            with database.paused():
                time.sleep(PAUSE / 2)
                stage.open_gate("end")  # these end while nobody can be told
                time.sleep(PAUSE / 2)
            resumed = time_until_work_goes_on(stage, producer, time.monotonic())
            wait_for_progress(stage, 25)
            producer.stop()
            print(f"{database.engine}: {producer}; work went on {resumed:.2f} s after the pause of {PAUSE:g} s")
            jobs = stage.wait_for_end([*producer.accepted, *held])
            assert {jobs.pop(job_id).attempt for job_id in held} == {1}
            check_promise(producer, jobs)
            check_nobody_was_taken_for_dead(stage, supervisor, sessions)
            assert "found dead" not in keeper.text()
            assert Counter(stage.runs().values()) == {1: len(jobs) + len(held)}
        assert resumed <= RESUMED_WITHIN


async def test_no_call_outlives_its_deadline_while_the_server_stands_still(own_database: Database) -> None:
    """Field bug B10. River (PR #1255, #1251): a call to the database that never came back stopped the fetcher, and the
    enqueuer of periodic jobs, for as long. Here every kind of call ends with an error at its deadline; one without a
    deadline would last as long as the pause.
    """
    new = NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}")
    async with open_store(own_database.url(timeout=IMPATIENT), SYSTEM) as store:
        await store.open_session(Session(id="s"))
        request = ClaimRequest(session_id="s", queues=("default",), limit=1)
        calls: dict[str, Callable[[Store], Awaitable[object]]] = {
            "beat": lambda store: store.beat("s"),
            "claim": lambda store: store.claim(request),
            "insert": lambda store: store.insert([new]),
            "insert_blocking": lambda store: asyncio.to_thread(store.insert_blocking, [new]),
            "now": lambda store: store.now(),
            "open": lambda store: store.beside().__aenter__(),
        }
        await asyncio.gather(*(call(store) for name, call in calls.items() if name not in ("claim", "open")))
        with own_database.paused():
            took = dict(zip(calls, await asyncio.gather(*(_time(call(store)) for call in calls.values())), strict=True))
        print(own_database.engine, {name: f"{seconds:.2f} s" for name, seconds in took.items()})
        job = await store.get(new.id)
        assert job is not None
        assert job.state in (State.READY, State.IN_FLIGHT)
    assert {name: seconds for name, seconds in took.items() if seconds > IMPATIENT + 2} == {}
    assert min(took.values()) >= IMPATIENT / 2


async def _time(call: Awaitable[object]) -> float:
    began = time.monotonic()
    with pytest.raises(StoreError):
        await call
    return time.monotonic() - began


# Negative control.


@ON_SQL  # two are enough: what is switched off knows of no engine
def test_with_the_wall_clock_instead_of_the_counter_a_pause_makes_living_workers_look_dead(
    tmp_path: Path, own_database: Database
) -> None:
    with ServerStage(tmp_path, own_database) as stage:
        supervisor = stage.supervisor(processes=2, guard_off="counter watch")
        sessions = stage.open_sessions()
        for _ in range(10):  # it takes a keeper that looks before the workers have beaten again
            with own_database.paused():
                time.sleep(1.5 * TTL)
            time.sleep(TTL / 2)
            if stage.open_sessions() != sessions:
                break
        with pytest.raises(AssertionError):
            check_nobody_was_taken_for_dead(stage, supervisor, sessions)
        assert supervisor.wait_for("taken for dead")
