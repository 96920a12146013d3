"""What goes to the server: one statement with its values, and verbs, which are made of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

import msgspec

from holdfast.stores.rows import ENDED_COLUMNS

T = TypeVar("T")

COLUMNS = ENDED_COLUMNS.replace("id,", "id::text,", 1)
"""What a job is read from, in the order of `job_from_row`."""


class Query(msgspec.Struct, frozen=True, gc=False):
    """One statement, complete with its values. `writes`: whether it may have had an effect if its reply is lost.

    The values stand as %s in the text, each with its type (`%s::json`): no driver has to guess it.
    """

    text: str
    values: tuple[Any, ...] = ()
    writes: bool = True


Verb = Generator[Query, list[tuple[Any, ...]], T]
"""Yields queries, receives the rows of each, and returns the answer."""
