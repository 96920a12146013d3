"""The memory store is the oracle of the others. What judges it are the invariants of a history."""

from __future__ import annotations

from pathlib import Path

import pytest

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
