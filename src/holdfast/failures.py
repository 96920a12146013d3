"""What went wrong with one attempt, made safe to store: bounded, plain text, no frame locals, no NUL.

A job's history keeps its latest ten failures. Stores treat the encoded history as opaque bytes; a row whose history
cannot be read any more (edited by hand, torn) yields one failure that says so instead of an error.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

import msgspec

KEPT_FAILURES = 10
LONGEST_MESSAGE = 2_000
LONGEST_TRACEBACK = 8_000
RESULT_NOT_KEPT = "ResultNotKept"
"""The `type` of the failure that stands for a result which could not be stored: the job itself succeeded."""

_MOST_FRAMES = 50


class Failure(msgspec.Struct, frozen=True, gc=False):
    """One failed attempt: when (worker's clock, for people), which attempt, the exception's type and message."""

    at: int
    attempt: int
    type: str
    message: str
    traceback: str = ""


def storable_text(text: str, longest: int) -> str:
    """The text with NUL and lone surrogates made visible, cut to `longest` characters. Never raises."""
    # Escaping makes text longer, so it is cut before (it may be huge) and after.
    stored = text[:longest].replace("\0", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= longest and len(stored) <= longest:
        return stored
    return stored[:longest] + f"… ({len(text)} characters)"


def _message(error: BaseException) -> str:
    try:
        return "".join((str(error),))  # a plain str, even if __str__ answers with a subclass
    except BaseException as unprintable:
        # A handler's exception class is foreign code: its __str__ may raise anything, SystemExit too.
        return f"<message not printable: {type(unprintable).__name__} in __str__>"


def _traceback(error: BaseException) -> str:
    try:
        # TracebackException breaks cycles of __cause__ and keeps no locals unless asked to.
        lines = traceback.TracebackException.from_exception(error, limit=-_MOST_FRAMES).format()
        # A huge message is one line of it; uncut it would push out the frames, which nothing else keeps.
        return "".join(line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + "…\n" for line in lines)
    except BaseException as unprintable:
        return f"<traceback not printable: {type(unprintable).__name__}>"


def capture(error: BaseException, *, at: int, attempt: int) -> Failure:
    """The failure for an exception, whatever that exception is: a broken `__str__`, 50 MB of text, a cycle of causes.

    The end of a long traceback is kept, because the error itself stands there.
    """
    trace = _traceback(error)
    if len(trace) > LONGEST_TRACEBACK:
        trace = "…" + trace[-LONGEST_TRACEBACK:]
    return Failure(
        at=at,
        attempt=attempt,
        type=storable_text(type(error).__qualname__, 200),
        message=storable_text(_message(error), LONGEST_MESSAGE),
        traceback=storable_text(trace, LONGEST_TRACEBACK + 1),
    )


def decode_history(history: bytes) -> list[Failure]:
    """The failures, oldest first."""
    if not history:
        return []
    try:
        return msgspec.json.decode(history, type=list[Failure])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        return [Failure(at=0, attempt=0, type="UnreadableHistory", message=str(error))]


def append_failures(history: bytes, new: Sequence[Failure]) -> bytes:
    """The history with `new` at its end, cut to the latest ten."""
    if not new:
        return history
    return msgspec.json.encode([*decode_history(history), *new][-KEPT_FAILURES:])
