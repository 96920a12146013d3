"""One run: hosts that work, produce and keep on one faulty store; then heal, drain, stop, check.

The hosts run the real worker, with its claimer, runner, settler, heartbeat and keepers, and the real client; only time,
chance, ids, processes and the network are simulated. What they did is an exact history, judged by
`holdfast.testing.history.check`.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Awaitable, Callable

import msgspec

from holdfast.job import ENDED, Job, State
from holdfast.keepers.retention import Retention
from holdfast.store import MOST_PER_CALL, JobQuery
from holdfast.testing.history import History, check, read_ending
from holdfast.testing.history.events import Cancel, Rules, Settle
from holdfast.testing.simulation.handlers import QUEUES, Handlers
from holdfast.testing.simulation.hosts import Hosts
from holdfast.testing.simulation.loop import run_simulated
from holdfast.testing.simulation.mishaps import Mishaps
from holdfast.testing.simulation.producers import Producers
from holdfast.testing.simulation.run import Run
from holdfast.testing.simulation.swarm import SQLITE_EVERY, Engine, Mishap

_DRAINED_AT_LEAST = 40.0
_WORST_JOB = 15.0
"""Virtual seconds that a slot may have to spend on one job, with all its attempts."""
_STOPPED_WITHIN = 30.0
_LONG_AFTER = 20 * 366 * 24 * 3600.0
_SHORT_WINDOW = 3600.0


class Report(msgspec.Struct):
    """What a run showed. `violations` is empty if everything held that must hold."""

    seed: int
    engine: Engine
    violations: list[str]
    fingerprint: str
    virtual_seconds: float
    happenings: Counter[str]
    history: History


class _Scenario:
    """The story of a run, and its history."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._hosts = Hosts(run)
        self._mishaps = Mishaps(run, self._hosts)
        handlers = Handlers(run, self._hosts.app, self._hosts.crash, self._mishaps.ambush)
        self._producers = Producers(run, self._hosts.app, handlers, self._hosts.noted)
        self._drained_within = _DRAINED_AT_LEAST
        """Seconds from the last fault until every job must have ended: the more are left, the longer."""

    async def live(self) -> None:
        """Faults, then none; until everything has ended, or should have."""
        run, hosts = self._run, self._hosts
        await self._suffer()
        await self._heal()
        await self._until(self._drained, self._drained_within)
        if run.plan.keep_watch:
            await self._keep_watch()
        for host in sorted(hosts.services):
            hosts.stop(host, run.chance.choice(["stop", "retire"]))
        if not await self._until(self._all_stopped, _STOPPED_WITHIN):
            run.surprises.append(f"{', '.join(hosts.leaving)} did not stop")

    async def _suffer(self) -> None:
        run, hosts, plan, chance = self._run, self._hosts, self._run.plan, self._run.chance
        hosts.start_missing()
        hosts.start_producers(self._producers.produce)
        least = run.loop.time() + 2 * plan.ttl
        while hosts.producing or run.loop.time() < least:
            await run.ports.clock.sleep(chance.uniform(0.05, 0.5))
            hosts.start_missing()
            if chance.random() < plan.mishap_rate:
                self._mishaps.befall(chance.choice(plan.mishaps))

    async def _heal(self) -> None:
        """The network is whole at once; what is on its way arrives, and who stands still wakes up when it is time."""
        run = self._run
        run.faults.heal()
        while run.faults.on_the_way or run.loop.anybody_paused() or run.faults.over_at() > run.loop.time():
            await run.ports.clock.sleep(0.1)
            self._hosts.start_missing()
        for queue in QUEUES:
            await run.raw.set_paused(queue, False)
        left = sum(count.ready + count.scheduled + count.in_flight for count in await run.raw.counts())
        self._drained_within += left * _WORST_JOB / (run.plan.workers * run.plan.concurrency)
        run.heal()

    async def _until(self, holds: Callable[[], Awaitable[bool]], seconds: float) -> bool:
        run = self._run
        deadline = run.loop.time() + seconds
        while not await holds():
            if run.loop.time() >= deadline:
                return False
            await run.ports.clock.sleep(0.2)
            self._hosts.start_missing()
        return True

    async def _drained(self) -> bool:
        counts = await self._run.raw.counts()
        return not any(count.ready or count.scheduled or count.in_flight for count in counts)

    async def _all_stopped(self) -> bool:
        return not self._hosts.leaving

    async def _keep_watch(self) -> None:
        """Nothing happens for a while, and so nothing may happen."""
        run = self._run
        until = (run.healed_at or 0.0) + self._hosts.time_to_recover() + 4 * run.plan.ttl
        await run.ports.clock.sleep(max(0.0, until - run.loop.time()))

    # The check.

    async def history(self) -> History:
        """What happened, and what it is to be compared with."""
        run, plan = self._run, self._run.plan
        self._hosts.noted.note_unanswered()
        return History(
            events=tuple(run.events),
            ending=await read_ending(run.raw),
            rules=Rules(
                backoff=plan.backoff,
                max_crashes=plan.max_crashes,
                max_snoozes=plan.max_snoozes,
                drained_within=self._drained_within,
                steady_clock=not run.happenings[Mishap.STORE_CLOCK],
                set_back=self._mishaps.set_back,
                keys_expire=plan.key_window < _SHORT_WINDOW,
            ),
            exact=True,
        )

    async def tidy(self) -> None:
        """Long after: retention has removed what succeeded or was cancelled, and no dead letter."""
        run = self._run
        before = {job.id for job in await self._jobs() if job.state is State.FAILED or job.state not in ENDED}
        run.store_clock.jumped += _LONG_AFTER
        await Retention(run.raw, ports=run.ports).one_pass()
        after = {job.id for job in await self._jobs()}
        if before != after:
            wrong = ", ".join(sorted(before ^ after))
            run.surprises.append(f"retention removed what it must keep, or kept what it must remove: {wrong}")

    async def _jobs(self) -> tuple[Job, ...]:
        return (await self._run.raw.find(JobQuery(limit=MOST_PER_CALL))).jobs


def engine_of(seed: int) -> Engine:
    """The store that a seed runs on, unless somebody chooses."""
    return Engine.SQLITE if seed % SQLITE_EVERY == SQLITE_EVERY - 1 else Engine.MEMORY


def simulate(seed: int, engine: Engine | None = None) -> Report:
    """Run one seed from beginning to end."""
    chosen = engine or engine_of(seed)
    run = Run(seed, chosen)
    histories: list[History] = []

    async def story() -> None:
        scenario = _Scenario(run)
        await scenario.live()
        histories.append(await scenario.history())
        await scenario.tidy()
        run.end()

    collecting = gc.isenabled()
    gc.disable()  # what a killed host left behind goes when the run is over, not when chance has it
    try:
        run_simulated(run.loop, story)
    finally:
        run.end()
        run.close()
        if collecting:
            gc.enable()
    [history] = histories
    happenings = run.happenings + run.faults.seen + _counted(history)
    happenings[f"run on {chosen}"] += 1
    return Report(
        seed=seed,
        engine=chosen,
        violations=[str(violation) for violation in check(history)] + run.surprises + run.loop.surprises,
        fingerprint=run.loop.fingerprint,
        virtual_seconds=run.loop.time(),
        happenings=happenings,
        history=history,
    )


def _counted(history: History) -> Counter[str]:
    """The events of a history by what they say."""
    counted: Counter[str] = Counter()
    for event in history.events:
        match event:
            case Settle():
                counted[f"{event.reason} {event.applied}"] += 1
            case Cancel():
                counted["cancelled while ready" if event.ended else "cancel asked"] += 1
            case _:
                counted[type(event).__name__] += 1
    return counted
