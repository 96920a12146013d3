"""What a session holds: each claim is started or given back, never both, from whatever thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast.job import Job
from holdfast.worker.holding import Holding
from tests.unit.samples import claimed_job


def claim(name: str, version: int = 1) -> Job:
    return claimed_job(id=name, version=version)


A, B, C, D = (claim(name) for name in "abcd")


@pytest.fixture
def holding() -> Holding:
    return Holding()


def test_claims_are_known_until_they_are_settled(holding: Holding) -> None:
    assert len(holding) == 0
    assert holding.take([A, B]) == [A, B]
    assert len(holding) == 2
    assert holding.known() == {("a", 1), ("b", 1)}
    assert [holding.knows(job) for job in (A, B, C)] == [True, True, False]
    holding.settled(A)
    assert [holding.knows(job) for job in (A, B)] == [False, True]
    holding.settled(A)
    assert len(holding) == 1


def test_many_claims_are_settled_at_once(holding: Holding) -> None:
    holding.take([A, B])
    holding.all_settled([B])
    assert [holding.knows(job) for job in (A, B)] == [True, False]
    holding.all_settled([A, B])  # a second time, and it is as it was
    assert len(holding) == 0


def test_a_claim_starts_once(holding: Holding) -> None:
    holding.take([A])
    assert holding.start([A]) == [A]
    assert holding.start([A]) == []
    assert holding.knows(A)


def test_what_was_never_taken_does_not_start(holding: Holding) -> None:
    assert holding.start([A]) == []
    assert not holding.knows(A)


def test_a_claim_that_was_given_back_never_starts(holding: Holding) -> None:
    holding.take([A])
    assert holding.give_back(A)
    assert holding.start([A]) == []
    assert holding.give_back(A)
    assert holding.knows(A)


def test_what_waits_for_a_slot_is_withdrawn_unless_somebody_was_faster(holding: Holding) -> None:
    holding.take([A, B, C])
    holding.give_back(B)
    holding.start([C])
    assert [holding.withdraw(job) for job in (A, B, C, D)] == [True, False, False, False]
    assert holding.start([A]) == []
    assert holding.known() == {("a", 1), ("b", 1), ("c", 1)}


def test_a_claim_that_has_started_is_not_given_back(holding: Holding) -> None:
    holding.take([A])
    assert holding.start([A]) == [A]
    assert not holding.give_back(A)
    assert holding.knows(A)


def test_a_claim_that_was_given_back_before_its_reply_arrived_is_left_out_and_forgotten(holding: Holding) -> None:
    assert holding.give_back(A)
    assert holding.take([A, B]) == [B]
    assert holding.known() == {("b", 1)}


def test_a_later_claim_of_the_same_job_is_another(holding: Holding) -> None:
    later = claim("a", version=2)
    holding.take([A])
    assert holding.start([A]) == [A]
    assert not holding.knows(later)
    assert holding.take([later]) == [later]
    assert holding.give_back(later)
    holding.settled(later)
    assert holding.known() == {("a", 1)}


def test_nothing_is_held_of_a_session_that_is_closed(holding: Holding) -> None:
    holding.take([A, B])
    holding.start([A])
    holding.forget()
    assert len(holding) == 0
    assert holding.start([B]) == []


# What the store counts and nobody here has heard of.


def test_a_claim_whose_reply_was_lost_is_found_and_never_starts(holding: Holding) -> None:
    holding.take([A])
    before = holding.known()
    assert holding.reconcile([A, B], before) == [B]
    assert holding.take([B]) == []


def test_what_was_settled_or_taken_while_the_store_was_asked_is_no_discovery(holding: Holding) -> None:
    holding.take([A])
    holding.start([A])
    before = holding.known()
    holding.settled(A)
    holding.take([B])
    assert holding.reconcile(iter([A, B]), before) == []
    assert holding.start([B]) == [B]


def test_what_was_given_back_is_forgotten_once_the_store_does_not_count_it_any_more(holding: Holding) -> None:
    holding.take([A, B, C, D])
    holding.start([C])
    for job in (A, B):
        holding.give_back(job)
    assert holding.reconcile([A], holding.known()) == []
    # C has started and D may start: their ends, or the reply about them, are on their way.
    assert holding.known() == {("a", 1), ("c", 1), ("d", 1)}
    assert holding.start([D]) == [D]


def test_what_was_given_back_without_an_answer_is_given_back_again_if_the_store_still_counts_it(
    holding: Holding,
) -> None:
    holding.take([A, B, C, D])
    for job in (A, B, C):
        assert holding.give_back(job)
    holding.doubt([A, B])
    assert holding.start([A]) == []
    assert holding.reconcile([A, C], holding.known()) == [A]
    assert holding.known() == {("a", 1), ("c", 1), ("d", 1)}
    # Once is enough: its second release is on its way now.
    assert holding.reconcile([A, C], holding.known()) == []
    assert holding.start([A]) == []


def test_there_is_no_doubt_about_what_was_not_given_back(holding: Holding) -> None:
    holding.take([A, B])
    assert holding.start([A]) == [A]
    holding.doubt([A, B, C])
    assert holding.reconcile([A, B], holding.known()) == []
    assert holding.known() == {("a", 1), ("b", 1)}
    assert holding.start([B]) == [B]


# Threads.


class Interrupted(dict[Any, Any]):
    """In the middle of the first call, another thread does something, and gets time to end."""

    def __init__(self, content: dict[Any, Any], other: Callable[[], object]) -> None:
        super().__init__(content)
        self._thread: threading.Thread | None = None
        self._other = other
        self.ended_meanwhile = False

    def _interrupt(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._other)
            self._thread.start()
            self._thread.join(0.1)
            self.ended_meanwhile = not self._thread.is_alive()

    def get(self, *args: Any) -> Any:
        found = super().get(*args)
        self._interrupt()
        return found

    def setdefault(self, *args: Any) -> Any:
        found = super().setdefault(*args)
        self._interrupt()
        return found

    def items(self) -> Any:
        self._interrupt()
        return super().items()

    def __iter__(self) -> Iterator[Any]:
        self._interrupt()
        return super().__iter__()

    def clear(self) -> None:
        self._interrupt()
        super().clear()

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(60)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda holding: holding.start([A]), lambda holding: holding.give_back(A)),
        (lambda holding: holding.give_back(A), lambda holding: holding.start([A])),
        (lambda holding: holding.withdraw(A), lambda holding: holding.give_back(A)),
        (lambda holding: holding.take([B]), lambda holding: holding.give_back(B)),
        (lambda holding: holding.doubt([A]), lambda holding: holding.start([A])),
        (lambda holding: holding.known(), lambda holding: holding.give_back(B)),
        (lambda holding: holding.reconcile([A], frozenset()), lambda holding: holding.give_back(B)),
        (lambda holding: holding.forget(), lambda holding: holding.start([A])),
    ],
    ids=["start", "give back", "withdraw", "take", "doubt", "known", "reconcile", "forget"],
)
def test_nothing_happens_in_the_middle_of_something_else(
    holding: Holding, one: Callable[[Holding], object], other: Callable[[Holding], object]
) -> None:
    """Or a job could be started and given back at the same time."""
    holding.take([A])
    fates = Interrupted(holding._fates, lambda: other(holding))
    holding._fates = fates
    one(holding)
    fates.join()
    assert not fates.ended_meanwhile
