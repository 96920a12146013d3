"""Others at the same time: deadlocks, keys and ids that two bring at once, claims against closing, storms."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.errors import SessionClosed, StoreUnavailable
from holdfast.job import Key
from holdfast.lifecycle import Failed, settle
from holdfast.policy import RetryPolicy, Steps
from holdfast.ports import SYSTEM
from holdfast.stores.mysql import MysqlStore, tending
from holdfast.stores.mysql import steps as steps_module
from holdfast.stores.mysql.faults import DEADLOCK, Fault
from holdfast.stores.mysql.pool import AsyncPooledLine
from holdfast.stores.mysql.sessions import Sessions
from holdfast.stores.mysql.tables import Tables
from holdfast.testing.suite.harness import BOOM
from tests.mysql.conftest import NAMESPACE
from tests.mysql.helpers import claim, connect, done, new_job, new_jobs, open_session, sql, store_at


class Faults:
    """Counts what the server refused."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: Counter[int] = Counter()
        send = AsyncPooledLine.send

        async def counting(line: AsyncPooledLine, statements: Sequence[str]) -> Any:
            try:
                return await send(line, statements)
            except Fault as fault:
                self.seen[fault.code] += 1
                raise

        monkeypatch.setattr(AsyncPooledLine, "send", counting)


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    return Faults(monkeypatch)


async def deadlock(store: MysqlStore, url: str) -> list[str]:
    """Make the server choose the settlement of two jobs as the victim of a deadlock. What `apply` answers at last."""
    await store.insert(new_jobs(2))
    await open_session(store)
    jobs = sorted(await claim(store), key=lambda job: job.id)
    with connect(url, autocommit=False) as connection, connection.cursor() as cursor:
        # Somebody else locks them the other way round, and has written much: the lighter one is the victim.
        cursor.execute(f"CREATE TABLE IF NOT EXISTS {NAMESPACE}_heavy (n INT) ENGINE = InnoDB")
        cursor.execute(f"INSERT INTO {NAMESPACE}_heavy SELECT 1 FROM information_schema.columns LIMIT 500")
        lock = f"SELECT id FROM {NAMESPACE}_in_flight WHERE id = %s FOR UPDATE"
        cursor.execute(lock, (jobs[1].id,))
        settling = asyncio.create_task(store.apply(done(jobs)))
        await asyncio.sleep(0.3)  # it has the first and waits for the second
        await asyncio.to_thread(cursor.execute, lock, (jobs[0].id,))
        connection.rollback()
    return [answer.value for answer in await settling]


async def test_the_victim_of_a_deadlock_runs_again(store: MysqlStore, url: str, faults: Faults) -> None:
    assert await deadlock(store, url) == ["applied", "applied"]
    assert faults.seen[DEADLOCK] >= 1


async def test_without_the_rerun_it_would_fail(store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps_module, "RERUN", frozenset())
    with pytest.raises(StoreUnavailable, match="Deadlock found"):
        await deadlock(store, url)


async def test_two_bring_the_same_key_at_once(store: MysqlStore, url: str, faults: Faults) -> None:
    async with store_at(url, NAMESPACE) as other:
        for number in range(15):
            key = Key(f"k{number}", "h", 60_000_000)
            one, two = await asyncio.gather(
                store.insert([new_job(key=key)]), other.insert([new_job(key=key), new_job(key=key)])
            )
            answers = [*one, *two]
            assert sorted(answer.status.value for answer in answers) == ["created", "existing", "existing"]
            assert len({answer.job_id for answer in answers}) == 1
    assert [count.ready for count in await store.counts()] == [15]


async def test_two_bring_the_same_id_at_once(store: MysqlStore, url: str) -> None:
    async with store_at(url, NAMESPACE) as other:
        for _ in range(15):
            job = new_job()
            one, two, three = await asyncio.gather(
                store.insert([job]), other.insert([job]), other.insert([new_job(), job])
            )
            statuses = [one[0].status.value, two[0].status.value, three[1].status.value]
            assert sorted(statuses) == ["created", "existing", "existing"]
    assert [count.ready for count in await store.counts()] == [30]


async def test_a_repeated_insert_never_makes_a_second_job(
    store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first insert commits and the job is claimed between the look of the second one and its insert."""
    await open_session(store)
    assert await insert_twice(store, url, monkeypatch) == ["existing"]
    assert [(count.ready, count.in_flight) for count in await store.counts()] == [(0, 1)]


async def test_without_the_second_look_there_would_be_two(
    store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await open_session(store)
    anywhere = Tables.anywhere

    def blind(tables: Tables, ids: Sequence[str], *places: str) -> str:
        return anywhere(tables, ids if "ready" in places else ["none"], *places)

    monkeypatch.setattr(Tables, "anywhere", blind)
    assert await insert_twice(store, url, monkeypatch) == ["created"]
    assert [(count.ready, count.in_flight) for count in await store.counts()] == [(1, 1)]


async def insert_twice(store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    jobs = new_jobs(1, key=Key("k", "h", 1))  # not by the short way
    send = AsyncPooledLine.send
    meddled = False

    async def meddling(line: AsyncPooledLine, statements: Sequence[str]) -> Any:
        nonlocal meddled
        if not meddled and any(f"INSERT INTO {NAMESPACE}_ready" in text for text in statements):
            meddled = True
            sql(url, f"INSERT INTO {NAMESPACE}_ready (id, task, payload) VALUES (%s, 't', '{{}}')", jobs[0].id)
            async with store_at(url, NAMESPACE) as other:
                assert len(await claim(other)) == 1
        return await send(line, statements)

    monkeypatch.setattr(AsyncPooledLine, "send", meddling)
    return [answer.status.value for answer in await store.insert(jobs)]


async def test_a_claim_and_a_close_cannot_miss_each_other(store: MysqlStore, url: str) -> None:
    """Whichever comes first: after the close nothing is claimed, and what was claimed before is found."""
    async with store_at(url, NAMESPACE) as other:
        for number in range(25):
            session = await open_session(store, f"s{number}")
            await store.insert(new_jobs(3))

            async def claiming(session: str = session) -> int:
                got = 0
                try:
                    while True:
                        got += len(await claim(other, session, limit=1))
                except SessionClosed:
                    return got

            async def closing(session: str = session) -> int:
                assert await store.close_session(session)
                return len(await store.lost(10, session_id=session))

            got, found = await asyncio.gather(claiming(), closing())
            assert got == found == len(await store.held(session))
            await store.request_cancel([job.id for job in await store.held(session)])


async def close_during_a_claim(store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """The session is closed while a claim is on its way. How many jobs the claim got, and how many the closer found."""
    await store.insert(new_jobs(3))
    await open_session(store)
    send = AsyncPooledLine.send
    closing: list[asyncio.Task[int]] = []

    async def close() -> int:
        async with store_at(url, NAMESPACE) as other:
            assert await other.close_session("s")
            return len(await other.lost(10))

    async def meddling(line: AsyncPooledLine, statements: Sequence[str]) -> Any:
        if not closing and any(text.startswith(f"INSERT INTO {NAMESPACE}_in_flight") for text in statements):
            closing.append(asyncio.create_task(close()))
            await asyncio.sleep(0.4)
        return await send(line, statements)

    with monkeypatch.context() as patch:
        patch.setattr(AsyncPooledLine, "send", meddling)
        got = len(await claim(store))
    return got, await closing[0]


async def test_a_close_waits_for_a_claim(store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert await close_during_a_claim(store, url, monkeypatch) == (3, 3)


async def test_without_the_lock_it_would_miss_the_claim(
    store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_open = Sessions.keep_open
    monkeypatch.setattr(Sessions, "keep_open", lambda *args: keep_open(*args).replace(" LOCK IN SHARE MODE", ""))
    assert await close_during_a_claim(store, url, monkeypatch) == (3, 0)


async def test_a_close_waits_for_a_settlement_and_beats_go_on(store: MysqlStore, url: str) -> None:
    await store.insert(new_jobs(1))
    await open_session(store)
    jobs = await claim(store)
    with connect(url, autocommit=False) as connection:
        assert store.apply_on(connection, done(jobs)) == ["applied"]
        before = (await store.beat("s")).open
        closing = asyncio.create_task(store.close_session("s", if_beat=1))
        await asyncio.sleep(0.3)
        assert not closing.done()
        assert before
        assert (await asyncio.wait_for(store.beat("s"), 1)).open  # it neither waits nor is lost
        connection.commit()
    assert await closing is False  # the beat came before it


async def test_a_storm(store: MysqlStore, url: str, faults: Faults) -> None:
    """Many claim, settle, retry, cancel and prune the same jobs: each job ends once, and nobody hears of a conflict."""
    clients = [store_at(url, NAMESPACE) for _ in range(4)]
    jobs = [new_job(share=str(number % 3), priority=number % 2, retention=0) for number in range(400)]
    await store.insert(jobs)
    applied: Counter[str] = Counter()
    policy = RetryPolicy(backoff=Steps((0.0,)))

    async def work(number: int) -> None:
        client = clients[number % len(clients)]
        session = await open_session(client, f"w{number}")
        idle = 0
        while idle < 3:
            claimed = await claim(client, session, limit=7)
            idle = 0 if claimed else idle + 1
            moves = done(claimed[1:])
            moves += [settle(job, Failed(BOOM), policy, SYSTEM.random) for job in claimed[:1]]
            answers = await client.apply(moves)
            if answers[-1:] == ["cancel_asked"]:
                moves.append(settle(claimed[0], Failed(BOOM), policy, SYSTEM.random, cancel_asked=True))
                answers += await client.apply(moves[-1:])
            for move, answer in zip(moves, answers, strict=True):
                if answer == "applied" and move.to != "ready":
                    applied[move.job_id] += 1
            await client.beat(session)

    async def meddle() -> None:
        for number in range(40):
            answers = await clients[0].request_cancel([job.id for job in jobs[number * 10 : number * 10 + 10]])
            for job, answer in zip(jobs[number * 10 : number * 10 + 10], answers, strict=True):
                if answer == "cancelled":
                    applied[job.id] += 1
            await clients[1].prune(50)

    await asyncio.gather(*(work(number) for number in range(8)), meddle())
    print(f"conflicts that the server reported: {dict(faults.seen)}")
    left = {count.queue: count for count in await store.counts()}
    assert all(count.ready == count.in_flight == 0 for count in left.values())
    assert applied == dict.fromkeys((job.id for job in jobs), 1)
    for client in clients:
        client.close()


async def test_the_totals_are_summed_up(store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settlements only add rows; retention makes few of them, also when there are more than it takes at once."""
    monkeypatch.setattr(tending, "_TOTALS_AT_ONCE", 10)
    await open_session(store)
    for number in range(33):
        await store.insert([new_job(queue=f"q{number % 2}")])
        assert await store.apply(done(await claim(store, queues=("q0", "q1")))) == ["applied"]
    before = await store.counts()
    assert await store.prune(100) == 0
    assert sql(url, f"SELECT COUNT(*) FROM {NAMESPACE}_totals") == [(33,)]  # few rows are left alone
    monkeypatch.setattr(tending, "_TOTALS_LEFT", 7)
    assert await store.prune(100) == 0
    assert sql(url, f"SELECT COUNT(*) FROM {NAMESPACE}_totals") == [(2,)]
    assert await store.counts() == before
    assert [(count.queue, count.succeeded) for count in before] == [("q0", 17), ("q1", 16)]


def test_blocking_calls_at_once(url: str, store: MysqlStore) -> None:
    jobs = new_jobs(40)
    answers: list[str] = []

    def insert(number: int) -> None:
        for job in jobs[number::4]:
            answers.append(store.insert_blocking([job])[0].status.value)
            answers.append(store.insert_blocking([job])[0].status.value)

    threads = [threading.Thread(target=insert, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert Counter(answers) == {"created": 40, "existing": 40}
