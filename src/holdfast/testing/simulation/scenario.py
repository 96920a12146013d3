"""One run: two worker hosts and a keeper on one faulty store; kills, pauses, skewed clocks; then heal, drain, check.

The hosts speak to the store through its port, with the real state machine and the real rescue keeper. The history of
what they did is checked against the invariants: nothing accepted is lost, nothing stale takes effect.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from holdfast.errors import HoldfastError, SessionClosed, StoreError
from holdfast.failures import Failure
from holdfast.job import ENDED, Job, JobId, Lease, NewJob, State
from holdfast.keepers.rescue import Rescue
from holdfast.lifecycle import Applied, Failed, Move, Outcome, Released, Succeeded, settle
from holdfast.policy import FullJitter, RetryPolicy
from holdfast.ports import Ports
from holdfast.store import Claimed, ClaimRequest, InsertStatus, Session, Store
from holdfast.stores.memory import MemoryStore
from holdfast.testing.simulation.faulty import Faults, wrap
from holdfast.testing.simulation.loop import HOST, SimulatedLoop, run_simulated
from holdfast.testing.simulation.ports import SimulatedClock, StoreClock, simulated_ports

TTL = 1.0
_DRAIN_DEADLINE = 120.0
_QUEUE = "simulated"
_Known = dict[Lease, asyncio.Task[None]]


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

    def record(self, what: str, job_id: JobId = "", version: int = 0) -> None:
        self.history.append(Happening(self.loop.time(), HOST.get(), what, job_id, version))

    # A host that works.

    def start_worker_host(self) -> str:
        self.started_hosts += 1
        host = f"worker-{self.started_hosts}"
        clock = self.ports.clock
        assert isinstance(clock, SimulatedClock)  # noqa: S101
        clock.skew[host] = self.loop.chance.choice([0.0, 3600.0, -3600.0])
        self.loop.on_host(host, self._work_for_ever())
        return host

    async def _work_for_ever(self) -> None:
        while True:
            session_id = self.ports.ids.session_id()
            known: _Known = {}
            try:
                await self.store.open_session(Session(id=session_id))
                beating = asyncio.create_task(self._beat(session_id))
                try:
                    await self._claim_for_ever(session_id, known, beating)
                finally:
                    beating.cancel()
            except StoreError:
                await self.ports.clock.sleep(0.1)
            except SessionClosed:
                self.record("session lost")
            for running in known.values():
                running.cancel()

    async def _beat(self, session_id: str) -> None:
        while True:
            await self.ports.clock.sleep(TTL / 3)
            try:
                if not (await self.store.beat(session_id)).open:
                    return
            except StoreError:
                continue

    async def _claim_for_ever(self, session_id: str, known: _Known, beating: asyncio.Task[None]) -> None:
        request = ClaimRequest(session_id=session_id, queues=(_QUEUE,), limit=3)
        while not beating.done():
            for lease in [lease for lease, running in known.items() if running.done()]:
                del known[lease]
            if len(known) < 4:
                try:
                    claimed = await self.store.claim(request)
                except StoreError:
                    await self._release_unknown(session_id, known)
                else:
                    for job in claimed.jobs:
                        known[job.lease] = asyncio.create_task(self._run(job))
            await self.ports.clock.sleep(0.05)

    async def _release_unknown(self, session_id: str, known: _Known) -> None:
        """A claim's reply may have been lost: give back what the store says we hold and we never saw.

        Compared by lease, not by job: an earlier claim of the same job may still be waiting for its reply.
        """
        for job in await self.store.held(session_id):
            if job.lease not in known:
                await self._settle(job, Released())

    async def _run(self, job: Job) -> None:
        chance = self.loop.chance
        self.record("start", job.id, job.version)
        await self.ports.clock.sleep(chance.choice([0.0, 0.05, 0.5, 2.5 * TTL]))
        outcome: Outcome = Succeeded(b"1")
        if chance.random() < 0.2:
            outcome = Failed(Failure(self.ports.clock.now(), job.attempt + 1, "Simulated", "failed by chance"))
        else:
            self.record("effect", job.id, job.version)
        await self._settle(job, outcome)

    async def _settle(self, job: Job, outcome: Outcome) -> None:
        cancel_asked = False
        while True:
            move = settle(job, outcome, self.policy, self.ports.random, cancel_asked=cancel_asked)
            try:
                [answer] = await self.store.apply([move])
            except StoreError:
                await self.ports.clock.sleep(0.05)
                continue
            if answer is not Applied.CANCEL_ASKED:
                return
            cancel_asked = True

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
            elif dice < 0.25 and self.accepted:
                await self._cancel(chance.choice(sorted(self.accepted)))

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
        for happening in self.history:
            if happening.what == "claim":
                newest[happening.job_id] = happening.version
            elif happening.what.endswith(" applied") and happening.version != newest.get(happening.job_id, 0):
                found.append(
                    f"{happening.job_id}: {happening.what} with version {happening.version} although version "
                    f"{newest.get(happening.job_id, 0)} had been claimed"
                )
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
