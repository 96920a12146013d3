"""What a seed chooses before its run begins. Each run has some of the faults and odd settings, never all: with all of
them on at once, most states would never be reached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

import msgspec

from holdfast.policy import FullJitter
from holdfast.testing.simulation.faulty import Faults

T = TypeVar("T")

SQLITE_EVERY = 8
"""One seed in so many runs on SQLite, the others in memory."""


class Engine(StrEnum):
    """Which store a run is on."""

    MEMORY = "memory"
    SQLITE = "sqlite"


class Mishap(StrEnum):
    """What happens to hosts and to the store while a run goes on."""

    KILL = "kill"
    PAUSE = "pause"
    BLOCK = "block"
    """The event loop of a worker stands still; its heartbeat goes on."""
    STILL_HEART = "still heart"
    """The heartbeat of a worker stands still; its event loop goes on."""
    CUT_OFF = "cut off"
    RESTART = "restart"
    """The store is away for a while, and its replies under way are lost."""
    HOST_CLOCK = "host clock jump"
    STORE_CLOCK = "store clock jump"
    RETIRE = "retire"
    STOP = "stop"
    STOP_NOW = "stop_now"
    STOP_TWICE = "stop twice"
    """Told to stop, and told again to stop at once."""
    CANCEL_RUN = "cancel run"
    """The task in which a worker runs is cancelled; what its handlers do goes on."""
    KILL_PRODUCER = "kill producer"


class Conduct(StrEnum):
    """What a handler does, as its job's argument says."""

    SUCCEED = "succeed"
    SLOW = "slow"
    LONG = "long"
    """Longer than the TTL."""
    FLAKY = "flaky"
    FAIL = "fail"
    GIVE_UP = "give up"
    PERMANENT = "permanent"
    """An error that its task declares permanent."""
    RETRY_AFTER = "retry after"
    SNOOZE = "snooze"
    SNOOZE_ALWAYS = "snooze always"
    OVERTIME = "overtime"
    """Longer than its timeout."""
    STUBBORN = "stubborn"
    """It ignores cancellation, past its hard limit."""
    DEAF = "deaf"
    """It ignores cancellation, and succeeds."""
    BLOCKING = "blocking"
    """It blocks the event loop."""
    BAD_RESULT = "bad result"
    PARENT = "parent"
    """It enqueues another job."""
    CRASH = "crash"
    """Its process dies, if it has one of its own."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """How a run is set up."""

    engine: Engine
    faults: Faults
    mishaps: tuple[Mishap, ...]
    mishap_rate: float
    ttl: float
    poll: float
    grace: float
    concurrency: int
    workers: int
    producers: int
    keepers_in_workers: bool
    keeper_hosts: int
    jobs: int
    pause_between: float
    """Mean seconds between two jobs of a producer."""
    conducts: tuple[Conduct, ...]
    backoff: FullJitter
    max_retries: tuple[int, ...]
    max_crashes: int
    max_snoozes: int
    max_depth: int | None
    queues: int
    delays: tuple[float, ...]
    priorities: tuple[int, ...]
    shares: tuple[str, ...]
    keys: int
    """From how many keys a job takes one. 0: no keys."""
    key_window: float
    cancel_rate: float
    replay_rate: float
    pause_queue_rate: float
    batch_rate: float
    """How often several jobs are enqueued in one call."""
    crash_rate: float
    """How often the process of an isolated job dies."""
    ambush: float
    """How often a worker is hindered in the middle of a long handler."""
    prune_every: float
    keep_watch: bool
    """Whether the workers go on for a while when everything is done."""
    outdated: float
    """How often a worker does not know one of the tasks."""


def draw(chance: random.Random, engine: Engine) -> Plan:
    """The plan of a run."""

    def often(choices: Sequence[float], on: float = 0.5) -> float:
        """One of these, or 0: the fault is off."""
        return chance.choice(choices) if chance.random() < on else 0.0

    def some(all_of: Sequence[T], least: int = 1) -> tuple[T, ...]:
        return tuple(chance.sample(all_of, chance.randint(least, len(all_of))))

    ttl = chance.choice([0.5, 0.5, 1.0, 2.0])
    rates = [0.005, 0.02, 0.06]
    faults = Faults(
        refused=often(rates),
        request_lost=often(rates, 0.3),
        reply_lost=often(rates),
        reply_late=often(rates, 0.3),
        request_late=often(rates, 0.3),
        request_twice=often(rates, 0.3),
        wakeup_lost=often([0.1, 1.0], 0.3),
        latency=often([0.001, 0.02, 0.1]),
        deadline=chance.choice([0.5, 1.0, 2.0]),
    )
    keepers_in_workers = chance.random() < 0.7
    # Long handlers are those in whose midst something can happen.
    conducts = (*some(list(Conduct)), Conduct.SUCCEED, *[Conduct.LONG] * chance.randint(0, 6))
    return Plan(
        engine=engine,
        faults=faults,
        mishaps=some(list(Mishap), 5),
        mishap_rate=chance.choice([0.1, 0.3, 0.5]),
        ttl=ttl,
        poll=chance.choice([0.1, 0.5, 2.0]),
        grace=chance.choice([0.0, 0.5, 3.0]),
        concurrency=chance.choice([1, 2, 4, 10]),
        workers=chance.choice([1, 2, 2, 3, 3, 3]),
        producers=chance.choice([1, 1, 2]),
        keepers_in_workers=keepers_in_workers,
        keeper_hosts=chance.choice([0, 1]) if keepers_in_workers else 1,
        jobs=chance.choice([8, 12, 20, 30]),
        pause_between=chance.choice([0.0, 0.1, 0.3, 0.6]),
        conducts=conducts,
        backoff=FullJitter(base=chance.choice([0.05, 0.2]), max=1.0),
        max_retries=some([0, 1, 2, 5]),
        max_crashes=chance.choice([1, 2, 3]),
        max_snoozes=chance.choice([1, 3]),
        max_depth=chance.choice([None, None, None, 4]),
        queues=chance.choice([1, 1, 2]),
        delays=some([0.0, 0.0, 0.3, 1.5]),
        priorities=some([0, 5, 10]),
        shares=some(["", "a", "b"]),
        keys=chance.choice([0, 0, 2, 5]),
        key_window=chance.choice([1.0, 86_400.0, 86_400.0]),
        cancel_rate=often([0.1, 0.3]),
        replay_rate=often([0.1, 0.3]),
        pause_queue_rate=often([0.1], 0.2),
        batch_rate=often([0.1, 0.3], 0.3),
        crash_rate=often([0.1, 0.5]),
        ambush=often([0.5, 1.0], 0.9),
        prune_every=chance.choice([1.0, 60.0]),
        keep_watch=chance.random() < 0.25,
        outdated=often([0.3], 0.2),
    )
