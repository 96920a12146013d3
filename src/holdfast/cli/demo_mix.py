"""The workload of `holdfast demo`: which kinds of jobs it enqueues, and how many of each.

The mix follows from the number of the job alone, so that every run has the same one. Import it only when the
environment says where the demo's store is (see `demo_tasks`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from holdfast.batches import PreparedJob
from holdfast.cli import demo_tasks as tasks


class Kind(msgspec.Struct, frozen=True):
    """A kind of job: what it shows, which jobs are of it (from `first` on, one of `every`), and how one is made from
    its number. Those with `cancel_after` are cancelled so many seconds after they were accepted.
    """

    label: str
    every: int
    first: int
    make: Callable[[int], PreparedJob[Any]]
    cancel_after: float | None = None


def _delayed(number: int) -> PreparedJob[Any]:
    return tasks.welcome.options(delay=0.5 + number % 4 * 0.5).job(number)


_QUICK = (
    Kind("succeeds (coroutine)", 2, 0, tasks.welcome.job),
    Kind("succeeds (thread)", 2, 1, tasks.thumbnail.job),
)
# The rarest first: a job is of the first kind that it fits.
_OTHERS = (
    Kind("crashes (segfault)", 1000, 30, lambda _: tasks.segfault.job()),
    Kind("crashes (exit)", 1000, 530, lambda _: tasks.hard_exit.job()),
    Kind("cancelled while it runs", 250, 12, lambda _: tasks.export.job(8.0), cancel_after=1.0),
    Kind("cancelled while it waits", 67, 40, lambda number: tasks.welcome.options(delay=30).job(number), 0.5),
    Kind("always fails", 67, 7, tasks.poison.job),
    Kind("slow (0.5 to 1.5 s)", 50, 3, lambda number: tasks.report.job(0.5 + number % 3 * 0.5)),
    Kind("high priority", 12, 2, tasks.alert.job),
    Kind("delayed (0.5 to 2 s)", 14, 5, _delayed),
    Kind("fails first, then succeeds", 11, 4, lambda number: tasks.flaky.job(1 + number % 2)),
)
_CANCELLED = [kind for kind in _OTHERS if kind.cancel_after is not None]
KINDS = (*_QUICK, *reversed([kind for kind in _OTHERS if kind not in _CANCELLED]), *_CANCELLED)
"""All kinds, in the order in which people read about them."""


def kind_of(number: int) -> Kind:
    """The kind of the job with that number, counted from 0."""
    for kind in _OTHERS:
        if number >= kind.first and (number - kind.first) % kind.every == 0:
            return kind
    return _QUICK[number % len(_QUICK)]
