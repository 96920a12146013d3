"""Every event has a line, with the right level, in plain English, and with nothing in it that could do harm."""

from __future__ import annotations

from typing import Any, cast, get_args

import msgspec
import pytest

from holdfast.events import (
    Event,
    JobEnqueued,
    JobsPruned,
    JobsRescued,
    KeeperFailed,
    LoopBlocked,
    PartFailed,
    ProcessDied,
    QueuePaused,
    WorkerStopped,
)
from holdfast.job import Reason, State
from holdfast.observe.lines import LONGEST_ERROR, Keys, Level, line, printable
from tests.observe.samples import EVENTS, JOB, WORKER, settled

HOSTILE = "one\ntwo\r\x1b[31mred\x1b[0m\x00\x7f\x9b1m\u2028\u202eevil\ud800\t"


# Every event.


def test_there_is_a_sample_of_every_event() -> None:
    assert [type(event) for event, _ in EVENTS] == list(get_args(Event))


@pytest.mark.parametrize(("event", "level"), EVENTS, ids=lambda value: type(value).__name__)
def test_every_event_has_a_line_of_its_level(event: Event, level: Level) -> None:
    said = line(event)
    assert said.level == level
    assert said.msg.isprintable()
    assert len(said.msg) > 5
    assert said.keys.keys() <= Keys.__annotations__.keys()


def test_an_event_that_nobody_thought_of_is_noticed() -> None:
    class Surprise(msgspec.Struct, frozen=True):
        pass

    with pytest.raises(AssertionError):
        line(cast(Any, Surprise()))


@pytest.mark.parametrize("event", [event for event, _ in EVENTS], ids=lambda event: type(event).__name__)
def test_what_can_be_searched_for_is_in_the_keys(event: Event) -> None:
    keys = line(event).keys
    assert (keys.get("job_id") or "") == getattr(event, "job_id", "")
    assert keys.get("queue") == getattr(event, "queue", None)
    assert keys.get("worker_id") == getattr(event, "worker_id", getattr(event, "session_id", None))
    assert keys.get("request_id") == getattr(event, "correlation_id", None)


def test_no_event_carries_what_must_not_be_logged() -> None:
    fields = {field for kind in get_args(Event) for field in kind.__struct_fields__}
    assert fields.isdisjoint({"payload", "args", "kwargs", "arguments", "result", "progress", "body"})


# Settlements.

SETTLEMENTS: list[tuple[Reason, State, str, Level]] = [
    (Reason.SUCCEEDED, State.SUCCEEDED, "", "debug"),
    (Reason.SUCCEEDED, State.SUCCEEDED, "ResultNotKept: too large", "warning"),
    (Reason.RETRIED, State.READY, "ValueError: boom", "info"),
    (Reason.EXHAUSTED, State.FAILED, "ValueError: boom", "error"),
    (Reason.PERMANENT, State.FAILED, "ValueError: boom", "error"),
    (Reason.SNOOZED_OUT, State.FAILED, "Snooze: later", "error"),
    (Reason.CRASHED, State.FAILED, "ProcessDied: SIGSEGV", "error"),
    (Reason.CRASHED, State.READY, "ProcessDied: SIGSEGV", "warning"),
    (Reason.LOST, State.READY, "WorkerLost: gone", "warning"),
    (Reason.RELEASED, State.READY, "", "debug"),
    (Reason.SNOOZED, State.READY, "Snooze: later", "info"),
    (Reason.CANCELLED, State.CANCELLED, "", "info"),
]


@pytest.mark.parametrize(("reason", "state", "error", "level"), SETTLEMENTS)
def test_the_level_of_a_settlement(reason: Reason, state: State, error: str, level: Level) -> None:
    said = line(settled(reason, state, error=error))
    assert said.level == level
    assert said.msg.startswith("welcome ")
    assert "attempt 2, 0.25 s" in said.msg
    assert said.msg.endswith(error)
    assert said.keys == {"job_id": JOB, "queue": "mail", "worker_id": WORKER, "request_id": "req-1"}


def test_every_end_for_good_is_an_error() -> None:
    for reason in Reason:
        said = line(settled(reason, State.FAILED))
        assert (said.level == "error") == ("failed for good" in said.msg), reason


@pytest.mark.parametrize("reason", Reason)
def test_every_reason_has_a_line(reason: Reason) -> None:
    assert line(settled(reason)).msg


def test_a_retry_says_when_and_why() -> None:
    said = line(settled(Reason.RETRIED, error="ValueError: boom", retry_in=1.5))
    assert said.msg == "welcome failed (attempt 2, 0.25 s), runs again in 1.5 s: ValueError: boom"


# The words.


@pytest.mark.parametrize(
    ("event", "level", "words"),
    [
        (JobEnqueued(JOB, "mail", "welcome", False), "debug", "was enqueued before"),
        (QueuePaused("mail", False), "info", "resumed"),
        (JobsRescued(1, 0), "warning", "1 job of dead workers"),
        (JobsRescued(3, 2), "error", "3 jobs of dead workers went back to their queues, 2 failed for good"),
        (WorkerStopped(WORKER, False, 5, 1, 2), "warning", "past its grace period: 5 succeeded, 1 failed, 2 released"),
        (LoopBlocked(WORKER, 2.5, 3, ("a", "b")), "warning", "blocked for 2.5 s by a handler (running: a, b)"),
        (LoopBlocked(WORKER, 12.4, 1, ()), "warning", "blocked for 12 s by a handler; 1 unstarted job went back. Make"),
        (ProcessDied(WORKER, 7, "exit code 3", "", 2, 8), "error", "2 jobs that it ran will run again alone, 8 unst"),
        (PartFailed(WORKER, "beat", "TimeoutError", 0.5), "warning", "beat failed, it goes on in 0.5 s: TimeoutError"),
        (JobsPruned(1), "info", "1 row removed"),
    ],
)
def test_the_words(event: Event, level: Level, words: str) -> None:
    said = line(event)
    assert said.level == level
    assert words in said.msg


def test_a_process_that_ran_one_job_alone_says_nothing_of_others() -> None:
    said = line(ProcessDied(WORKER, 7, "killed by SIGSEGV", JOB))
    assert said.msg == "process 7 died: killed by SIGSEGV"
    assert said.keys["job_id"] == JOB


def test_an_error_without_words_leaves_no_loose_end() -> None:
    events: list[Event] = [KeeperFailed("rescue", ""), PartFailed(WORKER, "beat", "", 0.5), settled(Reason.EXHAUSTED)]
    assert all(line(event).msg[-1].isalpha() for event in events)


# Hostile text.


def test_hostile_text_becomes_one_visible_line() -> None:
    shown = printable(HOSTILE, 1000)
    assert shown == r"one\ntwo\r\x1b[31mred\x1b[0m\x00\x7f\x9b1m\u2028\u202eevil\ud800\t"
    assert shown.isprintable()
    assert printable(shown, 1000) == shown


def test_text_that_does_no_harm_stays_as_it_is() -> None:
    for text in ("", "Größe 漢字 🙂", "[bold red]markup[/] {braces} %s <b>", "C:\\new\\table"):
        assert printable(text, 100) == text


@pytest.mark.parametrize("length", [LONGEST_ERROR - 1, LONGEST_ERROR, LONGEST_ERROR + 1, 10_000_000])
@pytest.mark.parametrize("character", ["x", "\x1b"])
def test_long_text_is_cut(length: int, character: str) -> None:
    shown = printable(character * length, LONGEST_ERROR)
    assert len(shown) <= LONGEST_ERROR
    assert shown.endswith("…") == (character == "\x1b" or length > LONGEST_ERROR)


@pytest.mark.parametrize("error", [HOSTILE, "x" * 100_000, "\x1b" * 100_000])
def test_an_error_is_cut_and_printable_wherever_it_appears(error: str) -> None:
    events: list[Event] = [settled(reason, error=error) for reason in Reason]
    for event, _ in EVENTS:
        texts = {"error", "how", "why", "answer"} & set(event.__struct_fields__)
        events += [msgspec.structs.replace(event, **{text: error}) for text in texts]
    assert KeeperFailed("rescue", error) in events
    for event in events:
        said = line(event).msg
        assert said.isprintable(), event
        assert len(said) < LONGEST_ERROR + 200, event
