"""Text as people may read it: times, URLs without their passwords, and foreign text that cannot harm a terminal."""

from __future__ import annotations

import re
import sys
from datetime import UTC, datetime, timedelta

from holdfast.observe.lines import printable
from holdfast.ports import MICROSECONDS

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60))
# Up to the last "@": a password may hold one that somebody forgot to escape.
_PASSWORD = re.compile(r"(://[^\s:/@]*):\S*@")
_SECRET_OPTION = re.compile(r"([?&][^\s=&]*(?:pass|pwd|secret|token|key)[^\s=&]*=)[^\s&]*", re.IGNORECASE)


def masked(text: str) -> str:
    """The text with the password of every URL in it replaced by stars."""
    return _SECRET_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1:***@", text))


def visible(text: str) -> str:
    """The text on one line, with everything that a terminal might obey (escape codes, line breaks, marks that turn the
    direction of reading) written out as an escape.
    """
    return printable(text, sys.maxsize)


def first_line(text: str, longest: int = 200) -> str:
    """The first line of the text, cut: for a list, where `show` has the rest."""
    line = next((line for line in text.splitlines() if line.strip()), "").strip()
    return line if len(line) <= longest else f"{line[:longest]}…"


def moment(at: int) -> str:
    """A stored time as ISO 8601 in UTC."""
    return (_EPOCH + timedelta(microseconds=at)).isoformat(timespec="microseconds").replace("+00:00", "Z")


def span(microseconds: int) -> str:
    """A duration in its largest unit: "12 s", "3 min", "5 d"."""
    seconds = max(0, microseconds) // MICROSECONDS
    for unit, size in _UNITS:
        if seconds >= 2 * size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def ago(at: int, now: int) -> str:
    """A stored time as seen from now: "3 min ago", "in 12 s"."""
    return f"{span(now - at)} ago" if at <= now else f"in {span(at - now)}"


def counted(number: int, noun: str) -> str:
    """ "1 job", "2 jobs"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
