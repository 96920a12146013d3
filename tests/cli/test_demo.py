"""`holdfast demo`: everything that was accepted is accounted for, and nothing is left behind, however it ends."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.cli.demo_ledger import Ledger, Tally, latency
from holdfast.job import NewJob, State
from holdfast.lifecycle import cancel
from holdfast.ports import SYSTEM
from holdfast.store import JobQuery
from holdfast.stores.memory import MemoryStore
from tests.cli.helpers import PATIENCE, Shop, environment, in_terminal, run_alone, started

JOBS = 80
"""Enough for one of each kind, with one that crashes its process."""

COUNTED = ("accepted", "succeeded", "failed", "cancelled", "crashed", "retried", "attempts", "lost", "processes_died")
MEASURED = ("seconds", "jobs_per_second", "latency_p50_ms", "latency_p99_ms")


class Place:
    """Where a demo runs: whatever it starts has this folder in its environment, and its files are in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = environment(TMPDIR=str(folder))

    @property
    def processes(self) -> list[str]:
        """The programs that were started here and still run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.folder).encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    @property
    def files(self) -> list[str]:
        return [path.name for path in self.folder.iterdir()]

    def check_nothing_is_left(self) -> None:
        assert (self.processes, self.files) == ([], [])


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    place = Place(folder)
    yield place
    eventually(lambda: not place.processes)


def eventually(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = SYSTEM.clock.monotonic() + seconds
    while not true():
        assert SYSTEM.clock.monotonic() < deadline
        SYSTEM.clock.pause(0.05)


def read_until_jobs_end(process: subprocess.Popen[str]) -> None:
    """Read the lines of a demo until it has told of jobs that have ended."""
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["succeeded"]:
            return
    raise AssertionError("it ended before a job did")


def check_sums(summary: dict[str, Any]) -> None:
    assert all(type(summary[name]) is int for name in COUNTED)
    assert all(type(summary[name]) is float for name in MEASURED)
    assert summary["lost"] == 0
    assert summary["accepted"] == summary["succeeded"] + summary["failed"] + summary["cancelled"]


# Whole demos.


def test_json(place: Place) -> None:
    ended = run_alone("demo", "--jobs", str(JOBS), "--json", env=place.environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    place.check_nothing_is_left()
    *progress, summary = map(json.loads, ended.stdout.splitlines())
    check_sums(summary)
    assert summary["accepted"] == JOBS
    assert summary["crashed"] == 1
    assert summary["failed"] == 1 + len(range(7, JOBS, 67))  # and every poison
    assert summary["cancelled"] == len(range(12, JOBS, 250)) + len(range(40, JOBS, 67))
    assert summary["retried"] >= summary["failed"] + len(range(4, JOBS, 11)) - 3  # some flaky numbers are rarer kinds
    assert summary["processes_died"] >= 4  # a worker, and then three times the job alone
    assert summary["jobs_per_second"] > 0
    times = [line["seconds"] for line in progress]
    assert all(later - sooner >= 0.99 for sooner, later in itertools.pairwise(times))


def test_piped(place: Place) -> None:
    ended = run_alone("demo", "--jobs", "11", "--processes", "1", env=place.environment)
    assert (ended.returncode, ended.stderr) == (0, "")
    place.check_nothing_is_left()
    assert "\x1b" not in ended.stdout
    assert "accepted   11\n" in ended.stdout
    assert "lost       0: " in ended.stdout
    assert "What next" not in ended.stdout


def test_in_a_terminal_with_a_store_that_is_kept(place: Place) -> None:
    code, shown = in_terminal("demo", "--jobs", "11", "--keep", env={**place.environment, "TERM": "xterm-256color"})
    assert code == 0, shown
    assert "Traceback" not in shown
    [folder] = place.files
    assert f"holdfast jobs list --store sqlite:///{place.folder / folder / 'jobs.db'}" in shown
    assert sorted(path.name for path in (place.folder / folder).iterdir()) == ["jobs.db", "workers.log"]
    queued = Shop(place.folder / folder / "jobs.db").use(lambda store: store.counts())
    assert sum(counts.succeeded + counts.failed + counts.cancelled for counts in queued) == 11


def test_ctrl_c_ends_an_endless_demo_well(place: Place) -> None:
    with started("demo", "--json", env=place.environment) as process:
        read_until_jobs_end(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    place.check_nothing_is_left()
    check_sums(json.loads(out.splitlines()[-1]))


def test_ctrl_c_before_all_jobs_have_ended(place: Place) -> None:
    with started("demo", "--jobs", "1000000", "--json", env=place.environment) as process:
        read_until_jobs_end(process)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (128 + signal.SIGINT, "")
    place.check_nothing_is_left()
    check_sums(json.loads(out.splitlines()[-1]))


def test_nothing_outlives_a_demo_that_is_killed(place: Place) -> None:
    with started("demo", "--json", env=place.environment) as process:
        read_until_jobs_end(process)
        eventually(lambda: len(place.processes) >= 4)  # itself, the supervisor, two workers: one may just have crashed
        process.kill()
    eventually(lambda: not place.processes)


def test_whoever_reads_may_have_seen_enough(place: Place) -> None:
    with started("demo", "--json", env=place.environment) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        assert process.communicate(timeout=PATIENCE)[1] == ""
    assert process.returncode == 0
    place.check_nothing_is_left()


def test_a_lost_job_is_found(place: Place, shop: Shop) -> None:
    """Somebody removes a job behind the demo's back."""

    async def forget(store: Any) -> int:
        ended = (await store.find(JobQuery(states=(State.SUCCEEDED,)))).jobs
        return int(await store.forget([job.id for job in ended[:1]]))

    with started("demo", "--jobs", "11", "--json", "--store", shop.url, env=place.environment) as process:
        eventually(lambda: shop.use(forget) == 1)
        out, _ = process.communicate(timeout=PATIENCE)
    summary = json.loads(out.splitlines()[-1])
    assert (process.returncode, summary["lost"], summary["accepted"]) == (1, 1, 11)
    assert summary["store"] == shop.url
    place.check_nothing_is_left()


# Bad usage.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--store", "memory://"], "memory cannot be shared"),
        (["--store", "nonsense://x"], "no engine for the store URL"),
        (["--jobs", "0"], "--jobs"),
    ],
)
def test_bad_usage(place: Place, arguments: list[str], message: str) -> None:
    ended = run_alone("demo", *arguments, env=place.environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr
    place.check_nothing_is_left()


# The mix.


def test_what_is_costly_is_rare() -> None:
    # In a process of its own: the demo's application is not to be imported here, where its store is not known.
    program = "from holdfast.cli.demo_mix import kind_of\nfor n in range(2000): print(kind_of(n).label)"
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    kinds = Counter(out.splitlines())
    assert kinds.total() == 2000
    assert kinds["crashes (segfault)"] == kinds["crashes (exit)"] == 2
    assert kinds["slow (0.5 to 1.5 s)"] <= 40
    assert kinds["cancelled while it runs"] <= 8
    assert kinds["succeeds (coroutine)"] + kinds["succeeds (thread)"] > 1200


# The accounts.


def new_job() -> NewJob:
    return NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}")


@pytest.mark.parametrize("keep_ids", [False, True])
async def test_the_ledger_believes_the_store_only(keep_ids: bool) -> None:
    store = MemoryStore(ports=SYSTEM)
    jobs = {name: new_job() for name in ("cancelled", "waits", "never stored")}
    await store.insert([jobs["cancelled"], jobs["waits"]])
    ledger = Ledger(store, ["a", "b"], keep_ids=keep_ids)
    for job in jobs.values():
        ledger.accept(job.id, "a")
    [stored] = [job for job in [await store.get(jobs["cancelled"].id)] if job is not None]
    await store.apply([cancel(stored)])
    assert ledger.total == Tally(accepted=3)

    await ledger.look([jobs["cancelled"].id, jobs["waits"].id, "unheard of"])
    assert ledger.total == Tally(accepted=3, cancelled=1)
    assert set(ledger.open) == {jobs["waits"].id, jobs["never stored"].id}

    await ledger.audit()
    assert ledger.total == Tally(accepted=3, cancelled=1, lost=2)
    assert ledger.tallies["b"] == Tally()


async def test_an_audit_finds_a_job_that_is_gone_since() -> None:
    store = MemoryStore(ports=SYSTEM)
    job = new_job()
    await store.insert([job])
    await store.request_cancel([job.id])
    ledger = Ledger(store, ["a"], keep_ids=True)
    ledger.accept(job.id, "a")
    await ledger.look([job.id])
    assert ledger.total == Tally(accepted=1, cancelled=1)
    assert await store.forget([job.id]) == 1
    await ledger.audit()
    assert ledger.total == Tally(accepted=1, lost=1)


def test_percentiles() -> None:
    assert latency([]).p50 is latency([]).p99 is None
    assert (latency([3.0]).p50, latency([3.0]).p99) == (3.0, 3.0)
    hundred = latency(float(number) for number in range(100))
    assert (hundred.p50, hundred.p99) == (50.0, 99.0)
