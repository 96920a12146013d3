"""One run: two worker hosts and a keeper on one faulty store; kills, pauses, skewed clocks; then heal, drain, check.

The hosts run the real worker, with its claimer, runner, settler, heartbeat and keepers; only time, chance, ids and
processes are simulated. The history of what they did is checked against the invariants: nothing accepted is lost,
nothing stale takes effect, nothing starts without a claim of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from holdfast.config import WorkerSettings
from holdfast.errors import HoldfastError, StoreError
from holdfast.events import Event, LoopBlocked, PartFailed, SessionLost, SettleRefused
from holdfast.failures import Failure
from holdfast.job import ENDED, Job, JobId, NewJob, State
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Applied, Crashed, Move, Outcome
from holdfast.policy import FullJitter, RetryPolicy
from holdfast.ports import Ports
from holdfast.registry import Registry, TaskOptions
from holdfast.store import Claimed, ClaimRequest, InsertStatus, Store
from holdfast.stores.memory import MemoryStore
from holdfast.testing.simulation.faulty import Faults, wrap
from holdfast.testing.simulation.loop import HOST, SimulatedLoop, run_simulated
from holdfast.testing.simulation.ports import SimulatedClock, StoreClock, simulated_ports
from holdfast.worker.context import CurrentJob, current
from holdfast.worker.handling import Handling
from holdfast.worker.service import WorkerService

TTL = 1.0
_DRAIN_DEADLINE = 120.0
_QUEUE = "simulated"


class Happening(msgspec.Struct, frozen=True, gc=False):
    """One line of the history."""

    at: float
    host: str
    what: str
    job_id: JobId
    version: int = 0


class Report(msgspec.Struct):
    """What a run showed. `violations` is empty if every invariant held."""

    seed: int
    violations: list[str]
    fingerprint: str
    virtual_seconds: float
    happenings: Counter[str]
    history: list[Happening]


class _RecordedStore(MemoryStore):
    """Writes claims and settlements into the history when they take effect, not when somebody hears of it."""

    def __init__(self, ports: Ports, record: Callable[[str, JobId, int], None]) -> None:
        super().__init__(ports=ports)
        self._record = record

    async def claim(self, request: ClaimRequest) -> Claimed:
        claimed = await super().claim(request)
        for job in claimed.jobs:
            self._record("claim", job.id, job.version)
        return claimed

    async def apply(self, moves: Sequence[Move]) -> list[Applied]:
        answers = await super().apply(moves)
        for move, answer in zip(moves, answers, strict=True):
            self._record(f"{move.reason.value} {answer.value}", move.job_id, move.version)
        return answers


class _SimulatedIsolation:
    """No processes: an isolated job runs as any other, and its process dies by chance."""

    def __init__(self, handling: Handling, registry: Registry, loop: SimulatedLoop, ports: Ports) -> None:
        self._handling = handling
        self._ports = ports
        self._registry = registry
        self._loop = loop

    async def run(
        self, job: Job, current: CurrentJob, hard_timeout: float | None, begun: Callable[[], None]
    ) -> Outcome:
        await self._ports.clock.sleep(self._loop.chance.choice([0.0, 0.0, 0.3]))
        begun()
        if self._loop.chance.random() < 0.1:
            return Crashed(Failure(0, job.attempt + 1, "ProcessDied", "died by chance"))
        return await self._handling.call_async(self._registry[job.task], job, current)

    async def close(self) -> None:
        pass


class _World:
    """Everything that one seed brings to life."""

    def __init__(self, seed: int) -> None:
        self.loop = SimulatedLoop(seed)
        self.ports: Ports = simulated_ports(self.loop)
        chance = self.loop.chance
        self.faults = Faults(
            request_lost=chance.choice([0.0, 0.02, 0.1]),
            reply_lost=chance.choice([0.0, 0.02, 0.1]),
            latency=chance.choice([0.0, 0.01, 0.1]),
        )
        store_ports = msgspec.structs.replace(self.ports, clock=StoreClock(self.loop))
        self.memory = _RecordedStore(store_ports, self.record)
        self.store: Store = wrap(self.memory, self.faults, self.ports)
        self.policy = RetryPolicy(backoff=FullJitter(base=0.1, max=1.0))
        self.history: list[Happening] = []
        self.accepted: set[JobId] = set()
        self.started_hosts = 0
        self.services: dict[str, WorkerService] = {}

    def record(self, what: str, job_id: JobId = "", version: int = 0) -> None:
        self.history.append(Happening(self.loop.time(), HOST.get(), what, job_id, version))

    # A host that works.

    def start_worker_host(self) -> str:
        self.started_hosts += 1
        host = f"worker-{self.started_hosts}"
        clock = self.ports.clock
        assert isinstance(clock, SimulatedClock)  # noqa: S101
        clock.skew[host] = self.loop.chance.choice([0.0, 3600.0, -3600.0])
        self.loop.on_host(host, self._work())
        return host

    async def _work(self) -> None:
        """The real worker, whole: claimer, runner, settler, heartbeat and keepers."""
        registry = Registry()
        registry.add(
            self._handler, "simulated", TaskOptions(queue=_QUEUE, backoff=self.policy.backoff, timeout=3 * TTL)
        )
        handling = Handling(self.ports.clock)
        rescue = Rescue(self.store, ports=self.ports, ttl=TTL, policy=self.policy)
        service = self.services[HOST.get()] = WorkerService(
            store=self.store,
            registry=registry,
            settings=WorkerSettings(concurrency=self.loop.chance.choice([1, 4]), lease_ttl=TTL, poll=1.0, grace=TTL),
            handling=handling,
            follow=lambda job, move: move,
            keepers=[rescue.run],
            isolation=_SimulatedIsolation(handling, registry, self.loop, self.ports),
            ports=self.ports,
            listener=self._hear,
        )
        await service.run()

    def _hear(self, event: Event) -> None:
        match event:
            case SessionLost():
                self.record("session lost")
            case LoopBlocked():
                self.record("loop blocked")
            case SettleRefused():
                self.record("settlement refused", event.job_id)
            case PartFailed():
                self.record(f"part failed {event.part}")

    async def _handler(self) -> None:
        chance = self.loop.chance
        lease = current().lease
        self.record("start", lease.job_id, lease.version)
        current().progress(0.5)
        await self.ports.clock.sleep(chance.choice([0.0, 0.05, 0.5, 2.5 * TTL]))
        if chance.random() < 0.2:
            raise RuntimeError("failed by chance")
        self.record("effect", lease.job_id, lease.version)

    # The story.

    async def run(self) -> None:
        hosts = [self.start_worker_host(), self.start_worker_host()]
        self.loop.on_host("keeper", Rescue(self.store, ports=self.ports, ttl=TTL, policy=self.policy).run())
        await self._produce_under_faults(hosts)
        self.faults.heal()
        deadline = self.loop.time() + _DRAIN_DEADLINE
        while self.loop.time() < deadline and not await self._drained():
            await self.ports.clock.sleep(0.5)

    async def _produce_under_faults(self, hosts: list[str]) -> None:
        chance = self.loop.chance
        for _ in range(25):
            await self._enqueue_one()
            await self.ports.clock.sleep(chance.choice([0.0, 0.05, 0.3]))
            dice = chance.random()
            if dice < 0.08:
                victim = hosts.pop(chance.randrange(len(hosts)))
                self.loop.kill(victim)
                self.record(f"kill {victim}")
                hosts.append(self.start_worker_host())
            elif dice < 0.2:
                victim = chance.choice(hosts)
                self.loop.pause(victim, chance.uniform(0.1, 4 * TTL))
                self.record(f"pause {victim}")
            elif dice < 0.24:
                self._stop_gracefully(hosts, chance.choice(["retire", "stop", "stop_now"]))
            elif dice < 0.3 and self.accepted:
                await self._cancel(chance.choice(sorted(self.accepted)))

    def _stop_gracefully(self, hosts: list[str], how: str) -> None:
        """As a deploy does: one host is told to stop, and another takes its place."""
        host = self.loop.chance.choice(hosts)
        if (service := self.services.get(host)) is not None:
            hosts.remove(host)
            self.loop.call_soon(getattr(service, how), context=self.loop.context_of(host))
            self.record(f"{how} {host}")
            hosts.append(self.start_worker_host())

    async def _enqueue_one(self) -> None:
        chance = self.loop.chance
        new = NewJob(
            id=self.ports.ids.job_id(),
            task="simulated",
            payload=b"{}",
            queue=_QUEUE,
            priority=chance.choice([0, 5]),
            delay=chance.choice([0, 0, 500_000]),
        )
        for _ in range(10):
            try:
                [inserted] = await self.store.insert([new])
            except StoreError:
                continue  # the same id again: it cannot become two jobs
            if inserted.status in (InsertStatus.CREATED, InsertStatus.EXISTING):
                self.accepted.add(new.id)
                self.record("accepted", new.id)
            return

    async def _cancel(self, job_id: JobId) -> None:
        try:
            [answer] = await self.store.request_cancel([job_id])
            self.record(f"cancel {answer.value}", job_id)
        except HoldfastError:
            pass

    async def _drained(self) -> bool:
        jobs = [await self.memory.get(job_id) for job_id in self.accepted]
        return all(job is not None and job.state in ENDED for job in jobs)

    # The check.

    async def violations(self) -> list[str]:
        found = []
        for job_id in sorted(self.accepted):
            job = await self.memory.get(job_id)
            if job is None:
                found.append(f"{job_id}: accepted, then gone")
            elif job.state not in ENDED:
                found.append(f"{job_id}: still {job.state} at the end")
            elif job.state is State.SUCCEEDED and not self._effects(job_id):
                found.append(f"{job_id}: succeeded without an effect")
        newest: dict[JobId, int] = {}
        started: set[tuple[JobId, int]] = set()
        ended: set[tuple[JobId, int]] = set()
        for happening in self.history:
            claim = (happening.job_id, happening.version)
            if happening.what == "claim":
                newest[happening.job_id] = happening.version
            elif happening.what == "start":
                if claim in started or happening.version > newest.get(happening.job_id, 0):
                    found.append(f"{happening.job_id}: version {happening.version} started twice, or without a claim")
                started.add(claim)
            elif happening.what.endswith(" applied"):
                if happening.version != newest.get(happening.job_id, 0):
                    found.append(
                        f"{happening.job_id}: {happening.what} with version {happening.version} although version "
                        f"{newest.get(happening.job_id, 0)} had been claimed"
                    )
                if claim in ended:
                    found.append(f"{happening.job_id}: version {happening.version} was settled twice")
                ended.add(claim)
        return found

    def _effects(self, job_id: JobId) -> int:
        return sum(happening.what == "effect" and happening.job_id == job_id for happening in self.history)


def simulate(seed: int) -> Report:
    """Run one seed from beginning to end."""
    world = _World(seed)
    violations: list[str] = []

    async def story() -> None:
        await world.run()
        violations.extend(await world.violations())

    run_simulated(world.loop, story)
    happenings = Counter(happening.what.split(" worker-")[0] for happening in world.history)
    happenings.update(world.faults.seen)
    return Report(
        seed=seed,
        violations=violations,
        fingerprint=world.loop.fingerprint,
        virtual_seconds=world.loop.time(),
        happenings=happenings,
        history=world.history,
    )
