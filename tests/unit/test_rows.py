"""Many rows become the jobs that each of them alone becomes; lists of names are the same, looked at together or not."""

from __future__ import annotations

from typing import Any

from holdfast.stores.mysql.sql import names
from holdfast.stores.rows import LIVE_AS_ENDED, job_from_row, jobs_from_rows

ROW: tuple[Any, ...] = (
    *("id", "task", b"{}", "1", "queue", "share", 5, 3, 100, "key", "hash", 60, "correlation", 1, "in_flight"),
    *("claimed", 2, 1, "session", 0, 0, 0, 0, 0, 0, 3, b"", None, None, None),
)


def another(value: Any) -> Any:
    """Something else of the same kind."""
    other = {"in_flight": "ready", "claimed": "retry", None: b"x", b"": b"x", b"{}": b"[]"}
    return other[value] if value in other else value + (1 if isinstance(value, int) else "x")


def test_a_row_that_differs_in_one_column_from_the_one_before_keeps_it() -> None:
    assert len(ROW) == len(LIVE_AS_ENDED.split(", "))
    rows = [ROW, ROW]
    for place, value in enumerate(ROW):
        rows += [(*ROW[:place], another(value), *ROW[place + 1 :]), ROW, ROW]
    assert jobs_from_rows(rows) == [job_from_row(row) for row in rows]
    assert len({repr(job) for job in jobs_from_rows(rows)}) == len(ROW) + 1


def test_names_that_no_name_can_be_match_nothing() -> None:
    assert names(["b", "a", "b"]) == "('a','b')"
    assert names(["b", "a'--"]) == "('a?--','b')"
    assert names([]) == "(NULL)"
