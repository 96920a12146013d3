"""Field bugs about stores that go away, come back, or answer somebody else."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from holdfast import Holdfast, Steps, WorkerSettings, current
from holdfast.errors import StoreError
from holdfast.events import Event, PartFailed
from holdfast.job import NewJob, State
from holdfast.ports import SYSTEM
from holdfast.store import Store
from holdfast.stores import open_store
from tests.faults.engines import Database, RedisDatabase
from tests.faults.proxy import Proxy
from tests.field_bugs.places import MARIADB, POSTGRES, REDIS, MakePlace, Place, Played, on
from tests.servers import missing_server_policy
from tests.worker.programs import DEADLINE, eventually

SERVERS = (POSTGRES, MARIADB, REDIS)
IMPATIENT = 1.0
"""Seconds that a call to the store may take."""
ANYTHING = re.compile(b"")
ROUNDS = ("cut", "silent", "ended") * 2


# An idle worker whose connections are lost under it.


def lose_connections(place: Place) -> list[tuple[str, float]]:
    """How long it took after each loss until a job ran that was accepted after it."""
    done: list[int] = []
    took: list[tuple[str, float]] = []
    with _own_connections(place) as database, Proxy(database.server.port) as proxy:
        url = database.url(port=proxy.port, timeout=IMPATIENT)
        with Holdfast(database.url()) as producer, Holdfast(url) as app:

            @app.task
            async def note(number: int) -> None:
                done.append(number)

            with app.start_worker(WorkerSettings(concurrency=2, poll=1.0)):
                for number, loss in enumerate(ROUNDS):
                    if loss == "ended":
                        database.end_connections()
                    else:  # whichever speaks next: it is cut, or nobody ever hears of it again
                        proxy.lose_reply(ANYTHING, cut=loss == "cut")
                    lost_at = time.monotonic()
                    new = NewJob(id=SYSTEM.ids.job_id(), task=note.name, payload=b'{"number": %d}' % number)
                    eventually(lambda: _is_accepted(producer.store, new), "it is accepted")  # noqa: B023
                    eventually(lambda: number in done, f"work after {loss}, number {number}")  # noqa: B023
                    took.append((loss, time.monotonic() - lost_at))
    assert Counter(done) == Counter(range(len(ROUNDS)))
    return took


def _is_accepted(store: Store, new: NewJob) -> bool:
    """Whether the store says so. The producer's own connection may be one of those that were ended."""
    try:
        store.insert_blocking([new])
    except StoreError:
        return False
    return True


@contextmanager
def _own_connections(place: Place) -> Iterator[Database]:
    """A database whose connections are nobody else's. Redis has none of that kind, so it is a server there."""
    assert place.database is not None
    if place.engine == REDIS:
        with RedisDatabase.start() as server:
            yield RedisDatabase(server)
    else:
        yield place.database


@pytest.fixture(scope="module", autouse=True)
def resumed(places: MakePlace) -> Played[list[tuple[str, float]]]:
    """It takes its time while the tests run that stand before the one that asks for it."""
    return places.ask(SERVERS, lose_connections)


# Failing while the store is away.


def test_b13_a_job_that_fails_while_the_store_is_away_is_kept_and_retried() -> None:
    """Sidekiq (#4141): a job that failed during an outage of Redis could not be put on the retry list, and was gone.

    Here the claim stays where it is, and the worker keeps the failure and repeats it until the store takes it: Redis
    is killed while the handler runs, the handler fails, Redis comes back, and the retry succeeds with the failure in
    its history. A worker that dropped what it cannot tell would leave the job in flight.
    """
    with missing_server_policy():
        server = RedisDatabase.start({"appendfsync": "always"})
    begun, go_on, refused = threading.Event(), threading.Event(), threading.Event()

    def listen(event: Event) -> None:
        if isinstance(event, PartFailed) and event.part == "settler":
            refused.set()

    with server, Holdfast(RedisDatabase(server).url(timeout=IMPATIENT), on_event=listen) as app:

        @app.task(backoff=Steps((0.0,)))
        def fail_at_first() -> str:
            if current().attempt == 1:
                begun.set()
                go_on.wait(DEADLINE)
                raise ValueError("on purpose")
            return "at last"

        with app.start_worker(WorkerSettings(lease_ttl=2.0)):
            job = fail_at_first.enqueue()
            assert begun.wait(DEADLINE)
            server.kill()
            go_on.set()
            assert refused.wait(DEADLINE)
            server.start()
            eventually(lambda: job.refresh().state is State.SUCCEEDED, "the retry succeeds")
        assert job.result() == "at last"
        assert job.details is not None
        assert (job.details.attempt, job.details.failures) == (2, 1)
        assert [failure.message for failure in job.failures] == ["on purpose"]


# Whose answer is it?


@on(*SERVERS)
async def test_b22_a_call_that_is_cancelled_leaves_its_answer_to_nobody_else(place: Place) -> None:
    """redis-py (CVE-2023-28858, -28859): a command that was cancelled left its reply in the connection, and the next
    caller got it: somebody else's data.

    Here hundreds of calls are cancelled at any moment, while others ask for jobs of their own; whoever is answered
    gets what he asked for. (For Redis `tests/redis/test_wire.py` adds the control: a line that forgets who has left.)
    """
    chance = random.Random(22)
    jobs = [NewJob(id=SYSTEM.ids.job_id(), task="t", payload=b'{"n": %d}' % number) for number in range(50)]
    answered = cancelled = 0
    async with open_store(place.url, SYSTEM) as store:
        await store.insert(jobs)

        async def ask() -> None:
            nonlocal answered, cancelled
            for _ in range(40):
                wanted = chance.choice(jobs)
                call = asyncio.ensure_future(store.get(wanted.id))
                if chance.random() < 0.5:
                    await asyncio.sleep(chance.choice((0, 0, chance.random() / 200)))
                    call.cancel()
                try:
                    found = await call
                except asyncio.CancelledError:
                    cancelled += 1
                    continue
                assert found is not None
                assert (found.id, found.payload) == (wanted.id, wanted.payload)
                answered += 1

        await asyncio.gather(*(ask() for _ in range(10)))
        print(f"{place.engine}: {answered} answered, {cancelled} cancelled")
        assert answered >= 100
        assert cancelled >= 20


# What became of the idle worker.


@on(*SERVERS)
def test_b04_a_worker_goes_on_after_its_connections_were_lost(
    engine: str, resumed: Played[list[tuple[str, float]]]
) -> None:
    """Celery (#8030, #8091, #10205), BullMQ (#4384, #4151): after a reconnect the worker lived, and took no more jobs.

    Here a worker that waits for jobs loses connections in three ways: the one that speaks next is cut, or falls silent
    for ever (half-open), or all are ended by the server. After each it takes the next job by itself; the times are
    printed. A call without a deadline would wait for the silent one until the test gives up. (With whole outages, under
    load: `tests/faults/test_server_killed.py`.)
    """
    took = resumed[engine]
    print(f"{engine}: work went on after", ", ".join(f"{seconds:.2f} s ({loss})" for loss, seconds in took))
    assert len(took) == len(ROUNDS)
