"""Negative controls: with a guard switched off, the seeds must show it. A check that cannot fail proves nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.job import Job, NewJob, SessionId, enqueued
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.watch import SessionWatch
from holdfast.lifecycle import Applied, Move, Standing, judge
from holdfast.ports import Clock, microseconds
from holdfast.store import Beat, Claimed, ClaimRequest, Inserted, SessionView
from holdfast.stores import memory
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite import settlements
from holdfast.testing.simulation import Engine, simulate
from holdfast.worker.claimer import Claimer
from holdfast.worker.heart import Heart


def caught(seeds: range, engine: Engine = Engine.MEMORY) -> dict[int, list[str]]:
    """The seeds that show something, and what."""
    found = {seed: simulate(seed, engine).violations for seed in seeds}
    return {seed: violations for seed, violations in found.items() if violations}


def says(found: dict[int, list[str]], what: str) -> bool:
    return any(what in violation for violations in found.values() for violation in violations)


def unfenced(move: Move, standing: Standing | None) -> Applied:
    """A guard that compares neither session nor version."""
    verdict = judge(move, standing)
    alive = standing is not None and standing.state in move.sources
    return Applied.APPLIED if verdict is Applied.STALE and alive else verdict


def test_without_fencing_many_seeds_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "judge", unfenced)
    found = caught(range(100))
    assert len(found) > 30
    assert says(found, "invariant 5 (fencing)")


def test_without_fencing_in_sqlite_many_seeds_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settlements, "judge", unfenced)
    found = caught(range(20), Engine.SQLITE)
    assert len(found) > 3
    assert says(found, "invariant 5 (fencing)")


def test_a_worker_that_never_asks_what_it_holds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim whose reply was lost is held by a living session for ever."""

    async def ask_nothing(claimer: Claimer) -> None:
        claimer._in_doubt = False

    monkeypatch.setattr(Claimer, "_give_back_unknown", ask_nothing)
    # When its worker stops at last, it gives the job back.
    assert says(caught(range(100)), "accepted, and still ready at the end")


def test_sessions_that_are_judged_by_wall_clocks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of a keeper an hour ahead, and every session is dead to it."""

    class WallClockWatch(SessionWatch):
        clock: Clock

        def still(self, views: Sequence[SessionView], asked_at: float, answered_at: float) -> list[SessionView]:
            latest = self.clock.now() - microseconds(self._ttl)
            return [view for view in views if view.open and view.beat_at < latest]

    make = Rescue.__init__

    def make_wrong(rescue: Rescue, *args: Any, **options: Any) -> None:
        make(rescue, *args, **options)
        rescue._watch = WallClockWatch(rescue._ttl)
        rescue._watch.clock = rescue._ports.clock

    monkeypatch.setattr(Rescue, "__init__", make_wrong)
    assert says(caught(range(12)), "lives, and its session")


def test_a_dead_session_that_nobody_closes_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SessionWatch, "still", lambda watch, views, asked_at, answered_at: [])
    assert says(caught(range(12)), "still in_flight at the end")


def test_a_worker_that_does_not_beat_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keepers cannot tell it from a dead one."""

    async def still(store: MemoryStore, session_id: SessionId) -> Beat:
        held = await store.held(session_id)
        return Beat(open=store._is_open(session_id), held=len(held), cancel=())

    monkeypatch.setattr(MemoryStore, "beat", still)
    assert says(caught(range(8)), "lives, and its session")


def test_a_job_that_is_handed_out_twice_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    claim = MemoryStore.claim
    last: list[Job] = []

    async def claim_again(store: MemoryStore, request: ClaimRequest) -> Claimed:
        claimed = await claim(store, request)
        again, last[:] = tuple(last), claimed.jobs
        return Claimed((*claimed.jobs, *again), claimed.now, claimed.due_in)

    monkeypatch.setattr(MemoryStore, "claim", claim_again)
    assert says(caught(range(6)), "was claimed 2 times")


def test_an_accepted_job_that_is_gone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    insert = MemoryStore._insert_one
    seen: list[str] = []

    def forgetful(store: MemoryStore, new: NewJob, now: int, limits: Any) -> Inserted:
        inserted = insert(store, new, now, limits)
        seen.append(new.id)
        if len(seen) % 20 == 0 and new.id in store._jobs:
            store._waiting.remove(store._jobs.pop(new.id), now)
        return inserted

    monkeypatch.setattr(MemoryStore, "_insert_one", forgetful)
    assert says(caught(range(6)), "accepted, and not in the store")


def test_a_key_that_nobody_compares_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryStore, "_key_holder", lambda store, queue, key, now: None)
    assert says(caught(range(20)), "invariant 13 (idempotency)")


def test_a_handler_that_starts_too_early_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that counts delays for nothing."""
    monkeypatch.setattr(memory, "enqueued", lambda new, now: enqueued(new, now - new.delay))
    assert says(caught(range(10)), "invariant 10 (never early)")


def test_dead_letters_that_are_pruned_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    prune = MemoryStore.prune

    async def greedy(store: MemoryStore, limit: int) -> int:
        for job_id in [job.id for job in store._jobs.values() if job.ended_at is not None]:
            del store._jobs[job_id]
        return await prune(store, limit)

    monkeypatch.setattr(MemoryStore, "prune", greedy)
    found = caught(range(6))
    assert says(found, "accepted, and not in the store")
    assert says(found, "retention removed what it must keep")


def test_an_error_of_our_own_code_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(heart: Heart, *args: Any) -> None:
        raise TypeError("a defect")

    monkeypatch.setattr(Heart, "_answer", broken)
    assert says(caught(range(2)), "TypeError: a defect")
