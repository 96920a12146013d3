"""Field bugs about workers that die: what becomes of their jobs, how soon, and who sees to it.

Each test is named by its number in our list of known bugs of job queues (`index.py`); its docstring says what happened
there, what is shown here, and what would break it.
"""

from __future__ import annotations

import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.failures import decode_history
from holdfast.job import Job, JobId, Key, NewJob, Reason, State
from holdfast.ports import SYSTEM
from holdfast.store import InsertStatus
from tests.faults.stage import StoreStage
from tests.field_bugs.places import REDIS, SHARED_BY_PROCESSES, SQLITE, MakePlace, Played, on
from tests.worker.programs import TTL, Program, eventually, pause_between_writes, throughout

AHEAD = 5
"""Jobs that the worker has fetched and not begun when it dies."""
LATEST_RECOVERY = 30 * TTL
"""An hour, or four, is what others took. On a machine that has other things to do we take a few TTLs."""
_HOUR = 3600 * 1_000_000


# A worker is killed with a job that runs and others that it has only fetched.


class Killed(msgspec.Struct):
    running: JobId
    fetched: list[JobId]
    jobs: dict[JobId, Job]
    runs: Counter[JobId]
    took: float
    """Seconds from the kill until the job ran again."""


def kill_a_worker(stage: StoreStage) -> Killed:
    victim = stage.alone(claim_ahead=AHEAD)
    calls: list[tuple[str, dict[str, Any]]] = [("note", {"number": number}) for number in range(AHEAD)]
    running, *fetched = stage.enqueue_all([("hold_at_first", {"gate": "never"}), *calls])
    stage.wait_for_entry(running)
    stage.wait_for_count("in_flight", 1 + AHEAD)
    stage.alone()
    killed_at = time.monotonic()
    victim.kill()
    took = stage.wait_for_entry(running, times=2).at - killed_at
    jobs = stage.wait_for_end([running, *fetched])
    return Killed(running, fetched, jobs, stage.runs(), took)


@pytest.fixture(scope="module")
def killed(places: MakePlace) -> Played[Killed]:
    return places.play(SHARED_BY_PROCESSES, kill_a_worker)


@on(*SHARED_BY_PROCESSES)
def test_b02_sigkill_loses_neither_the_running_job_nor_those_that_were_fetched(
    engine: str, killed: Played[Killed]
) -> None:
    """Celery (#7924, #1789) acknowledged early: SIGKILL lost what ran and what was prefetched.

    Here a claim is a row that names its holder. The job that ran runs once more, those that were only fetched run once,
    and all of them succeed. Without the claims in the store (an acknowledgement at the fetch) six jobs would be gone.
    """
    found = killed[engine]
    assert {found.jobs[job_id].state for job_id in [found.running, *found.fetched]} == {State.SUCCEEDED}
    assert found.runs == Counter({found.running: 2, **dict.fromkeys(found.fetched, 1)})
    assert [failure.type for failure in decode_history(found.jobs[found.running].failure_history)] == ["WorkerLost"]


@on(*SHARED_BY_PROCESSES)
def test_b03_a_job_is_recovered_after_the_ttl_and_not_after_an_hour(engine: str, killed: Played[Killed]) -> None:
    """Celery (#4984) waits for the visibility timeout, an hour; graphile-worker (#204, #222) four hours.

    Here it takes the TTL and the keepers' interval. The time is printed; the bound is generous, because machines are
    slow at times. A keeper that went by a fixed hour would never come near it.
    """
    found = killed[engine]
    print(f"{engine}: it ran again {found.took:.2f} s after the kill, with a TTL of {TTL:g} s")
    assert found.took <= LATEST_RECOVERY


# Nobody keeps, or he who does stands still.


class Kept(msgspec.Struct):
    held: JobId
    after_the_kill: Job
    without_a_keeper: Job
    """Several TTLs later."""
    jobs: dict[JobId, Job]
    runs: Counter[JobId]
    others: list[JobId]
    stopped_keeper_said: str


def stop_the_keeper(stage: StoreStage) -> Kept:
    victim = stage.alone(keepers=False)
    held = stage.enqueue("hold_at_first", gate="never")
    stage.wait_for_entry(held)
    keeper = stage.alone()
    _pause(stage, keeper)
    victim.kill()
    stage.alone(keepers=False)  # it has free hands, and does not look after others
    after_the_kill = stage.job(held)
    throughout(2.5 * TTL, lambda: len(stage.entries(job_id=held)) == 1, "nobody brings it back")
    without_a_keeper = stage.job(held)

    stage.alone()  # keepers are part of every worker, unless somebody switches them off
    stage.wait_for_state(held, "succeeded")
    keeper.signal(signal.SIGCONT)
    others = stage.enqueue_all(("note", {"number": number}) for number in range(20))
    jobs = stage.wait_for_end([held, *others])
    eventually(lambda: keeper.lines("taken for dead"), "the one that stood still hears of it", instead=keeper.text)
    return Kept(held, after_the_kill, without_a_keeper, jobs, stage.runs(), others, keeper.text())


def _pause(stage: StoreStage, program: Program) -> None:
    """Stop the program, at a moment when nobody waits for it."""
    if stage.url.startswith("sqlite"):
        pause_between_writes(Path(stage.url.removeprefix("sqlite:///")), [program])
    else:
        program.signal(signal.SIGSTOP)
        eventually(program.is_stopped, "it is stopped")


@pytest.fixture(scope="module")
def kept(places: MakePlace) -> Played[Kept]:
    return places.play((SQLITE, REDIS), stop_the_keeper)


@on(SQLITE, REDIS)
def test_b05_an_interrupted_job_does_not_stay_in_flight_because_keepers_are_built_in(
    engine: str, kept: Played[Kept]
) -> None:
    """Procrastinate (#307, #740): jobs of workers that were interrupted stayed `doing` for ever; to retry them was left
    to a task that everybody had to write and to schedule.

    Here any worker with its usual settings brings them back. The control is in the scene: while the only others have
    their keepers switched off, the job stays in flight.
    """
    found = kept[engine]
    assert found.after_the_kill == found.without_a_keeper
    assert found.without_a_keeper.state is State.IN_FLIGHT
    assert (found.jobs[found.held].state, found.jobs[found.held].attempt) == (State.SUCCEEDED, 2)


@on(SQLITE, REDIS)
def test_b06_a_keeper_that_stands_still_holds_up_no_other(engine: str, kept: Played[Kept]) -> None:
    """Procrastinate (#1408): the job that rescues others was itself a job; when it stalled, everything stalled.

    Here keeping is no job, takes no lock and has no leader: one keeper is stopped (SIGSTOP), another does the work, and
    when the first goes on nothing is run twice. Were there one leader, the job would have waited for the stopped one.
    """
    found = kept[engine]
    assert found.runs == Counter({found.held: 2, **dict.fromkeys(found.others, 1)})
    assert {job.state for job in found.jobs.values()} == {State.SUCCEEDED}
    assert "found dead" not in found.stopped_keeper_said


# A job that takes its worker with it, every time.


class CrashLoop(msgspec.Struct):
    culprit: JobId
    neighbours: list[JobId]
    jobs: dict[JobId, Job]
    runs: Counter[JobId]
    while_it_lived: InsertStatus
    """What an insert with its key was answered before its end."""
    after_its_end: InsertStatus


def crash_again_and_again(stage: StoreStage) -> CrashLoop:
    stage.open_gate("now")
    culprit = _new_job("die_among_others", {"gate": "now", "how": "kill"})
    same_call = _new_job("die_among_others", {"gate": "now", "how": "kill"})
    neighbours = [_new_job("note", {"number": number}, keyed=False) for number in range(AHEAD)]
    stage.store.insert_blocking([culprit, *neighbours[:2]])
    [while_it_lived] = stage.store.insert_blocking([same_call])
    stage.supervisor(ttl=600)  # nobody waits for that
    stage.wait_for_state(culprit.id, "failed")
    # It is over with that one: what it held is free.
    stage.store.insert_blocking(neighbours[2:])
    [after_its_end] = stage.store.insert_blocking([_new_job("note", {"number": 99})])
    ids = [job.id for job in neighbours]
    jobs = stage.wait_for_end([culprit.id, *ids])
    return CrashLoop(culprit.id, ids, jobs, stage.runs(), while_it_lived.status, after_its_end.status)


def _new_job(task: str, arguments: dict[str, Any], *, keyed: bool = True) -> NewJob:
    return NewJob(
        id=SYSTEM.ids.job_id(),
        task=task,
        payload=msgspec.json.encode(arguments),
        share="tenant",
        key=Key("the key", task, _HOUR) if keyed else None,
    )


@pytest.fixture(scope="module")
def crash_loop(places: MakePlace) -> Played[CrashLoop]:
    return places.play(SHARED_BY_PROCESSES, crash_again_and_again)


@on(*SHARED_BY_PROCESSES)
def test_b17_a_job_that_kills_its_worker_again_and_again_ends_as_a_dead_letter(
    engine: str, crash_loop: Played[CrashLoop]
) -> None:
    """Celery (#9082), taskiq-aio-pika (#35): a job whose worker was lost was put back without counting, so one that
    ran out of memory took down one worker after the other for ever.

    Here the first crash makes it a suspect that runs alone, and the third crash alone is its last. Without the count
    the scene would not end.
    """
    found = crash_loop[engine]
    dead = found.jobs[found.culprit]
    assert (dead.state, dead.reason, dead.crashes, dead.attempt) == (State.FAILED, Reason.CRASHED, 3, 4)
    assert found.runs[found.culprit] == 4
    failures = [failure.type for failure in decode_history(dead.failure_history)]
    assert failures == ["WorkerDied", *["ProcessDied"] * 3]


@on(*SHARED_BY_PROCESSES)
def test_b18_the_lane_of_a_job_that_crashed_for_the_last_time_goes_on(
    engine: str, crash_loop: Played[CrashLoop]
) -> None:
    """graphile-worker (#254, #449): the lock of a named queue was not released when its job crashed in the last
    attempt, and the whole queue stood still.

    Here a lane (queue, priority and share) has no lock: of the jobs of the same lane some came before the end of the
    culprit and some after it; each ran, and ran once. A lock that outlives its holder would leave them ready.
    """
    found = crash_loop[engine]
    assert {(found.jobs[job_id].state, found.runs[job_id]) for job_id in found.neighbours} == {(State.SUCCEEDED, 1)}


@on(*SHARED_BY_PROCESSES)
def test_b19_the_key_of_a_job_that_crashed_for_good_is_free_again(engine: str, crash_loop: Played[CrashLoop]) -> None:
    """Oban (#424): an orphan in `executing` kept its unique slot, and every later insert was refused.

    Here the key is held as long as the job lives (the control: the same call is the same job), and its end as a dead
    letter frees it in the same write: another payload with that key is taken.
    """
    found = crash_loop[engine]
    assert found.while_it_lived is InsertStatus.EXISTING
    assert found.after_its_end is InsertStatus.CREATED
