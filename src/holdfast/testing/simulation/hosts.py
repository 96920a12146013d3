"""The hosts of a run: workers, keepers and producers; how they start, stop and die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from holdfast.app import Holdfast
from holdfast.config import JobSettings, QueueSettings, Settings, WorkerSettings
from holdfast.events import Event, SessionRescued
from holdfast.keepers.rescue import Rescue
from holdfast.keepers.retention import Retention
from holdfast.registry import Registry
from holdfast.store import Store
from holdfast.tasks import FollowUps
from holdfast.testing.history.events import KeeperReady, Stopped
from holdfast.testing.simulation.handlers import NEWEST_TASK, QUEUES
from holdfast.testing.simulation.loop import HOST
from holdfast.testing.simulation.processes import SimulatedProcesses
from holdfast.testing.simulation.producers import told
from holdfast.testing.simulation.run import Run
from holdfast.worker.service import WorkerService

_TIME_TO_RECOVER = 5.5
"""The longest deadline of a call, and the longest pause of the settler after a failed one."""
_SKEWS = (0.0, 3600.0, -3600.0)


class Hosts:
    """Who there is. A host that died, or was told to stop, is replaced."""

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
        store, self.noted = told(run.store(), run)
        self.app = Holdfast(store, settings=self._settings, on_event=self._hear, ports=run.ports)
        self._processes = SimulatedProcesses(run, self.app.tasks, self.app.handling)
        self._follow_ups = FollowUps(self.app.tasks, self.app._client, self._hear)
        self._started = 0
        self.services: dict[str, WorkerService] = {}
        """Of the workers that live and were not told to stop."""
        self._working: dict[str, asyncio.Task[None]] = {}
        self.leaving: dict[str, tuple[int, float] | None] = {}
        """Those that were told to, with what had harmed them by then. None: they have not got over it yet."""
        self._told_twice: set[str] = set()
        """Those that were told to stop, and then cancelled: which of the two comes first is a matter of chance."""
        self.keepers: list[str] = []
        self.producing: set[str] = set()
        self._harmed: dict[str, float] = {}
        """When each host was last harmed."""

    def workers(self) -> list[str]:
        """Those that live, told to stop or not."""
        return [*self.services, *self.leaving]

    # Starting.

    def _new_host(self, kind: str) -> str:
        run = self._run
        self._started += 1
        host = f"{kind}-{self._started}"
        run.clock.skew[host] = run.chance.choice(_SKEWS)
        run.clock.origin[host] = run.chance.choice([0.0, 1e6])
        return host

    def start_missing(self) -> None:
        """What watches processes on a real machine: workers and keepers that died are replaced."""
        run, plan = self._run, self._run.plan
        while len(self.services) < plan.workers:
            host = self._new_host("worker")
            context = run.loop.context_of(host)
            self.services[host] = context.run(self._new_worker)
            self._working[host] = run.loop.create_task(self._work(host, self.services[host]), context=context)
        while len(self.keepers) < plan.keeper_hosts:
            host = self._new_host("keeper")
            self.keepers.append(host)
            run.loop.on_host(host, self._keep())

    def start_producers(self, produce: Callable[[], Awaitable[None]]) -> None:
        """Each does that once."""

        async def do(host: str) -> None:
            await produce()
            self.producing.discard(host)

        for _ in range(self._run.plan.producers):
            host = self._new_host("producer")
            self.producing.add(host)
            self._run.loop.on_host(host, do(host))

    def _new_worker(self) -> WorkerService:
        """The real worker, whole, as `Holdfast.worker_service` makes it, but for the processes of isolated jobs."""
        run, app = self._run, self.app
        store = run.store()
        return WorkerService(
            store=store,
            registry=_without_newest(app.tasks) if run.chance.random() < run.plan.outdated else app.tasks,
            settings=self._settings.worker,
            handling=app.handling,
            follow=self._follow_ups.add,
            keepers=[self._rescue(store).run, self._retention(store).run],
            isolation=self._processes,
            ports=run.ports,
            listener=self._hear,
        )

    def _rescue(self, store: Store) -> Rescue:
        settings = self._settings.worker
        return Rescue(
            store,
            ports=self._run.ports,
            ttl=settings.lease_ttl,
            policy=settings.policy(),
            listener=self._hear,
            follow=self._follow_ups.add,
        )

    def _retention(self, store: Store) -> Retention:
        return Retention(store, ports=self._run.ports, listener=self._hear, every=self._run.plan.prune_every)

    # Living.

    async def _work(self, host: str, service: WorkerService) -> None:
        run = self._run
        if run.plan.keepers_in_workers:
            run.note(KeeperReady(at=run.loop.time(), host=host))
        await service.run()
        if host in self._told_twice:
            return
        if host not in self.leaving:
            self.services.pop(host, None)
            run.surprises.append(f"{host} ended, and nobody had asked it to")
        elif self.leaving.pop(host) == self._harm(host):
            run.note(Stopped(at=run.loop.time(), host=host, session_id=service.worker_id))

    async def _keep(self) -> None:
        run, store = self._run, self._run.store()
        run.note(KeeperReady(at=run.loop.time(), host=HOST.get()))
        run.loop.on_host(HOST.get(), self._retention(store).run())
        await self._rescue(store).run()

    def _hear(self, event: Event) -> None:
        """Listen. Once nothing harms it any more, and it has had time to recover, a living worker keeps its session."""
        run = self._run
        run.hear(event)
        if isinstance(event, SessionRescued) and run.healed_at is not None:
            living = {service.worker_id: host for host, service in self.services.items()}
            host = living.get(event.session_id)
            if host is not None and run.loop.time() > run.healed_at + self.time_to_recover():
                run.surprises.append(f"{host} lives, and its session {event.session_id} was closed by a keeper")

    def time_to_recover(self) -> float:
        """Until every heart beats again: a beat may hang until its deadline, and a keeper has seen it stand still."""
        return self._run.faults.deadline + 2 * self._run.plan.ttl

    # Ending.

    def harmed_until(self, host: str, until: float) -> None:
        """Something keeps the host from its work until then."""
        self._harmed[host] = until

    def _harm(self, host: str) -> tuple[int, float]:
        """What has harmed the host so far."""
        return self._run.faults.harm, self._harmed.get(host, 0.0)

    def _is_calm(self, host: str) -> bool:
        """Whether nothing has harmed it for so long that no call of it hangs, or waits to be tried again."""
        latest = max(self._run.faults.harmed_at, self._harmed.get(host, 0.0))
        return latest + _TIME_TO_RECOVER < self._run.loop.time()

    def crash(self, host: str) -> None:
        """A handler ends the process that it runs in: one of its own, or the whole worker."""
        if not self._processes.die(host):
            self.kill(host, "crash")

    def kill(self, host: str, how: str = "kill") -> None:
        """End the host in the middle of whatever it does."""
        self._run.loop.kill(host)
        self._run.fault(f"{how} {host.partition('-')[0]}", host)
        self.services.pop(host, None)
        self.leaving.pop(host, None)
        if host in self.keepers:
            self.keepers.remove(host)
        self.producing.discard(host)

    def cancel_run(self, host: str) -> None:
        """The worker ends without another word to the store. Its handlers belong to the loop, and go on."""
        self.services.pop(host, None)
        if host in self.leaving:
            del self.leaving[host]
            self._told_twice.add(host)
        self._run.loop.call_soon(self._working[host].cancel, context=self._run.loop.context_of(host))

    def stop(self, host: str, how: str) -> None:
        """As a deploy does: a worker is told to stop."""
        service = self.services.pop(host)
        self.leaving[host] = self._harm(host) if service.idle or self._is_calm(host) else None
        self._run.loop.call_soon(getattr(service, how), context=self._run.loop.context_of(host))


def _without_newest(tasks: Registry) -> Registry:
    """The tasks as a worker knows them that was not updated yet."""
    older = Registry()
    for spec in tasks:
        if spec.name != NEWEST_TASK:
            older.add(spec.function, spec.name, spec.options)
    return older
