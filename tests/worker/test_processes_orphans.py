"""Nothing that a worker process started outlives it: not its programs, not its daemons, not even their corpses."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.programs import Program, World, children_of, eventually, is_alive


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


def start_others(world: World) -> tuple[list[str], set[int]]:
    """Two jobs, one in the worker process and one isolated, that have started programs and daemons. All their pids."""
    jobs = world.enqueue_all([("start_processes", {"gate": "end"}), ("start_processes_alone", {"gate": "end"})])
    entries = [world.wait_for_entry(job) for job in jobs]
    [worker] = world.open_sessions().values()
    assert [entry.pid == worker for entry in entries] == [True, False]
    others = {pid for entry in entries for pid in entry.others} | {entries[1].pid}
    assert len(others) == 5
    assert all(map(is_alive, others))
    return jobs, others


def check_all_gone(pids: set[int]) -> None:
    eventually(lambda: not any(map(is_alive, pids)), f"the end of {pids}", seconds=10)


def test_what_the_handlers_of_a_killed_process_had_started_is_killed_too(world: World) -> None:
    supervisor = world.supervisor(concurrency=2)
    jobs, others = start_others(world)
    [victim] = world.open_sessions().values()
    os.kill(victim, signal.SIGKILL)
    check_all_gone(others)

    # The jobs run again, and what those runs leave behind ends with the worker.
    again = {pid for job in jobs for pid in world.wait_for_entry(job, times=2).others}
    assert all(map(is_alive, again))
    world.open_gate("end")
    assert {row.state for row in world.wait_for_end(*jobs)} == {"succeeded"}
    supervisor.signal(signal.SIGTERM)
    assert supervisor.exit_code() == 0
    check_all_gone(again)
    assert world.left_behind() == []


def test_an_orderly_end_leaves_nothing_behind(world: World) -> None:
    supervisor = world.supervisor(concurrency=2)
    jobs, others = start_others(world)
    supervisor.signal(signal.SIGTERM)
    world.open_gate("end")
    assert supervisor.exit_code() == 0
    assert {world.job(job).state for job in jobs} == {"succeeded"}
    check_all_gone(others)
    assert world.left_behind() == []


def test_when_the_supervisor_is_killed_its_processes_finish_their_jobs_and_leave_nothing_behind(world: World) -> None:
    supervisor = world.supervisor(processes=2, concurrency=2, grace=10)
    jobs = world.enqueue_all([("hold", {"gate": "end"}), ("hold_in_thread", {"gate": "end"})])
    jobs += world.enqueue_all([("start_processes", {"gate": "end"}), ("start_processes_alone", {"gate": "end"})])
    others = {pid for job in jobs for pid in world.wait_for_entry(job).others}
    assert len(others) == 4
    sessions = world.open_sessions()
    assert all(map(is_alive, others))
    supervisor.kill()
    waiting = world.enqueue("note")
    assert all(map(is_alive, sessions.values()))
    world.open_gate("end")
    for row in world.wait_for_end(*jobs):
        assert (row.state, row.attempt, world.runs()[row.id]) == ("succeeded", 1, 1)
    eventually(lambda: world.left_behind() == [], "nothing is left", seconds=20)
    check_all_gone(others | set(sessions.values()))
    assert world.open_sessions() == {}
    print(f"the job that came after the kill is {world.job(waiting).state}")


def test_when_the_supervisor_is_killed_a_job_that_does_not_end_is_given_back_after_the_grace_period(
    world: World,
) -> None:
    supervisor = world.supervisor(concurrency=3, grace=1)
    jobs = world.enqueue_all(
        [("start_processes", {"gate": "never"}), ("stubborn", {"gate": "never"}), ("hold", {"gate": "never"})]
    )
    for job in jobs:
        world.wait_for_entry(job)
    supervisor.kill()
    eventually(lambda: world.left_behind() == [], "nothing is left", seconds=20)
    for job in jobs:
        row = world.job(job)
        assert (row.state, row.reason, row.attempt) == ("ready", "released", 0)
    assert world.open_sessions() == {}


def zombies_of(program: Program) -> list[int]:
    return [pid for pid, state in children_of(program.pid).items() if state == "Z"]


def test_daemons_that_end_by_themselves_do_not_pile_up_as_zombies(world: World) -> None:
    supervisor = world.supervisor(processes=2, concurrency=2)
    world.wait_for_end(*world.enqueue_all([("leave_a_short_daemon", {})] * 20))
    eventually(lambda: not zombies_of(supervisor), "no zombies", 10, lambda: zombies_of(supervisor))
    assert len(children_of(supervisor.pid)) == 2


def test_a_daemon_of_a_living_process_survives_the_death_of_another_process(world: World) -> None:
    world.supervisor(processes=2)
    jobs = world.enqueue_all([("start_processes", {"gate": "end"}), ("hold", {"gate": "end"})])
    entries = [world.wait_for_entry(job) for job in jobs]
    assert entries[0].pid != entries[1].pid
    os.kill(entries[1].pid, signal.SIGKILL)
    world.wait_for_entry(jobs[1], times=2)
    assert all(map(is_alive, entries[0].others))
