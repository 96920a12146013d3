"""The memory store is the oracle of the others. What judges it are the invariants of a history."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.lifecycle import Succeeded
from holdfast.ports import Ports
from holdfast.store import Store
from holdfast.stores.memory import MemoryStore
from holdfast.testing.history.events import Claim, Enqueue
from tests.model.machine import StoreModel, agrees_with_memory, search_for_a_fault

EXAMPLES = 30


class MemoryModel(StoreModel):
    def open_store(self, folder: Path, ports: Ports) -> Store:
        return MemoryStore(ports=ports)


def test_the_history_of_the_memory_store_is_in_order() -> None:
    agrees_with_memory(MemoryModel, examples=EXAMPLES)


def test_a_session_that_was_pruned_and_opened_again_has_a_history_in_order() -> None:
    model = MemoryModel()
    job = {"queue": "a", "share": "", "priority": 5, "delay": 0, "run_at": None, "max_retries": 0, "retention": 0}
    session = model.first_session()
    steps = (
        lambda: model.first_job({**job, "key": None, "payload": b"{}", "correlation_id": None}),
        lambda: model.close_session(session=session, if_beat="any"),
        lambda: model.advance(wait=4000.0),
        lambda: model.prune(size=1),
        lambda: model.open_session_again(session=session),
        lambda: model.work(limit=1, turn=0, ends=[Succeeded()] * 6),
    )
    for step in steps:
        step()
        model.both_agree_and_every_step_was_legal()
    model.teardown()
    assert "Applied.applied" in model.seen


# Negative controls: a history with one thing less, or one thing twice, is found to be wrong.


class UnclaimedModel(MemoryModel):
    """The first claim of a job is as if it had never been."""

    def _judge(self) -> None:
        claims = [event for event in self.events if isinstance(event, Claim)]
        self.events = [event for event in self.events if event not in claims[:1]]
        super()._judge()


class ClaimedTwiceModel(MemoryModel):
    """Somebody else was given the same job."""

    def _judge(self) -> None:
        self.events += [event for event in self.events if isinstance(event, Claim)][:1]
        super()._judge()


class NeverEnqueuedModel(MemoryModel):
    """A job that nobody has asked for."""

    def _judge(self) -> None:
        self.events = [event for event in self.events if not isinstance(event, Enqueue)]
        super()._judge()


@pytest.mark.parametrize("model", [UnclaimedModel, ClaimedTwiceModel, NeverEnqueuedModel])
def test_the_judgement_notices(model: type[MemoryModel]) -> None:
    with pytest.raises(AssertionError, match="invariant"):
        search_for_a_fault(model, examples=EXAMPLES)
