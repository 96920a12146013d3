"""One run: hosts that work, produce and keep on one faulty store; then heal, drain, stop, check.

The hosts run the real worker, with its claimer, runner, settler, heartbeat and keepers, and the real client; only time,
chance, ids, processes and the network are simulated. What they did is an exact history, judged by
`holdfast.testing.history.check`.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Callable

import msgspec

from holdfast.app import Holdfast
from holdfast.config import JobSettings, QueueSettings, Settings, WorkerSettings
from holdfast.events import Event, SessionRescued
from holdfast.job import ENDED, State
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.retention import Retention
from holdfast.registry import Registry
from holdfast.store import MOST_PER_CALL, JobQuery
from holdfast.tasks import FollowUps
from holdfast.testing.history import History, check, read_ending
from holdfast.testing.history.events import Cancel, KeeperReady, Rules, Settle, Stopped
from holdfast.testing.simulation.handlers import NEWEST_TASK, QUEUES, Handlers
from holdfast.testing.simulation.loop import HOST, run_simulated
from holdfast.testing.simulation.processes import SimulatedProcesses
from holdfast.testing.simulation.producers import Producers, told
from holdfast.testing.simulation.run import Run
from holdfast.testing.simulation.swarm import SQLITE_EVERY, Engine, Mishap
from holdfast.worker.service import WorkerService

_DRAINED_AT_LEAST = 40.0
_WORST_JOB = 15.0
"""Virtual seconds that a slot may have to spend on one job, with all its attempts."""
_STOPPED_WITHIN = 30.0
_TIME_TO_RECOVER = 5.5
"""The longest deadline of a call, and the longest pause of the settler after a failed one."""
_SKEWS = (0.0, 3600.0, -3600.0)
_LONG_AFTER = 20 * 366 * 24 * 3600.0
_LATEST_RESTART = 0.5
_BUSY_VICTIMS = 0.7
_HINDRANCES = (Mishap.PAUSE, Mishap.BLOCK, Mishap.STILL_HEART, Mishap.CUT_OFF)


class Report(msgspec.Struct):
    """What a run showed. `violations` is empty if everything held that must hold."""

    seed: int
    engine: Engine
    violations: list[str]
    fingerprint: str
    virtual_seconds: float
    happenings: Counter[str]
    history: History


class _World:
    """The hosts of a run, and what befalls them."""

    def __init__(self, run: Run) -> None:
        self._run = run
        plan = run.plan
        self._settings = Settings(
            queues=QueueSettings(max_depth=plan.max_depth),
            jobs=JobSettings(key_window=plan.key_window),
            worker=WorkerSettings(
                queues=QUEUES,
                concurrency=plan.concurrency,
                lease_ttl=plan.ttl,
                poll=plan.poll,
                grace=plan.grace,
                max_crashes=plan.max_crashes,
                max_snoozes=plan.max_snoozes,
                keepers=plan.keepers_in_workers,
            ),
        )
        store, self._noted = told(run.store(), run)
        self._app = Holdfast(store, settings=self._settings, on_event=self._hear, ports=run.ports)
        self._processes = SimulatedProcesses(run, self._app.tasks, self._app.handling)
        handlers = Handlers(run, self._app, self._crash, self._ambush)
        self._producers = Producers(run, self._app, handlers, self._noted)
        self._started = 0
        self._services: dict[str, WorkerService] = {}
        """Of the workers that live and were not told to stop."""
        self._working: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, tuple[int, float] | None] = {}
        """Those that were told to, with what had harmed them by then. None: they have not got over it yet."""
        self._keepers: list[str] = []
        self._producing: set[str] = set()
        self._harmed: dict[str, float] = {}
        """When each host was last harmed."""
        self._set_back = 0.0
        self._drained_within = _DRAINED_AT_LEAST
        """Seconds from the last fault until every job must have ended: the more are left, the longer."""

    # Hosts.

    def _new_host(self, kind: str) -> str:
        run = self._run
        self._started += 1
        host = f"{kind}-{self._started}"
        run.clock.skew[host] = run.chance.choice(_SKEWS)
        run.clock.origin[host] = run.chance.choice([0.0, 1e6])
        return host

    def _start_missing(self) -> None:
        """What watches processes on a real machine: those that died are replaced."""
        run, plan = self._run, self._run.plan
        while len(self._services) < plan.workers:
            host = self._new_host("worker")
            context = run.loop.context_of(host)
            self._services[host] = context.run(self._new_worker)
            self._working[host] = run.loop.create_task(self._work(host, self._services[host]), context=context)
        while len(self._keepers) < plan.keeper_hosts:
            host = self._new_host("keeper")
            self._keepers.append(host)
            run.loop.on_host(host, self._keep())

    def _new_worker(self) -> WorkerService:
        """The real worker, whole, as `Holdfast.worker_service` makes it, but for the processes of isolated jobs."""
        run, app, settings = self._run, self._app, self._settings.worker
        store = run.store()
        follow_ups = FollowUps(app.tasks, app._client, self._hear)
        rescue = Rescue(
            store,
            ports=run.ports,
            ttl=settings.lease_ttl,
            policy=settings.policy(),
            listener=self._hear,
            follow=follow_ups.add,
        )
        retention = Retention(store, ports=run.ports, listener=self._hear, every=run.plan.prune_every)
        return WorkerService(
            store=store,
            registry=_without_newest(app.tasks) if run.chance.random() < run.plan.outdated else app.tasks,
            settings=settings,
            handling=app.handling,
            follow=follow_ups.add,
            keepers=[rescue.run, retention.run],
            isolation=self._processes,
            ports=run.ports,
            listener=self._hear,
        )

    async def _work(self, host: str, service: WorkerService) -> None:
        run = self._run
        if run.plan.keepers_in_workers:
            run.note(KeeperReady(at=run.loop.time(), host=host))
        await service.run()
        if host not in self._leaving:
            self._services.pop(host, None)
            run.surprises.append(f"{host} ended, and nobody had asked it to")
        elif self._leaving.pop(host) == self._harm(host):
            run.note(Stopped(at=run.loop.time(), host=host, session_id=service.worker_id))

    async def _keep(self) -> None:
        run, settings = self._run, self._settings.worker
        store = run.store()
        run.note(KeeperReady(at=run.loop.time(), host=HOST.get()))
        retention = Retention(store, ports=run.ports, listener=self._hear, every=run.plan.prune_every)
        run.loop.on_host(HOST.get(), retention.run())
        follow_ups = FollowUps(self._app.tasks, self._app._client, self._hear)
        await Rescue(
            store,
            ports=run.ports,
            ttl=settings.lease_ttl,
            policy=settings.policy(),
            listener=self._hear,
            follow=follow_ups.add,
        ).run()

    def _start_producers(self) -> None:
        for _ in range(self._run.plan.producers):
            host = self._new_host("producer")
            self._producing.add(host)
            self._run.loop.on_host(host, self._produce(host))

    async def _produce(self, host: str) -> None:
        await self._producers.produce()
        self._producing.discard(host)

    def _hear(self, event: Event) -> None:
        """Listen. Once nothing harms it any more, and it has had time to recover, a living worker keeps its session."""
        run = self._run
        run.hear(event)
        if isinstance(event, SessionRescued) and run.healed_at is not None:
            living = {service.worker_id: host for host, service in self._services.items()}
            host = living.get(event.session_id)
            if host is not None and run.loop.time() > run.healed_at + self._time_to_recover():
                run.surprises.append(f"{host} lives, and its session {event.session_id} was closed by a keeper")

    def _time_to_recover(self) -> float:
        """Until every heart beats again: a beat may hang until its deadline, and a keeper has seen it stand still."""
        return self._run.faults.deadline + 2 * self._run.plan.ttl

    async def _keep_watch(self) -> None:
        """Nothing happens for a while, and so nothing may happen."""
        run = self._run
        until = (run.healed_at or 0.0) + self._time_to_recover() + 4 * run.plan.ttl
        await run.ports.clock.sleep(max(0.0, until - run.loop.time()))

    # What befalls them.

    def _harm(self, host: str) -> tuple[int, float]:
        """What has harmed the host so far."""
        return self._run.faults.harm, self._harmed.get(host, 0.0)

    def _is_calm(self, host: str) -> bool:
        """Whether nothing has harmed it for so long that no call of it hangs, or waits to be tried again."""
        latest = max(self._run.faults.harmed_at, self._harmed.get(host, 0.0))
        return latest + _TIME_TO_RECOVER < self._run.loop.time()

    def _crash(self, host: str) -> None:
        """A handler ends the process that it runs in: one of its own, or the whole worker."""
        if not self._processes.die(host):
            self._kill(host, "crash")

    def _kill(self, host: str, how: str = "kill") -> None:
        self._run.loop.kill(host)
        self._run.fault(f"{how} {host.partition('-')[0]}", host)
        self._services.pop(host, None)
        self._leaving.pop(host, None)
        if host in self._keepers:
            self._keepers.remove(host)
        self._producing.discard(host)

    def _cancel_run(self, host: str) -> None:
        """The worker ends without another word to the store. Its handlers belong to the loop, and go on."""
        self._services.pop(host, None)
        self._leaving.pop(host, None)
        self._run.loop.call_soon(self._working[host].cancel, context=self._run.loop.context_of(host))

    def _stop(self, host: str, how: str) -> None:
        """As a deploy does: a worker is told to stop."""
        service = self._services.pop(host)
        self._leaving[host] = self._harm(host) if service.idle or self._is_calm(host) else None
        self._run.loop.call_soon(getattr(service, how), context=self._run.loop.context_of(host))

    def _victim(self) -> str:
        """Whom it shall befall: a keeper sometimes, mostly a worker that has something to lose."""
        chance, workers = self._run.chance, [*self._services, *self._leaving]
        busy = [host for host, service in self._services.items() if not service.idle]
        if busy and chance.random() < _BUSY_VICTIMS:
            return chance.choice(busy)
        return chance.choice([*workers, *self._keepers])

    def _hinder(self, mishap: Mishap, host: str, seconds: float) -> None:
        run = self._run
        self._harmed[host] = run.loop.time() + seconds
        run.fault(mishap, host)
        match mishap:
            case Mishap.PAUSE:
                run.loop.pause(host, seconds)
            case Mishap.BLOCK:
                run.loop.block(host, seconds)
            case Mishap.STILL_HEART:
                run.loop.block(f"{host}/heart", seconds)
            case Mishap.CUT_OFF:
                run.faults.cut[host] = run.loop.time() + seconds

    def _ambush(self, host: str) -> None:
        """A long handler is in the middle of its work: the worst moment for its worker to stand still."""
        run, plan, chance = self._run, self._run.plan, self._run.chance
        ways = [mishap for mishap in plan.mishaps if mishap in _HINDRANCES] or _HINDRANCES
        if run.healed_at is None and host in self._services and chance.random() < plan.ambush:
            self._hinder(chance.choice(ways), host, plan.ttl * chance.uniform(1.8, 3.2))

    def _befall(self, mishap: Mishap) -> None:
        """Let it happen to somebody, if there is somebody to whom it can."""
        run, chance, ttl = self._run, self._run.chance, self._run.plan.ttl
        workers = [*self._services, *self._leaving]
        match mishap:
            case Mishap.KILL if workers or self._keepers:
                self._kill(self._victim())
            case Mishap.KILL_PRODUCER if self._producing:
                self._kill(chance.choice(sorted(self._producing)))
            case Mishap.PAUSE | Mishap.BLOCK | Mishap.STILL_HEART | Mishap.CUT_OFF if workers or self._keepers:
                self._hinder(mishap, self._victim(), ttl * chance.choice([0.3, 2.5, 4.0]) * chance.uniform(0.8, 1.2))
            case Mishap.CANCEL_RUN if workers:
                host = chance.choice(workers)
                self._cancel_run(host)
                run.fault(mishap, host)
            case Mishap.STOP_TWICE if self._services:
                host = chance.choice(sorted(self._services))
                again = self._services[host].stop_now
                self._stop(host, "stop")
                run.loop.call_later(chance.uniform(0.0, 1.0), again, context=run.loop.context_of(host))
                run.fault(mishap, host)
            case Mishap.RESTART:
                run.faults.restart(run.loop.time(), chance.uniform(0.0, 2 * ttl))
                run.fault(mishap, "store")
            case Mishap.HOST_CLOCK if workers:
                host = chance.choice(workers)
                run.clock.skew[host] += chance.choice([-300.0, 300.0, 86_400.0])
                run.fault(mishap, host)
            case Mishap.STORE_CLOCK:
                jump = chance.choice([-3.0, -0.5, 0.5, 10.0])
                run.store_clock.jumped += jump
                self._set_back += max(0.0, -jump)
                run.fault(mishap, "store")
            case Mishap.RETIRE | Mishap.STOP | Mishap.STOP_NOW if self._services:
                host = chance.choice(sorted(self._services))
                self._stop(host, mishap)
                run.fault(mishap, host)

    # The story.

    async def live(self) -> None:
        """Faults, then none; until everything has ended, or should have."""
        await self._suffer()
        await self._heal()
        await self._until(self._drained, self._drained_within)
        if self._run.plan.keep_watch:
            await self._keep_watch()
        for host in sorted(self._services):
            self._stop(host, self._run.chance.choice(["stop", "retire"]))
        if not await self._until(self._all_stopped, _STOPPED_WITHIN):
            self._run.surprises.append(f"{', '.join(self._leaving)} did not stop")

    async def _suffer(self) -> None:
        run, plan, chance = self._run, self._run.plan, self._run.chance
        self._start_missing()
        self._start_producers()
        least = run.loop.time() + 2 * plan.ttl
        while self._producing or run.loop.time() < least:
            await run.ports.clock.sleep(chance.uniform(0.05, _LATEST_RESTART))
            self._start_missing()
            if chance.random() < plan.mishap_rate:
                self._befall(chance.choice(plan.mishaps))

    async def _heal(self) -> None:
        """The network is whole at once; what is on its way arrives, and who stands still wakes up when it is time."""
        run = self._run
        run.faults.heal()
        while run.faults.on_the_way or run.loop.anybody_paused() or run.faults.over_at() > run.loop.time():
            await run.ports.clock.sleep(0.1)
            self._start_missing()
        for queue in QUEUES:
            await run.raw.set_paused(queue, False)
        left = sum(count.ready + count.scheduled + count.in_flight for count in await run.raw.counts())
        self._drained_within += left * _WORST_JOB / (run.plan.workers * run.plan.concurrency)
        run.heal()

    async def _until(self, holds: Callable[[], object], seconds: float) -> bool:
        run = self._run
        deadline = run.loop.time() + seconds
        while not await holds():  # type: ignore[misc]
            if run.loop.time() >= deadline:
                return False
            await run.ports.clock.sleep(0.2)
            self._start_missing()
        return True

    async def _drained(self) -> bool:
        counts = await self._run.raw.counts()
        return not any(count.ready or count.scheduled or count.in_flight for count in counts)

    async def _all_stopped(self) -> bool:
        return not self._leaving

    # The check.

    async def judge(self) -> History:
        """The history, which says what is wrong."""
        run, plan = self._run, self._run.plan
        self._noted.note_unanswered()
        return History(
            events=tuple(run.events),
            ending=await read_ending(run.raw),
            rules=Rules(
                backoff=plan.backoff,
                max_crashes=plan.max_crashes,
                max_snoozes=plan.max_snoozes,
                drained_within=self._drained_within,
                steady_clock=not run.happenings[Mishap.STORE_CLOCK],
                set_back=self._set_back,
                keys_expire=plan.key_window < 3600,
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

    async def _jobs(self) -> list:  # type: ignore[type-arg]
        page = await self._run.raw.find(JobQuery(limit=MOST_PER_CALL))
        return list(page.jobs)


def _without_newest(tasks: Registry) -> Registry:
    """The tasks as a worker knows them that was not updated yet."""
    older = Registry()
    for spec in tasks:
        if spec.name != NEWEST_TASK:
            older.add(spec.function, spec.name, spec.options)
    return older


def engine_of(seed: int) -> Engine:
    """The store that a seed runs on, unless somebody chooses."""
    return Engine.SQLITE if seed % SQLITE_EVERY == SQLITE_EVERY - 1 else Engine.MEMORY


def simulate(seed: int, engine: Engine | None = None) -> Report:
    """Run one seed from beginning to end."""
    chosen = engine or engine_of(seed)
    run = Run(seed, chosen)
    histories: list[History] = []

    async def story() -> None:
        world = _World(run)
        await world.live()
        histories.append(await world.judge())
        await world.tidy()
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
