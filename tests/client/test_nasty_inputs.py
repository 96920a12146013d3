"""The table of nasty inputs (`research/reliability.md`, section g), as far as enqueue, codec and store are concerned.

Every refusal is an error of our tree, and nothing of it is stored: no job, and no key that would stand in the way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from holdfast import CancelAnswer, Holdfast, QueueSettings, Settings, State
from holdfast.codec import encode_result
from holdfast.errors import (
    HoldfastError,
    InvalidOption,
    InvalidPayload,
    JobFailed,
    KeyConflict,
    PartlyRefused,
    PayloadTooLarge,
    QueueFull,
    ResultNotKept,
    UnknownPriority,
)
from holdfast.failures import LONGEST_MESSAGE, RESULT_NOT_KEPT, Failure, capture
from holdfast.job import NewJob
from holdfast.lifecycle import Applied, Failed, Released, Succeeded
from holdfast.ports import SYSTEM
from tests.client.conftest import MakeApp
from tests.client.helpers import finish, move_for, take, totals


class Nasty(msgspec.Struct, frozen=True):
    """One call that must be refused: options, arguments, and what becomes of it."""

    row: int
    what: str
    error: type[HoldfastError]
    words: str
    value: Any = 1
    options: dict[str, Any] = {}
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class Custom:
    pass


def payload(row: int, what: str, value: Any, words: str, error: type[HoldfastError] = InvalidPayload) -> Nasty:
    return Nasty(row, what, error, words, value)


def option(row: int, what: str, words: str, error: type[HoldfastError] = InvalidOption, **options: Any) -> Nasty:
    return Nasty(row, what, error, words, options=options)


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def inside_itself() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


REFUSED = [
    payload(1, "truncated JSON", msgspec.Raw(b'{"a":'), "$"),
    payload(1, "trailing garbage", msgspec.Raw(b"1} x"), "$"),
    payload(1, "a BOM", msgspec.Raw(b"\xef\xbb\xbf1"), "$"),
    payload(2, "NaN", math.nan, "$.value: nan is no JSON number"),
    payload(2, "infinity", [math.inf], "$.value[0]: inf is no JSON number"),
    payload(2, "minus infinity", {"a": -math.inf}, "$.value.a: -inf is no JSON number"),
    payload(2, "1e400", 1e400, "$.value: inf is no JSON number"),
    payload(2, "1e400 in JSON", msgspec.Raw(b"1e400"), "out of range"),
    payload(3, "NUL in a value", "a\0b", "$.value: the text contains a NUL"),
    payload(3, "NUL in a key", {"a": {"\0": 1}}, "$.value.a: the text contains a NUL"),
    payload(3, "NUL in JSON", msgspec.Raw(b'"\\u0000"'), "NUL"),
    option(3, "NUL in the queue", "queue", queue="a\0b"),
    option(3, "NUL in the share", "share", share="a\0b"),
    option(3, "NUL in the correlation id", "correlation_id", correlation_id="a\0b"),
    option(3, "NUL in the idempotency key", "key", key="a\0b"),
    payload(4, "lone surrogate in a value", ["\ud800"], "$.value[0]: the text contains a lone surrogate"),
    payload(4, "lone surrogate in a key", {"\udfff": 1}, "$.value: the text contains a lone surrogate"),
    payload(4, "overlong UTF-8", msgspec.Raw(b'"\xc0\xaf"'), "$"),
    option(4, "lone surrogate in the queue", "queue", queue="\ud800"),
    option(4, "lone surrogate in the share", "share", share="\ud800"),
    option(4, "lone surrogate in the correlation id", "correlation_id", correlation_id="\ud800"),
    option(4, "lone surrogate in the idempotency key", "key", key="\ud800"),
    payload(5, "5,000 digits", 10**5_000, "$.value: a int cannot be written as JSON: Exceeds the limit (4300 digits)"),
    payload(5, "5,000 digits in a key", {10**5_000: 1}, "$.value: a key of type int cannot be written"),
    option(5, "priority beyond 64 bits", "priority", priority=2**70),
    option(5, "priority of 5,000 digits", "priority", priority=10**5_000),
    option(5, "retries beyond 64 bits", "max_retries", max_retries=2**70),
    option(5, "delay of 400 digits", "delay", delay=10**400),
    option(5, "delay of 5,000 digits", "delay", delay=10**5_000),
    option(5, "retention of 400 digits", "retention", retention=10**400),
    payload(6, "10 MB", "a" * 10_000_000, "10000012 bytes of JSON, more than the 262144 allowed", PayloadTooLarge),
    payload(6, "256 KiB + 1", "a" * (256 * 1024 - 11), "262145 bytes", PayloadTooLarge),
    payload(6, "100,000 levels", deep(100_000), "nested deeper than 64 levels"),
    payload(6, "65 levels", deep(64), "nested deeper than 64 levels"),
    payload(6, "inside itself", inside_itself(), "(or inside itself)"),
    payload(6, "a million keys", dict.fromkeys(map(str, range(1_000_000))), "bytes", PayloadTooLarge),
    payload(7, "two keys that are one", {1: 1, "1": 2}, "$.value: the key 1 is a int, and JSON keys are text"),
    payload(7, "a number as key", {"a": {1: 1}}, "$.value.a: the key 1 is a int"),
    payload(7, "no key at all", {None: 1}, "$.value: a key of type NoneType"),
    payload(7, "a tuple", {"a": (1,)}, "$.value.a: a tuple would reach the handler as a list"),
    payload(7, "a set", [{1}], "$.value[0]: a set has no order"),
    payload(7, "a frozenset", frozenset(), "$.value: a set has no order"),
    payload(7, "a Decimal", Decimal(1), "$.value: a Decimal would reach the handler as a str"),
    payload(7, "a datetime", datetime.now(UTC), "$.value: a datetime would reach the handler as a str"),
    payload(7, "bytes", b"ab", "$.value: a bytes would reach the handler as a str"),
    payload(7, "an object", Custom(), "$.value: a Custom has no JSON form"),
    payload(7, "a class", Custom, "$.value: a type has no JSON form"),
    payload(7, "a generator", iter([1]), "$.value: a list_iterator has no JSON form"),
    option(8, "a negative delay", "delay must be a number of seconds from 0", delay=-0.001),
    option(8, "a negative timedelta", "delay", delay=timedelta(seconds=-1)),
    option(8, "NaN as delay", "delay", delay=math.nan),
    option(8, "infinity as delay", "delay", delay=math.inf),
    option(8, "10^12 seconds", "delay", delay=10**12),
    option(8, "the longest timedelta", "delay", delay=timedelta.max),
    option(8, "text as delay", "delay", delay="60"),
    option(8, "True as delay", "delay", delay=True),
    option(8, "a naive time", "with a time zone", run_at=datetime(2030, 1, 1)),  # noqa: DTZ001
    option(8, "the year 9999", "more than ten years away", run_at=datetime.max.replace(tzinfo=UTC)),
    option(
        8,
        "the year 9999 in the west",
        "more than ten years away",
        run_at=datetime.max.replace(tzinfo=timezone(timedelta(hours=-12))),
    ),
    option(8, "a date", "run_at must be a datetime", run_at=date(2030, 1, 1)),
    option(8, "a time stamp", "run_at must be a datetime", run_at=1e9),
    option(8, "delay and run_at", "either delay or run_at", delay=1, run_at=datetime.now(UTC)),
    option(9, "unknown priority", "priority 'urgent' is not configured", UnknownPriority, priority="urgent"),
    option(9, "empty priority", "priority '' is not configured", UnknownPriority, priority=""),
    option(9, "priority 101", "from -100 to 100", priority=101),
    option(9, "priority -101", "from -100 to 100", priority=-101),
    option(9, "half a priority", "whole number", priority=0.5),
    *[
        option(9, f"queue {name!r:.20}", "is not a valid name", queue=name)
        for name in (
            *("", " ", "mail ", " mail", "a\n", "a\r\nb", "a:b", "{a}", "*", "a/b", "../a", ".", "-a", "q" * 129),
            *("q" * 10_000, "📬", "caf\u00e9", "cafe\u0301", "a'b", 'a"b', "a;b", "a%b", "a\\b", "\u202ea", "\x7f"),
        )
    ],
    option(9, "no text as queue", "is not a valid name", queue=5),
    option(9, "an empty idempotency key", "key", key=""),
    option(9, "an idempotency key of 513 bytes", "at most 512 are allowed", key="k" * 513),
    option(9, "an idempotency key of 516 bytes", "at most 512 are allowed", key="🔑" * 129),
    option(9, "a number as idempotency key", "key", key=5),
    option(9, "a share of 129 bytes", "at most 128 are allowed", share="s" * 129),
    option(9, "a correlation id of 257 bytes", "at most 256 are allowed", correlation_id="c" * 257),
    option(9, "an empty correlation id", "correlation_id", correlation_id=""),
    option(9, "a number as correlation id", "correlation_id", correlation_id=5),
    Nasty(12, "too many arguments", InvalidPayload, "takes 2 positional arguments, not 3", args=(1, 2)),
    Nasty(12, "an unknown name", InvalidPayload, "has no parameter 'colour'", kwargs={"colour": "red"}),
    Nasty(12, "two values for one", InvalidPayload, "got two values for 'value'", kwargs={"value": 2}),
    Nasty(12, "the wrong type", InvalidPayload, "$.count: Expected `int`, got `str`", kwargs={"count": "1"}),
    Nasty(12, "text as number of a thing", InvalidPayload, "$.count: Expected `int`", kwargs={"count": None}),
]


def nasty_id(case: Nasty) -> str:
    return f"{case.row}-{case.what}"


@pytest.fixture
def work(app: Holdfast) -> Any:
    @app.task
    def work(value: Any, count: int = 0) -> None: ...

    return work


def batch(work: Any, case: Nasty) -> Iterator[Any]:
    """A good job before the bad one; both have keys."""
    yield work.options(key="good").job(0)
    yield work.options(**{"key": "k", **case.options}).job(case.value, *case.args, **case.kwargs)


def ways(app: Holdfast, work: Any, case: Nasty) -> list[Callable[[], Any]]:
    """The four ways to enqueue."""
    keyed = work.options(**{"key": "k", **case.options})
    return [
        lambda: keyed.enqueue(case.value, *case.args, **case.kwargs),
        lambda: asyncio.run(keyed.aenqueue(case.value, *case.args, **case.kwargs)),
        lambda: app.enqueue_many(batch(work, case)),
        lambda: asyncio.run(app.aenqueue_many(batch(work, case))),
    ]


@pytest.mark.parametrize("case", REFUSED, ids=nasty_id)
def test_refused_and_nothing_stored(app: Holdfast, work: Any, case: Nasty) -> None:
    work.options(key="before").enqueue(0)
    before = totals(app)
    for way in ways(app, work, case):
        with pytest.raises(case.error) as caught:
            way()
        assert type(caught.value) is case.error
        assert case.words in str(caught.value)
        assert len(str(caught.value)) < 1_000
    assert totals(app) == before
    assert work.options(key="k").enqueue("another").created
    assert work.options(key="good").enqueue("another").created


@pytest.mark.parametrize(
    "value",
    [2**53 + 1, 2**63, -(2**63) - 1, 2**64 + 1, 10**1_000 + 1],
    ids=lambda n: f"{n:.3e}" if n < 2**70 else "10^1000",
)
async def test_5_whole_numbers_are_kept_to_the_last_digit(app: Holdfast, work: Any, value: int) -> None:
    await work.aenqueue(value)
    job = await take(app.store)
    assert job.payload == b'{"value":%d}' % value
    assert work.spec.signature.decode(job.payload) == {"value": value}


async def test_6_exactly_the_limit(app: Holdfast, work: Any) -> None:
    await work.aenqueue("a" * (256 * 1024 - 12))
    assert len((await take(app.store)).payload) == 256 * 1024


def test_9_upper_and_lower_case_are_two_queues(app: Holdfast, work: Any) -> None:
    for queue in ("Mail", "mail", "MAIL"):
        assert work.options(queue=queue, key="k").enqueue(queue).created
    assert totals(app) == {"MAIL": (1, 0, 0), "Mail": (1, 0, 0), "mail": (1, 0, 0)}
    assert work.options(key="K").enqueue(1).created
    assert work.options(key="k").enqueue(2).created
    assert work.options(key="k ").enqueue(3).created
    assert work.options(key="caf\u00e9").enqueue(4).created
    assert work.options(key="cafe\u0301").enqueue(5).created


def test_10_another_payload_under_the_same_key(app: Holdfast, work: Any) -> None:
    first = work.options(key="k").enqueue(1)
    for enqueue in (work.options(key="k").enqueue, lambda value: asyncio.run(work.options(key="k").aenqueue(value))):
        with pytest.raises(KeyConflict) as caught:
            enqueue(2)
        assert caught.value.job_id == first.id
    with pytest.raises(PartlyRefused) as partly:
        app.enqueue_many([work.options(key="k").job(2), work.options(key="other").job(2)])
    assert list(partly.value.refused) == [0]
    assert totals(app) == {"default": (2, 0, 0)}
    first.cancel()
    assert work.options(key="k").enqueue(2).created


async def test_10_the_same_id_twice_at_once(app: Holdfast, work: Any) -> None:
    call = work.options(key="k").job(1)
    answers = await asyncio.gather(*(app.aenqueue_many([call, call]) for _ in range(20)))
    assert sum(handle.created for handles in answers for handle in handles) == 1
    assert {handle.id for handles in answers for handle in handles} == {call.new.id}
    [counts] = await app.acounts()
    assert counts.ready == 1


DAMAGED = [
    (1, b'{"value":1', "truncated"),
    (1, b'{"value":1}x', "trailing characters"),
    (1, b'\xef\xbb\xbf{"value":1}', "invalid character"),
    (1, b"", "truncated"),
    (2, b'{"value":NaN}', "malformed"),
    (2, b'{"value":1e400}', "out of range"),
    (4, b'{"value":"\xc0\xaf"}', "UnicodeDecodeError"),
    (5, b'{"value":' + b"9" * 5_000 + b"}", "out of range"),
    (6, b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "RecursionError"),
    (12, b'{"value":1,"count":"two"}', "$.count: Expected `int`, got `str`"),
    (12, b'{"count":2}', "missing required field `value`"),
    (12, b'{"value":1,"gone":2}', "unknown field `gone`"),
    (12, b"[]", "Expected `object`"),
]


@pytest.mark.parametrize(("row", "damaged", "words"), DAMAGED, ids=lambda value: f"{value!r:.30}")
async def test_a_damaged_payload_in_the_store_hurts_only_its_handler(
    app: Holdfast, work: Any, row: int, damaged: bytes, words: str
) -> None:
    new = NewJob(id=SYSTEM.ids.job_id(), task="work", payload=damaged)
    await app.store.insert([new])
    await work.aenqueue("good")
    job = await take(app.store)
    assert job.payload == damaged
    with pytest.raises(InvalidPayload) as caught:
        work.spec.signature.decode(job.payload)
    assert words in str(caught.value)
    failure = capture(caught.value, at=1, attempt=1)
    assert await app.store.apply([move_for(job, Failed(failure, permanent=True))]) == [Applied.APPLIED]
    with pytest.raises(JobFailed, match="InvalidPayload"):
        await (await app.aget(new.id)).aresult()
    [found] = (await app.afind(states=["failed"])).jobs
    assert found.details is not None
    assert found.details.payload == damaged
    assert (await app.areplay(new.id)).state is State.READY
    assert await app.acancel(new.id) is CancelAnswer.CANCELLED


@pytest.mark.parametrize(
    "result",
    [math.nan, "a\0b", "\ud800", {1}, Custom(), deep(100), 10**5_000, "x" * 300_000, inside_itself()],
    ids=lambda value: type(value).__name__,
)
async def test_13_a_result_that_cannot_be_kept(app: Holdfast, work: Any, result: Any) -> None:
    job = await work.aenqueue(1)
    with pytest.raises(InvalidPayload) as caught:
        encode_result(result)
    lost = Failure(at=1, attempt=1, type=RESULT_NOT_KEPT, message=str(caught.value))
    await finish(app.store, Succeeded(None, lost))
    with pytest.raises(ResultNotKept, match="succeeded, but "):
        await job.aresult()


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def cyclic() -> Exception:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    return one


RAISED: list[tuple[int, str, Callable[[], BaseException]]] = [
    (3, "NUL", lambda: ValueError("a\0b")),
    (4, "a lone surrogate", lambda: ValueError("\ud800")),
    (14, "__str__ that raises", BadText),
    (14, "50 MB", lambda: ValueError("x" * 50_000_000)),
    (14, "a cycle of causes", cyclic),
    (14, "a group", lambda: ExceptionGroup("many", [ValueError(str(n)) for n in range(1_000)])),
    (14, "arguments that cannot be shown", lambda: ValueError(BadText())),
    (15, "SystemExit", lambda: SystemExit(3)),
    (15, "KeyboardInterrupt", KeyboardInterrupt),
    (15, "GeneratorExit", GeneratorExit),
    (15, "CancelledError", asyncio.CancelledError),
    (15, "a BaseException", lambda: type("Odd\ud800", (BaseException,), {})("odd")),
]


@pytest.mark.parametrize(("row", "what", "make"), RAISED, ids=[f"{row}-{what}" for row, what, _ in RAISED])
async def test_whatever_a_handler_raises_can_be_stored(
    app: Holdfast, work: Any, row: int, what: str, make: Callable[[], BaseException]
) -> None:
    try:
        raise make()
    except BaseException as error:
        failure = capture(error, at=1, attempt=1)
    job = await work.aenqueue(1)
    await finish(app.store, Failed(failure, permanent=True))
    with pytest.raises(JobFailed) as caught:
        await job.aresult()
    assert list(caught.value.failures) == [failure]
    assert len(failure.message) < LONGEST_MESSAGE + 100
    assert len(failure.traceback) < 10_000
    assert "\0" not in failure.message


def test_21_a_job_that_enqueues_without_end(make_app: MakeApp) -> None:
    app = make_app(settings=Settings(queues=QueueSettings(max_depth=50)))

    @app.task(unique=True)
    def breed(n: int) -> None:
        for child in range(1_000):
            breed.enqueue(n * 1_000 + child)

    with pytest.raises(QueueFull, match="max_depth=50"):
        breed(0)
    assert totals(app) == {"default": (50, 0, 0)}
    asyncio.run(take(app.store))
    assert breed.enqueue(50).created  # the refused call left no key behind


async def test_32_an_answer_that_was_lost_is_asked_for_again(app: Holdfast, work: Any) -> None:
    call = work.options(key="k").job(1)
    for _ in range(3):
        [handle] = await app.aenqueue_many([call])
        assert handle.id == call.new.id
    job = await take(app.store)
    assert len(await app.store.held(job.session_id or "")) == 1
    done = move_for(job, Succeeded(b"null"))
    assert await app.store.apply([done]) == [Applied.APPLIED]
    assert await app.store.apply([done]) == [Applied.ALREADY]
    [handle] = await app.aenqueue_many([call])
    assert not handle.created
    assert [await app.acancel(call.new.id) for _ in range(2)] == [CancelAnswer.ENDED] * 2
    [counts] = await app.acounts()
    assert (counts.ready, counts.succeeded) == (0, 1)


async def test_33_a_call_that_is_cancelled_half_way(app: Holdfast, work: Any) -> None:
    calls = [work.options(key=f"k{n}").job(n) for n in range(30)]
    for n, call in enumerate(calls):
        under_way = asyncio.create_task(app.aenqueue_many([call]))
        for _ in range(n % 4):
            await asyncio.sleep(0)
        under_way.cancel()
        await asyncio.gather(under_way, return_exceptions=True)
    handles = await app.aenqueue_many(calls)  # each is there once: it was stored or it was not, never by halves
    assert [handle.id for handle in handles] == [call.new.id for call in calls]
    [counts] = await app.acounts()
    assert counts.ready == 30


async def test_36_cancelled_while_it_is_claimed_and_finishing(app: Holdfast, work: Any) -> None:
    job = await work.options(key="k").aenqueue(1)
    claimed = await take(app.store)
    assert await app.store.forget([job.id]) == 0  # a purge leaves what is running alone
    assert await job.acancel() is CancelAnswer.ASKED
    assert await job.acancel() is CancelAnswer.ASKED
    assert await app.store.apply([move_for(claimed, Released())]) == [Applied.CANCEL_ASKED]
    asked = (await job.arefresh()).details
    answers = await asyncio.gather(
        app.store.apply([move_for(asked, Released())]), app.store.apply([move_for(asked, Succeeded(b"1"))])
    )
    assert sorted(answer for [answer] in answers) == [Applied.APPLIED, Applied.STALE]
    assert (await job.arefresh()).state in (State.CANCELLED, State.SUCCEEDED)


async def test_36_cancelled_while_it_waits_for_a_retry(app: Holdfast, work: Any) -> None:
    job = await work.options(key="k").aenqueue(1)
    failed = Failed(Failure(at=1, attempt=1, type="E", message="m"), retry_after=60)
    claimed = await finish(app.store, failed)
    assert await job.acancel() is CancelAnswer.CANCELLED
    assert await app.store.apply([move_for(claimed, Succeeded(b"1"))]) == [Applied.STALE]
    assert (await work.options(key="k").aenqueue(2)).created
    with pytest.raises(KeyConflict):
        await app.areplay(job.id)
