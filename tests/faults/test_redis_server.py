"""What only a Redis does: it forgets its scripts, or comes back without its data."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import StoreReplaced
from holdfast.job import NewJob, State
from holdfast.ports import SYSTEM
from holdfast.store import Session
from holdfast.stores import open_store
from tests.faults.engines import RedisDatabase
from tests.faults.producer import Producer, check_nothing_is_lost, check_promise
from tests.faults.stage import ServerStage
from tests.faults.test_server_killed import (
    RESUMED_WITHIN,
    check_nobody_was_taken_for_dead,
    time_until_work_goes_on,
    wait_for_progress,
)
from tests.servers import RedisServer
from tests.worker.programs import TTL, eventually

PROCESSES = 2


def test_a_server_that_forgets_its_scripts_again_and_again_is_noticed_by_nobody(
    tmp_path: Path, redis_server: RedisServer, fault_seconds: float
) -> None:
    database = RedisDatabase(redis_server, "faults_flush")
    with ServerStage(tmp_path, database) as stage:
        supervisor = stage.supervisor(processes=PROCESSES, concurrency=5)
        sessions = stage.open_sessions()
        with Producer(stage.store) as producer:
            wait_for_progress(stage, 25)
            flushed = 0
            ends = time.monotonic() + fault_seconds / 3
            while time.monotonic() < ends:
                database.ask("SCRIPT", "FLUSH")
                flushed += 1
                time.sleep(0.02)
            wait_for_progress(stage, 25)
            producer.stop()
            print(f"{flushed} times; {producer}")
            jobs = stage.wait_for_end(producer.accepted)
            check_promise(producer, jobs)
            assert (producer.unknown, producer.refused) == ([], [])
            check_nobody_was_taken_for_dead(stage, supervisor, sessions)
            assert supervisor.lines("failed") == []
            assert Counter(stage.runs().values()) == {1: len(jobs)}
    database.drop()


def accepted_so_far(producers: Sequence[Producer], number: int) -> bool:
    return sum(len(producer.accepted) for producer in producers) >= number


def test_what_was_accepted_outlives_a_kill_of_the_server_however_often(tmp_path: Path) -> None:
    with RedisDatabase.start() as server, ServerStage(tmp_path, RedisDatabase(server)) as stage:
        producers: list[Producer] = []
        for kills in range(1, 6):
            with ExitStack() as stack:
                producers += [stack.enter_context(Producer(stage.store, every=0)) for _ in range(3)]
                eventually(partial(accepted_so_far, producers, 300 * kills), "jobs are accepted")
                server.kill()
            server.start()
        jobs = stage.jobs()
        for producer in producers:
            check_nothing_is_lost(producer, jobs)
        accepted = sum(len(producer.accepted) for producer in producers)
        unknown = [job_id for producer in producers for job_id in producer.unknown]
        there = sum(job_id in jobs for job_id in unknown)
        print(f"{accepted} accepted, none lost; {len(unknown)} unknown, of which {there} are there")


def test_a_store_that_came_back_empty_is_noticed_and_workers_go_on_with_new_jobs(tmp_path: Path) -> None:
    with RedisDatabase.start(RedisDatabase.forgetful) as server, ServerStage(tmp_path, RedisDatabase(server)) as stage:
        supervisor = stage.supervisor(processes=PROCESSES, concurrency=5)
        gone = stage.enqueue("hold", gate="end")
        stage.wait_for_entry(gone)
        with Producer(stage.store) as producer:
            wait_for_progress(stage, 25)
            sessions = stage.open_sessions()
            server.kill()
            before = [gone, *producer.accepted]
            server.start()
            resumed = time_until_work_goes_on(stage, producer, time.monotonic())
            lasting = [stage.enqueue("hold", gate="end") for _ in range(PROCESSES)]
            replaced = supervisor.wait_for("StoreReplaced", times=PROCESSES, seconds=RESUMED_WITHIN)
            eventually(
                lambda: set(stage.open_sessions().values()) == set(sessions.values()),
                "each process has a session again",
                RESUMED_WITHIN,
                stage.open_sessions,
            )
            renewed = stage.open_sessions()
            wait_for_progress(stage, 25)
            time.sleep(1.5 * TTL)  # keepers have looked at it, and found everybody alive
            producer.stop()
            stage.open_gate("end")
            accepted = [*lasting, *(job_id for job_id in producer.accepted if job_id not in before)]
            jobs = stage.wait_for_end(accepted)

        lost = [job_id for job_id in before if job_id not in jobs]
        print(f"{len(lost)} of {len(before)} jobs lost, then {len(accepted)} accepted")
        print(f"work went on {resumed:.2f} s later; {replaced[0].msg}")
        assert lost == before  # nobody has written them down
        assert set(jobs) <= {*accepted, *producer.unknown}
        assert {job.state for job in jobs.values()} == {State.SUCCEEDED}
        assert not set(renewed) & set(sessions)
        # It was noticed once: what was claimed afterwards is nobody else's.
        assert stage.open_sessions() == renewed
        assert len(supervisor.lines("taken for dead")) == PROCESSES
        runs = stage.runs()
        assert {runs[job_id] for job_id in jobs} == {1}
        assert resumed <= RESUMED_WITHIN


async def test_jobs_that_come_after_the_store_was_emptied_are_found(redis_server: RedisServer) -> None:
    database = RedisDatabase(redis_server, "faults_emptied")
    first, second = (NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(2))
    async with open_store(database.url(), SYSTEM) as store:
        await store.insert([first])
        database.drop()
        await store.insert([second])  # by one that had no reason to notice
        assert await store.get(second.id) is not None
        assert [count.ready for count in await store.counts()] == [1]
    database.drop()


async def test_that_the_store_was_rolled_back_is_told_to_the_worker_and_to_nobody_instead(
    redis_server: RedisServer,
) -> None:
    database = RedisDatabase(redis_server, "faults_rolled_back")
    async with open_store(database.url(), SYSTEM) as store, store.beside() as heart:
        await store.open_session(Session(id="s", queues=("default",)))
        assert (await heart.beat("s")).open
        database.ask("HINCRBY", f"{database.name}:epoch", "count", -2)  # as a replica would have it that lagged
        assert not (await store.beat("nobody")).open  # a keeper does that
        with pytest.raises(StoreReplaced):
            await heart.beat("s")
        assert not (await heart.beat("s")).open
        await store.open_session(Session(id="t", queues=("default",)))
        assert (await heart.beat("t")).open
    database.drop()
