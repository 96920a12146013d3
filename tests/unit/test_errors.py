"""Errors cross process borders: every one of the tree comes out of a pickle as it went in."""

from __future__ import annotations

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

from holdfast import errors
from holdfast.errors import (
    HoldfastError,
    InvalidPayload,
    JobFailed,
    KeyConflict,
    OutcomeUnknown,
    PartlyRefused,
    PayloadTooLarge,
    QueueFull,
    StoreUnavailable,
)
from holdfast.failures import Failure

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, HoldfastError)]
WITH_ATTRIBUTES: dict[type[HoldfastError], HoldfastError] = {
    InvalidPayload: InvalidPayload("is a set", "$.tags"),
    PayloadTooLarge: PayloadTooLarge("is too large", "$.text"),
    KeyConflict: KeyConflict("belongs to another", "the-job"),
    OutcomeUnknown: OutcomeUnknown("may be written", ["a", "b"]),
    JobFailed: JobFailed("failed", [Failure(at=1, attempt=2, type="ValueError", message="no")]),
    PartlyRefused: PartlyRefused(
        ["a"], {1: KeyConflict("taken", "b")}, stored=1, stopped_at=2, stopped_by=StoreUnavailable("x")
    ),
}


def seen(error: Any) -> Any:
    """Everything that a caller can see of an error, down to the errors that it carries."""
    if isinstance(error, dict):
        return {key: seen(value) for key, value in error.items()}
    if isinstance(error, BaseException):
        return type(error), str(error), repr(error), error.args, seen(error.__dict__)
    return error


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", KINDS)
def test_every_error_survives_pickling(kind: type[HoldfastError], protocol: int) -> None:
    error = WITH_ATTRIBUTES.get(kind) or kind("what was wrong")
    again = pickle.loads(pickle.dumps(error, protocol))
    assert seen(again) == seen(error)
    assert seen(pickle.loads(pickle.dumps(again))) == seen(error)


def test_every_error_with_attributes_is_tried_with_them() -> None:
    assert {kind for kind in KINDS if "__init__" in vars(kind)} <= set(WITH_ATTRIBUTES)


def test_notes_are_kept() -> None:
    error = QueueFull("full")
    error.add_note("on a Monday")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["on a Monday"]


def test_what_cannot_be_pickled_is_told() -> None:
    """Handles hold an application, and the error of somebody's iterable may hold anything."""

    class Unpicklable(Exception):
        """Of a function, so no other process can find it."""

    handles = [SimpleNamespace(id=job_id, client=lambda: None) for job_id in ("a", "b")]
    error = PartlyRefused(handles, {}, stored=len(handles), stopped_at=2, stopped_by=Unpicklable("the file ended"))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.accepted, again.refused, again.stopped_at) == (["a", "b"], {}, 2)
    assert (type(again.stopped_by), str(again.stopped_by)) == (HoldfastError, "Unpicklable('the file ended')")
    assert error.accepted == handles
