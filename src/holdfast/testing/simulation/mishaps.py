"""What befalls hosts, clocks and the store while a run suffers."""

from __future__ import annotations

from holdfast.testing.simulation.hosts import Hosts
from holdfast.testing.simulation.run import Run
from holdfast.testing.simulation.swarm import Mishap

_BUSY_VICTIMS = 0.7
_HINDRANCES = (Mishap.PAUSE, Mishap.BLOCK, Mishap.STILL_HEART, Mishap.CUT_OFF)


class Mishaps:
    """Lets things happen, and notes them."""

    def __init__(self, run: Run, hosts: Hosts) -> None:
        self._run = run
        self._hosts = hosts
        self.set_back = 0.0
        """By how many seconds the store's clock was set back, in all."""

    def befall(self, mishap: Mishap) -> None:
        """Let it happen to somebody, if there is somebody to whom it can."""
        run, hosts, chance, ttl = self._run, self._hosts, self._run.chance, self._run.plan.ttl
        workers = hosts.workers()
        match mishap:
            case Mishap.KILL if workers or hosts.keepers:
                hosts.kill(self._victim())
            case Mishap.KILL_PRODUCER if hosts.producing:
                hosts.kill(chance.choice(sorted(hosts.producing)))
            case Mishap.PAUSE | Mishap.BLOCK | Mishap.STILL_HEART | Mishap.CUT_OFF if workers or hosts.keepers:
                self._hinder(mishap, self._victim(), ttl * chance.choice([0.3, 2.5, 4.0]) * chance.uniform(0.8, 1.2))
            case Mishap.CANCEL_RUN if workers:
                host = chance.choice(workers)
                hosts.cancel_run(host)
                run.fault(mishap, host)
            case Mishap.STOP_TWICE if hosts.services:
                host = chance.choice(sorted(hosts.services))
                again = hosts.services[host].stop_now
                hosts.stop(host, "stop")
                run.loop.call_later(chance.uniform(0.0, 1.0), again, context=run.loop.context_of(host))
                run.fault(mishap, host)
            case Mishap.RETIRE | Mishap.STOP | Mishap.STOP_NOW if hosts.services:
                host = chance.choice(sorted(hosts.services))
                hosts.stop(host, mishap)
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
                self.set_back += max(0.0, -jump)
                run.fault(mishap, "store")

    def ambush(self, host: str) -> None:
        """A long handler is in the middle of its work: the worst moment for its worker to stand still."""
        run, plan, chance = self._run, self._run.plan, self._run.chance
        ways = [mishap for mishap in plan.mishaps if mishap in _HINDRANCES] or _HINDRANCES
        if run.healed_at is None and host in self._hosts.services and chance.random() < plan.ambush:
            self._hinder(chance.choice(ways), host, plan.ttl * chance.uniform(1.8, 3.2))

    def _victim(self) -> str:
        """Whom it shall befall: a keeper sometimes, mostly a worker that has something to lose."""
        chance, hosts = self._run.chance, self._hosts
        busy = [host for host, service in hosts.services.items() if not service.idle]
        if busy and chance.random() < _BUSY_VICTIMS:
            return chance.choice(busy)
        return chance.choice([*hosts.workers(), *hosts.keepers])

    def _hinder(self, mishap: Mishap, host: str, seconds: float) -> None:
        run = self._run
        until = run.loop.time() + seconds
        self._hosts.harmed_until(host, until)
        run.fault(mishap, host)
        match mishap:
            case Mishap.PAUSE:
                run.loop.pause(host, seconds)
            case Mishap.BLOCK:
                run.loop.block(host, seconds)
            case Mishap.STILL_HEART:
                run.loop.block(f"{host}/heart", seconds)
            case Mishap.CUT_OFF:
                run.faults.cut[host] = until
