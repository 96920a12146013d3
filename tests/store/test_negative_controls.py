"""The suite notices when a guard is missing: with the guard switched off, the tests named here must fail."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import holdfast.stores.memory
import holdfast.stores.sqlite.settlements
from holdfast.job import State
from holdfast.lifecycle import Applied, Failed, Move, Standing, Succeeded, judge
from holdfast.store import ClaimRequest, SessionPage
from holdfast.stores.memory import MemoryStore
from holdfast.stores.sqlite.inserts import Inserts
from holdfast.stores.sqlite.queries import Queries
from holdfast.stores.sqlite.verbs import Verbs
from holdfast.testing import suite
from holdfast.testing.suite import Harness, rig_on
from holdfast.testing.suite.harness import BOOM
from tests.store.harnesses import MemoryHarness, SqliteHarness

Test = Callable[..., Awaitable[None]]
Sabotage = Callable[[pytest.MonkeyPatch], None]

ACK: dict[str, object] = {"outcome": Succeeded(b"result")}
NACK: dict[str, object] = {"outcome": Failed(BOOM)}


def _patch_judge(patch: pytest.MonkeyPatch, *, version: bool = True, **ignored: None) -> None:
    """Both stores ask a judge that does not compare these fields of the guard, or not the version."""

    def blind(move: Move, standing: Standing | None) -> Applied:
        if standing and not version:
            move = replace(move, version=standing.version)
        return judge(replace(move, **ignored), standing)

    patch.setattr(holdfast.stores.memory, "judge", blind)
    patch.setattr(holdfast.stores.sqlite.settlements, "judge", blind)


def no_token(patch: pytest.MonkeyPatch) -> None:
    """Neither version nor session is compared."""
    _patch_judge(patch, version=False, session_id=None, session_open=None)


def no_version(patch: pytest.MonkeyPatch) -> None:
    """The session is compared, the version is not."""
    _patch_judge(patch, version=False)


def no_session_id(patch: pytest.MonkeyPatch) -> None:
    """The version is compared, the session is not."""
    _patch_judge(patch, session_id=None)


def no_session_state(patch: pytest.MonkeyPatch) -> None:
    """Moves of a closed session, and rescues from an open one, are let through."""
    _patch_judge(patch, session_open=None)


def no_cancel_guard(patch: pytest.MonkeyPatch) -> None:
    """A worker that has not heard of a cancel may settle as if there were none."""

    def deaf(move: Move, standing: Standing | None) -> Applied:
        return judge(move, standing and replace(standing, cancel_asked=False))

    patch.setattr(holdfast.stores.memory, "judge", deaf)
    patch.setattr(holdfast.stores.sqlite.settlements, "judge", deaf)


def no_session_check_in_claim(patch: pytest.MonkeyPatch) -> None:
    """Any session, closed or never opened, may claim; everything else is guarded as before."""
    memory_claim, verbs_claim = MemoryStore.claim, Verbs.claim

    async def claim_in_memory(self: MemoryStore, request: ClaimRequest) -> Any:
        with self._lock, pytest.MonkeyPatch.context() as during:
            during.setattr(self, "_is_open", lambda session_id: True)
            return await memory_claim(self, request)

    def claim_in_sqlite(self: Verbs, db: Any, request: ClaimRequest, now: int) -> Any:
        with pytest.MonkeyPatch.context() as during:
            during.setattr(self.queries, "open_among", lambda db, session_ids: {request.session_id})
            return verbs_claim(self, db, request, now)

    patch.setattr(MemoryStore, "claim", claim_in_memory)
    patch.setattr(Verbs, "claim", claim_in_sqlite)


def no_keys(patch: pytest.MonkeyPatch) -> None:
    """Nobody ever holds a key."""
    patch.setattr(MemoryStore, "_key_holder", lambda *args: None)
    patch.setattr(Inserts, "key_holder", lambda *args: None)


def no_compare_in_close(patch: pytest.MonkeyPatch) -> None:
    """A keeper closes a session however its counter stands."""
    in_memory, in_sqlite = MemoryStore.close_session, Verbs.close_session

    async def close_in_memory(self: MemoryStore, session_id: str, *, if_beat: int | None = None) -> bool:
        return await in_memory(self, session_id)

    def close_in_sqlite(self: Verbs, db: Any, session_id: str, if_beat: int | None, now: int) -> bool:
        return in_sqlite(self, db, session_id, None, now)

    patch.setattr(MemoryStore, "close_session", close_in_memory)
    patch.setattr(Verbs, "close_session", close_in_sqlite)


def no_cursor(patch: pytest.MonkeyPatch) -> None:
    """Every page is the first."""
    in_memory, in_sqlite = MemoryStore.sessions, Queries.sessions

    async def in_memory_from_the_start(
        self: MemoryStore, *, cursor: str | None = None, limit: int = 100
    ) -> SessionPage:
        return await in_memory(self, limit=limit)

    def in_sqlite_from_the_start(self: Queries, db: Any, cursor: str | None, limit: int) -> SessionPage:
        return in_sqlite(self, db, None, limit)

    patch.setattr(MemoryStore, "sessions", in_memory_from_the_start)
    patch.setattr(Queries, "sessions", in_sqlite_from_the_start)


def pages_by_number(patch: pytest.MonkeyPatch) -> None:
    """A cursor counts sessions instead of naming one: whoever goes meanwhile hides another."""
    in_memory, in_sqlite = MemoryStore.sessions, Queries.sessions

    def cut(whole: SessionPage, cursor: str | None, limit: int) -> SessionPage:
        end = int(cursor or 0) + limit
        return SessionPage(whole.sessions[end - limit : end], str(end) if end < len(whole.sessions) else None)

    async def counted_in_memory(self: MemoryStore, *, cursor: str | None = None, limit: int = 100) -> SessionPage:
        return cut(await in_memory(self, limit=1000), cursor, limit)

    def counted_in_sqlite(self: Queries, db: Any, cursor: str | None, limit: int) -> SessionPage:
        return cut(in_sqlite(self, db, None, 1000), cursor, limit)

    patch.setattr(MemoryStore, "sessions", counted_in_memory)
    patch.setattr(Queries, "sessions", counted_in_sqlite)


CONTROLS: list[tuple[Sabotage, Test, dict[str, object]]] = [
    (no_token, suite.test_moves_are_stale_after_another_session_claimed_the_job, ACK),
    (no_token, suite.test_moves_are_stale_after_another_session_claimed_the_job, NACK),
    (no_token, suite.test_a_closed_sessions_moves_are_stale_before_any_rescue, ACK),
    (no_token, suite.test_moves_are_stale_after_the_same_session_claimed_the_job_again, ACK),
    (no_token, suite.test_moves_of_another_open_session_are_stale, ACK),
    (no_token, suite.test_old_leases_stay_stale_after_a_replay, {**ACK, "state": State.FAILED}),
    (no_token, suite.test_a_late_keeper_does_not_take_the_job_from_its_new_holder, {}),
    (no_version, suite.test_moves_are_stale_after_the_same_session_claimed_the_job_again, ACK),
    (no_version, suite.test_moves_with_a_version_of_the_future_are_stale, NACK),
    (no_version, suite.test_old_leases_stay_stale_after_a_replay, {**ACK, "state": State.SUCCEEDED}),
    (no_version, suite.test_a_repeated_replay_was_made_already, {}),
    (no_session_id, suite.test_moves_of_another_open_session_are_stale, ACK),
    (no_session_id, suite.test_moves_of_another_open_session_are_stale, NACK),
    (no_session_state, suite.test_a_closed_sessions_moves_are_stale_before_any_rescue, ACK),
    (no_session_state, suite.test_a_job_of_an_open_session_cannot_be_declared_lost, {}),
    (no_session_state, suite.test_a_job_in_flight_without_any_session_is_lost_too, {}),
    (no_cancel_guard, suite.test_every_other_end_of_a_cancelled_job_is_cancelled, NACK),
    (no_cancel_guard, suite.test_a_keeper_that_has_not_heard_of_a_cancel_is_told, {}),
    (no_session_check_in_claim, suite.test_a_closed_session_cannot_claim, {}),
    (no_session_check_in_claim, suite.test_a_closed_session_cannot_claim_from_an_empty_queue, {}),
    (no_session_check_in_claim, suite.test_an_unknown_session_cannot_claim, {}),
    (no_session_check_in_claim, suite.test_a_closed_session_stays_closed, {}),
    (no_keys, suite.test_the_same_key_and_payload_is_the_same_job, {}),
    (no_keys, suite.test_the_same_key_with_another_payload_is_a_conflict, {}),
    (no_keys, suite.test_a_succeeded_job_holds_its_key, {}),
    (no_keys, suite.test_many_callers_with_one_key_create_one_job, {}),
    (no_keys, suite.test_a_job_whose_key_is_taken_cannot_be_replayed, {}),
    (no_compare_in_close, suite.test_close_compares_the_beat, {}),
    (no_cursor, suite.test_sessions_come_in_pages, {"limit": 3}),
    (pages_by_number, suite.test_sessions_that_come_and_go_between_pages_hide_no_other, {}),
]


def _name(value: object) -> str | None:
    return getattr(value, "__name__", None)


@pytest.fixture(params=["memory", "sqlite"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> Harness:
    return MemoryHarness() if request.param == "memory" else SqliteHarness(tmp_path)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


@pytest.mark.parametrize(("sabotage", "test", "arguments"), CONTROLS, ids=_name)
async def test_the_suite_notices(
    harness: Harness, patch: pytest.MonkeyPatch, sabotage: Sabotage, test: Test, arguments: dict[str, object]
) -> None:
    async with rig_on(harness) as rig:
        sabotage(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            await test(rig, **arguments)


@pytest.mark.parametrize(("sabotage", "test", "arguments"), CONTROLS, ids=_name)
async def test_the_same_test_passes_with_the_guard(
    harness: Harness, sabotage: Sabotage, test: Test, arguments: dict[str, object]
) -> None:
    """A control that would fail anyway proves nothing."""
    async with rig_on(harness) as rig:
        await test(rig, **arguments)
