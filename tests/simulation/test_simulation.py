"""Two hosts, a keeper and a faulty store, replayed by seed. What must hold, and that the check can fail."""

import re
import subprocess
import sys
from collections import Counter

import pytest

from holdfast.lifecycle import Applied, Move, Standing, judge
from holdfast.ports import SYSTEM
from holdfast.stores import memory
from holdfast.testing.simulation import simulate
from holdfast.testing.simulation.faulty import Faults, wrap
from holdfast.testing.simulation.loop import run_simulated
from holdfast.testing.simulation.scenario import _World
from holdfast.worker.claimer import Claimer

SEEDS = range(400)

MUST_HAPPEN = (
    *("accepted", "claim", "start", "effect", "kill", "pause", "session lost"),
    *("cancel cancelled", "cancel asked", "cancel ended", "cancelled applied"),
    *("succeeded applied", "succeeded already", "succeeded stale"),
    *("retried applied", "retried already", "retried stale", "exhausted applied"),
    *("released applied", "released already", "lost applied", "crashed applied"),
    *(
        "retire",
        "stop",
        "stop_now",
        "loop blocked",
        "settlement refused",
        "held: request lost",
        "open_session: reply lost",
    ),
    *("insert: request lost", "insert: reply lost", "claim: request lost", "claim: reply lost"),
    *("apply: request lost", "apply: reply lost", "beat: request lost", "beat: reply lost"),
)


@pytest.fixture(scope="module")
def reports() -> list:  # type: ignore[type-arg]
    return [simulate(seed) for seed in SEEDS]


def test_no_seed_violates_an_invariant(reports: list) -> None:  # type: ignore[type-arg]
    assert {report.seed: report.violations for report in reports if report.violations} == {}


def test_the_seeds_reach_every_kind_of_event_and_fault(reports: list) -> None:  # type: ignore[type-arg]
    """A run that never loses a reply or never rescues proves nothing: then the generator is at fault."""
    happenings: Counter[str] = sum((report.happenings for report in reports), Counter())
    assert [what for what in MUST_HAPPEN if not happenings[what]] == []


def test_a_seed_replays_the_same_run_whatever_the_hash_seed() -> None:
    outputs = set()
    for hash_seed in ("0", "1", "4242"):
        finished = subprocess.run(
            [sys.executable, "-m", "holdfast.testing.simulation", "--seed", "7"],
            env={"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        outputs.add(finished.stdout)
    assert len(outputs) == 1
    assert re.search(r"fingerprint [0-9a-f]{16}; violations: none", outputs.pop())
    assert simulate(7).fingerprint != simulate(8).fingerprint


def test_without_fencing_many_seeds_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a store that compares neither session nor version."""

    def unfenced(move: Move, standing: Standing | None) -> Applied:
        verdict = judge(move, standing)
        alive = standing is not None and standing.state in move.sources
        return Applied.APPLIED if verdict is Applied.STALE and alive else verdict

    monkeypatch.setattr(memory, "judge", unfenced)
    caught = [seed for seed in range(100) if simulate(seed).violations]
    assert len(caught) > 20


def test_a_worker_that_never_asks_what_it_holds_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: a claim whose reply was lost is held by a living session for ever."""

    async def ask_nothing(claimer: Claimer) -> None:
        claimer._in_doubt = False

    monkeypatch.setattr(Claimer, "_give_back_unknown", ask_nothing)
    caught = [violation for seed in range(40) for violation in simulate(seed).violations]
    assert any("still in_flight at the end" in violation for violation in caught)


def test_a_settlement_without_a_claim_is_a_violation() -> None:
    world = _World(0)
    found: list[str] = []

    async def check() -> None:
        world.record("succeeded applied", "job", 1)
        found.extend(await world.violations())

    run_simulated(world.loop, check)
    assert found == ["job: succeeded applied with version 1 although version 0 had been claimed"]


async def test_a_faulty_store_opens_and_closes_like_a_store() -> None:
    store = wrap(memory.MemoryStore(), Faults(), SYSTEM)
    async with store as opened:
        assert opened is store
        assert await opened.counts() == []
