"""The same workload ends the same on all five engines (invariant 20), and no invariant is broken on any of them.

A few seeds here; `python -m tests.differential --seeds 300` runs as many as one likes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from holdfast.job import NewJob, Reason
from holdfast.lifecycle import Applied, Move
from holdfast.ports import SYSTEM
from holdfast.store import Inserted, Store
from holdfast.stores.memory import MemoryStore
from holdfast.testing.history.findings import happenings
from tests.differential.engines import five_engines
from tests.differential.running import compare, run
from tests.differential.workload import workload
from tests.servers import MariaDbServer, PostgresServer, RedisServer

SEEDS = range(4)
SEEN = (
    "enqueue created",
    "enqueue existing",
    "enqueue key_conflict",
    "cancel",
    "succeeded applied",
    "retried applied",
    "exhausted applied",
    "permanent applied",
    "snoozed applied",
    "snoozed_out applied",
    "replayed applied",
    "replayed key_taken",
)
"""What must have happened on each engine for the comparison to mean anything."""


async def test_the_same_workload_ends_the_same_on_every_engine(
    tmp_path: Path, postgres_server: PostgresServer, mariadb_server: MariaDbServer, redis_server: RedisServer
) -> None:
    stores = five_engines(tmp_path, postgres=postgres_server.url, mariadb=mariadb_server.url, redis=redis_server.url)
    jobs = 0
    seen: dict[str, Counter[str]] = {engine: Counter() for engine in stores}
    for seed in SEEDS:
        ran, found = await compare(workload(seed), stores)
        assert [str(violation) for violation in found] == [], f"seed {seed}"
        jobs += len(ran["memory"].history.ending.jobs)
        for engine, one in ran.items():
            seen[engine] += happenings(one.history)
    print(f"{len(SEEDS)} seeds, {jobs} jobs on each of {len(stores)} engines")
    assert jobs > 20 * len(SEEDS)
    for engine, counted in seen.items():
        assert [what for what in SEEN if not counted[what]] == [], engine


def test_a_seed_is_always_the_same_workload() -> None:
    assert [workload(seed) for seed in SEEDS] == [workload(seed) for seed in SEEDS]
    assert workload(1) != workload(2)


# Negative controls: an engine that bends one answer is found.


class Bent:
    """An engine that does something else than it is asked."""

    def __init__(self) -> None:
        self._store = MemoryStore(ports=SYSTEM)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def beside(self) -> Bent:
        return self

    async def __aenter__(self) -> Bent:
        await self._store.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._store.__aexit__(*exc)


class Mislabels(Bent):
    """Says of a job without retries that its error was permanent."""

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        bent = [replace(move, reason=Reason.PERMANENT) if move.reason is Reason.EXHAUSTED else move for move in moves]
        return await self._store.apply(bent)


class DropsARetry(Bent):
    """Counts the first failure twice."""

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        first = [move.reason is Reason.RETRIED and move.failures == 1 for move in moves]
        bent = [replace(move, failures=2) if is_first else move for move, is_first in zip(moves, first, strict=True)]
        return await self._store.apply(bent)


class ForgetsKeys(Bent):
    """Takes a second job with the same key."""

    async def insert(self, jobs: Sequence[NewJob], **options: Any) -> list[Inserted]:
        return await self._store.insert([replace(job, key=None) for job in jobs], **options)


class LosesFollowers(Bent):
    """Leaves out what is to follow a failure, and says nothing."""

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        return await self._store.apply([replace(move, then=()) for move in moves])


@pytest.mark.parametrize("bent", [Mislabels, DropsARetry, ForgetsKeys])
async def test_an_engine_that_bends_an_answer_is_found(bent: type[Bent]) -> None:
    for seed in SEEDS:
        right = lambda: cast(Store, MemoryStore(ports=SYSTEM))  # noqa: E731
        _, found = await compare(workload(seed), {"memory": right, "bent": lambda: cast(Store, bent())})
        if any(violation.invariant == 20 for violation in found):
            return
    pytest.fail("it was not found")


async def test_an_engine_that_loses_what_follows_a_failure_never_comes_to_an_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tests.differential.running.PATIENCE", 2.0)
    with pytest.raises(TimeoutError):
        await run(workload(0), cast(Store, LosesFollowers()))
