"""The 26 bugs of other job queues that lost, doubled or stranded jobs, and which of our tests shows that we have none.

A test that is not in this folder was there before: it shows exactly that, and says so in its docstring.
"""

from __future__ import annotations

import msgspec

_HERE = "tests/field_bugs"


class FieldBug(msgspec.Struct, frozen=True):
    """What went wrong, where, and our tests, as file and function."""

    number: int
    what: str
    where: str
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        """As it is called."""
        return f"B{self.number}"


def _crashes(name: str) -> str:
    return f"{_HERE}/test_crashes.py::{name}"


def _leases(name: str) -> str:
    return f"{_HERE}/test_leases.py::{name}"


def _stopping(name: str) -> str:
    return f"{_HERE}/test_stopping.py::{name}"


def _outages(name: str) -> str:
    return f"{_HERE}/test_outages.py::{name}"


def _data(name: str) -> str:
    return f"{_HERE}/test_data.py::{name}"


FIELD_BUGS = (
    FieldBug(
        1,
        "a job longer than the visibility timeout is handed out again while it runs",
        "celery #5935, #5306, #6229",
        (_leases("test_b01_a_job_longer_than_the_visibility_timeout_runs_once"),),
    ),
    FieldBug(
        2,
        "SIGKILL loses what runs and what was prefetched",
        "celery #7924, #1789",
        (
            _crashes("test_b02_sigkill_loses_neither_the_running_job_nor_those_that_were_fetched"),
            "tests/faults/test_redis_server.py::test_what_was_accepted_outlives_a_kill_of_the_server_however_often",
        ),
    ),
    FieldBug(
        3,
        "recovery only after an hour, or four",
        "celery #4984; graphile-worker #204, #222",
        (_crashes("test_b03_a_job_is_recovered_after_the_ttl_and_not_after_an_hour"),),
    ),
    FieldBug(
        4,
        "a worker that lives and takes no more jobs after a reconnect",
        "celery #8030, #8082, #8091, #10205, #10302; bullmq #4384, #4151, #4479",
        (_outages("test_b04_a_worker_goes_on_after_its_connections_were_lost"),),
    ),
    FieldBug(
        5,
        "interrupted jobs stay in flight for ever",
        "procrastinate #307, #740",
        (_crashes("test_b05_an_interrupted_job_does_not_stay_in_flight_because_keepers_are_built_in"),),
    ),
    FieldBug(
        6,
        "the job that rescues others stalls itself",
        "procrastinate #1408",
        (_crashes("test_b06_a_keeper_that_stands_still_holds_up_no_other"),),
    ),
    FieldBug(
        7,
        "a dead worker is removed before its jobs are found; one with the same id hides them",
        "procrastinate #1518; oban #862",
        (_leases("test_b07_the_jobs_of_a_worker_that_was_removed_are_found"),),
    ),
    FieldBug(
        8,
        "a rescue by time alone runs live jobs again",
        "hexpm PR 1825; Oban's Lifeline",
        (_leases("test_b08_no_rescue_goes_by_the_age_of_a_job_alone"),),
    ),
    FieldBug(
        9,
        "a page of jobs that cannot be rescued hides those behind it",
        "river PR #1331, #1288, #1318",
        (_leases("test_b09_a_lost_job_is_found_behind_any_number_of_living_ones"),),
    ),
    FieldBug(
        10,
        "a call to the database that does not come back stops the fetcher",
        "river PR #1255, #1251",
        ("tests/faults/test_server_paused.py::test_no_call_outlives_its_deadline_while_the_server_stands_still",),
    ),
    FieldBug(
        11,
        "a payload that cannot be decoded goes round in circles",
        "river PR #1324",
        (_data("test_b11_a_payload_that_cannot_be_decoded_stops_neither_the_worker_nor_the_keeper"),),
    ),
    FieldBug(
        12,
        "with two pools on one queue, a long job runs twice during a shutdown",
        "sidekiq #6379",
        (_stopping("test_b12_a_long_job_does_not_run_twice_while_two_processes_on_its_queue_stop"),),
    ),
    FieldBug(
        13,
        "a job that fails while the store is away is lost",
        "sidekiq #4141",
        (_outages("test_b13_a_job_that_fails_while_the_store_is_away_is_kept_and_retried"),),
    ),
    FieldBug(
        14,
        "a job is taken for stalled before its lock is written",
        "bull #356, #258, PR 359",
        (_leases("test_b14_a_job_is_never_seen_without_its_lease"),),
    ),
    FieldBug(
        15,
        "a shutdown drops the rest of a claimed batch until the heartbeat times out",
        "pgqueuer PR 693",
        (_stopping("test_b15_what_was_fetched_is_given_back_at_once_when_the_worker_stops"),),
    ),
    FieldBug(
        16,
        "one settlement that fails takes its batch with it, or is repeated in a tight loop",
        "river PR #258, #1292",
        (
            "tests/worker/test_settling.py"
            "::test_one_job_that_cannot_be_settled_does_not_take_the_others_of_its_batch_with_it",
            "tests/worker/test_settling.py::test_one_job_that_can_not_be_settled_at_all_leaves_the_worker_working",
        ),
    ),
    FieldBug(
        17,
        "a job whose worker is lost comes back uncounted, for ever",
        "celery #9082; OasisPlatform PR 975; taskiq-aio-pika #35",
        (_crashes("test_b17_a_job_that_kills_its_worker_again_and_again_ends_as_a_dead_letter"),),
    ),
    FieldBug(
        18,
        "the lock of a queue outlives a crash in the last attempt",
        "graphile-worker #254, #449",
        (_crashes("test_b18_the_lane_of_a_job_that_crashed_for_the_last_time_goes_on"),),
    ),
    FieldBug(
        19,
        "an orphan keeps its unique slot",
        "oban #424; phoenix_kit PR 662",
        (_crashes("test_b19_the_key_of_a_job_that_crashed_for_good_is_free_again"),),
    ),
    FieldBug(
        20,
        "a deploy in the last attempt discards the job",
        "oban #328; river PR #1290",
        (_stopping("test_b20_a_deploy_in_the_last_attempt_of_a_job_does_not_end_it"),),
    ),
    FieldBug(
        21,
        "Redis evicts jobs and locks",
        "sidekiq #2883; bullmq #2215; rq #1280",
        ("tests/redis/test_memory_limit.py::test_a_server_that_may_throw_jobs_away_is_refused",),
    ),
    FieldBug(
        22,
        "a cancelled command leaves its reply to the next caller",
        "redis-py, CVE-2023-28858, CVE-2023-28859",
        (
            _outages("test_b22_a_call_that_is_cancelled_leaves_its_answer_to_nobody_else"),
            "tests/redis/test_wire.py::test_a_cancelled_call_hands_its_reply_to_nobody",
        ),
    ),
    FieldBug(
        23,
        "at a change of clocks: twice, not at all, an hour late",
        "celery #1604, #6438, #9653, #10107",
        (
            _data("test_b23_a_local_time_around_a_change_of_clocks_is_one_moment"),
            _data("test_b23_a_local_time_without_its_zone_is_refused"),
        ),
    ),
    FieldBug(
        24,
        "a NUL in a result leaves the job running for ever",
        "kestra #10326; osbuild-composer PR 4779; awa #85",
        (_data("test_b24_a_nul_in_a_result_or_an_error_does_not_leave_the_job_in_flight"),),
    ),
    FieldBug(
        25,
        "leases are judged by the clock of whoever looks",
        "mlflow PR 25199; MailFathom #1989; occurrent PR 664",
        (_leases("test_b25_a_keeper_whose_clock_is_wrong_takes_no_lease_from_the_living"),),
    ),
    FieldBug(
        26,
        "InnoDB deadlocks of claims with updates by the primary key",
        "MySQL bug 111637; oban's changelog",
        (
            "tests/faults/test_storm.py::test_ten_claimers_rescuers_and_bulk_cancels_on_the_same_rows",
            "tests/faults/test_deadlocks.py::test_a_deadlock_is_retried_and_user_code_does_not_see_it",
        ),
    ),
)
