"""Negative controls: with a guard switched off, or a server that forgets, the same checker finds fault."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.history import check
from tests.chaos.fleet import Fleet
from tests.chaos.rig import Rig
from tests.faults.engines import RedisDatabase
from tests.servers import missing_server_policy
from tests.worker.programs import eventually


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


@pytest.fixture
def rig(tmp_path: Path, fleet: Fleet) -> Iterator[Rig]:
    with Rig("sqlite", tmp_path, fleet) as rig:
        yield rig


def invariants(rig: Rig) -> set[int]:
    """The numbers of those that did not hold."""
    violations = check(rig.history())
    for violation in violations:
        print(violation)
    return {violation.invariant for violation in violations}


@pytest.mark.parametrize("fencing", [True, False])
def test_a_late_settlement_that_takes_effect(rig: Rig, fencing: bool) -> None:
    """Without a heartbeat and with all its slots in use, a worker does not find out that it is taken for dead."""
    rig.worker(keepers=False, concurrency=2, guard_off="heartbeat" if fencing else "heartbeat,fencing")
    jobs = rig.enqueue("held_at_first", 2, gate="end")
    rig.wait_for_starts(2, *jobs)
    rig.worker()
    rig.drain()
    rig.open_gate("end")
    rig.finish()
    assert (5 in invariants(rig)) is not fencing


@pytest.mark.parametrize("guard_off", ["", "started list"])
def test_a_job_that_was_running_when_its_process_died_and_goes_back_as_if_it_were_not(rig: Rig, guard_off: str) -> None:
    supervisor = rig.supervisor(guard_off=guard_off)
    jobs = rig.enqueue("held_at_first", 2, gate="end")
    rig.wait_for_starts(2, *jobs)
    rig.kill_process(rig.processes(supervisor)[0])
    rig.wait_for_starts(3, *jobs)
    rig.open_gate("end")
    rig.finish()
    assert (7 in invariants(rig)) is bool(guard_off)


@pytest.mark.parametrize("keepers", [True, False])
def test_jobs_that_nobody_brings_back(rig: Rig, keepers: bool) -> None:
    victim = rig.worker(keepers=False)
    jobs = rig.enqueue("held_at_first", 2, gate="end")
    rig.wait_for_starts(2, *jobs)
    rig.kill(victim)
    rig.worker(keepers=keepers)
    other = rig.enqueue("quick", 1)
    rig.wait_for_starts(1, *other)
    if keepers:
        rig.finish()
    assert (1 in invariants(rig)) is not keepers


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_server_that_forgets_what_it_has_accepted(tmp_path: Path, fleet: Fleet, forgetful: bool) -> None:
    with Rig("redis", tmp_path, fleet) as rig:
        with missing_server_policy():
            server = RedisDatabase.start(RedisDatabase.forgetful if forgetful else None)
        server.start()
        rig.use_server(server)
        with rig.producer() as producer:
            eventually(lambda: len(producer.accepted) >= 20, "jobs are accepted")
            with rig.server_away():
                producer.stop()
        if not forgetful:
            rig.worker()
            rig.finish()
        assert (1 in invariants(rig)) is forgetful
