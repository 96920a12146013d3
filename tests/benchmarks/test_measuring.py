"""How the harness measures: that it counts what happened, and takes nothing for a figure that is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.contestants import Contestant, ContestantFailedError, Program
from benchmarks.figures import ENOUGH
from benchmarks.marks import VARIABLE, Marker, Marks
from benchmarks.measuring import Bench, Figures
from benchmarks.processes import cpu_seconds, memory
from benchmarks.running import TRIAL, Plan, _Sizes, kept, run
from benchmarks.servers import Redis, Sqlite
from tests.servers import missing_server_policy

SWINDLER = """
import json, os, sys, time
verb, *arguments = sys.argv[1:]
how = os.environ["HOW"]
if verb == "info":
    print(json.dumps({"lib": "swindler", "verbs": ["enqueue_bulk", "enqueue_one"], "pending": None}))
elif verb == "worker":
    if how == "dies":
        sys.exit("out of luck")
    marks = os.open(os.environ["BENCH_MARKS"], os.O_WRONLY | os.O_APPEND)
    for _ in range({"all": 10, "twice": 20, "half": 5}[how]):
        os.write(marks, time.monotonic_ns().to_bytes(8, "little"))
    time.sleep(60)
else:
    print(json.dumps({"n": 10, "seconds": 0.001}))
"""


@pytest.fixture
def bench(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Bench]:
    """A contestant that pretends, on SQLite."""
    program = tmp_path / "swindler.py"
    program.write_text(SWINDLER)
    with Sqlite(tmp_path) as backend:
        marks = Marks(tmp_path / "marks")
        contestant = Contestant("swindler", "peer", (sys.executable, str(program)), {"HOW": request.param})
        yield Bench(backend, Program(contestant, {VARIABLE: str(marks.path)}, tmp_path), marks)


@pytest.mark.parametrize("bench", ["all"], indirect=True)
def test_a_drain_is_all_jobs_once(bench: Bench) -> None:
    assert bench.drain(10)["n"] == 10
    assert bench.program.pids == []


@pytest.mark.parametrize("bench", ["twice"], indirect=True)
def test_a_drain_that_ran_jobs_twice_is_an_error(bench: Bench) -> None:
    with pytest.raises(ContestantFailedError, match="20 handlers ran for 10 jobs"):
        bench.drain(10)


@pytest.mark.parametrize("bench", ["half"], indirect=True)
def test_a_drain_that_left_jobs_undone_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measuring.STALL_SECONDS", 0.5)
    with pytest.raises(ContestantFailedError, match="5 of 10 jobs ran, then none did"):
        bench.drain(10)
    assert bench.program.pids == []


@pytest.mark.parametrize("bench", ["dies"], indirect=True)
def test_a_worker_that_ends_says_why(bench: Bench) -> None:
    with pytest.raises(ContestantFailedError, match="out of luck"):
        bench.drain(10)


@pytest.mark.parametrize("bench", ["all"], indirect=True)
def test_what_stays_pending_is_an_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.measuring.ACK_SECONDS", 0.3)
    monkeypatch.setattr(bench.backend, "pending", lambda query: 3)
    with pytest.raises(ContestantFailedError, match="3 of 10 jobs stayed pending"):
        bench.drain(10)


def test_ours_must_have_enqueued_what_it_says(tmp_path: Path) -> None:
    program = tmp_path / "swindler.py"
    program.write_text(SWINDLER)
    with Sqlite(tmp_path) as backend:
        contestant = Contestant("holdfast", "holdfast", (sys.executable, str(program)), {"HOW": "all"})
        ours = Bench(backend, Program(contestant, {}, tmp_path), Marks(tmp_path / "marks"))
        ours.program.info["pending"] = {"holdfast": True}
        with pytest.raises(ContestantFailedError, match="enqueue_one 10: 0 are there"):
            ours.enqueue("enqueue_one", 10)


# Sizes: who gets warm slowly must not be judged by how it does when cold.


def warming(count: int) -> Figures:
    """A thousand a second at first, ten thousand when warm: as a runtime that compiles what runs often."""
    seconds = min(count, 1_000) / 1_000 + max(0, count - 1_000) / 10_000
    return {"rate": count / seconds, "seconds": seconds, "n": count}


def test_only_a_measurement_that_lasted_long_enough_counts() -> None:
    sizes = _Sizes(scale=1.0)
    seen = sizes.measured("drain", 3.0, warming)
    assert seen["seconds"] >= ENOUGH * 3.0
    assert seen["rate"] > 5 * warming(TRIAL)["rate"]
    assert sizes.measured("drain", 3.0, warming)["n"] == seen["n"]


def test_a_measurement_like_another_begins_with_its_size() -> None:
    sizes = _Sizes(scale=1.0)
    count = sizes.measured("drain", 3.0, warming)["n"]
    tried: list[int] = []

    def noted(number: int) -> Figures:
        tried.append(number)
        return warming(number)

    sizes.measured("drain2", 3.0, noted, like="drain")
    assert tried == [count]


def test_sizes_are_bounded() -> None:
    tried: list[int] = []

    def instant(count: int) -> Figures:
        tried.append(count)
        return {"rate": 1e12, "seconds": 0.0, "n": count}

    _Sizes(scale=1.0).measured("drain", 3.0, instant)
    assert len(tried) <= 7
    assert max(tried) <= 1_000_000


# Marks and processes.


def test_marks_are_counted_and_read(tmp_path: Path) -> None:
    marks = Marks(tmp_path / "marks")
    mark = Marker(str(marks.path))
    before = time.monotonic_ns()
    mark()
    mark()
    assert marks.count() == 2
    assert before <= marks.at(0) <= marks.at(1) == marks.at(-1) <= time.monotonic_ns()
    marks.clear()
    assert marks.count() == 0
    mark()
    assert marks.count() == 1


def test_the_processor_time_of_ended_children_counts() -> None:
    work = "sum(range(3_000_000))"
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', '{work}']); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_seconds(process.pid) > 0.02
        assert memory(process.pid).processes == 1
        process.communicate("\n")
    assert memory(os.getpid()).largest > 5


# Whole runs, as short as they can be.


@pytest.mark.parametrize("engine", ["sqlite", "memory"])
def test_a_run_from_end_to_end(engine: str, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    run([Plan(engine, runs=1, scale=0.01, groups=("enqueue", "enqueue_bulk", "drain"))], path)
    records = [json.loads(text) for text in path.read_text().splitlines()]
    assert not [record for record in records if "error" in record]
    found = {(record["contestant"], record["figure"]) for record in records[1:]}
    assert {record["group"] for record in records if "value" in record} == {"enqueue", "enqueue_bulk", "drain"}
    assert {("holdfast", "drain"), ("bare", "drain"), ("holdfast", "cpu"), ("holdfast", "rss_process")} <= found
    assert records[0]["info"]["scale"] == 0.01


def test_a_run_replaces_what_it_measures_anew_and_keeps_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    lines = [
        {"engine": "redis", "figure": "machine"},
        {"engine": "redis", "group": "drain", "figure": "cpu"},
        {"engine": "redis", "group": "latency", "figure": "idle"},
        {"engine": "sqlite", "group": "drain", "figure": "drain"},
    ]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    left = [json.loads(text) for text in kept(path, [Plan("redis", groups=("drain",))])]
    assert left == [lines[0], lines[2], lines[3]]
    assert kept(tmp_path / "none", []) == []


def test_the_default_run_is_expected_to_take_little_more_than_half_an_hour() -> None:
    peers = {"redis": 3, "postgres": 4, "sqlite": 1, "mariadb": 0, "memory": 0}
    peer = Contestant("peer", "peer", ())
    assert sum(Plan(engine, peers=[peer] * count).expected() for engine, count in peers.items()) < 37 * 60


def test_a_bare_worker_collects_as_seldom_as_ours() -> None:
    look = (
        "import gc, sys; from benchmarks import program; sys.argv = ['x', 'worker']\n"
        "class One(program.Program):\n    def worker(self): print(gc.get_threshold()[0], gc.get_freeze_count() > 0)\n"
        "program.main(One())"
    )
    told = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True).stdout
    assert told.split() == ["10000", "True"]


def test_commands_of_clients_are_counted_and_those_of_scripts_are_not(tmp_path: Path) -> None:
    with missing_server_policy(), Redis(tmp_path) as backend:
        with backend.counting() as seen:
            backend.server.ask("PING")
            backend.server.ask("EVAL", "redis.call('SET', KEYS[1], 1) return redis.call('GET', KEYS[1])", 1, "a")
            time.sleep(0.2)
        assert seen == [2]
