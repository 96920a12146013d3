"""What a history tells besides right and wrong."""

from __future__ import annotations

from collections import Counter

from holdfast.testing.history.events import Fault
from holdfast.testing.history.executions import cause
from holdfast.testing.history.facts import Facts
from holdfast.testing.history.findings import happenings
from tests.history.test_invariants import A_RETRY, NEW, TAKEN, enqueue, history, run, settle, stored


def test_what_happened_is_counted_with_its_answers() -> None:
    met = [*TAKEN, Fault(at=9.0, kind="pause")]
    assert happenings(history(met, stored(version=2))) == Counter(
        {
            "enqueue created": 1,
            "claim": 2,
            "start": 2,
            "end": 2,
            "effect": 1,
            "close": 1,
            "lost applied": 1,
            "succeeded stale": 1,
            "succeeded applied": 1,
            "pause": 1,
        }
    )


def test_each_further_start_has_its_cause() -> None:
    again = [enqueue(), *run(1, 1.0), *run(2, 2.0), settle(3.0, 2)]
    harmed = [Fault(at=1.5, kind="kill"), *again]

    def why(events: list, *, exact: bool = False) -> str:  # type: ignore[type-arg]
        return cause(Facts(history(events, stored(version=2), exact=exact)), NEW.id, 1, 2, 2.1)

    assert why(A_RETRY) == "retried"
    assert why(TAKEN) == "lost"
    assert why(again) == ""
    assert why(harmed) == "not heard of"
    assert why(harmed, exact=True) == ""
