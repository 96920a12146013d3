"""Whatever a handler raises becomes a failure that every store can keep."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.failures import (
    KEPT_FAILURES,
    LONGEST_MESSAGE,
    LONGEST_TRACEBACK,
    Failure,
    append_failures,
    capture,
    decode_history,
    storable_text,
)

SUFFIX = 40
"""Room for the note that says how long the text was."""


def captured(error: BaseException) -> Failure:
    """The failure for an error that was really raised, checked for what every failure must be."""
    try:
        raise error
    except BaseException as raised:
        failure = capture(raised, at=5, attempt=2)
    assert (failure.at, failure.attempt) == (5, 2)
    assert len(failure.type) <= 200 + SUFFIX
    assert len(failure.message) <= LONGEST_MESSAGE + SUFFIX
    assert len(failure.traceback) <= LONGEST_TRACEBACK + SUFFIX
    for text in (failure.type, failure.message, failure.traceback):
        assert "\0" not in text
        assert text.encode("utf-8").decode("utf-8") == text
    assert decode_history(append_failures(b"", [failure])) == [failure]
    return failure


def test_an_ordinary_error() -> None:
    failure = captured(ValueError("no such user"))
    assert (failure.type, failure.message) == ("ValueError", "no such user")
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.traceback.endswith("ValueError: no such user\n")
    assert __file__ in failure.traceback


def test_an_error_that_was_never_raised() -> None:
    failure = capture(ValueError("made, not raised"), at=0, attempt=1)
    assert failure.traceback == "ValueError: made, not raised\n"


# Errors whose own code is broken.


class StrRaises(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError("no message for you")


class ReprRaisesToo(StrRaises):
    def __repr__(self) -> str:
        raise ZeroDivisionError("nor this")


class StrIsNoText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]  # noqa: PLE0307


class StrRecurses(Exception):
    def __str__(self) -> str:
        return str(self)


@pytest.mark.parametrize(
    ("error", "because"),
    [
        (StrRaises(), "ZeroDivisionError"),
        (ReprRaisesToo(), "ZeroDivisionError"),
        (StrIsNoText(), "TypeError"),
        (StrRecurses(), "RecursionError"),
    ],
)
def test_an_error_that_cannot_be_printed(error: Exception, because: str) -> None:
    failure = captured(error)
    assert failure.message == f"<message not printable: {because} in __str__>"
    assert failure.type == type(error).__qualname__
    assert failure.traceback


def test_text_of_a_foreign_class_is_only_text() -> None:
    class Stubborn(str):
        def __len__(self) -> int:
            raise ZeroDivisionError

        def replace(self, *args: Any) -> str:
            raise ZeroDivisionError

    class Odd(Exception):
        def __str__(self) -> str:
            return Stubborn("plain")

    failure = captured(Odd())
    assert failure.message == "plain"
    assert type(failure.message) is str


def test_an_error_with_broken_notes() -> None:
    error = ValueError("with notes")
    error.__notes__ = 5  # type: ignore[assignment]
    assert captured(error).message == "with notes"
    noted = ValueError("with notes")
    noted.add_note("nul \0 and surrogate \ud800")
    assert "nul \\x00 and surrogate \\ud800" in captured(noted).traceback


# Too much of it.


def test_fifty_megabytes_of_message() -> None:
    failure = captured(ValueError("x" * 50_000_000))
    assert failure.message == "x" * LONGEST_MESSAGE + "… (50000000 characters)"


def test_a_long_message_does_not_push_the_frames_out_of_the_traceback() -> None:
    failure = captured(ValueError("x" * 50_000_000))
    assert __file__ in failure.traceback
    assert "in captured" in failure.traceback


def test_a_message_at_the_limit_is_whole() -> None:
    assert captured(ValueError("x" * LONGEST_MESSAGE)).message == "x" * LONGEST_MESSAGE
    assert captured(ValueError("x" * (LONGEST_MESSAGE + 1))).message.endswith(f"… ({LONGEST_MESSAGE + 1} characters)")


@pytest.mark.parametrize("character", ["\0", "\ud800", "\U0001f680"])
def test_a_message_is_as_long_as_allowed_after_escaping(character: str) -> None:
    captured(ValueError(character * 1_000_000))


def test_a_type_name_is_cut() -> None:
    endless = type("E" * 10_000, (Exception,), {})
    assert captured(endless()).type == "E" * 200 + "… (10000 characters)"


def test_deep_recursion_keeps_the_end() -> None:
    def down() -> None:
        down()

    with pytest.raises(RecursionError) as raised:
        down()
    failure = capture(raised.value, at=0, attempt=1)
    assert failure.type == "RecursionError"
    assert failure.traceback.rstrip().endswith(failure.message)


def test_a_chain_of_ten_thousand_causes() -> None:
    error: Exception | None = None
    for number in range(10_000):
        caused = ValueError(number)
        caused.__cause__ = error
        error = caused
    assert error is not None
    assert captured(error).traceback.endswith("ValueError: 9999\n")


# Cycles and groups.


def test_causes_in_a_circle() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__cause__, second.__cause__ = second, first
    failure = captured(first)
    assert "KeyError: 'second'" in failure.traceback
    assert failure.traceback.endswith("ValueError: first\n")


def test_an_error_that_is_its_own_cause() -> None:
    error = ValueError("me")
    error.__cause__ = error
    assert captured(error).message == "me"


def test_contexts_in_a_circle() -> None:
    first, second = ValueError("first"), KeyError("second")
    first.__context__, second.__context__ = second, first
    assert captured(first).message == "first"


def test_a_group() -> None:
    failure = captured(ExceptionGroup("both", [ValueError("one"), ExceptionGroup("in", [OSError("two")])]))
    assert failure.type == "ExceptionGroup"
    assert failure.message == "both (2 sub-exceptions)"
    assert "ValueError: one" in failure.traceback
    assert "OSError: two" in failure.traceback


def test_a_group_ten_thousand_wide_and_a_group_a_thousand_deep() -> None:
    captured(ExceptionGroup("wide", [ValueError("x")] * 10_000))
    deep: Exception = ValueError("bottom")
    for _ in range(1_000):
        deep = ExceptionGroup("deeper", [deep])
    captured(deep)


# Characters that some store cannot keep.


@pytest.mark.parametrize(
    ("raw", "kept"),
    [
        ("a\0b", "a\\x00b"),
        ("a\ud800b", "a\\ud800b"),
        ("\udcff", "\\udcff"),
        ("\ud83d\ude80", "\\ud83d\\ude80"),
        ("🚀 é\n\t", "🚀 é\n\t"),
        ("", ""),
    ],
)
def test_nul_and_lone_surrogates_are_made_visible(raw: str, kept: str) -> None:
    failure = captured(ValueError(raw))
    assert failure.message == kept
    assert kept in failure.traceback


@given(st.text(alphabet=st.characters()), st.integers(1, 50))
def test_any_text_can_be_stored(text: str, longest: int) -> None:
    stored = storable_text(text, longest)
    assert "\0" not in stored
    assert stored.encode("utf-8").decode("utf-8") == stored
    assert len(stored) <= longest + SUFFIX
    if len(text) <= longest and "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text):
        assert stored == text


# Errors that are not Exceptions.


class Abrupt(BaseException):
    pass


@pytest.mark.parametrize(
    "error",
    [
        SystemExit(3),
        SystemExit(),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError("from inside"),
        Abrupt("x"),
        BaseExceptionGroup("all", [KeyboardInterrupt()]),
    ],
    ids=repr,
)
def test_errors_that_end_programs_are_captured_like_others(error: BaseException) -> None:
    failure = captured(error)
    assert failure.type == type(error).__qualname__
    assert type(error).__name__ in failure.traceback


# What must not be stored.


def test_no_values_of_local_variables() -> None:
    def handler(password: str) -> None:
        token = password[::-1]
        raise ValueError("refused" if token else "")

    with pytest.raises(ValueError, match="refused") as raised:
        handler("".join(["hunter", "2"]))
    failure = capture(raised.value, at=0, attempt=1)
    assert "in handler" in failure.traceback
    for secret in ("hunter2", "2retnuh"):
        assert secret not in failure.traceback


# The history.


def numbered(number: int) -> Failure:
    return Failure(at=number, attempt=number, type="E", message=str(number))


def test_an_empty_history_is_empty_bytes() -> None:
    assert decode_history(b"") == []
    assert append_failures(b"", []) == b""


def test_the_history_keeps_the_latest_ten_in_order() -> None:
    history = b""
    for number in range(25):
        history = append_failures(history, [numbered(number)])
        assert decode_history(history) == [numbered(n) for n in range(max(0, number - 9), number + 1)]
    assert append_failures(b"", [numbered(n) for n in range(25)]) == history
    assert KEPT_FAILURES == 10


def test_nothing_new_leaves_the_history_untouched() -> None:
    assert append_failures(b"not even readable", []) == b"not even readable"


UNREADABLE = [
    b"junk",
    b"{",
    b"[",
    b"null",
    b"{}",
    b"5",
    b"[5]",
    b"[{}]",
    b'[{"at":"x","attempt":1,"type":"E","message":"m"}]',
    b'[{"at":1e999,"attempt":1,"type":"E","message":"m"}]',
    b'[{"at":1,"attempt":1,"type":"E","message":"\xff"}]',
    b'[{"at":1,"attempt":1,"type":"E","message":"\\ud800"}]',
    b"\xff\xfe\x00",
    b"\0",
    b"[" * 100_000,
    b"9" * 5_000,
]


@pytest.mark.parametrize("history", UNREADABLE, ids=lambda history: ascii(history[:30]))
def test_an_unreadable_history_says_so_and_goes_on(history: bytes) -> None:
    (note,) = decode_history(history)
    assert note.type == "UnreadableHistory"
    assert note.message
    assert decode_history(append_failures(history, [numbered(1)])) == [note, numbered(1)]


@given(st.binary(max_size=60))
def test_no_bytes_break_the_history(history: bytes) -> None:
    assert decode_history(append_failures(history, [numbered(1)]))[-1] == numbered(1)


def test_a_history_from_a_newer_version_is_readable() -> None:
    newer = [{**msgspec.structs.asdict(numbered(1)), "worker": "w1"}]
    assert decode_history(msgspec.json.encode(newer)) == [numbered(1)]


def test_a_history_of_the_largest_failures_is_bounded() -> None:
    largest = captured(ValueError("\U0001f680" * 1_000_000))
    history = b""
    for _ in range(30):
        history = append_failures(history, [largest])
    assert len(history) < KEPT_FAILURES * 4 * (LONGEST_MESSAGE + LONGEST_TRACEBACK + 500)
