"""The processes of isolated jobs: what becomes of a job, and of those who wait for it, when one of them ends."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest

from holdfast import State
from holdfast.events import JobSettled
from holdfast.job import Job, NewJob, enqueued
from holdfast.lifecycle import Crashed, Outcome
from holdfast.ports import SYSTEM
from holdfast.worker.context import CurrentJob, Surroundings
from holdfast.worker.isolated_process import how_it_ended
from holdfast.worker.isolation import IsolatedPool
from tests.worker.bench import PATIENCE, Bench, Heard, failed, stored, wait_until
from tests.worker.shop import STORE, Shop


def ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def test_a_process_that_dies_while_it_has_nothing_to_do_costs_the_next_job_nothing(bench: Bench, shop: Shop) -> None:
    bench.work(shop.app)
    pid = shop.where_alone.enqueue().result(PATIENCE)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: ended(pid), "it is gone")
    job = shop.where_alone.enqueue()
    assert job.result(PATIENCE)["pid"] != pid
    assert (stored(job).attempt, stored(job).crashes) == (1, 0)


def test_several_jobs_run_in_several_processes_at_once(bench: Bench, shop: Shop, tmp_path: Path) -> None:
    bench.work(shop.app, concurrency=3)
    begun = [tmp_path / str(number) for number in range(3)]
    jobs = [shop.until_cancelled_alone.enqueue(str(path)) for path in begun]
    wait_until(lambda: all(path.exists() for path in begun), "all of them run")
    for job in jobs:
        job.cancel()
    wait_until(lambda: all(stored(job).state is State.CANCELLED for job in jobs), "all of them are cancelled")


def test_a_job_whose_process_cannot_be_started_is_put_off_and_has_used_no_attempt(
    bench: Bench, shop: Shop, heard: Heard, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STORE, "nonsense://")
    bench.work(shop.app)
    job = shop.ping_alone.options(max_retries=0).enqueue()
    heard.wait_for(JobSettled, lambda settled: settled.job_id == job.id and settled.reason == "snoozed")
    assert (stored(job).state, stored(job).attempt, stored(job).snoozes) == (State.READY, 0, 1)
    assert shop.aping.enqueue().result(PATIENCE) == "pong"


def test_a_job_whose_process_can_never_be_started_fails_in_the_end_and_says_so(
    bench: Bench, shop: Shop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STORE, "nonsense://")
    bench.work(shop.app, max_snoozes=0)
    reason, kind, message = failed(shop.ping_alone.enqueue())
    assert (reason, kind) == ("snoozed_out", "OSError")
    assert "it ended while it loaded tests.worker.shop:app: exit code 1" in message


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (None, "still running"),
        (0, "exit code 0"),
        (3, "exit code 3"),
        (-11, "killed by SIGSEGV"),
        (-9, "killed by SIGKILL (out of memory?)"),
        (-63, "killed by signal 63"),
    ],
)
def test_the_end_of_a_process_is_told_in_words(code: int | None, words: str) -> None:
    assert how_it_ended(code) == words


async def test_whoever_waits_for_a_job_hears_of_it_when_all_processes_are_ended(
    shop: Shop, heard: Heard, tmp_path: Path
) -> None:
    """Or the event loop, which waits for them, would never end."""
    pool = IsolatedPool("tests.worker.shop:app", shop.app.tasks, ports=SYSTEM, listener=heard)
    payload = b'{"path": "%s", "seconds": 60}' % str(tmp_path / "begun").encode()
    job: Job = enqueued(NewJob(id=SYSTEM.ids.job_id(), task="endless_alone", payload=payload), 0)
    current = CurrentJob(job, Surroundings(shop.app.store, SYSTEM, lambda current: None), is_async=False)
    begun = threading.Event()
    running: asyncio.Task[Outcome] = asyncio.create_task(pool.run(job, current, None, begun.set))
    while not begun.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await pool.close()
    await asyncio.wait({running}, timeout=5)
    assert running.done()
    assert isinstance(running.result(), Crashed)
