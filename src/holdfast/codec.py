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
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec

from holdfast.errors import InvalidOption, InvalidPayload, PayloadTooLarge

DEFAULT_PAYLOAD_LIMIT = 256 * 1024
DEEPEST_NESTING = 64

_encoder = msgspec.json.Encoder()
_canonical_encoder = msgspec.json.Encoder(order="sorted")
_NUL = b"\\u0000"
_FORBIDDEN_TYPES = (set, frozenset)


class Signature:
    """The named arguments of one handler: how they are bound, encoded and decoded."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """`InvalidOption` if a parameter cannot be filled from named JSON values."""
        self._function = function
        self._parameters = tuple(inspect.signature(function).parameters.values())
        for parameter in self._parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise InvalidOption(
                    f"task {function.__qualname__}: {parameter} has no name to travel under; "
                    f"give each argument a parameter of its own"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise InvalidOption(
                    f"task {function.__qualname__}: parameter {parameter.name!r} is positional-only, but arguments "
                    f"travel by name: remove the '/'"
                )
        self._positional = tuple(
            parameter.name for parameter in self._parameters if parameter.kind is not parameter.KEYWORD_ONLY
        )
        self._required = frozenset(
            parameter.name for parameter in self._parameters if parameter.default is parameter.empty
        )
        self._names = frozenset(parameter.name for parameter in self._parameters)

    @cached_property
    def _hints(self) -> dict[str, Any]:
        try:
            return typing.get_type_hints(self._function)
        except Exception as error:
            raise InvalidOption(
                f"task {self._function.__qualname__}: its annotations cannot be resolved ({error}); the types must "
                f"be importable where the task is defined"
            ) from error

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[msgspec.Struct]:
        fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
        for parameter in self._parameters:
            kind = self._hints.get(parameter.name, Any)
            if parameter.name in self._required:
                fields.append((parameter.name, kind))
            else:
                # An argument that was left out takes the handler's own default when it runs.
                fields.append((parameter.name, kind | msgspec.UnsetType, msgspec.UNSET))
        try:
            arguments = msgspec.defstruct(
                "Arguments", fields, kw_only=True, forbid_unknown_fields=True, module=__name__
            )
            return msgspec.json.Decoder(arguments)
        except TypeError as error:
            raise InvalidOption(
                f"task {self._function.__qualname__}: an annotation names a type that JSON cannot carry: {error}"
            ) from error

    @cached_property
    def _result_decoder(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self._hints.get("return", Any))

    def check(self) -> None:
        """`InvalidOption` if an annotation cannot be resolved or carried."""
        _ = self._decoder

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, or `InvalidPayload` if they do not fit the handler's parameters."""
        if len(args) > len(self._positional):
            raise InvalidPayload(
                f"{self._function.__qualname__} takes {len(self._positional)} positional arguments, not {len(args)}"
            )
        named = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in named:
                raise InvalidPayload(f"{self._function.__qualname__} got two values for {name!r:.80}")
            if name not in self._names:
                raise InvalidPayload(f"{self._function.__qualname__} has no parameter {name!r:.80}")
            named[name] = value
        if missing := self._required - named.keys():
            raise InvalidPayload(f"{self._function.__qualname__} needs a value for {', '.join(sorted(missing))}")
        return named

    def encode(self, arguments: Mapping[str, Any], limit: int = DEFAULT_PAYLOAD_LIMIT) -> bytes:
        """The arguments as JSON that `decode` turns back into equal values, or `InvalidPayload` with the path."""
        payload = _encode(arguments)
        if len(payload) > limit:
            raise PayloadTooLarge(
                f"the arguments are {len(payload)} bytes of JSON, more than the {limit} allowed: "
                f"send a reference (a path, a row id) instead of the data"
            )
        try:
            decoded = self.decode(payload)
        except InvalidPayload:
            _refuse_forbidden(arguments, "$", 0)  # names the cause where the decoder only sees its trace
            raise
        try:
            same = bool(decoded == arguments)
        except Exception as error:
            raise InvalidPayload(f"the arguments cannot be compared: {error!r:.200}") from error
        if not same or _suspicious(payload):
            _refuse_difference(arguments, decoded)
        return payload

    def decode(self, payload: bytes) -> dict[str, Any]:
        """The keyword arguments for the handler, or `InvalidPayload` if they do not fit its annotations."""
        try:
            arguments = self._decoder.decode(payload)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise _invalid(error) from error
        return {
            name: value
            for name in arguments.__struct_fields__
            if (value := getattr(arguments, name)) is not msgspec.UNSET
        }

    def decode_result(self, result: bytes) -> Any:
        """What the handler returned, by its own return annotation."""
        try:
            return self._result_decoder.decode(result)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _invalid(error) from error


def encode_result(value: Any, limit: int = DEFAULT_PAYLOAD_LIMIT) -> bytes:
    """A handler's return value as JSON, or `InvalidPayload`. Tuples become lists; NUL is refused as in payloads."""
    result = _encode(value)
    if len(result) > limit:
        raise PayloadTooLarge(f"the result is {len(result)} bytes of JSON, more than the {limit} allowed")
    if _suspicious(result):
        _refuse_forbidden(value, "$", 0)
    return result


def payload_hash(task: str, payload: bytes) -> str:
    """SHA-256 over the task and its canonical payload: the same arguments in another order hash the same."""
    canonical = _canonical_encoder.encode(msgspec.json.decode(payload))
    return hashlib.sha256(task.encode() + b"\0" + canonical).hexdigest()


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        _refuse_forbidden(value, "$", 0)
        raise InvalidPayload(str(error)) from error


def _suspicious(encoded: bytes) -> bool:
    """Whether a closer look is due: a NUL, or brackets enough for too deep a nesting."""
    return _NUL in encoded or encoded.count(b"[") + encoded.count(b"{") > DEEPEST_NESTING


def _invalid(error: Exception) -> InvalidPayload:
    text, _, path = str(error).partition(" - at `")
    return InvalidPayload(text, path.rstrip("`") or "$")


def _refuse_difference(given: Any, decoded: Any) -> None:
    """Raise for the first place where the handler would see something else. The slow path, for the error message."""
    _refuse_forbidden(given, "$", 0)
    _compare(given, decoded, "$")


def _compare(given: Any, decoded: Any, path: str) -> None:
    if isinstance(given, Mapping) and isinstance(decoded, Mapping):
        for name, value in given.items():
            inner = f"{path}.{name}"
            if name not in decoded:
                raise InvalidPayload(f"the key {name!r:.80} is a {type(name).__name__}, and JSON keys are text", path)
            _compare(value, decoded[name], inner)
        if len(given) == len(decoded):
            return
    elif type(given) is type(decoded) and isinstance(given, list | tuple) and len(given) == len(decoded):
        for index, (left, right) in enumerate(zip(given, decoded, strict=True)):
            _compare(left, right, f"{path}[{index}]")
        return
    if given != decoded:
        raise InvalidPayload(
            f"a {type(given).__name__} would reach the handler as a {type(decoded).__name__}: "
            f"annotate the parameter with its type, or pass what JSON has (str, int, float, bool, None, list, dict)",
            path,
        )


def _refuse_forbidden(value: Any, path: str, depth: int) -> None:
    """Raise for the first value that no annotation can save."""
    if depth > DEEPEST_NESTING:
        raise InvalidPayload(f"nested deeper than {DEEPEST_NESTING} levels (or inside itself)", path)
    if isinstance(value, str):
        if "\0" in value:
            raise InvalidPayload("the text contains a NUL character, which not every engine can store", path)
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidPayload("the text contains a lone surrogate, which is no valid Unicode", path) from error
    elif isinstance(value, float) and not math.isfinite(value):
        raise InvalidPayload(f"{value} is no JSON number", path)
    elif isinstance(value, _FORBIDDEN_TYPES):
        raise InvalidPayload("a set has no order and no JSON form: pass a sorted list", path)
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            _refuse_forbidden(name, f"{path}.{name!r:.80}" if not isinstance(name, str) else path, depth + 1)
            _refuse_forbidden(inner, f"{path}.{str(name)[:80]}", depth + 1)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _refuse_forbidden(inner, f"{path}[{index}]", depth + 1)
    elif msgspec.inspect.is_struct(value) or hasattr(value, "__dataclass_fields__"):
        for name in getattr(value, "__struct_fields__", None) or value.__dataclass_fields__:
            _refuse_forbidden(getattr(value, name, None), f"{path}.{name}", depth + 1)
    elif not isinstance(value, int | None):
        try:
            _encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InvalidPayload(f"a {type(value).__qualname__} has no JSON form", path) from error
