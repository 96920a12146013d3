"""What a history tells besides right and wrong: what happened how often."""

from __future__ import annotations

from collections import Counter

from holdfast.testing.history.events import Enqueue, Fault, History, Settle


def happenings(history: History) -> Counter[str]:
    """How often each kind of event, answer and fault is in the history: what a run must show that it has met."""
    counted: Counter[str] = Counter()
    for event in history.events:
        match event:
            case Enqueue():
                counted[f"enqueue {event.status or event.answer}"] += 1
            case Settle():
                counted[f"{event.reason} {event.applied or event.answer}"] += 1
            case Fault():
                counted[event.kind] += 1
            case _:
                counted[type(event).__name__.lower()] += 1
    return counted
