"""Payloads and results as JSON, strictly: what a handler receives equals what was enqueued, or enqueue refuses.

Arguments travel as a JSON object of named values. Encoding checks the round trip: the bytes are decoded again by the
handler's own annotations and compared. So a `datetime` for a parameter annotated `datetime` goes through, and for one
without annotation is refused, because the handler would see text. NaN, infinities, NUL, lone surrogates, sets, unknown
objects and anything nested deeper than 64 levels are refused everywhere, with the path of the culprit. No pickle.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
from msgspec.structs import asdict, astuple

from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge, shown

DEFAULT_PAYLOAD_LIMIT = 256 * 1024
DEEPEST_NESTING = 64

T = typing.TypeVar("T")

_encoder = msgspec.json.Encoder()
_canonical_encoder = msgspec.json.Encoder(order="sorted")
_plain_decoder = msgspec.json.Decoder()
_NUL = b"\\u0000"
_PLAIN_TYPES = frozenset({str, float, bool, type(None)})
_QUOTED_VALUE = re.compile(r" '.*'$", re.DOTALL)
_MSGSPEC_ERROR = re.compile(r"(.*?)(?: - at (?:`(key)` in )?`(.*)`)?", re.DOTALL)


class Signature:
    """The named arguments of one handler: how they are bound, encoded and decoded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """`InvalidOption` if a parameter cannot be filled from named JSON values."""
        self._function = function
        self._name = getattr(function, "__qualname__", type(function).__qualname__)
        try:
            self._parameters = tuple(inspect.signature(function).parameters.values())
        except (TypeError, ValueError) as error:
            raise InvalidOption(f"task {self._name}: Python does not know its parameters ({error})") from error
        for parameter in self._parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidOption(
                    f"task {self._name}: {parameter} has no name to travel under; "
                    f"give each argument a parameter of its own"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise InvalidOption(
                    f"task {self._name}: parameter {parameter.name!r} is positional-only, but arguments "
                    f"travel by name: remove the '/'"
                )
        self._positional = tuple(
            parameter.name for parameter in self._parameters if parameter.kind is not parameter.KEYWORD_ONLY
        )
        self._required = frozenset(
            parameter.name for parameter in self._parameters if parameter.default is parameter.empty
        )
        self._names = frozenset(parameter.name for parameter in self._parameters)
        self.all_given = len(self._required) == len(self._positional) == len(self._parameters)
        """Whether each argument always travels and may be given by its place: the short ways are enough then."""

    @property
    def names(self) -> frozenset[str]:
        """The names of all parameters."""
        return self._names

    @property
    def required(self) -> frozenset[str]:
        """The names of the parameters without a default."""
        return self._required

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._function, include_extras=True)
        except Exception as error:
            raise InvalidOption(
                f"task {self._name}: its annotations cannot be resolved ({error}); the types must "
                f"be importable where the task is defined"
            ) from error

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[msgspec.Struct]:
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        try:
            for parameter in self._parameters:
                kind = self._hints.get(parameter.name, Any)
                if parameter.name in self._required:
                    fields.append((parameter.name, kind))
                else:
                    # An argument that was left out takes the handler's own default when it runs.
                    fields.append((parameter.name, kind | msgspec.UnsetType, msgspec.UNSET))
            arguments = msgspec.defstruct(
                "Arguments", fields, kw_only=not self.all_given, forbid_unknown_fields=True, module=__name__
            )
            return msgspec.json.Decoder(arguments)
        except (TypeError, NameError) as error:
            raise InvalidOption(
                f"task {self._name}: an annotation names a type that JSON cannot carry: {error}"
            ) from error

    @cached_property
    def _mentions_sets(self) -> bool:
        return _mentions_sets(msgspec.inspect.type_info(self._decoder.type))

    @cached_property
    def _result_decoder(self) -> msgspec.json.Decoder[Any]:
        try:
            return msgspec.json.Decoder(self._hints.get("return", Any))
        except (TypeError, NameError) as error:
            raise InvalidOption(
                f"task {self._name}: its return annotation names a type that JSON cannot carry: {error}"
            ) from error

    def check(self) -> None:
        """`InvalidOption` if an annotation names a type that JSON cannot carry.

        One that cannot be resolved yet, because its class is defined further down, is left for the first call.
        """
        try:
            _ = self._decoder, self._result_decoder
        except InvalidOption as error:
            if not isinstance(error.__cause__, NameError):
                raise

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, or `InvalidPayload` if they do not fit the handler's parameters."""
        if len(args) > len(self._positional):
            raise InvalidPayload(f"{self._name} takes {len(self._positional)} positional arguments, not {len(args)}")
        named = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in named:
                raise InvalidPayload(f"{self._name} got two values for {shown(name)}")
            if name not in self._names:
                raise InvalidPayload(f"{self._name} has no parameter {shown(name)}")
            named[name] = value
        if missing := self._required - named.keys():
            raise InvalidPayload(f"{self._name} needs a value for {', '.join(sorted(missing))}")
        return named

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any], limit: int = DEFAULT_PAYLOAD_LIMIT) -> bytes:
        """What `encode` makes of what `bind` makes of them, with the same errors."""
        if self.all_given and not kwargs and len(args) == len(self._positional) and not self._mentions_sets:
            # The usual case, without a dictionary of what was given and another of what arrives.
            try:
                decoder = self._decoder
                given = decoder.type(*args)
                payload = _encoder.encode(given)
                if len(payload) <= limit and not _may_hide(payload) and decoder.decode(payload) == given:
                    return payload
            except Exception:  # noqa: S110 - whatever it is, the long way has the words for it
                pass
        return self.encode(self.bind(args, kwargs), limit)

    def encode(self, arguments: Mapping[str, Any], limit: int = DEFAULT_PAYLOAD_LIMIT) -> bytes:
        """The arguments as JSON that `decode` turns back into equal values, or `InvalidPayload` with the path."""
        payload = _encode(arguments)
        if len(payload) > limit:
            raise PayloadTooLarge(
                f"the arguments are {len(payload)} bytes of JSON, more than the {limit} allowed: "
                f"send a reference (a path, a row id) instead of the data"
            )
        _refuse_hidden(payload)
        try:
            decoded = self.decode(payload)
        except InvalidPayload:
            _refuse_forbidden(arguments, "$", 0)  # names the cause where the decoder only sees its trace
            raise
        try:
            same = bool(decoded == arguments)
        except Exception:  # an argument's own `__eq__` may raise anything: `_refuse_difference` finds it
            same = False
        if not same or self._mentions_sets:
            _refuse_forbidden(arguments, "$", 0)
        if not same:
            _refuse_difference(arguments, decoded, "$")
            raise InvalidPayload("the arguments would reach the handler as others, which are not equal to them")
        return payload

    def decode(self, payload: bytes) -> dict[str, Any]:
        """The keyword arguments for the handler, or `InvalidPayload` if they do not fit its annotations."""
        arguments = asdict(_decode(self._decoder, payload))
        if len(self._required) == len(arguments):
            return arguments
        return {name: value for name, value in arguments.items() if value is not msgspec.UNSET}

    def decode_in_order(self, payload: bytes) -> tuple[Any, ...]:
        """The same as positional arguments, where all are given (`all_given`). Quicker to make and to call with."""
        decoder = self._decoder
        try:
            return astuple(decoder.decode(payload))
        except MemoryError:
            raise
        except Exception as error:  # as in `_decode`; one call less for every job
            raise _invalid(error) from error

    def decode_result(self, result: bytes) -> Any:
        """What the handler returned, by its own return annotation."""
        return _decode(self._result_decoder, result)


def encode_result(value: Any, limit: int = DEFAULT_PAYLOAD_LIMIT) -> bytes:
    """A handler's return value as JSON, or `InvalidPayload` for what no payload may hold. Tuples become lists."""
    result = _encode(value)
    if len(result) > limit:
        raise PayloadTooLarge(f"the result is {len(result)} bytes of JSON, more than the {limit} allowed")
    _refuse_hidden(result)
    _refuse_forbidden(value, "$", 0)
    return result


def payload_hash(task: str, signature: Signature, payload: bytes) -> str:
    """SHA-256 over the task and its arguments as the handler sees them: their order, or 1 for 1.0, does not matter."""
    canonical = _canonical_encoder.encode(signature.decode(payload))
    return hashlib.sha256(task.encode() + b"\0" + canonical).hexdigest()


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except MemoryError:
        raise
    except Exception as error:
        _refuse_forbidden(value, "$", 0)
        raise InvalidPayload(str(error)) from error


def _decode(decoder: msgspec.json.Decoder[T], encoded: bytes) -> T:
    try:
        return decoder.decode(encoded)
    except MemoryError:
        raise
    except Exception as error:  # the `__post_init__` of an annotated type may raise anything
        raise _invalid(error) from error


def _invalid(error: Exception) -> InvalidPayload:
    if not isinstance(error, msgspec.MsgspecError):
        return InvalidPayload(f"{type(error).__name__}: {error}")
    problem, key, path = typing.cast(re.Match[str], _MSGSPEC_ERROR.fullmatch(str(error))).groups()
    problem = _QUOTED_VALUE.sub("", problem)  # an argument may be a secret, and errors end in logs
    return InvalidPayload(f"in a key: {problem}" if key else problem, path or "$")


def _mentions_sets(kind: msgspec.inspect.Type) -> bool:
    """Whether a set can come out of a decoder for that type, at whatever depth."""
    waiting: list[Any] = [kind]
    seen: set[int] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, msgspec.inspect.SetType | msgspec.inspect.FrozenSetType):
            return True
        if isinstance(node, tuple):
            waiting += node
        elif isinstance(node, msgspec.inspect.Type | msgspec.inspect.Field) and id(node) not in seen:
            seen.add(id(node))
            waiting += msgspec.structs.astuple(node)
    return False


def _may_hide(encoded: bytes) -> bool:
    # Not `in`, which would first try to take the NUL for a number, at the price of an exception. What is short cannot
    # be deep: it need not be searched for brackets.
    return encoded.find(_NUL) >= 0 or (
        len(encoded) > DEEPEST_NESTING and encoded.count(b"[") + encoded.count(b"{") > DEEPEST_NESTING
    )


def _refuse_hidden(encoded: bytes) -> None:
    """Raise for a NUL or too deep a nesting in the JSON, whatever it came from: an enum's value, a `msgspec.Raw`."""
    if _may_hide(encoded):
        _refuse_forbidden(_decode(_plain_decoder, encoded), "$", 0)


def _refuse_difference(given: Any, decoded: Any, path: str) -> None:
    """Raise for the first place where the handler would see something else. The slow path, for the error message."""
    if isinstance(given, Mapping) and isinstance(decoded, Mapping):
        for name in given:
            if name not in decoded:
                raise InvalidPayload(f"the key {shown(name)} is a {type(name).__name__}, and JSON keys are text", path)
        for name, value in given.items():
            _refuse_difference(value, decoded[name], _inside(path, name))
        if len(given) == len(decoded):
            return
    elif type(given) is type(decoded) and isinstance(given, list | tuple) and len(given) == len(decoded):
        for index, (left, right) in enumerate(zip(given, decoded, strict=True)):
            _refuse_difference(left, right, f"{path}[{index}]")
        return
    try:
        same = bool(given == decoded)
    except Exception as error:
        raise InvalidPayload(
            f"a {type(given).__name__} cannot be compared: its __eq__ raised {shown(error)}", path
        ) from error
    if same:
        return
    if type(given) is type(decoded):
        raise InvalidPayload(
            f"a {type(given).__name__} would reach the handler as one that is not equal to it: give the type an "
            f"__eq__ that compares what JSON carries",
            path,
        )
    raise InvalidPayload(
        f"a {type(given).__name__} would reach the handler as a {type(decoded).__name__}: "
        f"annotate the parameter with its type, or pass what JSON has (str, int, float, bool, None, list, dict)",
        path,
    )


def _refuse_forbidden(value: Any, path: str, depth: int) -> None:
    """Raise for the first value that no annotation can save."""
    if isinstance(value, str):
        _refuse_text(value, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidPayload(f"{value} is no JSON number", path)
    elif isinstance(value, set | frozenset):
        raise InvalidPayload("a set has no order and no JSON form: pass a sorted list", path)
    if type(value) in _PLAIN_TYPES or (type(value) is int and value.bit_length() <= 64):
        return
    parts = _parts(value, path)
    if parts is None:
        _require_json_form(value, path, f"a {type(value).__qualname__}")
    elif depth == DEEPEST_NESTING:
        raise InvalidPayload(f"nested deeper than {DEEPEST_NESTING} levels (or inside itself)", path)
    else:
        for inner_path, inner in parts:
            _refuse_forbidden(inner, inner_path, depth + 1)


def _parts(value: Any, path: str) -> list[tuple[str, Any]] | None:
    """What a container holds, with paths. None: it is no container."""
    if isinstance(value, dict):
        for name in value:
            if isinstance(name, str):
                _refuse_text(name, path)
            else:
                _require_json_form({name: None}, path, f"a key of type {type(name).__qualname__}")
        return [(_inside(path, name), inner) for name, inner in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{path}[{index}]", inner) for index, inner in enumerate(value)]
    if isinstance(value, type):
        return None
    names = getattr(value, "__struct_fields__", None) or getattr(value, "__dataclass_fields__", None)
    return None if names is None else [(f"{path}.{name}", getattr(value, name, None)) for name in names]


def _inside(path: str, name: object) -> str:
    return f"{path}.{name[:80]}" if isinstance(name, str) else f"{path}[{shown(name)}]"


def _refuse_text(text: str, path: str) -> None:
    if "\0" in text:
        raise InvalidPayload("the text contains a NUL character, which not every engine can store", path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidPayload("the text contains a lone surrogate, which is no valid Unicode", path) from error


def _require_json_form(value: Any, path: str, what: str) -> None:
    try:
        _encoder.encode(value)
    except TypeError as error:
        raise InvalidPayload(f"{what} has no JSON form", path) from error
    except ValueError as error:
        raise InvalidPayload(f"{what} cannot be written as JSON: {error}", path) from error
