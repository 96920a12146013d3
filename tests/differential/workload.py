"""A workload made from a seed: what is asked of an application, and what becomes of each job when it runs.

What a job does at which of its runs is in its own payload, so neither the engine nor the time decides its fate. A
workload has phases: in each, everything is asked while nothing is claimed, and then everything runs until it has ended.
"""

from __future__ import annotations

import random

import msgspec

QUEUES = ("first", "second")
PHASES = 3
STEPS = ("ok", "fail", "permanent", "give up", "retry", "snooze", "exit", "not JSON", "NUL")
"""What a handler can do in one run; see `application`."""
_WEIGHTS = (8, 8, 1, 1, 3, 5, 1, 1, 1)
TASKS = ("work", "plain", "slow")
_KEYS = ("k", "l", "m")


class Add(msgspec.Struct, frozen=True, kw_only=True):
    """Enqueue a job. After its last step a handler succeeds."""

    label: int
    task: str
    steps: tuple[str, ...]
    queue: str
    share: str
    priority: int
    delay: float
    max_retries: int
    key: str | None


class Cancel(msgspec.Struct, frozen=True):
    """Cancel the latest job with that label."""

    label: int


class Replay(msgspec.Struct, frozen=True):
    """Bring it back, if that is possible."""

    label: int


Action = Add | Cancel | Replay


class Workload(msgspec.Struct, frozen=True):
    """All of it, phase after phase."""

    seed: int
    phases: tuple[tuple[Action, ...], ...]


def workload(seed: int) -> Workload:
    """The workload of that seed: always the same."""
    chance = random.Random(seed)
    added: list[Add] = []
    phases = []
    for number in range(PHASES):
        phase: list[Action] = []
        for _ in range(chance.randint(4, 10)):
            added.append(_add(chance, len(added)))
            phase.append(added[-1])
        again = [chance.choice(added) for _ in range(chance.randint(0, 2))]
        cancels = [Cancel(chance.choice(added).label) for _ in range(chance.randint(0, 3))]
        replays = [Replay(chance.choice(added).label) for _ in range(chance.randint(1, 5) if number else 0)]
        phase += [*again, *cancels, *replays]
        phases.append(tuple(phase))
    return Workload(seed, tuple(phases))


def _add(chance: random.Random, label: int) -> Add:
    task = chance.choices(TASKS, (6, 3, 1))[0]
    return Add(
        label=label,
        task=task,
        steps=() if task == "slow" else tuple(chance.choices(STEPS, _WEIGHTS, k=chance.randint(0, 5))),
        queue=chance.choice(QUEUES),
        share=chance.choice(("", "a", "b")),
        priority=chance.choice((0, 5, 10)),
        delay=chance.choice((0.0, 0.0, 0.02, 0.1)),
        max_retries=chance.choice((0, 1)) if task == "slow" else chance.choice((0, 1, 2, 3)),
        key=chance.choice(_KEYS) if chance.random() < 0.4 else None,
    )
