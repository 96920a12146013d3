"""Claims that wait in a Redis server: what goes over the wire, what may get in the way, and workers that wait so."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from holdfast import Holdfast, WorkerSettings
from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.job import SessionId, State
from holdfast.patience import Patient, WaitingClaims
from holdfast.store import Claimed, Store
from holdfast.stores.redis import RedisStore, waiting
from holdfast.stores.redis.connections import Connections
from holdfast.stores.redis.tokens import Tokens
from holdfast.stores.redis.verbs import Share, Verbs
from holdfast.stores.redis.waiting import RedisWaitingClaims
from holdfast.stores.redis.wire import Line, ReplyError
from holdfast.testing.history.events import AnyEvent, Claim
from holdfast.testing.history.recording import recorded
from holdfast.testing.suite import Rig
from holdfast.testing.suite import waiting as promises
from holdfast.testing.suite.waiting import BLOCKED_WITHIN, SOON, begin, known_session, waiting_claims
from holdfast.worker.service import WorkerService
from tests.redis.conftest import NAMESPACE
from tests.redis.fake import FORWARD, FakeServer, error
from tests.redis.helpers import outside, store_at
from tests.servers import RedisServer, missing_server_policy

QUEUES = ("a", "b", "c")
Test = Callable[[Rig], Awaitable[None]]


# Several queues.


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 7])
async def test_the_limit_holds_over_all_queues(rig: Rig, limit: int) -> None:
    session = await known_session(rig, QUEUES)
    for queue in QUEUES:
        await rig.add_many(5, queue=queue)
    async with waiting_claims(rig.store, QUEUES) as claims:
        claimed = await asyncio.wait_for(begin(claims, session, limit, queues=QUEUES), SOON)
    assert 1 <= len(claimed.jobs) <= limit
    assert claimed.due_in == 0
    assert len(await rig.store.held(session)) == len(claimed.jobs)


async def test_without_shares_the_limit_would_not_hold(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy(self: Verbs, request: Any) -> list[Share]:
        known = [("5\t",)] * len(request.queues)
        return [
            Share(queue, lanes, self._claim_call(queue, request, request.limit, lanes, serve=True))
            for queue, lanes in zip(request.queues, known, strict=True)
        ]

    monkeypatch.setattr(Verbs, "shares", greedy)
    with pytest.raises(AssertionError):
        await test_the_limit_holds_over_all_queues(rig, 4)


@pytest.mark.parametrize("queue", QUEUES)
async def test_a_job_of_any_of_the_queues_comes(rig: Rig, queue: str) -> None:
    """Also of one that has no share in the limit: an ordinary claim follows."""
    session = await known_session(rig, QUEUES)
    async with rig.harness.second() as other, waiting_claims(rig.store, QUEUES) as claims:
        claim = begin(claims, session, 1, queues=QUEUES)
        await asyncio.sleep(BLOCKED_WITHIN)
        job_id = await rig.using(other).add(queue=queue)
        assert [job.id for job in (await asyncio.wait_for(claim, SOON)).jobs] == [job_id]


async def test_a_job_of_a_lane_that_nobody_knew_of_comes(rig: Rig) -> None:
    session = await known_session(rig)
    async with rig.harness.second() as other, waiting_claims(rig.store) as claims:
        claim = begin(claims, session)
        await asyncio.sleep(BLOCKED_WITHIN)
        job_id = await rig.using(other).add(priority=2, share="somebody")
        assert [job.id for job in (await asyncio.wait_for(claim, SOON)).jobs] == [job_id]


# What goes over the wire.


async def test_nothing_is_sent_between_the_wait_and_the_job(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    session = await known_session(rig)
    sent: list[bytes] = []
    send = Line.send

    def watched(self: Line, data: bytes, count: int, timeout: float) -> asyncio.Future[list[object]]:
        if b"{default}" in data:
            sent.append(data)
        return send(self, data, count, timeout)

    async with waiting_claims(rig.store) as claims, rig.harness.second() as other:
        producer = rig.using(other)
        for _ in range(2):  # it opens its connection, and the server hears of its scripts
            await producer.add()
            await asyncio.wait_for(begin(claims, session, 5), SOON)
        claim = begin(claims, session, 5)
        await asyncio.sleep(BLOCKED_WITHIN)
        monkeypatch.setattr(Line, "send", watched)
        await producer.add()
        assert len((await asyncio.wait_for(claim, SOON)).jobs) == 1
        await asyncio.sleep(0.1)
        monkeypatch.setattr(Line, "send", send)
    assert len(sent) == 1  # the insert


async def test_a_token_is_passed_on_if_jobs_are_left(rig: Rig, redis_server: RedisServer) -> None:
    session = await known_session(rig)
    async with waiting_claims(rig.store) as claims:
        await rig.add_many(3)
        await asyncio.wait_for(begin(claims, session, 2), SOON)
        assert outside(redis_server.url).llen(f"{NAMESPACE}:{{default}}:wake") == 1


async def test_others_hear_of_a_delayed_job_if_who_heard_of_it_is_busy(rig: Rig) -> None:
    one, two = await known_session(rig), await known_session(rig)
    async with rig.harness.second() as other, waiting_claims(rig.store) as first, waiting_claims(other) as second:
        claim = begin(first, one)
        await asyncio.sleep(BLOCKED_WITHIN)
        job_id = await rig.add(delay=800_000)
        assert (await asyncio.wait_for(claim, SOON)).jobs == ()  # now it is busy
        claim = begin(second, two)
        assert [job.id for job in (await asyncio.wait_for(claim, 2)).jobs] == [job_id]


async def test_a_history_hears_of_what_a_wait_has_brought(rig: Rig) -> None:
    """Otherwise jobs would start in it that nobody had claimed."""
    events: list[AnyEvent] = []
    session = await known_session(rig)
    async with waiting_claims(recorded(rig.store, events.append, time.monotonic, str)) as claims:
        claim = begin(claims, session)
        job_id = await rig.add()
        [job] = (await asyncio.wait_for(claim, SOON)).jobs
    noted = [event for event in events if isinstance(event, Claim)]
    assert [(event.job_id, event.version, event.session_id) for event in noted] == [(job_id, job.version, session)]


def test_a_cluster_has_no_call_that_waits_for_queues_of_different_slots() -> None:
    store = store_at("redis+cluster://127.0.0.1:1")
    assert store.waiting_claims(["a"]) is not None
    assert store.waiting_claims(["a", "b"]) is None
    assert store_at("redis://127.0.0.1:1").waiting_claims(["a", "b"]) is not None


def test_the_store_is_patient() -> None:
    assert isinstance(store_at("redis://127.0.0.1:1"), Patient)


# The promises of the suite notice when a guard is missing.


def _stays_connected(patch: pytest.MonkeyPatch) -> None:
    disconnect, close = RedisWaitingClaims._disconnect, RedisWaitingClaims.close

    async def close_for_good(self: RedisWaitingClaims) -> None:
        disconnect(self)
        await close(self)

    patch.setattr(RedisWaitingClaims, "_disconnect", lambda self: None)
    patch.setattr(RedisWaitingClaims, "close", close_for_good)


def _all_may_be_taken(patch: pytest.MonkeyPatch) -> None:
    shares = Verbs.shares
    patch.setattr(Verbs, "shares", lambda self, request: shares(self, replace(request, limit=300)))


def _refusals_are_empty(patch: pytest.MonkeyPatch) -> None:
    async def claim(self: RedisStore, request: Any) -> Any:
        return Claimed((), 0, None)

    patch.setattr(RedisStore, "claim", claim)


def _servers_end_waits_late(patch: pytest.MonkeyPatch) -> None:
    """And nobody brings about a token when a job is due."""

    async def never(self: object, seconds: float, queues: Sequence[str]) -> None:
        return

    patch.setattr(RedisWaitingClaims, "_offer_after", never)
    patch.setattr(Tokens, "taken", lambda self, queue: None)
    patch.setattr("holdfast.stores.redis.waiting.MICROSECONDS", 100_000)


@pytest.mark.parametrize(
    ("sabotage", "test"),
    [
        (_stays_connected, promises.test_a_waiting_claim_that_is_cancelled_takes_nothing_later),
        (_all_may_be_taken, promises.test_a_waiting_claim_takes_no_more_than_its_limit),
        (_refusals_are_empty, promises.test_a_waiting_claim_of_a_session_that_is_closed_meanwhile_is_refused),
        (_servers_end_waits_late, promises.test_a_waiting_claim_brings_a_delayed_job_in_time),
    ],
)
async def test_the_suite_notices(rig: Rig, sabotage: Callable[[pytest.MonkeyPatch], None], test: Test) -> None:
    with pytest.MonkeyPatch.context() as patch:
        sabotage(patch)
        with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
            await test(rig)


# What gets in the way.


@pytest.fixture
def own_server() -> Any:
    with missing_server_policy():
        server = RedisServer()
    with server:
        yield server


def cut_connections_that_wait(server: RedisServer) -> int:
    blocked = [line for line in server.ask("CLIENT", "LIST").splitlines() if "cmd=blpop" in line]
    for line in blocked:
        server.ask("CLIENT", "KILL", "ID", dict(word.partition("=")[::2] for word in line.split())["id"])
    return len(blocked)


async def test_a_connection_that_is_cut_leaves_the_outcome_unknown_and_the_next_wait_has_another(
    rig: Rig, redis_server: RedisServer
) -> None:
    session = await known_session(rig)
    async with waiting_claims(rig.store) as claims:
        claim = begin(claims, session)
        await asyncio.sleep(BLOCKED_WITHIN)
        assert cut_connections_that_wait(redis_server) == 1
        with pytest.raises(OutcomeUnknown):
            await asyncio.wait_for(claim, SOON)
        claim = begin(claims, session)
        await asyncio.sleep(BLOCKED_WITHIN)
        job_id = await rig.add()
        assert [job.id for job in (await asyncio.wait_for(claim, SOON)).jobs] == [job_id]


@pytest.mark.parametrize(("timeout", "given_up_within"), [(0.5, 2.0), (60.0, 5.0)])
async def test_a_server_that_does_not_answer_any_more_is_given_up(
    own_server: RedisServer, timeout: float, given_up_within: float
) -> None:
    """Sooner than other calls are: nobody asks for jobs meanwhile."""
    async with store_at(f"{own_server.url}?timeout={timeout}") as store, waiting_claims(store) as claims:
        claim = begin(claims, "session", seconds=0.5)
        await asyncio.sleep(BLOCKED_WITHIN)
        os.kill(own_server.pid, signal.SIGSTOP)
        began = time.monotonic()
        try:
            with pytest.raises(OutcomeUnknown):
                await asyncio.wait_for(claim, 2 * SOON)
            assert time.monotonic() - began < given_up_within
        finally:
            os.kill(own_server.pid, signal.SIGCONT)


async def test_a_connection_that_was_not_used_for_long_is_not_trusted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between may have forgotten it, and would tell neither side."""
    session = await known_session(rig)
    async with waiting_claims(rig.store) as claims:
        await asyncio.wait_for(begin(claims, session, seconds=0.01), SOON)
        assert isinstance(claims, RedisWaitingClaims)
        trusted = claims._line
        await asyncio.wait_for(begin(claims, session, seconds=0.01), SOON)
        assert claims._line is trusted
        monkeypatch.setattr(waiting, "_UNUSED", 0.0)
        await asyncio.wait_for(begin(claims, session, seconds=0.01), SOON)
        assert claims._line is not trusted


async def test_a_cancelled_claim_takes_nothing_though_a_child_has_a_copy_of_its_connection(rig: Rig) -> None:
    """As one has that a handler has forked: the server would see no end of the connection."""
    session = await known_session(rig)
    async with waiting_claims(rig.store) as claims:
        claim = begin(claims, session)
        await asyncio.sleep(BLOCKED_WITHIN)
        assert isinstance(claims, RedisWaitingClaims)
        assert claims._line is not None
        assert claims._line._transport is not None
        copy = os.dup(claims._line._transport.get_extra_info("socket").fileno())
        try:
            claim.cancel()
            with suppress(asyncio.CancelledError):
                await claim
            await asyncio.sleep(0.05)
            job_id = await rig.add()
            await asyncio.sleep(BLOCKED_WITHIN)
            assert await rig.state(job_id) is State.READY
        finally:
            os.close(copy)


async def test_without_a_server_nothing_is_claimed(own_server: RedisServer) -> None:
    store = store_at(f"{own_server.url}?timeout=0.5")
    async with store, waiting_claims(store) as claims:
        own_server.stop()
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(begin(claims, "session"), 10)


async def test_scripts_that_the_server_has_forgotten_are_sent_again(rig: Rig, redis_server: RedisServer) -> None:
    session = await known_session(rig)
    async with waiting_claims(rig.store) as claims:
        claim = begin(claims, session)
        await asyncio.sleep(BLOCKED_WITHIN)
        redis_server.ask("SCRIPT", "FLUSH")
        job_id = await rig.add()
        assert [job.id for job in (await asyncio.wait_for(claim, SOON)).jobs] == [job_id]


@asynccontextmanager
async def refused(said: str, redis_server: RedisServer) -> AsyncIterator[WaitingClaims]:
    def refuse(words: list[bytes]) -> Any:
        return error(said) if words[0] == b"BLPOP" else FORWARD

    with FakeServer(refuse, behind=redis_server.port) as fake:
        async with store_at(f"{fake.url}?namespace={NAMESPACE}") as store, waiting_claims(store) as claims:
            yield claims


async def asks_from_time_to_time(rig: Rig, claims: WaitingClaims, session: SessionId) -> None:
    """Less often each time, but once a second; in time for a delayed job; and often again when jobs have come."""
    began = time.monotonic()
    for _ in range(5):
        assert (await asyncio.wait_for(begin(claims, session, seconds=5), SOON)).jobs == ()
    assert 1 < time.monotonic() - began < 4
    delayed = await rig.add(delay=200_000)
    claim = begin(claims, session, due_in=200_000, seconds=5)
    await asyncio.sleep(0)
    assert [job.id for job in (await asyncio.wait_for(claim, 0.6)).jobs] == [delayed]
    began = time.monotonic()
    assert (await asyncio.wait_for(begin(claims, session, seconds=5), SOON)).jobs == ()
    assert time.monotonic() - began < 0.5


@pytest.mark.parametrize("said", ["NOPERM no BLPOP for you", "UNBLOCKED it has become a replica"])
async def test_where_nobody_may_wait_it_asks_from_time_to_time(rig: Rig, redis_server: RedisServer, said: str) -> None:
    session = await known_session(rig)
    async with refused(said, redis_server) as claims:
        await asks_from_time_to_time(rig, claims, session)


async def test_where_no_further_connection_is_to_be_had_it_asks_from_time_to_time(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server is full, or the password has changed: those that are connected go on."""

    async def full(self: Connections, key: bytes) -> Line:
        raise ReplyError("ERR max number of clients reached")

    session = await known_session(rig)
    monkeypatch.setattr(Connections, "line_apart", full)
    async with waiting_claims(rig.store) as claims:
        await asks_from_time_to_time(rig, claims, session)


# Workers.


@asynccontextmanager
async def working(store: Store, **settings: Any) -> AsyncIterator[tuple[Any, WorkerService, list[int]]]:
    """A worker that is idle, and its claim waits."""
    app = Holdfast(store)
    ran: list[int] = []

    @app.task(name="note")
    async def note(number: int, seconds: float = 0.0) -> None:
        ran.append(number)
        await asyncio.sleep(seconds)

    service = app.worker_service(WorkerSettings(**{"poll": 60.0, "keepers": False, "concurrency": 3, **settings}))
    task = asyncio.create_task(service.run())
    await until(lambda: waits(service))
    await asyncio.sleep(BLOCKED_WITHIN)
    try:
        yield note, service, ran
    finally:
        service.stop_now()
        with suppress(asyncio.CancelledError):
            await asyncio.wait_for(task, 20)


def waits(service: WorkerService) -> bool:
    return service._claimer._patience is not None


async def until(condition: Callable[[], object], seconds: float = SOON) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - others change it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def producer(rig: Rig) -> AsyncIterator[Any]:
    """The worker's task, in another process, as it seems."""
    async with rig.harness.second() as other, Holdfast(other) as app:

        @app.task(name="note")
        async def note(number: int, seconds: float = 0.0) -> None:
            raise NotImplementedError

        yield note


async def enqueue(rig: Rig, *arguments: Any) -> str:
    """A job for the worker, from there."""
    async with producer(rig) as note:
        job_id: str = (await note.aenqueue(*arguments)).id
        return job_id


async def test_jobs_come_to_a_worker_whose_other_slots_are_busy(rig: Rig) -> None:
    async with working(rig.store, concurrency=2) as (_, _, ran):
        await enqueue(rig, 1, 1.0)
        await until(lambda: ran == [1])
        began = time.monotonic()
        await enqueue(rig, 2, 0.0)
        await until(lambda: ran == [1, 2])
        await enqueue(rig, 3, 0.0)
        await until(lambda: ran == [1, 2, 3])
        assert time.monotonic() - began < 0.8


async def test_a_worker_waits_with_no_more_than_its_free_slots(rig: Rig) -> None:
    async with working(rig.store, concurrency=2) as (_, service, ran):
        for number in range(5):
            await enqueue(rig, number, 0.4)
        await until(lambda: len(ran) == 2)
        assert len(await rig.store.held(service.worker_id)) == 2
        await until(lambda: len(ran) == 5)


async def test_a_worker_whose_claim_waits_stops_at_once(rig: Rig) -> None:
    async with working(rig.store) as (_, service, _):
        began = time.monotonic()
        service.stop()
        await until(lambda: service._ended)
        assert time.monotonic() - began < 1
    assert [view.open for view in (await rig.store.sessions()).sessions] == [False]


async def test_a_worker_whose_claim_waits_stops_soon_though_its_server_stands_still(own_server: RedisServer) -> None:
    async with store_at(own_server.url) as store, working(store) as (_, service, _):
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            service.stop()
            await until(lambda: service._ended, 5)
            assert time.monotonic() - began < 3
        finally:
            os.kill(own_server.pid, signal.SIGCONT)


async def test_a_worker_that_looks_what_it_holds_stops_when_it_knows(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither claims once more nor waits for jobs."""
    async with working(rig.store) as (_, service, _):
        held, asked, answered = RedisStore.held, asyncio.Event(), asyncio.Event()

        async def slow(self: RedisStore, session_id: SessionId) -> Any:
            asked.set()
            await answered.wait()
            return await held(self, session_id)

        monkeypatch.setattr(RedisStore, "held", slow)
        service._claimer.reconcile()
        await asyncio.wait_for(asked.wait(), SOON)
        claims = service._claimer.answered
        service.stop()
        answered.set()
        await until(lambda: service._ended)
        assert service._claimer.answered == claims


async def test_a_job_that_comes_while_a_worker_stops_is_given_back_or_has_run(rig: Rig) -> None:
    for pause in (None, 0.0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001, 0.0015, 0.002, 0.02):
        async with working(rig.store) as (_, service, ran), producer(rig) as note:
            inserting = asyncio.ensure_future(note.aenqueue(1))
            if pause is not None:
                await asyncio.sleep(pause)
            service.stop()
            job_id = (await inserting).id
            await until(lambda: service._ended)
        job = await rig.get(job_id)
        assert job.state is (State.SUCCEEDED if ran else State.READY)
        assert not job.suspect
        await rig.store.request_cancel([job_id])


async def test_a_worker_goes_on_when_its_connection_was_cut(rig: Rig, redis_server: RedisServer) -> None:
    async with working(rig.store) as (_, service, ran):
        assert cut_connections_that_wait(redis_server) == 1
        await until(lambda: not waits(service))
        await enqueue(rig, 1)
        await until(lambda: ran == [1])


async def test_what_a_claim_took_whose_reply_was_lost_comes_back(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection is cut after the server has carried out the claim."""
    async with working(rig.store) as (_, _, ran):
        received = Line.data_received

        def cut(self: Line, data: bytes) -> None:
            if b"jobs" in data and b"wake" in data:
                monkeypatch.setattr(Line, "data_received", received)
                self._fail("cut")
            else:
                received(self, data)

        monkeypatch.setattr(Line, "data_received", cut)
        job_id = await enqueue(rig, 1)
        await until(lambda: ran == [1])
        assert Line.data_received is received
        await until_state(rig, job_id, State.SUCCEEDED)
        assert (await rig.get(job_id)).version == 2  # it was given back, and claimed once more


async def until_state(rig: Rig, job_id: str, state: State) -> None:
    async with asyncio.timeout(SOON):
        while await rig.state(job_id) is not state:  # noqa: ASYNC110 - others change it
            await asyncio.sleep(0.01)


async def test_a_worker_goes_on_when_its_server_was_restarted(own_server: RedisServer) -> None:
    """It comes back without its data."""
    url = f"{own_server.url}?timeout=1"
    async with store_at(url) as store, working(store) as (note, service, ran):
        own_server.stop()
        own_server.start()
        await until(lambda: not waits(service))
        await until(lambda: waits(service), 15)
        async with asyncio.timeout(10):
            await note.aenqueue(7)
        await until(lambda: ran == [7], 15)


async def test_a_worker_whose_session_is_closed_while_its_claim_waits_begins_another(rig: Rig) -> None:
    async with working(rig.store, lease_ttl=3.0) as (_, service, ran):
        before = service.worker_id
        async with rig.harness.second() as keeper:
            assert await keeper.close_session(before)
        await until(lambda: service.worker_id != before)  # its heart notices: no job has come
        await enqueue(rig, 1)
        await until(lambda: ran == [1])


async def test_a_worker_that_should_look_what_it_holds_does_not_wait_for_jobs(rig: Rig) -> None:
    async with working(rig.store) as (_, service, ran):
        job_id = await rig.add(task="note", payload=b"[[1], {}]", queue="elsewhere")
        [unheard] = await rig.claim(service.worker_id, queues=("elsewhere",))
        assert unheard.id == job_id
        service._claimer.reconcile()
        await until_state(rig, job_id, State.READY)
        await enqueue(rig, 1)
        await until(lambda: ran == [1])


async def test_jobs_that_come_while_the_event_loop_is_blocked_are_given_back(rig: Rig) -> None:
    """Also those that come when the others have been given back already."""
    job = rig.new(task="note")
    seen: list[State] = []

    async with rig.harness.second() as other, working(rig.store):

        def produce() -> None:
            time.sleep(3.0)
            other.insert_blocking([job])
            while len(seen) < 60:
                time.sleep(0.05)
                found = asyncio.run(other.get(job.id))
                seen.append(found.state)  # type: ignore[union-attr]

        producing = asyncio.get_running_loop().run_in_executor(None, produce)
        time.sleep(7.0)  # noqa: ASYNC251
        await producing
    assert State.IN_FLIGHT in seen
    assert State.READY in seen[seen.index(State.IN_FLIGHT) :]
