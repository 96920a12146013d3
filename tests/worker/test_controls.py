"""Negative controls: with a guard taken away, the situation that it is there for goes wrong, and the tests see it.

Each names the test that must fail without the guard.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast import Holdfast, State
from holdfast.events import SessionRescued
from holdfast.worker.heart import Heart
from holdfast.worker.holding import Holding
from holdfast.worker.runner import Runner
from holdfast.worker.settler import Settler
from tests.worker import scenarios
from tests.worker.bench import Bench, Heard


def test_without_the_heartbeat_a_job_longer_than_the_ttl_is_taken_for_lost(
    bench: Bench, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_a_job_longer_than_the_ttl_runs_once`."""

    def start_without_a_heart(app: Holdfast) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(Heart, "start", lambda self: None)
            bench.work(app, lease_ttl=0.5, keepers=False)

    found = scenarios.outlive_the_ttl(bench, start_without_a_heart, lambda: heard.wait_for(SessionRescued))
    assert found.states != {State.SUCCEEDED: 1} or found.runs != {"long": 1}


@pytest.mark.parametrize("method", ["start", "give_back"])
def test_without_the_guard_between_starting_and_giving_back_a_job_runs_twice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """`test_a_handler_that_blocks_the_event_loop_keeps_its_lease_and_the_jobs_behind_it_run_elsewhere`."""
    guarded = getattr(Holding, method)

    def unguarded(self: Holding, subject: Any) -> Any:
        guarded(self, subject)
        return list(subject) if method == "start" else True

    monkeypatch.setattr("holdfast.worker.heart.BLOCKED_AFTER", 0.3)
    monkeypatch.setattr(Holding, method, unguarded)
    monkeypatch.setattr(Runner, "release_stale", lambda self: 0)  # on some event loops it would come first
    found = scenarios.block_the_loop(bench, seconds=0.5)
    assert max(found.runs.values()) == 2


def test_without_keeping_what_did_not_go_through_a_finished_job_is_lost(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_settlements_are_kept_and_repeated_while_the_store_fails`."""

    def drop(self: Settler, batch: object) -> None:
        self._flushing = 0

    monkeypatch.setattr(Settler, "_keep", drop)
    found = scenarios.settle_while_the_store_fails(bench, outage=0.3)
    assert found.states[State.IN_FLIGHT] > 0
