"""A server that is killed with SIGKILL and started again under load, and one that ends every connection, several times.

Workers go on by themselves, nothing that was accepted is lost, no connection leaks, and no living session is closed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pytest

from holdfast.job import SessionId
from tests.faults.engines import ENGINES, Database
from tests.faults.producer import Producer, check_nothing_is_lost, check_promise
from tests.faults.stage import ServerStage
from tests.worker.programs import TTL, Program, eventually

PROCESSES = 2
RESUMED_WITHIN = 10.0
OUTAGE = 1.5 * TTL
SLACK = 4
"""Connections: as many as happen to be needed at once are kept. One that leaks does so with every fault."""


def wait_for_progress(stage: ServerStage, count: int) -> None:
    """So many jobs more were started."""
    started = len(stage.entries())
    eventually(lambda: len(stage.entries()) >= started + count, f"{count} more jobs are started")


def check_nobody_was_taken_for_dead(stage: ServerStage, supervisor: Program, sessions: dict[SessionId, int]) -> None:
    assert stage.open_sessions() == sessions
    for said in ("found dead", "taken for dead", "was refused ("):
        assert [line.msg for line in supervisor.lines(said)] == []


def time_until_work_goes_on(stage: ServerStage, producer: Producer, since: float) -> float:
    """Seconds from that moment until a job was started that was accepted after it."""
    return stage.wait_for_entry(producer.urgent()).at - since


def test_workers_go_on_after_the_server_was_killed_and_after_all_connections_were_ended(
    tmp_path: Path, own_database: Database, fault_seconds: float
) -> None:
    database = own_database
    with ServerStage(tmp_path, database) as stage:
        supervisor = stage.supervisor(processes=PROCESSES, concurrency=5)
        with Producer(stage.store) as producer:
            wait_for_progress(stage, 25)
            sessions = stage.open_sessions()
            eventually(stage.connections_agree, "the server and its clients know of the same connections")
            before = len(stage.sockets())

            database.server.kill()
            time.sleep(OUTAGE)
            database.server.start()
            back = time.monotonic()
            resumed = time_until_work_goes_on(stage, producer, back)
            wait_for_progress(stage, 25)
            print(f"{database.engine}: {producer} around the kill; work went on {resumed:.2f} s after the return")

            longest = 0.0
            ended = 0
            for _ in range(max(3, round(fault_seconds / 2))):
                ended += database.end_connections()
                longest = max(longest, time_until_work_goes_on(stage, producer, time.monotonic()))
                time.sleep(1)
            wait_for_progress(stage, 25)
            producer.stop()
            print(f"{ended} connections ended; work went on {longest:.2f} s later at most; in all {producer}")

            jobs = stage.wait_for_end(producer.accepted)
            check_promise(producer, jobs)
            check_nobody_was_taken_for_dead(stage, supervisor, sessions)
            assert Counter(stage.runs().values()) == {1: len(jobs)}
            eventually(stage.connections_agree, "no connection is left over on either side")
            after = len(stage.sockets())
            print(f"{before} connections before, {after} after")
            assert after <= before + SLACK
        assert resumed <= RESUMED_WITHIN
        assert longest <= RESUMED_WITHIN


def test_a_worker_process_that_died_during_the_outage_is_back_soon_after_it(
    tmp_path: Path, own_database: Database
) -> None:
    with ServerStage(tmp_path, own_database) as stage:
        supervisor = stage.supervisor()
        held = stage.enqueue("hold_at_first", gate="never")
        child = stage.wait_for_entry(held).pid
        own_database.server.kill()
        os.kill(child, signal.SIGKILL)
        supervisor.wait_for("start failed, it goes on", times=4)  # so often that it has become slow to try again
        supervisor.wait_for("recovery failed, it goes on", times=4)
        own_database.server.start()
        back = time.monotonic()
        again = stage.wait_for_entry(held, times=2).at - back
        print(f"{own_database.engine}: its job was started again {again:.2f} s after the return")
        job = stage.wait_for_state(held, "succeeded")
        assert job.attempt == 2
        assert len(supervisor.lines("worker started")) == 2
        assert again <= RESUMED_WITHIN


# Negative control.


def test_what_a_forgetful_server_has_lost_would_be_found(tmp_path: Path, engine: str) -> None:
    with ENGINES[engine].start(ENGINES[engine].forgetful) as server:
        database = ENGINES[engine](server)
        with ServerStage(tmp_path, database) as stage:
            for _ in range(5):
                with Producer(stage.store) as producer:
                    eventually(lambda: len(producer.accepted) >= 20, "jobs are accepted")
                    server.kill()
                server.start()
                jobs = stage.jobs()
                lost = sum(job_id not in jobs for job_id in producer.accepted)
                print(f"{engine}: {producer}, of which {lost} are lost")
                if lost:
                    with pytest.raises(AssertionError):
                        check_nothing_is_lost(producer, jobs)
                    return
    pytest.fail("it has just written everything, five times")
