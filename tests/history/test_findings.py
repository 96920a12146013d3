"""What a history tells besides right and wrong."""

from __future__ import annotations

from collections import Counter

from holdfast.job import Reason
from holdfast.testing.history.events import Fault, KeeperReady
from holdfast.testing.history.findings import duplicates, happenings, recoveries, refused
from tests.history.test_invariants import A_RETRY, ONE_RUN, TAKEN, claim, enqueue, history, run, settle, stored


def test_each_further_start_has_its_cause() -> None:
    assert duplicates(history(ONE_RUN, stored())) == Counter()
    assert duplicates(history(A_RETRY, stored(version=2))) == Counter(retried=1)
    assert duplicates(history(TAKEN, stored(version=2))) == Counter(lost=1)
    again = [enqueue(), *run(1, 1.0), *run(2, 2.0), settle(3.0, 2)]
    assert duplicates(history(again, stored(version=2))) == Counter(unexplained=1)
    assert duplicates(history([Fault(at=1.5, kind="kill"), *again], stored(version=2))) == {"not heard of": 1}


def test_what_came_too_late_is_counted() -> None:
    assert refused(history(TAKEN, stored(version=2))) == 1
    assert happenings(history(TAKEN, stored(version=2)))["succeeded stale"] == 1


def test_a_recovery_counts_from_the_later_of_the_kill_and_a_keeper() -> None:
    kill = Fault(at=2.0, kind="kill worker", victim="w")
    lost = settle(4.0, 1, Reason.LOST, from_the_dead=True, host="keeper")
    again = claim(5.0, 2, host="other")
    assert recoveries(history([enqueue(), claim(1.0), kill, lost, again], stored(version=2))) == [3.0]
    late = KeeperReady(at=3.5, host="keeper")
    assert recoveries(history([enqueue(), claim(1.0), kill, late, lost, again], stored(version=2))) == [1.5]
    early = KeeperReady(at=0.5, host="keeper")
    assert recoveries(history([early, enqueue(), claim(1.0), kill, lost, again], stored(version=2))) == [3.0]
    settled = settle(1.5, 1, Reason.RETRIED, host="w")
    assert recoveries(history([enqueue(), claim(1.0), settled, kill, again], stored(version=2))) == []
