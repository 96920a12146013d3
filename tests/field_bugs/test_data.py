"""Field bugs about what is in a job: data that cannot be read or kept, local times that do not exist or come twice."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from holdfast import Holdfast, InvalidOption, InvalidPayload, JobFailed, ResultNotKept, Steps, WorkerSettings, current
from holdfast.failures import decode_history
from holdfast.job import Job, NewJob, Reason, State
from holdfast.keepers.rescue import Rescue
from holdfast.ports import MICROSECONDS, SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.testing import isolated
from tests.field_bugs.places import EVERY_ENGINE, Place, on
from tests.worker.programs import DEADLINE

SETTINGS = WorkerSettings(lease_ttl=1.0, concurrency=4)
UNREADABLE = (b"", b"{", b"\xff\xfe\x00", b'{"number": 1} and more', b"[1]", b'{"number": "\xed\xa0\x80"}')


# Payloads that nobody can read.


@on(*EVERY_ENGINE)
async def test_b11_a_payload_that_cannot_be_decoded_stops_neither_the_worker_nor_the_keeper(place: Place) -> None:
    """River (PR #1324): a job whose JSON could not be decoded sent the executor and the rescuer round in circles.

    Here such jobs were in flight when their worker died. A keeper brings all of them back at once; a worker then makes
    each a dead letter at its first call, with what is wrong with it, while the readable ones in between succeed. A
    keeper or a worker that gives up a batch for one job would leave those waiting.
    """
    readable = [b'{"number": %d}' % number for number in range(len(UNREADABLE))]
    payloads = [payload for pair in zip(UNREADABLE, readable, strict=True) for payload in pair]
    jobs = [NewJob(id=SYSTEM.ids.job_id(), task="double", payload=payload) for payload in payloads]
    async with place.store() as store, Holdfast(store) as app:
        await store.insert(jobs)
        await store.open_session(Session(id="dead", queues=("default",)))
        request = ClaimRequest(session_id="dead", queues=("default",), limit=len(jobs))
        assert len((await store.claim(request)).jobs) == len(jobs)
        await store.close_session("dead")
        assert await Rescue(store, ports=SYSTEM, ttl=600).one_pass() == len(jobs)

        @app.task(name="double", on_failed="told")
        async def double(number: int) -> int:
            return 2 * number

        @app.task(name="told")
        async def told(job_id: str) -> str:
            return job_id

        with app.start_worker(SETTINGS):
            for new in jobs:
                job = await app.aget(new.id)
                if new.payload in UNREADABLE:
                    with pytest.raises(JobFailed):
                        await job.aresult(timeout=DEADLINE)
                    assert job.details is not None
                    assert (job.details.reason, job.details.payload) == (Reason.PERMANENT, new.payload)
                    assert (job.failures[0].type, job.failures[-1].type) == ("WorkerLost", "InvalidPayload")
                else:
                    await job.aresult(timeout=DEADLINE)


# NUL.


@on(*EVERY_ENGINE)
def test_b24_a_nul_in_a_result_or_an_error_does_not_leave_the_job_in_flight(place: Place) -> None:
    """Kestra (#10326) among others: PostgreSQL takes no NUL in text, so writing the result failed, and the execution
    stayed RUNNING for ever.

    Here a NUL in an argument is refused at the enqueue; in a result, the job has succeeded and says that the result
    was not kept; in an error, it is made visible. The same on every engine, those that could keep it included. A
    worker that handed it on would leave the job in flight on PostgreSQL.
    """
    with Holdfast(place.store()) as app:

        @app.task(backoff=Steps((0.0,)), max_retries=1)
        async def nul(where: str) -> str:
            if where == "error" or (where == "first error" and current().attempt == 1):
                raise ValueError("a\0b")
            return "a\0b" if where == "result" else "fine"

        with pytest.raises(InvalidPayload, match="NUL"):
            nul.enqueue("a\0b")
        with app.start_worker(SETTINGS):
            in_result = nul.enqueue("result")
            with pytest.raises(ResultNotKept, match="NUL"):
                in_result.result(timeout=DEADLINE)
            assert _details(in_result).state is State.SUCCEEDED
            in_error = nul.enqueue("error")
            with pytest.raises(JobFailed):
                in_error.result(timeout=DEADLINE)
            retried = nul.enqueue("first error")
            assert retried.result(timeout=DEADLINE) == "fine"
        for job, attempts in ((in_error, 2), (retried, 1)):
            history = decode_history(_details(job).failure_history)
            assert [(failure.type, failure.message) for failure in history] == [("ValueError", "a\\x00b")] * attempts
        assert [(count.succeeded, count.failed, count.in_flight) for count in app.counts()] == [(2, 1, 0)]


def _details(job: Any) -> Job:
    details = job.refresh().details
    assert isinstance(details, Job)
    return details


# Local times.

NOW = datetime(2029, 1, 1, tzinfo=UTC)
CHANGES = [
    # zone, local time, fold, the same in UTC
    pytest.param("Europe/Berlin", "2029-03-25T01:59:59", 0, "2029-03-25T00:59:59", id="the last second of winter"),
    pytest.param("Europe/Berlin", "2029-03-25T02:30:00", 0, "2029-03-25T01:30:00", id="skipped, by the time before"),
    pytest.param("Europe/Berlin", "2029-03-25T02:30:00", 1, "2029-03-25T00:30:00", id="skipped, by the time after"),
    pytest.param("Europe/Berlin", "2029-03-25T03:00:00", 0, "2029-03-25T01:00:00", id="the first second of summer"),
    pytest.param("Europe/Berlin", "2029-10-28T02:30:00", 0, "2029-10-28T00:30:00", id="twice, the first"),
    pytest.param("Europe/Berlin", "2029-10-28T02:30:00", 1, "2029-10-28T01:30:00", id="twice, the second"),
    pytest.param("America/New_York", "2029-03-11T02:30:00", 0, "2029-03-11T07:30:00", id="skipped in New York"),
    pytest.param(
        "America/New_York", "2029-11-04T01:30:00", 0, "2029-11-04T05:30:00", id="twice in New York, the first"
    ),
    pytest.param("America/New_York", "2029-11-04T01:30:00", 1, "2029-11-04T06:30:00", id="and the second"),
    pytest.param("Australia/Lord_Howe", "2029-04-01T01:45:00", 0, "2029-03-31T14:45:00", id="half an hour, the first"),
    pytest.param("Australia/Lord_Howe", "2029-04-01T01:45:00", 1, "2029-03-31T15:15:00", id="half an hour, the second"),
    pytest.param("Asia/Kathmandu", "2029-06-01T00:00:00", 0, "2029-05-31T18:15:00", id="a quarter of an hour"),
    pytest.param("Pacific/Kiritimati", "2029-06-01T00:00:00", 0, "2029-05-31T10:00:00", id="fourteen hours ahead"),
    pytest.param("UTC", "2029-06-01T00:00:00", 0, "2029-06-01T00:00:00", id="UTC"),
]


@pytest.mark.parametrize(("zone", "local", "fold", "utc"), CHANGES)
def test_b23_a_local_time_around_a_change_of_clocks_is_one_moment(zone: str, local: str, fold: int, utc: str) -> None:
    """Celery (#1604, #6438, #9653, #10107): at a change of clocks, scheduled tasks ran twice, not at all, or an hour
    late.

    Schedules (cron) do not exist here yet and will bring a table of their own. What exists is `run_at`: a local time
    with its zone is one moment, kept in UTC, that no change of clocks moves. A time that comes twice is told apart by
    its `fold`, one that is skipped is read as Python's documentation says (PEP 495). The job does not run a second
    before it, runs when it comes, and runs once. Computing with local clock times would miss the table by an hour.
    """
    moment = datetime.fromisoformat(local).replace(tzinfo=ZoneInfo(zone), fold=fold)
    expected = datetime.fromisoformat(utc).replace(tzinfo=UTC)
    app = Holdfast("memory://")
    ran: list[int] = []

    @app.task
    def at_last() -> None:
        ran.append(current().attempt)

    with isolated(app, at=NOW) as jobs:
        job = at_last.options(run_at=moment).enqueue()
        assert _details(job).run_at == int(expected.timestamp()) * MICROSECONDS
        jobs.clock.advance((expected - NOW).total_seconds() - 1)
        assert jobs.drain() == []
        jobs.clock.advance(1)
        assert len(jobs.drain()) == 1
        jobs.clock.advance(timedelta(days=2).total_seconds())
        assert jobs.drain() == []
    assert ran == [1]


def test_b23_a_local_time_without_its_zone_is_refused() -> None:
    """The same: a naive time would be read by the clock of whatever machine enqueues it."""
    app = Holdfast("memory://")

    @app.task
    def at_last() -> None:
        """Nothing."""

    with isolated(app, at=NOW), pytest.raises(InvalidOption, match="with a time zone"):
        at_last.options(run_at=datetime(2029, 10, 28, 2, 30)).enqueue()  # noqa: DTZ001
