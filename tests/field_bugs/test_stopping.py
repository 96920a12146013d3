"""Field bugs about workers that are told to stop: who finishes, who is given back, and at what cost.

The TTL is ten minutes throughout: whatever comes back in these tests was given back, and not found to be lost.
"""

from __future__ import annotations

import signal
from collections import Counter
from typing import Any

import msgspec
import pytest

from holdfast.job import Job, JobId, Reason, State
from tests.faults.stage import StoreStage
from tests.field_bugs.places import MARIADB, SQLITE, MakePlace, Played, on
from tests.worker.programs import TTL, throughout

NEVER = 600.0
"""The TTL, in seconds."""
AHEAD = 20
ENGINES = (SQLITE, MARIADB)


class Stopped(msgspec.Struct):
    finished: list[JobId]
    """Those that ran in two processes when these were told to stop, and had time to finish."""
    unfinished: JobId
    """The one that had not. It may be tried once only."""
    fetched: list[JobId]
    """Those that its worker had fetched and not begun."""
    given_back: dict[JobId, Job]
    """These two kinds, when the worker had ended."""
    jobs: dict[JobId, Job]
    runs: Counter[JobId]
    exit_codes: list[int]


def stop_two_workers(stage: StoreStage) -> Stopped:
    # One that has time: two processes on one queue, and somebody else who looks for jobs in it.
    patient = stage.supervisor(processes=2, ttl=NEVER, grace=NEVER)
    finished = [stage.enqueue("hold", gate="finish") for _ in range(2)]
    for job_id in finished:
        stage.wait_for_entry(job_id)
    patient.signal(signal.SIGTERM)
    patient.wait_for("stopping")
    somebody_else = stage.alone(ttl=NEVER)
    stage.wait_for_state(stage.enqueue("note"), "succeeded")  # he claims
    throughout(TTL / 2, lambda: len(stage.entries(task="hold")) == 2, "nobody else begins them")
    stage.open_gate("finish")
    exit_codes = [patient.exit_code()]
    somebody_else.signal(signal.SIGTERM)
    exit_codes.append(somebody_else.exit_code())

    # One that has not, with a full prefetch.
    hasty = stage.alone(ttl=NEVER, grace=0.2, claim_ahead=AHEAD)
    calls: list[tuple[str, dict[str, Any]]] = [("note", {"number": number}) for number in range(AHEAD)]
    unfinished, *fetched = stage.enqueue_all([("hold", {"gate": "late"}), *calls], max_retries=0)
    stage.wait_for_entry(unfinished)
    stage.wait_for_count("in_flight", 1 + AHEAD)
    hasty.signal(signal.SIGTERM)
    hasty.exit_code()
    jobs = stage.jobs()
    given_back = {job_id: jobs[job_id] for job_id in [unfinished, *fetched]}
    stage.open_gate("late")
    stage.alone(ttl=NEVER)
    jobs = stage.wait_for_end([*finished, unfinished, *fetched])
    return Stopped(finished, unfinished, fetched, given_back, jobs, stage.runs(), exit_codes)


@pytest.fixture(scope="module")
def stopped(places: MakePlace) -> Played[Stopped]:
    return places.play(ENGINES, stop_two_workers)


@on(*ENGINES)
def test_b12_a_long_job_does_not_run_twice_while_two_processes_on_its_queue_stop(
    engine: str, stopped: Played[Stopped]
) -> None:
    """Sidekiq (#6379): with two capsules, the one that stopped first pushed back what the other was still running.

    Here both processes of a supervisor finish their long jobs after SIGTERM while another worker looks for jobs in the
    same queue. Each ran once. Had the stop given back what it does not hold, the other worker would have begun it.
    """
    found = stopped[engine]
    assert {found.runs[job_id] for job_id in found.finished} == {1}
    assert {(found.jobs[job_id].state, found.jobs[job_id].version) for job_id in found.finished} == {
        (State.SUCCEEDED, 1)
    }
    assert found.exit_codes == [0, 0]


@on(*ENGINES)
def test_b15_what_was_fetched_is_given_back_at_once_when_the_worker_stops(
    engine: str, stopped: Played[Stopped]
) -> None:
    """PgQueuer (PR 693): a shutdown dropped the rest of a batch that it had claimed; it came back when the heartbeat
    timed out.

    Here all of it is ready again when the process has ended, though the TTL is ten minutes, and each runs once. Without
    the release they would be in flight at that moment.
    """
    found = stopped[engine]
    for job_id in found.fetched:
        back = found.given_back[job_id]
        assert (back.state, back.reason, back.attempt) == (State.READY, Reason.RELEASED, 0)
    assert Counter(found.jobs[job_id].state for job_id in found.fetched) == {State.SUCCEEDED: AHEAD}
    assert {found.runs[job_id] for job_id in found.fetched} == {1}


@on(*ENGINES)
def test_b20_a_deploy_in_the_last_attempt_of_a_job_does_not_end_it(engine: str, stopped: Played[Stopped]) -> None:
    """Oban (#328), River (PR #1290): a job that was interrupted by a deploy in its last attempt was discarded.

    Here the job has one attempt and no retries. Interrupted, it is given back with nothing counted, and succeeds in the
    next worker in its first attempt. Were the interruption a failure, it would be a dead letter.
    """
    found = stopped[engine]
    back = found.given_back[found.unfinished]
    assert (back.state, back.reason, back.attempt, back.failures) == (State.READY, Reason.RELEASED, 0, 0)
    job = found.jobs[found.unfinished]
    assert (job.max_retries, job.state, job.attempt) == (0, State.SUCCEEDED, 1)
    assert found.runs[found.unfinished] == 2
