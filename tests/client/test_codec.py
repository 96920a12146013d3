"""The codec: what a handler receives equals what was enqueued, or there is an error that names the place."""

# No postponed annotations here: the handlers below are annotated with types that only exist inside a test.

import contextlib
import dataclasses
import enum
import functools
import math
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from types import MappingProxyType
from typing import Annotated, Any, Literal
from uuid import UUID
from zoneinfo import ZoneInfo

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.codec import DEEPEST_NESTING, Signature, encode_result, payload_hash
from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Color(enum.Enum):
    RED = "red"
    NUL = "a\0b"


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Address:
    street: str
    number: int | None = None
    tags: list[Any] = dataclasses.field(default_factory=list)


class User(msgspec.Struct):
    name: str
    address: Address
    born: date | None = None
    extra: Any = None


class Bag(msgspec.Struct):
    """Holds itself, and a set somewhere below."""

    inner: "list[Bag]" = []
    things: dict[str, frozenset[int]] = {}


class Circle(msgspec.Struct, tag=True):
    radius: float


class Square(msgspec.Struct, tag=True):
    side: float


@dataclasses.dataclass
class Incomparable:
    number: int
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")


@dataclasses.dataclass(eq=False)
class NeverEqual:
    number: int


class Picky(msgspec.Struct):
    number: int

    def __post_init__(self) -> None:
        if self.number < 0:
            raise KeyError("negative")


class Opaque:
    pass


class Text(str):
    pass


class Number(int):
    pass


def taking(annotation: Any) -> Signature:
    """The signature of a handler with one parameter `x` of that type."""

    def handler(x: Any) -> None: ...

    handler.__annotations__["x"] = annotation
    return Signature(handler)


UNANNOTATED = Signature(lambda x: None)


def nested(levels: int, innermost: Any = 0) -> Any:
    """The innermost value inside so many lists."""
    return functools.reduce(lambda inner, _: [inner], range(levels), innermost)


def encode(signature: Signature, value: Any, *limit: int) -> bytes:
    """Its only argument encoded, by its name and as a call gives it: the same bytes, or the same error."""
    ways = (
        lambda: signature.encode({"x": value}, *limit),
        lambda: signature.encode_call((value,), {}, *limit),
    )
    one, other = (outcome(way) for way in ways)
    assert one == other or (str(one), type(one)) == (str(other), type(other))
    if isinstance(one, InvalidPayload):
        raise one
    return one


def outcome(way: Callable[[], bytes]) -> bytes | InvalidPayload:
    try:
        return way()
    except InvalidPayload as error:
        return error


def refusal(signature: Signature, value: Any) -> InvalidPayload:
    with pytest.raises(InvalidPayload) as caught:
        encode(signature, value)
    assert str(caught.value).startswith(f"{caught.value.path}: ")
    return caught.value


# Values that go through.

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=30,
)


@unhurried
@given(plain_values)
def test_every_json_value_goes_through_unannotated(value: Any) -> None:
    decoded = UNANNOTATED.decode(encode(UNANNOTATED, value))["x"]
    assert decoded == value
    assert repr(decoded) == repr(value)  # not even an int for a float, or 0.0 for -0.0


annotated_values = st.one_of(
    st.tuples(st.just(datetime), st.datetimes(timezones=st.just(UTC) | st.none())),
    st.tuples(st.just(date), st.dates()),
    st.tuples(st.just(timedelta), st.timedeltas(timedelta(days=-10_000), timedelta(days=10_000))),
    st.tuples(st.just(UUID), st.uuids()),
    st.tuples(st.just(Decimal), st.decimals(allow_nan=False, allow_infinity=False)),
    st.tuples(st.just(bytes), st.binary()),
    st.tuples(st.just(dict[int, str]), st.dictionaries(st.integers(), texts)),
    st.tuples(st.just(tuple[int, ...]), st.lists(st.integers()).map(tuple)),
    st.tuples(st.just(Address), st.builds(Address, texts, st.none() | st.integers(), st.lists(texts))),
    st.tuples(st.just(list[User]), st.lists(st.builds(User, texts, st.builds(Address, texts), st.dates()))),
)


@unhurried
@given(annotated_values)
def test_every_annotated_value_goes_through(case: tuple[Any, Any]) -> None:
    annotation, value = case
    signature = taking(annotation)
    decoded = signature.decode(encode(signature, value))["x"]
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    ("annotation", "value"),
    [
        (datetime, datetime(2026, 2, 28, 23, 59, 59, 999_999, UTC)),
        (datetime, datetime(2026, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin"))),
        (datetime, datetime(1, 1, 1)),  # noqa: DTZ001 naive stays naive
        (time, time(1, 2, 3, 4)),
        (Decimal, Decimal("1.10")),
        (Decimal, Decimal("1E+500")),
        (Color, Color.RED),
        (Level, Level.LOW),
        (Address, Address("Hill", 7, ["a"])),
        (User, User("Ann", Address("Hill"), date(2000, 1, 1), {"deep": [1]})),
        (Circle | Square, Square(2.0)),
        (tuple[int, str], (1, "a")),
        (list[tuple[int, int]], [(1, 2), (3, 4)]),
        (dict[int, str], {1: "a", -5: "b", 2**70: "c"}),
        (dict[UUID, int], {UUID(int=1): 1}),
        (dict[date, Color], {date(2000, 1, 1): Color.RED}),
        (int | str | None, "7"),
        (Literal["a", "b"], "b"),
        (Annotated[int, msgspec.Meta(ge=5)], 5),
        (float, 1),
        (bytes, b"\0\xff"),
        (Picky, Picky(1)),
    ],
)
def test_annotated_examples(annotation: Any, value: Any) -> None:
    signature = taking(annotation)
    assert signature.decode(encode(signature, value)) == {"x": value}


@pytest.mark.parametrize(
    "number",
    [2**53 + 1, 2**63 - 1, 2**63, 2**64, 2**64 + 1, -(2**63), -(2**63) - 1, 10**100 + 7, -(10**4_298)],
    ids=lambda number: f"{number.bit_length()} bits",
)
@pytest.mark.parametrize("signature", [UNANNOTATED, taking(int)])
def test_whole_numbers_are_kept_to_the_last_digit(number: int, signature: Signature) -> None:
    payload = encode(signature, number)
    assert payload == b'{"x":%d}' % number
    assert signature.decode(payload)["x"] == number


@pytest.mark.parametrize(
    "text", ["\\u0000", "\\\\u0000", "\x7f\x1b", "\ufeff", "\u2028", "😀", "\u00e9", "e\u0301", ""]
)
def test_odd_but_valid_text_goes_through(text: str) -> None:
    payload = encode(UNANNOTATED, {text: text})
    assert UNANNOTATED.decode(payload)["x"] == {text: text}


def test_as_deep_as_allowed() -> None:
    deepest = nested(DEEPEST_NESTING - 1)  # the object of the arguments is a level too
    assert UNANNOTATED.decode(encode(UNANNOTATED, deepest))["x"] == deepest


def test_wide_is_not_deep() -> None:
    wide: Any = [[{"a": []}] for _ in range(1_000)]
    assert UNANNOTATED.decode(encode(UNANNOTATED, wide))["x"] == wide


# Values that nothing can save.

SELF_CONTAINING: list[Any] = []
SELF_CONTAINING.append(SELF_CONTAINING)
SELF_CONTAINING_DICT: dict[str, Any] = {"a": 1}
SELF_CONTAINING_DICT["again"] = SELF_CONTAINING_DICT


@pytest.mark.parametrize(
    ("value", "path", "words"),
    [
        (math.nan, "$.x", "nan is no JSON number"),
        (math.inf, "$.x", "inf is no JSON number"),
        (-math.inf, "$.x", "-inf is no JSON number"),
        (1e400, "$.x", "inf is no JSON number"),
        ({"a": [1, math.nan]}, "$.x.a[1]", "nan is no JSON number"),
        ("a\0b", "$.x", "NUL"),
        (["", "\0"], "$.x[1]", "NUL"),
        ({"a\0b": 1}, "$.x", "NUL"),
        ({"a": {"\0": 1}}, "$.x.a", "NUL"),
        ("\ud800", "$.x", "surrogate"),
        ([{"a": "ok\udfff"}], "$.x[0].a", "surrogate"),
        ({"\ud800": 1}, "$.x", "surrogate"),
        ({"a": {"\udc00": 1}}, "$.x.a", "surrogate"),
        ({1, 2}, "$.x", "sorted list"),
        (set(), "$.x", "sorted list"),
        (frozenset({1}), "$.x", "sorted list"),
        ({"a": [{1}]}, "$.x.a[0]", "sorted list"),
        (Opaque(), "$.x", "a Opaque has no JSON form"),
        ([1, {"a": Opaque()}], "$.x[1].a", "a Opaque has no JSON form"),
        (Opaque, "$.x", "a type has no JSON form"),
        (Address, "$.x", "a type has no JSON form"),
        (math.sqrt, "$.x", "has no JSON form"),
        (1j, "$.x", "a complex has no JSON form"),
        (range(3), "$.x", "a range has no JSON form"),
        (iter([1]), "$.x", "has no JSON form"),
        (..., "$.x", "has no JSON form"),
        (msgspec.UNSET, "$.x", "has no JSON form"),
        (ValueError("secret"), "$.x", "a ValueError has no JSON form"),
        (MappingProxyType({"a": 1}), "$.x", "a mappingproxy has no JSON form"),
        (Text("a"), "$.x", "a Text has no JSON form"),
        ([Number(1)], "$.x[0]", "a Number has no JSON form"),
        ({True: 1}, "$.x", "a key of type bool has no JSON form"),
        ({"a": {None: 1}}, "$.x.a", "a key of type NoneType has no JSON form"),
        ({(1, 2): 1}, "$.x", "a key of type tuple has no JSON form"),
        (10**5_000, "$.x", "4300 digits"),
        ({"a": [10**5_000]}, "$.x.a[0]", "4300 digits"),
        ({10**5_000: 1}, "$.x", "4300 digits"),
        (nested(DEEPEST_NESTING), "$.x" + "[0]" * (DEEPEST_NESTING - 1), "deeper than 64 levels"),
        (nested(DEEPEST_NESTING - 1, []), "$.x" + "[0]" * (DEEPEST_NESTING - 1), "deeper than 64 levels"),
        (nested(500), "$.x" + "[0]" * (DEEPEST_NESTING - 1), "deeper than 64 levels"),
        (nested(100_000), "$.x" + "[0]" * (DEEPEST_NESTING - 1), "deeper than 64 levels"),
        (SELF_CONTAINING, "$.x" + "[0]" * (DEEPEST_NESTING - 1), "inside itself"),
        (SELF_CONTAINING_DICT, "$.x" + ".again" * (DEEPEST_NESTING - 1), "inside itself"),
        (msgspec.Raw(b"[1"), "$", "malformed"),
    ],
    ids=lambda value: f"{value!r:.30}" if isinstance(value, str) else type(value).__name__,
)
def test_refused_with_the_place(value: Any, path: str, words: str) -> None:
    error = refusal(UNANNOTATED, value)
    assert error.path == path
    assert words in str(error)
    assert "secret" not in str(error)


def test_an_object_nested_a_hundred_thousand_times_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"a": deep}
    assert refusal(UNANNOTATED, deep).path == "$.x" + ".a" * (DEEPEST_NESTING - 1)


def test_deep_nesting_is_named_even_where_the_stack_is_nearly_used_up() -> None:
    def at_depth(frames: int) -> InvalidPayload:
        return at_depth(frames - 1) if frames else refusal(UNANNOTATED, nested(400))

    assert "deeper than 64 levels" in str(at_depth(sys.getrecursionlimit() // 2))


# Values that their annotation saves, or would.


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"ab", "a bytes would reach the handler as a str"),
        (bytearray(b"ab"), "a bytearray would reach"),
        (datetime(2026, 1, 1, tzinfo=UTC), "a datetime would reach the handler as a str"),
        (date(2026, 1, 1), "a date would reach the handler as a str"),
        (timedelta(1), "a timedelta would reach"),
        ((1, 2), "a tuple would reach the handler as a list"),
        ((), "a tuple would reach the handler as a list"),
        (Decimal("1.5"), "a Decimal would reach the handler as a str"),
        (UUID(int=1), "a UUID would reach the handler as a str"),
        (Color.RED, "a Color would reach the handler as a str"),
        (Address("Hill"), "a Address would reach the handler as a dict"),
        (Square(1.0), "a Square would reach the handler as a dict"),
    ],
)
def test_what_json_would_change_is_refused_without_annotation(value: Any, words: str) -> None:
    for place, path in (
        (value, "$.x"),
        ([0, value], "$.x[1]"),
        ({"a": {"b": value}}, "$.x.a.b"),
    ):
        error = refusal(UNANNOTATED, place)
        assert error.path == path
        assert words in str(error)
        assert "annotate the parameter" in str(error)


@pytest.mark.parametrize("value", [{1: "a"}, {1.5: "a"}, {1: 1, "1": 2}, {"1": 1, 1: 2}, {UUID(int=1): 1}])
def test_keys_that_are_no_text_are_refused_without_annotation(value: Any) -> None:
    assert refusal(UNANNOTATED, value).path == "$.x"
    assert refusal(UNANNOTATED, [value]).path == "$.x[0]"
    assert "JSON keys are text" in str(refusal(UNANNOTATED, value))


def test_keys_that_become_one_are_refused_with_annotation() -> None:
    assert refusal(taking(dict[int | str, int]), {1: 1, "1": 2}).path == "$.x"


@pytest.mark.parametrize(
    ("annotation", "value", "path"),
    [
        (set[int], {1}, "$.x"),
        (frozenset[int], frozenset({1}), "$.x"),
        (set[int], set(), "$.x"),
        (set[int], [1], "$.x"),
        (list[set[int]], [set(), {1}], "$.x[0]"),
        (dict[str, set[str]] | None, {"a": {"b"}}, "$.x.a"),
        (Bag, Bag(things={"a": frozenset()}), "$.x.things.a"),
        (Bag, Bag(inner=[Bag(), Bag(things={"a": frozenset({1})})]), "$.x.inner[1].things.a"),
    ],
)
def test_sets_are_refused_even_where_annotated(annotation: Any, value: Any, path: str) -> None:
    assert refusal(taking(annotation), value).path == path


@pytest.mark.parametrize(
    ("annotation", "value", "path", "words"),
    [
        (int, "7", "$.x", "Expected `int`, got `str`"),
        (int, True, "$.x", "Expected `int`, got `bool`"),
        (int, 1.0, "$.x", "Expected `int`, got `float`"),
        (int, None, "$.x", "Expected `int`, got `null`"),
        (str, 7, "$.x", "Expected `str`"),
        (float, 2**60 + 1, "$.x", "a int would reach the handler as a float"),
        (float | None, math.nan, "$.x", "nan is no JSON number"),
        (Decimal, 1.1, "$.x", "a float would reach the handler as a Decimal"),
        (Decimal, Decimal("NaN"), "$.x", "not equal to it"),
        (datetime, "2026-01-01T00:00:00Z", "$.x", "a str would reach the handler as a datetime"),
        (list[int], (1, 2), "$.x", "a tuple would reach the handler as a list"),
        (tuple[int, int], (1, 2, 3), "$.x", "length 2"),
        (dict[int, list[int]], {"a": [1]}, "$.x", "in a key: Expected `int`"),
        (dict[str, list[int]], {"a": ["b"]}, "$.x[...][0]", "Expected `int`"),
        (Annotated[int, msgspec.Meta(ge=5)], 4, "$.x", ">= 5"),
        (Literal["a"], "b", "$.x", "Invalid enum value"),
        (Color, Color.NUL, "$.x", "NUL"),
        (msgspec.Raw, msgspec.Raw(b'{"a":"\\u0000"}'), "$.x.a", "NUL"),
        (Any, Address("Hill", tags=[math.nan]), "$.x.tags[0]", "nan is no JSON number"),
        (User, User("Ann", Address("a\0")), "$.x.address.street", "NUL"),
        (User, User("Ann", Address("Hill"), extra=(1,)), "$.x", "not equal to it"),
        (Circle, Square(1.0), "$.x.type", "Invalid value"),
        (Opaque, Opaque(), "$.x", "a Opaque has no JSON form"),
        (NeverEqual, NeverEqual(1), "$.x", "not equal to it"),
        (Incomparable, Incomparable(1), "$.x", "its __eq__ raised RuntimeError"),
        (list[Incomparable], [Incomparable(1)], "$.x[0]", "its __eq__ raised RuntimeError"),
        (Any, Incomparable(1), "$.x", "its __eq__ raised RuntimeError"),
    ],
)
def test_refused_despite_or_by_the_annotation(annotation: Any, value: Any, path: str, words: str) -> None:
    error = refusal(taking(annotation), value)
    assert error.path == path
    assert words in str(error)


def test_an_annotated_type_may_raise_what_it_likes() -> None:
    picky = Picky(1)
    picky.number = -1
    assert "KeyError: 'negative'" in str(refusal(taking(Picky), picky))


def test_equality_of_another_argument_is_not_asked_for_in_vain() -> None:
    def handler(a: Any, b: Incomparable) -> None: ...

    with pytest.raises(InvalidPayload):
        Signature(handler).encode({"b": Incomparable(1), "a": (1,)})


def test_a_dict_that_is_never_equal_is_refused() -> None:
    class Odd(dict[str, int]):
        def __eq__(self, other: object) -> bool:
            return False

        __hash__ = None

    assert refusal(UNANNOTATED, Odd(a=1)).path == "$"


# The limit.


@pytest.mark.parametrize("limit", [100, 256 * 1024])
def test_the_limit_is_exact(limit: int) -> None:
    text = "a" * (limit - len(b'{"x":""}'))
    assert len(encode(UNANNOTATED, text, limit)) == limit
    with pytest.raises(PayloadTooLarge, match=rf"{limit + 1} bytes of JSON, more than the {limit} allowed"):
        encode(UNANNOTATED, text + "a", limit)


def test_the_limit_counts_bytes() -> None:
    with pytest.raises(PayloadTooLarge, match="28 bytes"):
        encode(UNANNOTATED, "é" * 10, 27)
    assert encode(UNANNOTATED, "é" * 10, 28)


def test_the_message_never_contains_the_payload() -> None:
    with pytest.raises(PayloadTooLarge) as caught:
        encode(UNANNOTATED, "secret" * 100, 10)
    assert "secret" not in str(caught.value)


def test_a_long_key_is_cut_in_the_path() -> None:
    error = refusal(UNANNOTATED, {"k" * 1_000: {1}})
    assert error.path == "$.x." + "k" * 80


# Binding.


def sample(a: int, b: int = 2, *, c: int, d: str = "d") -> None: ...


SAMPLE = Signature(sample)


@pytest.mark.parametrize(
    ("args", "kwargs", "bound"),
    [
        ((1,), {"c": 3}, {"a": 1, "c": 3}),
        ((1, 5), {"c": 3}, {"a": 1, "b": 5, "c": 3}),
        ((), {"c": 3, "a": 1, "d": "x", "b": 4}, {"a": 1, "b": 4, "c": 3, "d": "x"}),
    ],
)
def test_arguments_are_bound_by_name(args: tuple[Any, ...], kwargs: dict[str, Any], bound: dict[str, Any]) -> None:
    assert SAMPLE.bind(args, kwargs) == bound
    assert SAMPLE.encode_call(args, kwargs) == SAMPLE.encode(SAMPLE.bind(args, kwargs))


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((1, 2, 3), {"c": 3}, "sample takes 2 positional arguments, not 3"),
        ((1,), {"a": 1, "c": 3}, "sample got two values for 'a'"),
        ((1,), {"c": 3, "z": 1}, "sample has no parameter 'z'"),
        ((1,), {"c": 3, "z" * 1_000: 1}, "sample has no parameter 'z"),
        ((), {}, "sample needs a value for a, c"),
        ((1,), {}, "sample needs a value for c"),
    ],
)
def test_arguments_that_do_not_fit(args: tuple[Any, ...], kwargs: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidPayload, match="sample") as caught:
        SAMPLE.bind(args, kwargs)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 200
    with pytest.raises(InvalidPayload) as again:
        SAMPLE.encode_call(args, kwargs)
    assert str(again.value) == str(caught.value)


def test_a_call_whose_parameters_must_all_be_given() -> None:
    signature = Signature(lambda a, b: None)
    for args, kwargs in (((1, [2]), {}), ((1,), {"b": [2]}), ((), {"a": 1, "b": [2]})):
        assert signature.encode_call(args, kwargs) == b'{"a":1,"b":[2]}'
    for few in ((), (1,)):
        with pytest.raises(InvalidPayload, match="needs a value for"):
            signature.encode_call(few, {})
    with pytest.raises(InvalidPayload, match="takes 2 positional arguments, not 3"):
        signature.encode_call((1, 2, 3), {})
    with pytest.raises(InvalidPayload):
        signature.encode_call((1, msgspec.UNSET), {})


def test_a_default_that_is_left_out_is_the_handlers_when_it_runs() -> None:
    payload = SAMPLE.encode(SAMPLE.bind((1,), {"c": 3}))
    assert payload == b'{"a":1,"c":3}'
    assert SAMPLE.decode(payload) == {"a": 1, "c": 3}

    def newer(a: int, b: int = 99, *, c: int, d: str = "new", e: list[int] = []) -> Any:  # noqa: B006
        return a, b, c, d, e

    assert newer(**Signature(newer).decode(payload)) == (1, 99, 3, "new", [])


def test_no_parameters_at_all() -> None:
    signature = Signature(lambda: None)
    assert signature.encode(signature.bind((), {})) == b"{}"
    assert signature.decode(b"{}") == {}


def test_every_kind_of_default() -> None:
    def handler(a=1, b: "int | None" = None, c: Literal["x"] = "x", d: Annotated[int, "doc"] = 0) -> None: ...  # type: ignore[no-untyped-def]

    signature = Signature(handler)
    assert signature.decode(b"{}") == {}
    given = {"a": [1], "b": None, "c": "x", "d": 4}
    assert signature.decode(signature.encode(given)) == given


# Functions that cannot be handlers.


def with_args(*args: int) -> None: ...
def with_kwargs(a: int, **more: int) -> None: ...
def positional_only(a: int, /) -> None: ...


class Callable_:
    def __call__(self, *args: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (with_args, r"with_args: \*args: int has no name"),
        (with_kwargs, r"with_kwargs: \*\*more: int has no name"),
        (positional_only, "'a' is positional-only"),
        (Callable_(), r"Callable_: \*args"),
        (functools.partial(with_args, 1), r"partial: \*args"),
        (min, "min: Python does not know its parameters"),
    ],
)
def test_parameters_that_cannot_travel(function: Callable[..., Any], words: str) -> None:
    with pytest.raises(InvalidOption, match=words):
        Signature(function)


@dataclasses.dataclass
class Dangling:
    inner: "list[NotThere]"  # type: ignore[name-defined]  # noqa: F821


def unresolvable(a: "NotThere") -> None: ...  # type: ignore[name-defined]  # noqa: F821
def unresolvable_result(a: int) -> "NotThere": ...  # type: ignore[name-defined]  # noqa: F821
def unresolvable_inside(a: Dangling) -> None: ...
def two_arrays(a: list[int] | tuple[int, ...]) -> None: ...
def no_type(a: 5 = 5) -> None: ...  # type: ignore[valid-type]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (unresolvable, "unresolvable: its annotations cannot be resolved .*NotThere"),
        (unresolvable_result, "unresolvable_result: its annotations cannot be resolved .*NotThere"),
        (unresolvable_inside, "NotThere"),
        (two_arrays, "more than one array-like"),
        (no_type, "no_type: an annotation names a type that JSON cannot carry"),
        (functools.partial(sample, 1), "partial: its annotations cannot be resolved"),
    ],
)
def test_annotations_that_cannot_be_used(function: Callable[..., Any], words: str) -> None:
    signature = Signature(function)
    for use in (lambda: signature.encode({"a": 1}), lambda: signature.decode(b'{"a":1}')):
        with pytest.raises(InvalidOption, match=words):
            use()
    if "NotThere" in words:
        signature.check()  # it may be defined further down in the module
    else:
        with pytest.raises(InvalidOption, match=words):
            signature.check()


def test_annotations_that_can_be_used() -> None:
    SAMPLE.check()
    taking(User).check()


# Payloads that were damaged, or meant for another handler.


def typed(x: int, user: User | None = None, by_id: dict[int, list[int]] | None = None) -> None: ...


@pytest.mark.parametrize(
    ("payload", "path", "words"),
    [
        (b"", "$", "truncated"),
        (b'{"x":1', "$", "truncated"),
        (b'{"x":1}x', "$", "trailing characters (byte 8)"),
        (b'{"x":1}{}', "$", "trailing characters"),
        (b'\xef\xbb\xbf{"x":1}', "$", "invalid character (byte 0)"),
        ('{"x":1}'.encode("utf-16"), "$", "malformed"),
        (b"{'x':1}", "$", "malformed"),
        (b"\0", "$", "malformed"),
        (b'{"x":NaN}', "$", "malformed"),
        (b'{"x":1e400}', "$.x", "out of range"),
        (b'{"x":' + b"9" * 5_000 + b"}", "$.x", "out of range"),
        (b"[1]", "$", "Expected `object`, got `array`"),
        (b"null", "$", "Expected `object`, got `null`"),
        (b"{}", "$", "missing required field `x`"),
        (b'{"x":1,"z":2}', "$", "unknown field `z`"),
        (b'{"x":"1"}', "$.x", "Expected `int`, got `str`"),
        (b'{"x":null}', "$.x", "Expected `int`, got `null`"),
        (b'{"x":1,"user":{"name":"Ann"}}', "$.user", "missing required field `address`"),
        (b'{"x":1,"user":{"name":"A","address":{"street":1}}}', "$.user.address.street", "Expected `str`"),
        (b'{"x":1,"user":{"name":"\xff"}}', "$", "UnicodeDecodeError"),
        (b'{"x":1,"user":{"name":"\\ud800"}}', "$", ""),
        (b'{"x":1,"by_id":{"a":[1]}}', "$.by_id", "in a key: Expected `int`, got `str`"),
        (b'{"x":1,"by_id":{"1":[1,"b"]}}', "$.by_id[...][1]", "Expected `int`, got `str`"),
    ],
    ids=lambda value: f"{value!r:.40}",
)
def test_damaged_payloads(payload: bytes, path: str, words: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        Signature(typed).decode(payload)
    assert caught.value.path == path
    assert words in str(caught.value)


def test_a_payload_nested_a_hundred_thousand_times() -> None:
    with pytest.raises(InvalidPayload, match="RecursionError"):
        UNANNOTATED.decode(b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@unhurried
@given(st.binary(max_size=60))
def test_any_bytes_decode_or_are_refused(payload: bytes) -> None:
    with contextlib.suppress(InvalidPayload):
        assert isinstance(Signature(typed).decode(payload)["x"], int)


@unhurried
@given(st.integers(0, 40), st.integers(0, 255))
def test_one_flipped_byte_is_decoded_or_refused(position: int, byte: int) -> None:
    payload = bytearray(b'{"x":1,"by_id":{"1":[1,2],"-5":[3,4,10]}}')
    payload[position] = byte
    with contextlib.suppress(InvalidPayload):
        assert isinstance(Signature(typed).decode(bytes(payload))["x"], int)


def test_memory_errors_are_no_fault_of_the_payload() -> None:
    class Hungry(msgspec.Struct):
        x: int

        def __post_init__(self) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        taking(Hungry).decode(b'{"x":{"x":1}}')


# Results.


@pytest.mark.parametrize(
    ("value", "result"),
    [
        (None, b"null"),
        ("done", b'"done"'),
        ((1, 2), b"[1,2]"),
        ({"a": [1.5, None, True]}, b'{"a":[1.5,null,true]}'),
        (Color.RED, b'"red"'),
        (User("Ann", Address("Hill")), None),
        (datetime(2026, 1, 1, tzinfo=UTC), b'"2026-01-01T00:00:00Z"'),
        (2**70, b"1180591620717411303424"),
    ],
)
def test_results(value: Any, result: bytes | None) -> None:
    encoded = encode_result(value)
    assert result is None or encoded == result


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (math.nan, "$"),
        ({"a": [math.inf]}, "$.a[0]"),
        ("a\0b", "$"),
        ({"\0": 1}, "$"),
        ("\ud800", "$"),
        ([{1}], "$[0]"),
        (Opaque(), "$"),
        ({"a": Opaque()}, "$.a"),
        (Address("Hill", tags=[Opaque()]), "$.tags[0]"),
        (Color.NUL, "$"),
        (10**5_000, "$"),
        (nested(DEEPEST_NESTING + 1), "$" + "[0]" * DEEPEST_NESTING),
        (nested(100_000), "$" + "[0]" * DEEPEST_NESTING),
        (SELF_CONTAINING, "$" + "[0]" * DEEPEST_NESTING),
    ],
    ids=lambda value: f"{value!r:.30}" if isinstance(value, str) else type(value).__name__,
)
def test_results_that_cannot_be_kept(value: Any, path: str) -> None:
    with pytest.raises(InvalidPayload) as caught:
        encode_result(value)
    assert caught.value.path == path


def test_the_limit_of_results_is_exact() -> None:
    assert len(encode_result("a" * 98, 100)) == 100
    with pytest.raises(PayloadTooLarge, match="the result is 101 bytes"):
        encode_result("a" * 99, 100)


def test_results_are_decoded_by_the_return_annotation() -> None:
    def handler() -> tuple[User, datetime]: ...  # type: ignore[empty-body]

    value = (User("Ann", Address("Hill")), datetime(2026, 1, 1, tzinfo=UTC))
    assert Signature(handler).decode_result(encode_result(value)) == value
    with pytest.raises(InvalidPayload) as caught:
        Signature(handler).decode_result(b'[{"name":1}, ""]')
    assert caught.value.path == "$[0].name"


def test_a_result_by_an_annotation_that_json_cannot_carry() -> None:
    with pytest.raises(InvalidOption, match="its return annotation names a type that JSON cannot carry"):
        signature_returning(list[int] | tuple[int, ...]).decode_result(b"[1]")


def signature_returning(annotation: Any) -> Signature:
    def handler() -> None: ...

    handler.__annotations__["return"] = annotation
    return Signature(handler)


def test_without_return_annotation_a_result_is_plain_json() -> None:
    assert Signature(lambda: None).decode_result(b'{"a":[1,2.5]}') == {"a": [1, 2.5]}


# The hash of a payload.


def hashed(task: str, payload: bytes) -> str:
    return payload_hash(task, Signature(lambda value: None), b'{"value":' + payload + b"}")


def test_the_hash_is_over_what_the_handler_sees() -> None:
    def price(amount: float, unit: str = "EUR") -> None: ...

    signature = Signature(price)
    assert payload_hash("t", signature, b'{"amount":1}') == payload_hash("t", signature, b'{"amount":1.0}')
    assert payload_hash("t", signature, b'{"amount":1}') != payload_hash("t", signature, b'{"amount":2}')


def test_a_keyword_only_argument_is_not_given_by_position() -> None:
    def f(a: int, *, b: int = 0) -> None: ...

    with pytest.raises(InvalidPayload, match="takes 1 positional arguments, not 2"):
        Signature(f).bind((1, 2), {})


def test_an_error_does_not_show_the_value() -> None:
    class Colour(enum.Enum):
        RED = "red"

    def paint(colour: Colour, size: Literal["s", "m"] = "s") -> None: ...

    for payload in (b'{"colour":"hunter2"}', b'{"colour":"red","size":"hunter2"}'):
        with pytest.raises(InvalidPayload) as caught:
            Signature(paint).decode(payload)
        assert "hunter2" not in str(caught.value)


def test_the_hash_does_not_depend_on_the_order_of_keys() -> None:
    one = hashed("t", b'{"a":1,"b":{"c":[1,2],"d":null}}')
    assert one == hashed("t", b'{ "b": {"d":null, "c":[1,2]}, "a":1 }')
    assert len(one) == 64


@unhurried
@given(st.dictionaries(texts, plain_values, max_size=5), st.randoms())
def test_the_hash_of_shuffled_arguments(arguments: dict[str, Any], random: Any) -> None:
    shuffled = list(arguments.items())
    random.shuffle(shuffled)
    encode = msgspec.json.encode
    assert hashed("t", encode(arguments)) == hashed("t", encode(dict(shuffled)))


@pytest.mark.parametrize(
    "other",
    [
        ("u", b'{"a":1,"b":[1,2]}'),
        ("t", b'{"a":2,"b":[1,2]}'),
        ("t", b'{"a":1,"b":[2,1]}'),
        ("t", b'{"a":1}'),
        ("t", b'{"a":1.0,"b":[1,2]}'),
        ("t", b'{"a":"1","b":[1,2]}'),
        ("t", b'{"a":true,"b":[1,2]}'),
    ],
)
def test_the_hash_tells_others_apart(other: tuple[str, bytes]) -> None:
    assert hashed("t", b'{"a":1,"b":[1,2]}') != hashed(*other)


def test_the_hash_keeps_every_digit() -> None:
    assert hashed("t", b'{"a":%d}' % 2**70) != hashed("t", b'{"a":%d}' % (2**70 + 1))


def test_time_zones_go_through_as_the_same_moment() -> None:
    moment = datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=5, minutes=45)))
    signature = taking(datetime)
    assert signature.decode(signature.encode({"x": moment}))["x"] == moment


# In order.


def test_arguments_that_are_all_given_come_in_the_order_of_the_parameters() -> None:
    def handler(zeta: int, alpha: date, mid: str) -> None: ...

    signature = Signature(handler)
    payload = signature.encode({"mid": "m", "alpha": date(2024, 2, 29), "zeta": 1})
    assert signature.all_given
    assert signature.decode_in_order(payload) == (1, date(2024, 2, 29), "m")
    for broken in (b'{"zeta": "1", "alpha": "2024-02-29", "mid": "m"}', b'{"zeta": 1}', payload[:-1] + b',"more":1}'):
        with pytest.raises(InvalidPayload):
            signature.decode_in_order(broken)


def test_a_default_or_a_keyword_only_parameter_is_not_given_by_its_place() -> None:
    def with_default(a: int, b: int = 2) -> None: ...

    def keyword_only(a: int, *, b: int) -> None: ...

    def nothing() -> None: ...

    assert [Signature(each).all_given for each in (with_default, keyword_only, nothing)] == [False, False, True]
