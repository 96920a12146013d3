"""Negative controls: with a guard switched off, the check of the test that relies on it fails.

The guards are replaced in the processes by `tests.worker.program`. The scenarios and checks are those of the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.programs import World
from tests.worker.test_faults import (
    WRITE_LOCK,
    block_for_long,
    check_it_kept_its_lease,
    check_nobody_was_taken_for_dead,
    check_only_the_culprit_is_dead,
    keep_out_for_long,
    segfault_among_others,
)
from tests.worker.test_processes import check_only_the_culprit_lost_an_attempt, crash_with_others_behind


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


def test_without_a_heartbeat_a_job_that_blocks_the_event_loop_runs_twice(world: World) -> None:
    worker, blocking, behind = block_for_long(world, guard_off="heartbeat")
    with pytest.raises(AssertionError):
        check_it_kept_its_lease(world, worker, blocking, behind)
    assert world.runs()[blocking] > 1


def test_with_the_wall_clock_instead_of_the_counter_a_lock_makes_living_workers_look_dead(world: World) -> None:
    supervisor, sessions, jobs = keep_out_for_long(world, WRITE_LOCK, guard_off="counter watch")
    with pytest.raises(AssertionError):
        check_nobody_was_taken_for_dead(world, supervisor, sessions, jobs)
    assert world.sql("SELECT count(*) FROM holdfast_sessions WHERE NOT open")[0][0] > 0
    assert not supervisor.lines("died")


def test_without_the_list_of_started_jobs_nobody_is_a_suspect_after_a_crash(world: World) -> None:
    culprit, behind, died = crash_with_others_behind(world, guard_off="started list")
    with pytest.raises(AssertionError):
        check_only_the_culprit_lost_an_attempt(world, culprit, behind, died)
    assert "0 jobs that it ran will run again alone, 100 unstarted jobs went back" in died.msg
    assert world.job(culprit).attempt == 1


def test_without_the_list_of_started_jobs_the_culprit_takes_down_one_process_after_another(world: World) -> None:
    supervisor, culprit, neighbours = segfault_among_others(world, 5, guard_off="started list")
    supervisor.wait_for("killed by SIGSEGV", times=3)
    with pytest.raises(AssertionError):
        check_only_the_culprit_is_dead(world, supervisor, culprit, neighbours)
    assert world.job(culprit).state != "failed"
    assert world.runs()[culprit] >= 3
