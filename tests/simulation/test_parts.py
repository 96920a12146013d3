"""The parts of the simulation: a faulty store is a store; a loop kills, pauses and blocks; SQLite runs in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from holdfast.errors import OutcomeUnknown, StoreError, StoreUnavailable
from holdfast.job import NewJob
from holdfast.store import Store
from holdfast.stores.memory import MemoryStore
from holdfast.testing.simulation.faulty import Faults, wrap
from holdfast.testing.simulation.hosts import Hosts
from holdfast.testing.simulation.loop import SimulatedLoop, Stuck, run_simulated
from holdfast.testing.simulation.ports import simulated_ports
from holdfast.testing.simulation.run import Run
from holdfast.testing.simulation.sqlite import SimulatedFile, SteppedSqliteStore
from holdfast.testing.simulation.swarm import Engine

DEADLINE = 2.0


def in_simulation(story: Callable[[SimulatedLoop], Awaitable[None]]) -> SimulatedLoop:
    loop = SimulatedLoop(1)

    async def tell() -> None:
        await story(loop)

    run_simulated(loop, tell)
    return loop


def one_job(loop: SimulatedLoop) -> NewJob:
    return NewJob(id=simulated_ports(loop).ids.job_id(), task="any", payload=b"{}")


# The network.


@pytest.mark.parametrize(
    ("faults", "error", "waits", "done"),
    [
        (Faults(refused=1.0), StoreUnavailable, 0.0, False),
        (Faults(request_lost=1.0), OutcomeUnknown, DEADLINE, False),
        (Faults(reply_lost=1.0), OutcomeUnknown, 0.0, True),
        (Faults(reply_late=1.0), OutcomeUnknown, DEADLINE, True),
        (Faults(request_late=1.0), OutcomeUnknown, DEADLINE, False),
        (Faults(cut={"simulator": 100.0}), OutcomeUnknown, DEADLINE, False),
        (Faults(away_until=100.0), StoreError, None, False),
    ],
)
def test_a_caller_is_told_what_he_can_know(
    faults: Faults, error: type[Exception], waits: float | None, done: bool
) -> None:
    async def story(loop: SimulatedLoop) -> None:
        memory = MemoryStore()
        store = wrap(memory, faults, simulated_ports(loop), loop)
        job = one_job(loop)
        with pytest.raises(error):
            await store.insert([job])
        assert waits is None or loop.time() == waits
        assert (await memory.get(job.id) is not None) == done
        while faults.on_the_way:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert (await memory.get(job.id) is not None) == (done or bool(faults.request_late))

    in_simulation(story)


def test_a_restart_loses_the_replies_under_way() -> None:
    async def story(loop: SimulatedLoop) -> None:
        memory, faults = MemoryStore(), Faults(latency=1.0)
        store = wrap(memory, faults, simulated_ports(loop), loop)
        job = one_job(loop)
        asked = asyncio.ensure_future(store.insert([job]))
        while await memory.get(job.id) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        faults.restart(loop.time(), 0.0)
        with pytest.raises(OutcomeUnknown):
            await asked

    in_simulation(story)


def test_a_request_that_comes_twice_is_answered_once() -> None:
    async def story(loop: SimulatedLoop) -> None:
        beats: list[str] = []

        class Counting(MemoryStore):
            async def beat(self, session_id: str) -> Any:
                beats.append(session_id)
                return await super().beat(session_id)

        faults = Faults(request_twice=1.0)
        store = wrap(Counting(), faults, simulated_ports(loop), loop)
        await store.beat("nobody")
        assert len(beats) == 1
        while faults.on_the_way:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert len(beats) == 2

    in_simulation(story)


async def test_a_faulty_store_opens_and_closes_like_a_store() -> None:
    loop = SimulatedLoop(0)
    store = wrap(MemoryStore(), Faults(), simulated_ports(loop), loop)
    async with store as opened:
        assert opened is store
        assert await opened.counts() == []
    loop.finish()


# Hosts.


class Witness:
    """Looks at the clock every second."""

    def __init__(self, loop: SimulatedLoop, *hosts: str) -> None:
        self.seen: dict[str, list[float]] = {host: [] for host in hosts}
        self.ended: list[str] = []
        for host in hosts:
            loop.on_host(host, self._look(loop, host))

    async def _look(self, loop: SimulatedLoop, host: str) -> None:
        try:
            for _ in range(6):
                await asyncio.sleep(1.0)
                self.seen[host].append(loop.time())
        finally:
            self.ended.append(host)


def test_a_killed_host_does_nothing_any_more_and_sees_no_cancellation() -> None:
    async def story(loop: SimulatedLoop) -> None:
        witness = Witness(loop, "host", "host/heart", "host-2")
        await asyncio.sleep(2.5)
        loop.kill("host")
        await asyncio.sleep(10)
        assert witness.seen["host"] == witness.seen["host/heart"] == [1.0, 2.0]
        assert witness.ended == ["host-2"]

    in_simulation(story)


def test_a_paused_host_goes_on_later_and_a_blocked_one_has_parts_that_go_on() -> None:
    async def story(loop: SimulatedLoop) -> None:
        witness = Witness(loop, "host", "host/heart")
        await asyncio.sleep(1.5)
        loop.pause("host", 2.0)
        assert loop.anybody_paused()
        await asyncio.sleep(2.1)
        assert not loop.anybody_paused()
        assert witness.seen["host"] == witness.seen["host/heart"] == [1.0, 3.5]
        loop.block("host", 2.0)
        await asyncio.sleep(10)
        assert witness.seen["host"][2] == 5.6
        assert witness.seen["host/heart"][2] == 4.5

    in_simulation(story)


def test_a_call_to_the_other_thread_waits_while_that_one_is_blocked() -> None:
    async def story(loop: SimulatedLoop) -> None:
        called: list[float] = []

        async def heart() -> None:
            await asyncio.sleep(1.0)
            loop.call_soon_threadsafe(lambda: called.append(loop.time()))

        loop.context_of("host").run(loop.start_heart, heart())
        loop.block("host", 3.0)
        await asyncio.sleep(5.0)
        assert called == [3.0]

    in_simulation(story)


def test_errors_that_nobody_hears_of_are_noted() -> None:
    async def story(loop: SimulatedLoop) -> None:
        async def broken() -> None:
            raise RuntimeError("unheard")

        def broken_callback() -> None:
            raise RuntimeError("in a callback")

        loop.create_task(broken())
        loop.call_soon(broken_callback)
        await asyncio.sleep(1.0)

    loop = in_simulation(story)
    assert [True for surprise in loop.surprises if "in a callback" in surprise] == [True]
    assert [True for surprise in loop.surprises if "unheard" in surprise] == [True]


def test_a_run_in_which_nothing_can_happen_is_stuck() -> None:
    async def story(loop: SimulatedLoop) -> None:
        await loop.create_future()

    with pytest.raises(Stuck):
        in_simulation(story)


def test_no_thread_starts() -> None:
    async def story(loop: SimulatedLoop) -> None:
        spawner = simulated_ports(loop).spawner
        with pytest.raises(RuntimeError, match="inside the simulation"):
            spawner.thread(lambda: None, "any")
        with pytest.raises(RuntimeError, match="inside the simulation"):
            spawner.process(["any"], [])

    in_simulation(story)


@pytest.mark.parametrize("cancelled_in_time", [True, False])
def test_a_worker_that_was_told_to_stop_and_then_cancelled_ends_by_either(cancelled_in_time: bool) -> None:
    def stop_and_cancel(hosts: Hosts, host: str) -> None:
        hosts.stop(host, "stop")
        if not cancelled_in_time:
            hosts._working[host] = asyncio.ensure_future(asyncio.sleep(0))
        hosts.cancel_run(host)

    assert odd_ends(stop_and_cancel) == []


def test_a_worker_that_ends_though_nobody_had_asked_it_is_noted() -> None:
    noted = odd_ends(lambda hosts, host: hosts.services[host].stop())
    assert noted == ["worker-1 ended, and nobody had asked it to"]


def odd_ends(end: Callable[[Hosts, str], object]) -> list[str]:
    """What was odd about the end of the first worker of a run without faults."""
    run = Run(0, Engine.MEMORY)

    async def story() -> None:
        hosts = Hosts(run)
        run.faults.heal()
        hosts.start_missing()
        working = hosts._working["worker-1"]
        await asyncio.sleep(1.0)
        end(hosts, "worker-1")
        await asyncio.wait({working}, timeout=60.0)
        assert working.done()
        run.end()

    run_simulated(run.loop, story)
    return run.surprises


# SQLite.


def test_sqlite_answers_in_one_step_and_leaves_nothing_behind() -> None:
    file = SimulatedFile()
    assert file.path.exists()

    async def story(loop: SimulatedLoop) -> None:
        ports = simulated_ports(loop)
        first, second = SteppedSqliteStore(file, ports), SteppedSqliteStore(file, ports)
        beside: Store = second.beside()
        job = one_job(loop)
        steps = loop.steps
        await first.insert([job])
        found = await second.get(job.id)
        assert found is not None
        assert await beside.get(job.id) == found
        assert loop.steps == steps, "nobody else ran in between"

    in_simulation(story)
    file.close()
    assert not file.path.exists()
