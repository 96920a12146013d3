"""What a producer may write. Everything else is refused with a message that names the field and stays short."""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import HoldfastError, InvalidOption
from holdfast.job import (
    ENDED,
    LATEST_TIME,
    LONGEST_DELAY,
    Key,
    Lease,
    State,
    check_name,
    check_text,
    check_whole,
)
from tests.unit.samples import claimed_job, new_job

HUGE = 10**5000
"""An int with more digits than Python is willing to print."""
LONG = "x" * 1_000_000
LONGEST_MESSAGE = 260


def described(value: object) -> str:
    """A short test id for any value, however nasty."""
    if type(value) is int and abs(value) > 10**20:
        return f"an int of {value.bit_length()} bits"
    return f"{value!a:.40}"


def refused(field: str, value: Any) -> str:
    """The message with which a new job refuses the value: of our tree, a ValueError too, and short."""
    with pytest.raises(InvalidOption) as caught:
        new_job(**{field: value})
    assert isinstance(caught.value, HoldfastError)
    assert isinstance(caught.value, ValueError)
    message = str(caught.value)
    assert len(message) <= LONGEST_MESSAGE
    assert message.isprintable()
    return message


# Names: task, version and queue.

NAMES = {"task": "task", "task_version": "version", "queue": "queue"}

BAD_NAMES = [
    "",
    " ",
    "a b",
    "a ",
    " a",
    "a\n",
    "\n",
    "a\tb",
    "\0",
    "a\0b",
    "\ud800",
    "a\udfffb",
    "a:b",
    "{a}",
    "a*",
    "a?",
    "a/b",
    "../etc/passwd",
    "..",
    ".hidden",
    "-flag",
    "a'b",
    'a"b',
    "a;b",
    "a%b",
    "a\\b",
    "a$b",
    "é",
    "e\u0301",
    "ａ",
    "ﬁ",
    "١",
    "ß",
    "İ",
    "🚀",
    "a\u200b",
    "a\u202e",
    "\ufeffa",
    "a" * 129,
    "a" * 10_000,
    LONG,
    None,
    5,
    5.0,
    True,
    b"mail",
    ["mail"],
    {"mail": 1},
    {"mail"},
]


@pytest.mark.parametrize("name", BAD_NAMES, ids=described)
@pytest.mark.parametrize("field", NAMES)
def test_bad_names_are_refused(field: str, name: Any) -> None:
    message = refused(field, name)
    assert message.startswith(f"{NAMES[field]} ")
    assert "is not a valid name: use 1 to 128 letters, digits, '_', '.' or '-'" in message


@pytest.mark.parametrize("name", ["a", "Z", "_", "0", "a.b-c_D9", "a..b", "mail.", "mail-", "a" * 128])
@pytest.mark.parametrize("field", NAMES)
def test_good_names_are_kept_as_they_are(field: str, name: str) -> None:
    assert getattr(new_job(**{field: name}), field) == name


def test_names_that_differ_in_case_are_different() -> None:
    assert new_job(queue="Mail").queue != new_job(queue="mail").queue


@given(st.text(max_size=200))
def test_a_name_is_plain_ascii_or_refused(name: str) -> None:
    try:
        check_name("queue", name)
    except InvalidOption:
        assert not re.fullmatch(r"[\w][\w.-]{0,127}", name, re.ASCII)
    else:
        assert re.fullmatch(r"[\w][\w.-]{0,127}", name, re.ASCII)


def test_a_refused_name_is_refused_again() -> None:
    for _ in range(3):
        with pytest.raises(InvalidOption, match="queue 'a b'"):
            check_name("queue", "a b")
        with pytest.raises(InvalidOption, match="task 'a b'"):
            check_name("task", "a b")


# Numbers and times.

BOUNDS = {
    "priority": (-100, 100),
    "delay": (0, LONGEST_DELAY),
    "run_at": (0, LATEST_TIME),
    "max_retries": (0, 1_000),
    "retention": (0, LONGEST_DELAY),
}

BAD_NUMBERS = [
    True,
    False,
    0.0,
    1.0,
    -1.0,
    math.nan,
    math.inf,
    -math.inf,
    1e400,
    -(2**63) - 1,
    2**63,
    2**64,
    10**400,
    HUGE,
    -HUGE,
    "1",
    "",
    LONG,
    b"1",
    Decimal(1),
    1j,
    [],
    [1],
    timedelta(seconds=1),
    datetime(2030, 1, 1),  # noqa: DTZ001
    datetime(2030, 1, 1, tzinfo=UTC),
    datetime.min,  # noqa: DTZ901
    datetime.max.replace(tzinfo=UTC),
]


@pytest.mark.parametrize("number", BAD_NUMBERS, ids=described)
@pytest.mark.parametrize("field", BOUNDS)
def test_bad_numbers_are_refused(field: str, number: Any) -> None:
    least, most = BOUNDS[field]
    message = refused(field, number)
    assert message.startswith(field)
    assert f"must be a whole number from {least} to {most}, not " in message


@pytest.mark.parametrize("field", sorted(set(BOUNDS) - {"run_at"}))
def test_no_number_is_not_a_number(field: str) -> None:
    assert refused(field, None).endswith("not None")


@pytest.mark.parametrize("field", BOUNDS)
def test_numbers_are_accepted_up_to_their_bounds_and_no_further(field: str) -> None:
    least, most = BOUNDS[field]
    for good in (least, least + 1, most - 1, most):
        assert getattr(new_job(**{field: good}), field) == good
    for bad in (least - 1, most + 1):
        assert refused(field, bad).endswith(f"not {bad}")


def test_every_bound_fits_a_signed_64_bit_column_with_room_for_now() -> None:
    now = int(datetime(2100, 1, 1, tzinfo=UTC).timestamp()) * 1_000_000
    assert now + LONGEST_DELAY + LATEST_TIME < 2**63


def test_the_latest_time_is_exact_as_a_floating_point_number() -> None:
    assert float(LATEST_TIME) == LATEST_TIME
    assert float(LATEST_TIME - 1) == LATEST_TIME - 1
    assert (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=LATEST_TIME)).year == 2255


@given(st.one_of(st.integers(), st.floats(), st.text(), st.none(), st.booleans(), st.binary()))
def test_a_number_is_whole_and_within_its_bounds_or_refused(number: Any) -> None:
    try:
        check_whole("n", number, -100, 100)
    except InvalidOption:
        assert type(number) is not int or abs(number) > 100
    else:
        assert type(number) is int


# Text: share, correlation id, key.

LONGEST_TEXT = {"share": 128, "correlation_id": 256}
BAD_TEXTS = ["\0", "a\0b", "\n", "a\r\nb", "\x1b[31m", "\x7f", "\ud800", "a\udfff", 5, True, b"a", b"", ["a"], 0, False]


@pytest.mark.parametrize("text", BAD_TEXTS, ids=described)
@pytest.mark.parametrize("field", LONGEST_TEXT)
def test_bad_texts_are_refused(field: str, text: Any) -> None:
    message = refused(field, text)
    assert message.startswith(f"{field} ")
    assert message.endswith("must be text, not empty, and without control characters")


@pytest.mark.parametrize("text", BAD_TEXTS, ids=described)
def test_bad_keys_are_refused(text: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^key .* must be text, not empty, and without control characters"):
        Key(text, "h", 1)


@pytest.mark.parametrize("field", LONGEST_TEXT)
def test_text_is_measured_in_bytes(field: str) -> None:
    longest = LONGEST_TEXT[field]
    for letter in ("a", "é", "€", "🚀"):
        width = len(letter.encode())
        fits = letter * (longest // width)
        assert getattr(new_job(**{field: fits}), field) == fits
        assert (
            refused(field, fits + letter)
            == f"{field} is {len(fits.encode()) + width} bytes long; at most {longest} are allowed"
        )
    assert refused(field, LONG) == f"{field} is 1000000 bytes long; at most {longest} are allowed"


def test_a_key_is_measured_in_bytes() -> None:
    assert Key("🚀" * 128, "h", 1).text == "🚀" * 128
    with pytest.raises(InvalidOption, match="key is 513 bytes long; at most 512 are allowed"):
        Key("🚀" * 128 + "a", "h", 1)


def test_the_empty_share_is_the_default_and_other_texts_may_not_be_empty() -> None:
    assert new_job().share == new_job(share="").share == ""
    refused("correlation_id", "")
    with pytest.raises(InvalidOption):
        Key("", "h", 1)
    with pytest.raises(InvalidOption):
        new_job(share=None)


@pytest.mark.parametrize("window", [0, -1, True, 1.0, math.nan, None, LONGEST_DELAY + 1, HUGE], ids=described)
def test_bad_key_windows_are_refused(window: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^key window in microseconds must be a whole number from 1 to "):
        Key("k", "h", window)


def test_case_normal_form_and_trailing_space_make_another_text() -> None:
    composed, decomposed = unicodedata.normalize("NFC", "é"), unicodedata.normalize("NFD", "é")
    texts = [composed, decomposed, "e", "E", "e ", " e"]
    for field in LONGEST_TEXT:
        assert len({getattr(new_job(**{field: text}), field) for text in texts}) == len(texts)
    assert len({Key(text, "h", 1).text.encode() for text in texts}) == len(texts)


@given(st.text(alphabet=st.characters(), max_size=300))
def test_accepted_text_can_be_stored_everywhere(text: str) -> None:
    try:
        check_text("key", text, 512)
    except InvalidOption:
        refused("correlation_id", text)
    else:
        assert 1 <= len(text.encode("utf-8")) <= 512
        assert "\0" not in text


# Ids.


@pytest.mark.parametrize("job_id", ["", "\0", "a\nb", "\ud800", "x" * 65, LONG, None, 5, b"id"], ids=described)
def test_bad_ids_are_refused(job_id: Any) -> None:
    assert refused("id", job_id).startswith("id ")


# The values themselves.


def test_a_value_that_cannot_be_printed_is_still_refused_clearly() -> None:
    class Unprintable:
        def __repr__(self) -> str:
            raise RuntimeError

    assert "<Unprintable that cannot be printed>" in refused("queue", Unprintable())
    assert "<Unprintable that cannot be printed>" in refused("priority", Unprintable())
    assert "<Unprintable that cannot be printed>" in refused("share", Unprintable())
    assert "<int that cannot be printed>" in refused("priority", HUGE)


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        new_job().queue = "other"  # type: ignore[misc]
    with pytest.raises(AttributeError):
        claimed_job().version = 10  # type: ignore[misc]


def test_a_lease_is_session_and_version() -> None:
    assert claimed_job().lease == Lease("01900000-0000-7000-8000-000000000001", "mail", "s1", 9)
    assert claimed_job(session_id=None).lease.session_id == ""
    assert claimed_job().lease != claimed_job(version=10).lease
    assert claimed_job().lease != claimed_job(session_id="s2").lease


def test_a_state_is_either_live_or_ended() -> None:
    assert set(State) - ENDED == {State.READY, State.IN_FLIGHT}
