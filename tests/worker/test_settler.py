"""The settler alone: what it sends, in which batches, what it repeats and for how long, and what it says about it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.events import Event, JobSettled, PartFailed, SettleRefused, ignore
from holdfast.failures import Failure, decode_history
from holdfast.job import Job, NewJob, Reason, State
from holdfast.lifecycle import Applied, Failed, Move, Outcome, Released, Snoozed, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM, Ports
from holdfast.store import MOST_BYTES_PER_CALL, MOST_PER_CALL, CancelAnswer, ClaimRequest, Session
from holdfast.stores.memory import MemoryStore
from holdfast.testing import ManualClock
from holdfast.worker import settler
from holdfast.worker.handling import NOTHING_RETURNED
from holdfast.worker.holding import Holding
from holdfast.worker.settler import Settler, settlement
from tests.unit.samples import BROKEN, FixedRandom, claimed_job

DONE = NOTHING_RETURNED
FAILED = Failed(BROKEN)
DEAD = Failed(BROKEN, permanent=True)
ONCE = RetryPolicy()


class SleeplessClock(ManualClock):
    """Whoever sleeps is awake at once, and time has passed. What happened meanwhile is up to the test."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []
        self.meanwhile: Callable[[], object] = lambda: None

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.meanwhile()
        self.advance(seconds)
        await asyncio.sleep(0)


class Ears:
    """A listener that keeps what it hears, and says whether it cares for routine."""

    def __init__(self, heard: list[Event], routine: bool) -> None:
        self._heard = heard
        self.routine = routine

    def __call__(self, event: Event) -> None:
        self._heard.append(event)


class Bench(MemoryStore):
    """A store that takes every settlement, unless the test has another answer; and a settler in front of it."""

    def __init__(self, *, listening: bool = True, routine: bool = True) -> None:
        super().__init__()
        self.clock = SleeplessClock()
        self.holding = Holding()
        self.sent: list[list[Move]] = []
        self.counted: list[int] = []
        """How many outcomes the settler counted during each call."""
        self.events: list[Event] = []
        self.followed: list[State] = []
        self.left: list[int] = []
        """How many it counted after each flush."""
        self.answer: Callable[[Sequence[Move]], Awaitable[list[Applied]]] = self.accept
        self.settler = Settler(
            self,
            self.holding,
            ports=Ports(clock=self.clock, random=FixedRandom(0.25)),
            listener=Ears(self.events, routine) if listening else ignore,
            follow=self._follow,
            settled=self._settled,
        )
        self.after_flush: Callable[[], object] = lambda: None

    @staticmethod
    async def accept(moves: Sequence[Move]) -> list[Applied]:
        return [Applied.APPLIED] * len(moves)

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        self.sent.append(list(moves))
        self.counted.append(len(self.settler))
        return await self.answer(moves)

    def _follow(self, job: Job, move: Move) -> Move:
        self.followed.append(move.to)
        return move

    def _settled(self) -> None:
        self.left.append(len(self.settler))
        self.after_flush()

    def sizes(self) -> list[int]:
        return [len(moves) for moves in self.sent]

    def ids(self) -> list[list[str]]:
        return [[move.job_id for move in moves] for moves in self.sent]

    def add(self, *names: str, outcome: Outcome = DONE, seconds: float = 0.5) -> None:
        """Claims of that name have ended like that."""
        for name in names:
            job = claimed_job(id=name)
            self.holding.take([job])
            self.holding.start([job])
            self.settler.add(job, outcome, ONCE, seconds=seconds)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.settler.run())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def settle(self) -> None:
        """Run until everything is settled."""
        async with self.running():
            await until(lambda: not self.settler)

    def failures(self) -> list[PartFailed]:
        return [event for event in self.events if isinstance(event, PartFailed)]


async def until(condition: Callable[[], object]) -> None:
    for _ in range(2_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


@pytest.fixture
async def bench() -> Bench:
    return Bench()


class Gate:
    """Holds calls up until it is opened."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, moves: Sequence[Move]) -> list[Applied]:
        await self.opened.wait()
        return [Applied.APPLIED] * len(moves)


class FirstFail:
    """The first calls fail."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)

    async def __call__(self, moves: Sequence[Move]) -> list[Applied]:
        if self._errors:
            raise self._errors.pop(0)
        return [Applied.APPLIED] * len(moves)


def gone() -> Exception:
    return StoreUnavailable("gone")


# Batches.


async def test_what_arrives_during_a_flush_goes_out_together(bench: Bench) -> None:
    bench.answer = gate = Gate()
    assert (len(bench.settler), bool(bench.settler)) == (0, False)
    async with bench.running():
        bench.add("a")
        assert (len(bench.settler), bool(bench.settler)) == (1, True)
        await until(lambda: bench.sent)
        bench.add("b", "c", "d")
        assert len(bench.settler) == 4
        gate.opened.set()
        await until(lambda: not bench.settler)
    assert bench.ids() == [["a"], ["b", "c", "d"]]
    assert bench.counted == [1, 3]
    assert bench.left == [3, 0]
    assert len(bench.holding) == 0


async def test_a_settler_with_nothing_to_do_waits_until_there_is(bench: Bench) -> None:
    async with bench.running():
        for name in "abc":
            bench.add(name)
            await until(lambda: not bench.settler)
            for _ in range(5):
                await asyncio.sleep(0)
            assert not bench.settler._arrived.is_set()
    assert bench.sizes() == [1, 1, 1]


async def test_a_batch_has_no_more_moves_than_a_store_takes(bench: Bench) -> None:
    bench.add(*(str(number) for number in range(2 * MOST_PER_CALL + 1)))
    await bench.settle()
    assert bench.sizes() == [MOST_PER_CALL, MOST_PER_CALL, 1]


async def test_a_batch_holds_results_of_no_more_than_half_of_what_a_store_takes(bench: Bench) -> None:
    """Each result is at most as large as the other half."""
    half = MOST_BYTES_PER_CALL // 2
    quarter = Succeeded(bytes(half // 4))
    bench.add("a", "b", "c", "d", "e", outcome=quarter)
    bench.add("f", outcome=FAILED)
    await bench.settle()
    bench.add("g", "h", outcome=Succeeded(bytes(half - 1)))
    await bench.settle()
    bench.add("i", "j", outcome=Succeeded(bytes(half)))
    await bench.settle()
    assert bench.ids() == [["a", "b", "c", "d"], ["e", "f"], ["g", "h"], ["i"], ["j"]]


# What is repeated.


@pytest.mark.parametrize("error", [StoreUnavailable("gone"), OutcomeUnknown("the reply got lost")])
async def test_a_flush_that_fails_is_kept_and_repeated_before_what_came_later(bench: Bench, error: Exception) -> None:
    bench.answer = FirstFail(error)
    counted: list[int] = []

    def more() -> None:
        counted.append(len(bench.settler))
        bench.add("c")

    bench.clock.meanwhile = more
    bench.add("a", "b")
    await bench.settle()
    assert bench.ids() == [["a", "b"], ["a", "b", "c"]]
    assert counted == [2]
    pause = 0.05 * 0.75
    assert bench.failures() == [PartFailed("s1", "settler", f"{type(error).__name__}: {error}", pause)]
    assert bench.clock.slept == [pause]
    assert bench.settler.counts == {"succeeded": 3}


async def test_the_pauses_double_up_to_a_limit_and_are_short_again_after_a_success(bench: Bench) -> None:
    bench.answer = FirstFail(*(gone() for _ in range(8)))
    bench.add("a")
    await bench.settle()
    seconds = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert bench.clock.slept == pytest.approx([0.75 * pause for pause in seconds])
    async with bench.running():
        bench.answer = FirstFail(gone(), gone())
        bench.add("b")
        await until(lambda: not bench.settler)
        bench.answer = FirstFail(gone())
        bench.add("c")
        await until(lambda: not bench.settler)
    assert bench.clock.slept[8:] == pytest.approx([0.75 * pause for pause in (0.05, 0.1, 0.05)])


async def test_what_a_lost_session_held_is_not_repeated(bench: Bench) -> None:
    """Others have its jobs. Nobody waits for an answer about them."""

    async def fail_and_lose(moves: Sequence[Move]) -> list[Applied]:
        bench.holding.forget()
        raise gone()

    bench.answer = fail_and_lose
    bench.add("a", "b")
    await bench.settle()
    assert bench.ids() == [["a", "b"]]


async def test_a_settler_that_is_cancelled_keeps_what_is_under_way(bench: Bench) -> None:
    bench.answer = Gate()
    bench.add("a", "b")
    task = asyncio.create_task(bench.settler.run())
    await until(lambda: bench.sent)
    bench.add("c")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(bench.settler) == 3
    bench.answer = bench.accept
    await bench.settle()
    assert bench.ids() == [["a", "b"], ["a", "b", "c"]]
    assert bench.failures() == []


# What no store may raise.


async def test_a_batch_that_chokes_the_store_goes_out_one_by_one(bench: Bench) -> None:
    async def only_alone(moves: Sequence[Move]) -> list[Applied]:
        if len(moves) > 1:
            raise LookupError("a bug")
        return [Applied.APPLIED]

    bench.answer = only_alone
    bench.add("a", "b", "c")
    await bench.settle()
    assert bench.ids() == [["a", "b", "c"], ["a"], ["b"], ["c"]]
    assert bench.counted == [3, 3, 2, 1]
    assert bench.failures() == [PartFailed("s1", "settler", "LookupError: a bug", 0.0)]
    assert bench.settler.counts == {"succeeded": 3}
    assert bench.clock.slept == []


async def test_an_outcome_that_cannot_be_stored_fails_the_job_with_the_error(bench: Bench) -> None:
    async def choke(moves: Sequence[Move]) -> list[Applied]:
        if any(move.job_id == "b" and move.to is State.SUCCEEDED for move in moves):
            raise LookupError("a bug")
        return [Applied.APPLIED] * len(moves)

    bench.answer = choke
    bench.add("a", "b", "c")
    await bench.settle()
    assert bench.ids() == [["a", "b", "c"], ["a"], ["b"], ["b"], ["c"]]
    [move] = bench.sent[3]
    assert (move.to, move.reason, move.attempt) == (State.FAILED, Reason.PERMANENT, 7)
    last = decode_history(move.failure_history)[-1]
    assert (last.at, last.attempt, last.type, last.message) == (bench.clock.now(), 7, "LookupError", "a bug")
    assert bench.settler.counts == {"succeeded": 2, "failed": 1}
    assert bench.followed == [State.FAILED]
    assert len(bench.holding) == 0


async def test_a_job_that_cannot_be_settled_in_any_way_is_left_to_the_rescue(bench: Bench) -> None:
    async def choke(moves: Sequence[Move]) -> list[Applied]:
        if any(move.job_id == "a" for move in moves):
            raise LookupError("a bug")
        return [Applied.APPLIED] * len(moves)

    bench.answer = choke
    bench.add("a", "b")
    await bench.settle()
    assert bench.ids() == [["a", "b"], ["a"], ["a"], ["b"]]
    assert bench.settler.counts == {"succeeded": 1}
    assert len(bench.holding) == 0


async def test_a_release_that_chokes_the_store_is_not_made_a_failure(bench: Bench) -> None:
    async def choke(moves: Sequence[Move]) -> list[Applied]:
        raise LookupError("a bug")

    bench.answer = choke
    bench.add("a", outcome=Released())
    await bench.settle()
    assert [move.to for moves in bench.sent for move in moves] == [State.READY, State.READY]
    assert len(bench.holding) == 0
    assert bench.followed == []


async def test_a_store_that_goes_away_during_the_search_is_asked_again(bench: Bench) -> None:
    bench.answer = FirstFail(LookupError("a bug"), gone())
    bench.add("a", "b")
    await bench.settle()
    # a is kept, b goes out, then a again
    assert bench.ids() == [["a", "b"], ["a"], ["b"], ["a"]]
    assert bench.counted == [2, 2, 2, 1]
    assert bench.settler.counts == {"succeeded": 2}


async def test_a_store_that_goes_away_while_a_job_is_failed_for_it_is_asked_again(bench: Bench) -> None:
    """With the outcome that the job had: the store may have been the one at fault."""
    bench.answer = FirstFail(LookupError("a bug"), LookupError("a bug"), gone())
    bench.add("a")
    await bench.settle()
    assert [move.to for moves in bench.sent for move in moves] == [
        State.SUCCEEDED,
        State.SUCCEEDED,
        State.FAILED,
        State.SUCCEEDED,
    ]
    assert bench.settler.counts == {"succeeded": 1}


async def test_what_was_answered_is_not_sent_again_whatever_happens_then(bench: Bench) -> None:
    def fall_once() -> None:
        if len(bench.left) == 1:
            raise RuntimeError("a surprise")

    bench.after_flush = fall_once
    bench.add("a", "b", "c")
    await bench.settle()
    assert bench.ids() == [["a", "b", "c"]]
    assert bench.settler.counts == {"succeeded": 3}


async def test_a_claim_without_a_session_is_spoken_of_all_the_same(bench: Bench) -> None:
    job = claimed_job(session_id=None)
    for error in (gone(), LookupError("a bug")):
        bench.holding.take([job])
        bench.answer = FirstFail(error)
        bench.settler.add(job, DONE, ONCE)
        await bench.settle()
    assert [event.worker_id for event in bench.failures()] == ["", ""]
    assert settlement(job, settle(job, DONE, ONCE, SYSTEM.random), Applied.STALE, 0.0).worker_id == ""


async def test_what_fails_is_told_of_the_session_of_the_oldest_claim(bench: Bench) -> None:
    """After a session was lost, a batch may hold claims of two."""
    for error in (gone(), LookupError("a bug")):
        bench.answer = FirstFail(error)
        bench.add("a")
        later = claimed_job(id="b", session_id="s2")
        bench.holding.take([later])
        bench.settler.add(later, DONE, ONCE)
        await bench.settle()
    assert [event.worker_id for event in bench.failures()] == ["s1", "s1"]


# What the answers mean.


async def test_a_job_that_was_to_be_cancelled_is_settled_again_knowing_that() -> None:
    bench = Bench()
    await bench.open_session(Session(id="s"))
    await bench.insert([NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b"{}") for _ in range(2)])
    asked, other = (await bench.claim(ClaimRequest(session_id="s", queues=("default",), limit=2))).jobs
    assert await bench.request_cancel([asked.id]) == [CancelAnswer.ASKED]
    bench.holding.take([asked, other])

    async def really(moves: Sequence[Move]) -> list[Applied]:
        assert bench.holding.knows(asked)
        return await MemoryStore.apply(bench, moves)

    bench.answer = really
    for job in (asked, other):
        bench.settler.add(job, FAILED, ONCE, seconds=0.5)
    await bench.settle()
    assert bench.ids() == [[asked.id, other.id], [asked.id]]
    assert bench.counted == [2, 1]
    assert bench.settler.counts == {"retried": 1, "cancelled": 1}
    told = [(event.job_id, event.state, event.seconds) for event in bench.events if isinstance(event, JobSettled)]
    assert told == [(other.id, State.READY, 0.5), (asked.id, State.CANCELLED, 0.5)]
    assert len(bench.holding) == 0


async def test_a_cancel_that_the_worker_knows_of_is_told_to_the_store(bench: Bench) -> None:
    bench.settler.add(claimed_job(), FAILED, ONCE, cancel_asked=True)
    bench.settler.add(claimed_job(), FAILED, ONCE)
    await bench.settle()
    assert [move.to for move in bench.sent[0]] == [State.CANCELLED, State.READY]


async def test_how_long_a_handler_took_is_nothing_unless_it_is_said(bench: Bench) -> None:
    bench.settler.add(claimed_job(), Released(), ONCE)
    await bench.settle()
    assert [event.seconds for event in bench.events if isinstance(event, JobSettled)] == [0.0]


@pytest.mark.parametrize("listening", [True, False])
async def test_what_the_store_accepted_and_refused_is_counted(listening: bool) -> None:
    bench = Bench(listening=listening)
    answers = [Applied.APPLIED, Applied.ALREADY, Applied.STALE, Applied.GONE, Applied.APPLIED, Applied.APPLIED]

    async def each_its_own(moves: Sequence[Move]) -> list[Applied]:
        return answers

    bench.answer = each_its_own
    bench.add("applied", "already", "stale", "gone")
    bench.add("retried", outcome=FAILED)
    bench.add("failed", outcome=DEAD)
    await bench.settle()
    assert bench.settler.counts == {"succeeded": 2, "refused": 2, "retried": 1, "failed": 1}
    assert bench.followed == [State.FAILED]
    assert len(bench.holding) == 0
    refused = [(event.job_id, event.answer) for event in bench.events if isinstance(event, SettleRefused)]
    assert refused == ([("stale", "stale"), ("gone", "gone")] if listening else [])


@pytest.mark.parametrize(
    ("routine", "heard"),
    [(True, ["plain", "odd", "retried", "released"]), (False, ["odd", "retried", "released"])],
)
async def test_who_does_not_care_for_routine_hears_of_the_rest(routine: bool, heard: list[str]) -> None:
    """A success whose result could not be kept is not routine. All are counted."""
    bench = Bench(routine=routine)
    bench.add("plain")
    bench.add("odd", outcome=Succeeded(failure=BROKEN))
    bench.add("retried", outcome=FAILED)
    bench.add("released", outcome=Released())
    await bench.settle()
    assert [event.job_id for event in bench.events if isinstance(event, JobSettled)] == heard
    assert bench.settler.counts == {"succeeded": 2, "retried": 1, "released": 1}


@pytest.mark.parametrize(("routine", "heard"), [(True, ["a", "b", "c"]), (False, [])])
async def test_a_batch_of_nothing_but_plain_successes_is_told_to_who_cares(routine: bool, heard: list[str]) -> None:
    bench = Bench(routine=routine)
    bench.add("a", "b", "c")
    await bench.settle()
    assert [event.job_id for event in bench.events if isinstance(event, JobSettled)] == heard
    assert bench.settler.counts == {"succeeded": 3}
    assert len(bench.holding) == 0


async def test_each_of_a_batch_of_plain_successes_is_answered_by_itself() -> None:
    """The first call refuses one and asks for another to be cancelled: that one goes out again."""
    answers = [[Applied.APPLIED, Applied.STALE, Applied.CANCEL_ASKED, Applied.ALREADY], [Applied.APPLIED]]

    async def each_its_own(moves: Sequence[Move]) -> list[Applied]:
        return answers.pop(0)

    bench = Bench(routine=False)
    bench.answer = each_its_own
    bench.add("applied", "stale", "asked", "already")
    await bench.settle()
    assert bench.ids() == [["applied", "stale", "asked", "already"], ["asked"]]
    assert [event.job_id for event in bench.events if isinstance(event, SettleRefused)] == ["stale"]
    assert bench.settler.counts == {"succeeded": 3, "refused": 1}
    assert len(bench.holding) == 0


async def test_successes_that_nobody_hears_of_are_counted_batch_by_batch() -> None:
    bench = Bench(routine=False)
    for names in ("ab", "cde"):
        bench.add(*names)
        await bench.settle()
    assert bench.settler.counts == {"succeeded": 5}
    assert len(bench.holding) == 0


async def test_an_error_after_the_first_answers_keeps_nobody_from_being_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first is answered by then, and is left out; the others follow."""
    bench = Bench(routine=False)
    failing = [RuntimeError("a surprise")]

    def fails_once(*args: Any) -> JobSettled | SettleRefused:
        if failing:
            raise failing.pop()
        return settlement(*args)

    monkeypatch.setattr(settler, "settlement", fails_once)
    bench.add("answered")
    bench.add("retried", "again", outcome=FAILED)
    await bench.settle()
    assert bench.ids() == [["answered", "retried", "again"], ["again"]]
    assert bench.settler.counts == {"succeeded": 1, "retried": 2}
    assert len(bench.holding) == 0


@pytest.mark.parametrize(("routine", "heard"), [(True, ["plain", "odd"]), (False, ["odd"])])
async def test_a_success_that_the_store_knew_already_is_as_routine_as_the_first(
    routine: bool, heard: list[str]
) -> None:
    async def already(moves: Sequence[Move]) -> list[Applied]:
        return [Applied.ALREADY] * len(moves)

    bench = Bench(routine=routine)
    bench.answer = already
    bench.add("plain")
    bench.add("odd", outcome=Succeeded(failure=BROKEN))
    await bench.settle()
    assert [event.job_id for event in bench.events if isinstance(event, JobSettled)] == heard
    assert bench.settler.counts == {"succeeded": 2}
    assert len(bench.holding) == 0


async def test_a_store_that_answers_for_fewer_jobs_is_not_believed(bench: Bench) -> None:
    async def too_few(moves: Sequence[Move]) -> list[Applied]:
        return [Applied.APPLIED]

    bench.answer = too_few
    bench.add("a", "b")
    await bench.settle()
    assert bench.ids() == [["a", "b"], ["a"], ["b"]]
    assert "shorter" in bench.failures()[0].error


def told(outcome: Outcome, answer: Applied = Applied.APPLIED, **changes: object) -> JobSettled | SettleRefused:
    job = claimed_job(correlation_id="c", **changes)
    return settlement(job, settle(job, outcome, ONCE, FixedRandom(0.5)), answer, 1.5)


def test_what_is_told_of_a_success() -> None:
    for answer in (Applied.APPLIED, Applied.ALREADY):
        assert told(Succeeded(b"1"), answer) == JobSettled(
            worker_id="s1",
            job_id=claimed_job().id,
            queue="mail",
            task="mail.welcome",
            state=State.SUCCEEDED,
            reason=Reason.SUCCEEDED,
            attempt=7,
            seconds=1.5,
            error="",
            retry_in=None,
            correlation_id="c",
        )


def test_what_is_told_of_a_failure_is_the_newest() -> None:
    newest = Failure(at=1, attempt=7, type="OSError", message="newest")
    settled = told(Failed(newest, retry_after=2.5))
    assert isinstance(settled, JobSettled)
    assert (settled.error, settled.retry_in, settled.reason) == ("OSError: newest", 2.5, Reason.RETRIED)


def test_an_old_failure_is_not_told_again() -> None:
    settled = told(Snoozed(3.0, BROKEN))
    assert isinstance(settled, JobSettled)
    assert (settled.error, settled.retry_in) == ("", 3.0)


@pytest.mark.parametrize("answer", [Applied.STALE, Applied.GONE])
def test_what_is_told_of_a_refusal(answer: Applied) -> None:
    assert told(DONE, answer) == SettleRefused("s1", claimed_job().id, "mail", "mail.welcome", answer.value)
