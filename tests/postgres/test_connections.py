"""Connections: few, replaced when they die, bounded in time, never shared over a fork, never left behind."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from holdfast.errors import OutcomeUnknown, StoreUnavailable
from holdfast.job import Key
from holdfast.store import InsertStatus
from holdfast.stores.postgres import connections
from holdfast.stores.postgres.query import Query
from tests.postgres.helpers import (
    HOUR,
    Database,
    claim,
    eventually,
    finish,
    new_job,
    new_jobs,
    open_session,
    raw,
    wait_until,
)
from tests.postgres.named import Named, locked

# How many.


async def test_an_event_loop_uses_few_connections(named: Named) -> None:
    store = named.store
    answers = await asyncio.gather(
        *(store.insert([new_job()]) for _ in range(100)), *(store.counts() for _ in range(50))
    )
    assert len(answers) == 150
    assert 1 <= len(named.pids()) <= connections._MOST_PER_LOOP


def test_twenty_threads_use_few_connections(named: Named) -> None:
    together = threading.Barrier(20)
    most = 0

    def work(number: int) -> int:
        nonlocal most
        together.wait(10)
        for _ in range(10):
            assert named.store.insert_blocking([new_job()])[0].status is InsertStatus.CREATED
            if number == 0:
                most = max(most, len(named.pids()))
        return number

    with ThreadPoolExecutor(20) as pool:
        assert sorted(pool.map(work, range(20))) == list(range(20))
    assert 1 <= most <= connections._MOST_BLOCKING
    assert named._database.number_of("waiting") == 200


def test_loops_one_after_the_other_leave_nothing_behind(named: Named) -> None:
    """As in a program that calls `asyncio.run` again and again."""
    for _ in range(5):
        assert asyncio.run(named.store.insert(new_jobs(2)))
    gc.collect()
    wait_until(lambda: len(named.pids()) <= 1)


# The server ends them.


async def test_dead_idle_connections_are_noticed(named: Named) -> None:
    await asyncio.gather(*(named.store.insert([new_job()]) for _ in range(20)))
    named.store.insert_blocking([new_job()])
    assert len(named.pids()) >= 2
    named.terminate()
    await eventually(lambda: not named.pids())
    await asyncio.gather(*(named.store.insert([new_job()]) for _ in range(20)))
    assert named.store.insert_blocking([new_job()])[0].status is InsertStatus.CREATED
    assert await claim(named.store, await open_session(named.store), limit=100)


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
async def test_terminated_in_the_middle_of_an_insert(named: Named, database: Database, blocking: bool) -> None:
    jobs = new_jobs(3)
    with locked(database):
        call = asyncio.to_thread(named.store.insert_blocking, jobs) if blocking else named.store.insert(jobs)
        inserting = asyncio.ensure_future(call)
        await eventually(named.waiting)
        named.terminate(named.waiting())
        with pytest.raises(OutcomeUnknown, match="may or may not have happened") as unknown:
            await inserting
    assert list(unknown.value.ids) == [job.id for job in jobs]
    assert [answer.status for answer in await named.store.insert(jobs)] == [InsertStatus.CREATED] * 3


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
@pytest.mark.parametrize("written", [False, True])
async def test_a_fresh_insert_whose_reply_is_lost_is_repeated(
    named: Named, database: Database, blocking: bool, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is answered `existing` if and only if it was done, also when the job has ended meanwhile."""
    store, job = named.store, new_job()

    async def insert(*, fresh: bool) -> InsertStatus:
        if blocking:
            return (await asyncio.to_thread(store.insert_blocking, [job], fresh=fresh))[0].status
        return (await store.insert([job], fresh=fresh))[0].status

    if written:
        name = "_try_blocking" if blocking else "_try"
        tried = getattr(store._connections, name)

        def lost(*_: object) -> None:
            raise psycopg.OperationalError("the connection is lost")

        def unheard_blocking(query: Query, meanwhile: object) -> None:
            tried(query, meanwhile)
            lost()

        async def unheard(query: Query) -> None:
            await tried(query)
            lost()

        monkeypatch.setattr(store._connections, name, unheard_blocking if blocking else unheard)
        with pytest.raises(OutcomeUnknown) as unknown:
            await insert(fresh=True)
        monkeypatch.undo()
        await finish(store, await claim(store, await open_session(store)))
    else:
        with locked(database):
            inserting = asyncio.ensure_future(insert(fresh=True))
            await eventually(named.waiting)
            named.terminate(named.waiting())
            with pytest.raises(OutcomeUnknown) as unknown:
                await inserting
    assert list(unknown.value.ids) == [job.id]
    assert await insert(fresh=False) is (InsertStatus.EXISTING if written else InsertStatus.CREATED)
    assert database.value("SELECT count(*) FROM {ns}_jobs") == 1


async def test_terminated_in_the_middle_of_a_settlement(named: Named, database: Database) -> None:
    await named.store.insert(new_jobs(2))
    jobs = await claim(named.store, await open_session(named.store))
    with locked(database, "in_flight"):
        settling = asyncio.ensure_future(finish(named.store, jobs))
        await eventually(named.waiting)
        named.terminate(named.waiting())
        with pytest.raises(OutcomeUnknown) as unknown:
            await settling
    assert list(unknown.value.ids) == [job.id for job in jobs]
    assert await finish(named.store, jobs) == ["applied", "applied"]


async def test_terminated_in_the_middle_of_a_read(named: Named, database: Database) -> None:
    with locked(database):
        for read in (named.store.counts(), named.store.get(new_job().id)):
            reading = asyncio.ensure_future(read)
            await eventually(named.waiting)
            named.terminate(named.waiting())
            with pytest.raises(StoreUnavailable, match="terminating connection"):
                await reading
    assert await named.store.counts() == []


async def test_a_statement_that_an_operator_cancels(named: Named, database: Database) -> None:
    """The server says that nothing was written, and the connection is still good."""
    with locked(database):
        inserting = asyncio.ensure_future(named.store.insert([new_job()]))
        await eventually(named.waiting)
        [pid] = named.waiting()
        database.sql("SELECT pg_cancel_backend(%s)", pid)
        with pytest.raises(StoreUnavailable, match="canceling statement"):
            await inserting
    await named.store.insert([new_job()])
    assert pid in named.pids()


# Deadlines.


@pytest.mark.parametrize("blocking", [False, True], ids=["async", "blocking"])
async def test_a_lock_that_is_held_too_long(database: Database, blocking: bool) -> None:
    named = Named(database, timeout=0.4)
    jobs = new_jobs(2)
    with locked(database):
        before = time.monotonic()
        for _ in range(3):
            with pytest.raises(OutcomeUnknown) as unknown:
                await (asyncio.to_thread(named.store.insert_blocking, jobs) if blocking else named.store.insert(jobs))
            assert list(unknown.value.ids) == [job.id for job in jobs]
        with pytest.raises(StoreUnavailable):
            await named.store.counts()
        assert time.monotonic() - before < 4 * 0.4 + 2.5
        # They are thrown away, on both sides: nothing waits there for the lock.
        await eventually(lambda: named.waiting() == [] and len(named.pids()) <= 1)
    await asyncio.sleep(0.1)
    assert database.number_of("waiting") == 0
    assert named.store.insert_blocking(jobs)[0].status is InsertStatus.CREATED
    named.store.close()


async def test_opening_has_a_deadline_too(database: Database) -> None:
    """Not a migration, which may take as long as it needs: but to see that there is none to be made."""
    for create in (True, False):
        store = database.store(timeout=0.4, create=create)
        with locked(database, "schema"):
            before = time.monotonic()
            for call in (store.counts, store.examine):
                with pytest.raises(StoreUnavailable, match=r"cannot (open|examine)"):
                    await call()
            assert time.monotonic() - before < 4
        await store.counts()
        store.close()


async def test_a_full_house(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every connection is in use for longer than anybody wants to wait."""
    monkeypatch.setattr(connections, "_MOST_BLOCKING", 2)
    named = Named(database, timeout=0.5)
    with locked(database):
        calls = [asyncio.to_thread(named.store.insert_blocking, [new_job()]) for _ in range(5)]
        problems = await asyncio.gather(*calls, return_exceptions=True)
    assert {type(problem) for problem in problems} <= {OutcomeUnknown, StoreUnavailable}
    full = [problem for problem in problems if type(problem) is StoreUnavailable]
    assert all("all 2 blocking connections" in str(problem) for problem in full)
    assert len(full) >= 1
    named.store.close()


async def test_a_cancelled_call(named: Named, database: Database) -> None:
    store = named.store
    with locked(database):
        for _ in range(6):  # more often than there are connections
            inserting = asyncio.ensure_future(store.insert([new_job()]))
            await eventually(named.waiting)
            inserting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.wait_for(inserting, 2)
            await eventually(lambda: named.waiting() == [])
        # Also while it waits for a free connection.
        waiting = [asyncio.ensure_future(store.insert([new_job()])) for _ in range(6)]
        await eventually(lambda: len(named.waiting()) == connections._MOST_PER_LOOP)
        for task in waiting:
            task.cancel()
        assert len(await asyncio.gather(*waiting, return_exceptions=True)) == 6
        await eventually(lambda: named.waiting() == [])
    assert (await store.insert([new_job()]))[0].status is InsertStatus.CREATED
    assert database.number_of("waiting") == 1


# Others in the way.


async def test_a_deadlock_is_tried_again(database: Database) -> None:
    """Two who take the same keys in two orders: the server ends one of them, and nobody notices."""
    named = Named(database, options="&options=-cdeadlock_timeout%3D100ms")
    one, two = new_job(key=Key("one", "h", HOUR)), new_job(key=Key("two", "h", HOUR))
    with raw(database.url) as other:
        other.execute("BEGIN")
        take = "INSERT INTO {ns}_keys VALUES ('default', %s, 'h', gen_random_uuid(), %s)"
        other.execute(database.text(take), ("two", 2**60))
        inserting = asyncio.ensure_future(named.store.insert([one, two]))
        await eventually(named.waiting)
        [before] = named.waiting()
        await asyncio.to_thread(other.execute, database.text(take), ("one", 2**60))  # it survives, so the store did not
        other.execute("COMMIT")
    answers = await inserting
    assert [answer.status for answer in answers] == [InsertStatus.EXISTING] * 2
    assert before in named.pids()
    named.store.close()


def test_many_deadlocks_at_once(database: Database) -> None:
    named = Named(database, options="&options=-cdeadlock_timeout%3D20ms")

    def work(thread: int) -> None:
        for turn in range(12):
            keys = [Key(f"{turn}-{name}", "h", HOUR) for name in "abcdef"]
            jobs = [new_job(key=key) for key in (keys if thread % 2 else reversed(keys))]
            assert len(named.store.insert_blocking(jobs)) == 6

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert database.number_of("keys") == database.number_of("waiting") == 72
    named.store.close()


async def test_a_key_that_is_taken_meanwhile_is_looked_at_again(named: Named, database: Database) -> None:
    """A serialization failure of our own making."""
    with raw(database.url) as other:
        other.execute("BEGIN")
        take = "INSERT INTO {ns}_keys VALUES ('default', 'k', 'theirs', gen_random_uuid(), %s)"
        other.execute(database.text(take), (2**60,))
        inserting = asyncio.ensure_future(named.store.insert([new_job(key=Key("k", "ours", HOUR))]))
        await eventually(named.waiting)
        other.execute("COMMIT")
    assert (await inserting)[0].status is InsertStatus.KEY_CONFLICT


async def test_a_database_whose_transactions_are_serializable(database: Database) -> None:
    """It is not what we ask for, and it works: what cannot be serialized is tried again."""
    named = Named(database, options="&options=-cdefault_transaction_isolation%3Dserializable")
    store = named.store
    await store.insert(new_jobs(60))
    sessions = [await open_session(store) for _ in range(3)]

    async def work(session: str) -> int:
        done = 0
        while jobs := await claim(store, session, limit=5):
            assert set(await finish(store, jobs)) == {"applied"}
            done += len(jobs)
        return done

    assert sum(await asyncio.gather(*map(work, sessions))) == 60
    store.close()


async def test_a_call_that_others_always_get_in_the_way_of_ends(
    named: Named, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named.store.server, "timeout", 0.3)
    database.sql(
        """CREATE FUNCTION {ns}_refuse() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN RAISE EXCEPTION 'in the way' USING ERRCODE = 'serialization_failure'; END $$"""
    )
    database.sql("CREATE TRIGGER refuse BEFORE INSERT ON {ns}_waiting EXECUTE FUNCTION {ns}_refuse()")
    try:
        for call in (named.store.insert([new_job()]), asyncio.to_thread(named.store.insert_blocking, [new_job()])):
            before = time.monotonic()
            with pytest.raises(StoreUnavailable, match="in the way"):
                await call
            assert time.monotonic() - before < 2
    finally:
        database.sql("DROP FUNCTION {ns}_refuse CASCADE")


# Forks.


def in_a_fork(work: Callable[[], None]) -> int:
    """Run it in a fork of this process, as some servers do. The exit code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that other threads are running: they are the test's
        pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_gets_connections_of_its_own(named: Named) -> None:
    store = named.store
    store.insert_blocking([new_job()])
    loop = asyncio.new_event_loop()
    loop.run_until_complete(store.insert([new_job()]))
    mine = named.pids()
    assert len(mine) == 2

    def child() -> None:
        for _ in range(3):
            assert store.insert_blocking([new_job()])[0].status is InsertStatus.CREATED
        assert asyncio.run(store.insert([new_job()]))[0].status is InsertStatus.CREATED
        del loop_of_parent[:]
        gc.collect()

    loop_of_parent = [loop]
    assert in_a_fork(child) == 0
    assert in_a_fork(store.close) == 0
    store.insert_blocking([new_job()])
    loop.run_until_complete(store.insert([new_job()]))
    loop.close()
    assert set(mine) <= set(named.pids())
    assert named._database.number_of("waiting") == 8


def test_a_fork_in_the_middle_of_a_call(named: Named, database: Database) -> None:
    """Another thread is inside the store, and may hold any of its locks, when the process forks."""
    over = threading.Event()

    def busy() -> None:
        while not over.is_set():
            named.store.insert_blocking([new_job()])

    def child() -> None:
        named.store.insert_blocking([new_job(queue="forked")])

    threads = [threading.Thread(target=busy) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            assert in_a_fork(child) == 0
    finally:
        over.set()
        for thread in threads:
            thread.join(10)
    assert database.value("SELECT count(*) FROM {ns}_waiting WHERE queue = 'forked'") == 5


# The end.


async def test_closed_and_used_again(named: Named) -> None:
    for _ in range(3):
        await named.store.insert([new_job()])
        named.store.insert_blocking([new_job()])
        named.store.close()
        await eventually(lambda: not named.pids())
    async with named.store:
        await named.store.counts()
    await eventually(lambda: not named.pids())
    assert [counts.ready for counts in await named.store.counts()] == [6]


async def test_dropped_without_being_closed(database: Database) -> None:
    named = Named(database)
    await named.store.insert([new_job()])
    named.store.insert_blocking([new_job()])
    assert len(named.pids()) == 2
    del named.store
    gc.collect()
    await eventually(lambda: not named.pids())


async def test_a_store_beside_another_is_closed_by_itself(named: Named) -> None:
    beside = named.store.beside()
    await beside.insert([new_job()])
    await named.store.insert([new_job()])
    assert len(named.pids()) == 2
    await beside.__aexit__()
    await eventually(lambda: len(named.pids()) == 1)
    assert [counts.ready for counts in await named.store.counts()] == [2]
