"""Corners of worker processes: signals to all of them at once, a machine that has none to spare, tasks in several
modules, copies of a process, and neighbours of a handler that never ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.programs import TTL, Program, World, children_of, eventually, is_alive, throughout

DRAIN = 30.0
"""A grace period that is never over in these tests."""
HOLDING = ("hold", "hold_in_thread", "hold_alone")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as world:
        yield world


# Signals to a whole group, as systemd sends them (KillMode=control-group).


def supervise_everything(world: World, *, grace: float = DRAIN) -> Program:
    application = "tests.worker.modules.everything:app"
    options = ["--concurrency", 5, "--grace", grace, "--lease-ttl", TTL, "--log-format", "json"]
    program = world.start(["holdfast.cli", "worker", application, *options])
    program.wait_for("worker started")
    return program


def hold_everywhere(world: World) -> list[str]:
    """A job on the event loop, one on a thread and one in a process of its own, all of which run."""
    jobs = world.enqueue_all([(task, {"gate": "end"}) for task in HOLDING])
    for job in jobs:
        world.wait_for_entry(job)
    return jobs


def signal_all(world: World, supervisor: Program) -> None:
    """To the supervisor last: the others have got theirs when it passes its own on."""
    others = [pid for pid in world.left_behind() if pid != supervisor.pid]
    assert len(others) == 2  # the worker, and the process of the isolated job
    for pid in (*others, supervisor.pid):
        os.kill(pid, signal.SIGTERM)


def test_a_signal_to_all_processes_at_once_is_one_stop_and_running_jobs_finish(world: World) -> None:
    supervisor = supervise_everything(world)
    jobs = hold_everywhere(world)
    signal_all(world, supervisor)
    supervisor.wait_until_heard(signal.SIGTERM)
    throughout(
        1.5,
        lambda: world.count("in_flight") == len(jobs) and not world.entries("told to stop"),
        "all of them run undisturbed",
    )
    world.open_gate("end")
    assert supervisor.exit_code() == 0
    for row in (world.job(job) for job in jobs):
        assert (row.task, row.state, row.attempt, row.crashes) == (row.task, "succeeded", 1, 0)
    assert Counter(world.runs().values()) == {1: len(jobs)}
    assert supervisor.lines("worker stopped: 3 succeeded")
    assert not supervisor.lines("died")
    assert world.open_sessions() == {}
    assert world.left_behind() == []


def test_after_a_signal_to_all_processes_a_second_one_to_the_supervisor_stops_at_once(world: World) -> None:
    supervisor = supervise_everything(world)
    jobs = hold_everywhere(world)
    signal_all(world, supervisor)
    supervisor.wait_until_heard(signal.SIGTERM)
    assert world.count("in_flight") == len(jobs)
    began = time.monotonic()
    supervisor.signal(signal.SIGTERM)
    assert supervisor.exit_code() == 128 + signal.SIGTERM
    assert time.monotonic() - began < DRAIN / 2
    for row in (world.job(job) for job in jobs):
        assert (row.task, row.state, row.attempt, row.crashes) == (row.task, "ready", 0, 0)
    assert world.open_sessions() == {}
    assert world.left_behind() == []


# Tasks in several modules.


def test_isolated_tasks_of_every_module_run_though_nobody_supervises_the_worker(world: World) -> None:
    world.start(["tests.worker.modules.alone"]).wait_for("worker started")
    jobs = world.enqueue_all([("render", {}), ("stamp", {}), ("render", {}), ("stamp", {})])
    assert [(row.state, row.attempt, row.failures) for row in world.wait_for_end(*jobs)] == [("succeeded", 1, 0)] * 4


# Handlers that never end, and their neighbours.


def test_while_a_job_outlasts_two_stuck_neighbours_another_process_takes_what_comes(world: World) -> None:
    supervisor = world.supervisor(concurrency=3, grace=0.5)
    hold, *stuck = world.enqueue_all([("hold", {"gate": "end"}), *[("wedge_in_thread", {})] * 2], max_retries=0)
    first = world.wait_for_entry(hold).pid
    for row in world.wait_for_end(*stuck):
        assert (row.state, [failure.type for failure in row.failure_list]) == ("failed", ["HardTimeout"])
    supervisor.wait_for("worker started", times=2)
    [note] = world.wait_for_end(world.enqueue("note"))
    assert world.wait_for_entry(note.id).pid != first
    throughout(
        1.0,
        lambda: is_alive(first) and world.job(hold).state == "in_flight" and not world.entries("told to stop"),
        "it runs undisturbed",
    )
    world.open_gate("end")
    [row] = world.wait_for_end(hold)
    assert (row.state, row.attempt, world.runs()[hold]) == ("succeeded", 1, 1)
    eventually(lambda: not is_alive(first), "the old process has ended")
    assert not supervisor.lines("was killed")
    assert len(supervisor.lines("worker started")) == 2


# No process to be had.


def pipes_and_boards(program: Program) -> Counter[str]:
    """What it has open for its processes."""
    targets = [os.readlink(file) for file in Path(f"/proc/{program.pid}/fd").iterdir()]
    return Counter(name for target in targets for name in ("pipe:", "holdfast-board") if name in target)


def check_two_processes_work(world: World, supervisor: Program) -> None:
    """The supervisor has the processes that it is to have, and no other."""
    eventually(lambda: len(world.open_sessions()) == 2, "two processes work")
    assert set(children_of(supervisor.pid)) == set(world.open_sessions().values())
    assert len(world.left_behind()) == 3
    supervisor.signal(signal.SIGTERM)
    assert supervisor.exit_code() == 0
    assert world.left_behind() == []


@pytest.mark.parametrize(
    ("processes", "threads", "told"),
    [
        ("2,3", "", "BlockingIOError: [Errno 11] Resource temporarily unavailable"),
        ("", "2", "RuntimeError: can't start new thread"),
    ],
    ids=["no process", "no thread"],
)
def test_a_supervisor_that_cannot_start_a_process_says_so_goes_on_and_starts_it_later(
    world: World, processes: str, threads: str, told: str
) -> None:
    supervisor = world.start(["tests.worker.modules.short_of_resources", processes, threads])
    lines = supervisor.wait_for("supervisor", times=len((processes or threads).split(",")))
    assert all(told in line.msg for line in lines)
    supervisor.wait_for("worker started", times=2)
    check_two_processes_work(world, supervisor)


def test_a_supervisor_that_cannot_replace_a_process_keeps_the_others_and_nothing_open(world: World) -> None:
    supervisor = world.start(["tests.worker.modules.short_of_resources", "3,4", ""])
    supervisor.wait_for("worker started", times=2)
    before = pipes_and_boards(supervisor)
    survivor, victim = world.open_sessions().values()
    os.kill(victim, signal.SIGKILL)
    supervisor.wait_for("BlockingIOError", times=2)
    supervisor.wait_for("worker started", times=3)
    assert is_alive(survivor)
    assert pipes_and_boards(supervisor) == before == {"pipe:": 2, "holdfast-board": 2}
    check_two_processes_work(world, supervisor)


# Copies of a worker.


@pytest.mark.parametrize("loop", [{}, {"no_uvloop": 1}], ids=["uvloop", "asyncio"])
def test_handlers_that_are_ready_to_run_do_not_run_in_a_copy_of_the_worker(world: World, loop: dict[str, int]) -> None:
    worker = world.start(["tests.worker.modules.alone"], **loop)
    worker.wait_for("worker started")
    fork = world.enqueue("fork_when_all_are_set")
    world.wait_for_entry(fork)
    payments = world.enqueue_all([("pay_when_all_are_set", {})] * 3)
    for job in payments:
        world.wait_for_entry(job)
    jobs = [fork, *payments, world.enqueue("set_all")]
    assert {row.state for row in world.wait_for_end(*jobs)} == {"succeeded"}
    [copy] = world.wait_for_entry(fork, "forked").others
    eventually(lambda: not is_alive(copy), "the copy has ended")
    assert [(entry.job, entry.pid) for entry in world.entries("paid")] == [(job, worker.pid) for job in payments]
