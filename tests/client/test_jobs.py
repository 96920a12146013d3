"""Jobs after they were enqueued: states and results, looking up, cancelling, replaying, pausing, counting."""

from __future__ import annotations

import asyncio
import threading
from datetime import date
from typing import Any

import pytest

from holdfast import CancelAnswer, Holdfast, QueueCounts, State
from holdfast.errors import (
    InvalidOption,
    InvalidPayload,
    JobCancelled,
    JobFailed,
    JobNotFound,
    JobStillLive,
    KeyConflict,
    NotFinished,
    OutcomeUnknown,
    ResultNotKept,
)
from holdfast.events import CancelRequested, Event, JobReplayed, QueuePaused
from holdfast.failures import RESULT_NOT_KEPT, Failure
from holdfast.lifecycle import Applied, Failed, Released, Succeeded
from holdfast.store import ClaimRequest, Session
from tests.client.helpers import BROKEN, BROKEN_FOR_GOOD, SESSION, finish, move_for, succeed, take

UNKNOWN_ID = "01890000-0000-7000-8000-000000000000"


@pytest.fixture
def double(app: Holdfast) -> Any:
    @app.task
    def double(n: int) -> int:
        return 2 * n

    return double


# Results.


async def test_the_result(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(21)
    await succeed(app.store, b"42")
    assert repr(job) == f"<Job {job.id} double ready>"  # as last seen
    assert (await job.arefresh()) is job
    assert job.state is State.SUCCEEDED
    assert await job.aresult() == 42
    assert await job.aresult(timeout=0) == 42
    assert repr(job) == f"<Job {job.id} double succeeded>"


def test_the_result_blocking(app: Holdfast, double: Any) -> None:
    job = double.enqueue(21)
    asyncio.run(succeed(app.store, b"42"))
    assert job.refresh().state is State.SUCCEEDED
    assert job.result() == 42
    assert job.result(timeout=0) == 42


async def test_waiting_for_the_result(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(21)
    waiting = asyncio.create_task(job.aresult(timeout=30))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await succeed(app.store, b"42")
    assert await waiting == 42


def test_waiting_for_the_result_blocking(app: Holdfast, double: Any) -> None:
    job = double.enqueue(21)
    timer = threading.Timer(0.02, lambda: asyncio.run(succeed(app.store, b"42")))
    timer.start()
    assert job.result(timeout=30) == 42
    timer.join()


async def test_the_result_has_the_type_of_the_handler(app: Holdfast) -> None:
    @app.task
    def birthday(name: str) -> date:
        return date(2000, 1, 1)

    job = await birthday.aenqueue("Ann")
    await succeed(app.store, b'"2000-01-01"')
    assert await job.aresult() == date(2000, 1, 1)
    assert await (await app.aget(job.id)).aresult() == "2000-01-01"  # by its id alone it is plain JSON


async def test_a_result_of_another_version_does_not_fit(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    await succeed(app.store, b'"text"')
    with pytest.raises(InvalidPayload, match="Expected `int`"):
        await job.aresult()


async def test_no_result_is_none(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    await succeed(app.store, None)
    assert await job.aresult() is None


async def test_a_result_that_was_not_kept(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    lost = Failure(at=1, attempt=1, type=RESULT_NOT_KEPT, message="the result is 300000 bytes of JSON")
    await finish(app.store, Succeeded(None, lost))
    with pytest.raises(ResultNotKept, match="succeeded, but the result is 300000 bytes"):
        await job.aresult()
    assert job.state is State.SUCCEEDED


async def test_a_failed_job(app: Holdfast, double: Any) -> None:
    job = await double.options(max_retries=1).aenqueue(1)
    await finish(app.store, Failed(BROKEN, retry_after=0))
    await finish(app.store, Failed(Failure(at=2, attempt=2, type="KeyError", message="again")))
    with pytest.raises(
        JobFailed, match=rf"job {job.id} \(double\) failed for good \(exhausted\): KeyError: again"
    ) as caught:
        await job.aresult()
    assert [failure.type for failure in caught.value.failures] == ["ValueError", "KeyError"]
    assert caught.value.failures[0] == BROKEN
    assert job.failures == caught.value.failures
    assert job.state is State.FAILED


def test_a_failed_job_blocking(app: Holdfast, double: Any) -> None:
    job = double.enqueue(1)
    asyncio.run(finish(app.store, BROKEN_FOR_GOOD))
    with pytest.raises(JobFailed, match=r"\(permanent\): ValueError: broken"):
        job.result()


@pytest.mark.parametrize("timeout", [0, 0.03, -1])
def test_not_finished(app: Holdfast, double: Any, timeout: float) -> None:
    job = double.enqueue(1)
    with pytest.raises(NotFinished, match=f"job {job.id} is still ready after {timeout:g} s; no worker has taken it"):
        job.result(timeout=timeout)
    with pytest.raises(TimeoutError):
        asyncio.run(job.aresult(timeout=timeout))
    asyncio.run(take(app.store))
    with pytest.raises(NotFinished, match="still in_flight after 0 s; it goes on"):
        job.result(timeout=0)


def test_what_is_no_timeout(double: Any) -> None:
    with pytest.raises(InvalidOption, match="timeout must be a number of seconds"):
        double.enqueue(1).result(timeout="5")
    with pytest.raises(InvalidOption, match="nan"):
        double.enqueue(1).result(timeout=float("nan"))


async def test_a_cancelled_wait_leaves_the_job_alone(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(job.aresult(), 0.02)
    await succeed(app.store, b"2")
    assert await job.aresult() == 2


def test_closing_ends_the_wait_of_another_thread(app: Holdfast, double: Any) -> None:
    job = double.enqueue(1)
    ended: list[BaseException] = []

    def wait() -> None:
        try:
            job.result()
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():  # the first close may come before the thread waits
        app.close()
        thread.join(0.05)
    assert [type(error) for error in ended] == [OutcomeUnknown]
    assert "result() was still under way when the application was closed" in str(ended[0])


# Cancelling.


def test_cancel_a_waiting_job(app: Holdfast, double: Any, events: list[Event]) -> None:
    job = double.enqueue(1)
    assert job.cancel() is CancelAnswer.CANCELLED
    with pytest.raises(JobCancelled, match=r"\(double\) was cancelled"):
        job.result()
    assert job.state is State.CANCELLED
    assert job.cancel() is CancelAnswer.ENDED
    assert app.cancel(job.id) is CancelAnswer.ENDED
    assert events[1:] == [CancelRequested(job.id, answer) for answer in ("cancelled", "ended", "ended")]


async def test_cancel_a_running_job(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    claimed = await take(app.store)
    assert await job.acancel() is CancelAnswer.ASKED
    assert (await app.store.beat(SESSION)).cancel == (job.id,)
    assert await app.store.apply([move_for(claimed, Released())]) == [Applied.CANCEL_ASKED]
    seen = (await job.arefresh()).details
    assert await app.store.apply([move_for(seen, Released())]) == [Applied.APPLIED]
    with pytest.raises(JobCancelled):
        await job.aresult()


async def test_success_beats_a_cancel_that_was_asked(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    claimed = await take(app.store)
    assert await app.acancel(job.id) is CancelAnswer.ASKED
    assert await app.store.apply([move_for(claimed, Succeeded(b"2"))]) == [Applied.APPLIED]
    assert await job.aresult() == 2


# Ids that lead nowhere.


def test_unknown_ids(app: Holdfast) -> None:
    for ask in (app.get, app.cancel, app.replay):
        with pytest.raises(JobNotFound, match=UNKNOWN_ID):
            ask(UNKNOWN_ID)


@pytest.mark.parametrize("job_id", ["", "a\0b", "\ud800", "x" * 1_000, 5, None, b"id"])
def test_ids_that_are_none(app: Holdfast, job_id: Any) -> None:
    for ask in (app.get, app.cancel, app.replay):
        with pytest.raises(InvalidOption, match="job id"):
            ask(job_id)


async def test_a_forgotten_job(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    await succeed(app.store)
    assert await app.store.forget([job.id]) == 1
    for ask in (job.arefresh, job.aresult, job.acancel):
        with pytest.raises(JobNotFound):
            await ask()


# Looking up.


def test_get(app: Holdfast, double: Any) -> None:
    job = double.options(correlation_id="c").enqueue(3)
    found = app.get(job.id)
    assert (found.id, found.task, found.state, found.created) == (job.id, "double", State.READY, False)
    assert found.details is not None
    assert (found.details.payload, found.details.correlation_id) == (b'{"n":3}', "c")
    assert found.failures == []


def test_find(app: Holdfast, double: Any) -> None:
    app.task(name="other")(lambda: None)
    jobs = app.enqueue_many(double.job(n) for n in range(5))
    mail = double.options(queue="mail", correlation_id="order-7").enqueue(6)
    asyncio.run(finish(app.store, BROKEN_FOR_GOOD))

    newest_first = [mail.id, *(job.id for job in reversed(jobs))]
    assert [job.id for job in app.find().jobs] == newest_first
    assert app.find().next is None
    assert [job.id for job in app.find(queue="mail").jobs] == [mail.id]
    assert [job.id for job in app.find(correlation_id="order-7").jobs] == [mail.id]
    assert [job.id for job in app.find(states=["failed"]).jobs] == [jobs[0].id]
    assert [job.id for job in app.find(states=[State.FAILED, "ready"]).jobs] == newest_first
    assert app.find(states=["in_flight"]).jobs == ()
    assert app.find(task="other").jobs == ()
    [failed] = app.find(states=["failed"]).jobs
    assert (failed.state, failed.failures) == (State.FAILED, [BROKEN])

    seen: list[str] = []
    page = app.find(limit=4)
    while True:
        seen += [job.id for job in page.jobs]
        if page.next is None:
            break
        page = app.find(limit=4, cursor=page.next)
    assert seen == newest_first


@pytest.mark.parametrize(
    "query",
    [
        {"states": ["done"]},
        {"states": "no state"},
        {"states": [None]},
        {"queue": "a b"},
        {"queue": "\ud800"},
        {"queue": 5},
        {"task": ""},
        {"correlation_id": "\0"},
        {"correlation_id": 5},
        {"cursor": "\ud800"},
        {"cursor": 5},
        {"limit": 0},
        {"limit": 1_001},
        {"limit": 1.5},
    ],
    ids=str,
)
async def test_questions_that_make_no_sense(app: Holdfast, query: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        await app.afind(**query)


# Replaying.


async def test_replay(app: Holdfast, double: Any, events: list[Event]) -> None:
    job = await double.options(key="k").aenqueue(4)
    await finish(app.store, BROKEN_FOR_GOOD)
    again = await app.areplay(job.id)
    assert (again.id, again.state) == (job.id, State.READY)
    assert again.details is not None
    assert (again.details.failures, again.details.payload) == (0, b'{"n":4}')
    assert again.failures == [BROKEN]
    assert events[-1] == JobReplayed(job.id, "default")
    await succeed(app.store, b"8")
    assert await job.aresult() == 8


def test_replay_of_every_end(app: Holdfast, double: Any) -> None:
    cancelled, succeeded = double.options(delay=60).enqueue(1), double.enqueue(2)
    cancelled.cancel()
    asyncio.run(succeed(app.store, b"4"))
    assert app.replay(cancelled.id).state is State.READY
    assert app.replay(succeeded.id).state is State.READY
    for job in (cancelled, succeeded):
        with pytest.raises(JobStillLive, match="is ready; only a job that has ended can be replayed"):
            app.replay(job.id)
    asyncio.run(take(app.store))
    with pytest.raises(JobStillLive):
        app.replay(cancelled.id)


def test_replay_of_a_job_whose_key_is_taken(app: Holdfast, double: Any) -> None:
    dead = double.options(key="k").enqueue(1)
    asyncio.run(finish(app.store, BROKEN_FOR_GOOD))
    heir = double.options(key="k").enqueue(2)
    with pytest.raises(KeyConflict, match=f"job {dead.id} cannot come back: its key 'k' belongs to another job now"):
        app.replay(dead.id)
    assert app.get(dead.id).state is State.FAILED
    heir.cancel()
    assert app.replay(dead.id).state is State.READY


async def test_replays_at_once_bring_it_back_once(app: Holdfast, double: Any) -> None:
    job = await double.aenqueue(1)
    await finish(app.store, BROKEN_FOR_GOOD)
    answers = await asyncio.gather(*(app.areplay(job.id) for _ in range(10)), return_exceptions=True)
    assert any(not isinstance(answer, BaseException) for answer in answers)
    assert all(isinstance(answer, JobStillLive) for answer in answers if isinstance(answer, BaseException))
    [counts] = await app.acounts()
    assert (counts.ready, counts.failed) == (1, 0)


# Queues.


async def test_pause_and_resume(app: Holdfast, double: Any, events: list[Event]) -> None:
    await app.store.open_session(Session(id=SESSION))
    request = ClaimRequest(session_id=SESSION, queues=("default",), limit=1)
    await app.apause("default")
    job = await double.aenqueue(1)
    assert (await app.store.claim(request)).jobs == ()
    assert await app.acounts() == [QueueCounts(queue="default", ready=1, paused=True)]
    await app.aresume("default")
    assert [claimed.id for claimed in (await app.store.claim(request)).jobs] == [job.id]
    assert [event for event in events if isinstance(event, QueuePaused)] == [
        QueuePaused("default", True),
        QueuePaused("default", False),
    ]


def test_pause_and_resume_blocking(app: Holdfast) -> None:
    app.pause("mail")
    app.pause("mail")
    assert app.counts() == [QueueCounts(queue="mail", paused=True)]
    app.resume("mail")
    assert app.counts() == []
    for steer in (app.pause, app.resume):
        with pytest.raises(InvalidOption, match="queue 'a b' is not a valid name"):
            steer("a b")


def test_counts(app: Holdfast, double: Any) -> None:
    app.enqueue_many(double.job(n) for n in range(6))
    double.options(delay=60).enqueue(1)
    double.options(queue="mail").enqueue(1)
    asyncio.run(finish(app.store, BROKEN_FOR_GOOD))
    asyncio.run(succeed(app.store))
    last = asyncio.run(take(app.store))
    double.options(queue="bulk").enqueue(1).cancel()
    assert last.state is State.IN_FLIGHT
    assert app.counts() == [
        QueueCounts(queue="bulk", cancelled=1),
        QueueCounts(queue="default", ready=3, scheduled=1, in_flight=1, succeeded=1, failed=1),
        QueueCounts(queue="mail", ready=1),
    ]


async def test_forget_removes_what_has_ended_and_nothing_else(app: Holdfast) -> None:
    @app.task
    def work() -> None: ...

    job = await work.aenqueue()
    with pytest.raises(JobStillLive, match="is ready; cancel it"):
        await app.aforget(job.id)
    await job.acancel()
    await app.aforget(job.id)
    with pytest.raises(JobNotFound):
        await app.aforget(job.id)
    with pytest.raises(InvalidOption, match="is a handle: pass its id"):
        await app.aforget(job)  # type: ignore[arg-type]
