"""The connections: group commit, deadlines, errors, threads and event loops at once, closing, forking."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest

from holdfast.errors import (
    HoldfastError,
    InvalidOption,
    OutcomeUnknown,
    SessionClosed,
    StoreError,
    StoreUnavailable,
)
from holdfast.lifecycle import Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import Checkpoint, ClaimRequest, InsertStatus, JobQuery
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.writer import Busy, Writer, store_error
from tests.sqlite.helpers import (
    CHILDREN,
    claim,
    eventually,
    is_sound,
    live_ids,
    new_job,
    new_jobs,
    open_session,
    raw,
    run_sql,
    start_child,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest.fixture
def store(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, timeout=5)
    yield store
    store.close()


@pytest.fixture
def impatient(path: Path) -> Iterator[SqliteStore]:
    store = SqliteStore(path, timeout=0.4)
    yield store
    store.close()


def writer_of(store: SqliteStore) -> Writer:
    return store._open().writer


@contextlib.contextmanager
def others_write(path: Path) -> Iterator[sqlite3.Connection]:
    """Somebody else holds the write lock, as a long transaction of another program would."""
    connection = raw(path)
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
    finally:
        connection.close()


@contextlib.contextmanager
def counted_commits(store: SqliteStore) -> Iterator[list[str]]:
    commits: list[str] = []
    connection = writer_of(store)._connection
    connection.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    yield commits
    connection.set_trace_callback(None)


@contextlib.asynccontextmanager
async def one_batch(store: SqliteStore) -> Any:
    """Everything that is submitted inside goes into one batch of the writer thread."""
    writer = writer_of(store)
    with writer._lock:
        # The thread takes this first call alone, and waits for the lock with it.
        first = asyncio.ensure_future(writer.calls.submit(lambda db: None))
        await eventually(lambda: writer.calls._thread is not None and not writer.calls._waiting)
        yield
        await asyncio.sleep(0)  # what was made into tasks inside has been submitted after this
        await asyncio.sleep(0)
    with contextlib.suppress(StoreError):
        await first


# Group commit.


async def test_many_calls_share_a_transaction(store: SqliteStore, path: Path) -> None:
    with counted_commits(store) as commits:
        await asyncio.gather(*(store.insert([new_job()]) for _ in range(1000)))
    print(f"1000 concurrent inserts took {len(commits)} transactions")
    assert len(live_ids(path)) == 1000
    assert len(commits) <= 100


async def test_calls_one_after_the_other_have_a_transaction_each(store: SqliteStore) -> None:
    with counted_commits(store) as commits:
        for _ in range(5):
            await store.insert([new_job()])
    assert len(commits) == 5


async def test_a_batch_is_bounded(store: SqliteStore) -> None:
    with counted_commits(store) as commits:
        async with one_batch(store):
            calls = [asyncio.ensure_future(store.insert([new_job()])) for _ in range(600)]
        await asyncio.gather(*calls)
    assert len(commits) == 1 + 3  # 256 at once


async def test_a_failing_call_harms_no_other_and_leaves_no_trace(store: SqliteStore, path: Path) -> None:
    ids = [job.id for job in new_jobs(3)]

    def breaks_after_writing(db: sqlite3.Connection) -> None:
        store._verbs.insert(db, [new_job(id=ids[0])], 0, {})
        db.execute("INSERT INTO no_such_table VALUES (1)")

    def raises_after_writing(db: sqlite3.Connection) -> None:
        store._verbs.insert(db, [new_job(id=ids[1])], 0, {})
        raise InvalidOption("mine")

    def has_a_bug(db: sqlite3.Connection) -> None:
        store._verbs.insert(db, [new_job(id=ids[2])], 0, {})
        raise ZeroDivisionError

    jobs = new_jobs(3)
    submit = writer_of(store).calls.submit
    with counted_commits(store) as commits:
        async with one_batch(store):
            tasks: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(call)
                for call in (
                    store.insert([jobs[0]]),
                    submit(breaks_after_writing),
                    store.insert([jobs[1]]),
                    submit(raises_after_writing),
                    submit(has_a_bug),
                    store.claim(ClaimRequest(session_id="unknown", queues=("default",), limit=1)),
                    store.insert([new_job()], checkpoint=Checkpoint("default", "cursor", "not this", "new")),
                    store.insert([jobs[2]]),
                )
            ]
        answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert len(commits) == 2  # `one_batch` and ours
    assert [type(answer).__name__ for answer in answers] == [
        "list",
        "StoreUnavailable",
        "list",
        "InvalidOption",
        "StoreUnavailable",
        "SessionClosed",
        "CheckpointConflict",
        "list",
    ]
    assert live_ids(path) == [job.id for job in jobs]


# Deadlines.


async def test_a_write_waits_no_longer_than_its_deadline(impatient: SqliteStore, path: Path) -> None:
    session = await open_session(impatient)
    refused = new_jobs(3)
    with others_write(path):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"held the write lock .* for 0.4 s .*nothing was written"):
            await impatient.insert([refused[0]])
        assert 0.35 < time.monotonic() - began < 1.5
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="nothing was written"):
            await asyncio.to_thread(impatient.insert_blocking, [refused[1]])
        assert 0.35 < time.monotonic() - began < 1.5
        with pytest.raises(StoreUnavailable):
            await impatient.beat(session)
    assert live_ids(path) == []
    kept = new_job()
    await impatient.insert([kept])
    impatient.insert_blocking([refused[2]])
    assert live_ids(path) == [kept.id, refused[2].id]
    assert (await impatient.beat(session)).open


async def test_a_write_goes_on_when_the_lock_is_released(store: SqliteStore, path: Path) -> None:
    store._open()
    job, other = new_jobs(2)
    with others_write(path):
        tasks = [
            asyncio.ensure_future(store.insert([job])),
            asyncio.ensure_future(asyncio.to_thread(store.insert_blocking, [other])),
        ]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in tasks)
    began = time.monotonic()
    await asyncio.gather(*tasks)
    assert time.monotonic() - began < 0.5
    assert sorted(live_ids(path)) == sorted([job.id, other.id])


async def test_only_those_that_waited_long_enough_are_refused(impatient: SqliteStore, path: Path) -> None:
    impatient._open()
    with others_write(path):
        stuck = asyncio.ensure_future(impatient.insert([new_job()]))
        await asyncio.sleep(0.02)
        early = asyncio.ensure_future(impatient.insert([new_job()]))
        await asyncio.sleep(0.3)
        late_job = new_job()
        late = asyncio.ensure_future(impatient.insert([late_job]))  # in one batch with `early`
        for refused in (stuck, early):
            with pytest.raises(StoreUnavailable):
                await refused
        assert not late.done()
    await late
    assert live_ids(path) == [late_job.id]


async def test_waiting_for_others_keeps_no_thread_from_its_own_deadline(impatient: SqliteStore, path: Path) -> None:
    impatient._open()
    with others_write(path):
        began = time.monotonic()
        answers = await asyncio.gather(
            *(asyncio.to_thread(impatient.insert_blocking, [new_job()]) for _ in range(4)),
            *(impatient.insert([new_job()]) for _ in range(4)),
            return_exceptions=True,
        )
    assert all(isinstance(answer, StoreUnavailable) for answer in answers), answers
    assert time.monotonic() - began < 1.5


async def test_a_reader_does_not_wait_for_a_writer(store: SqliteStore, path: Path) -> None:
    [job, hidden] = new_jobs(2)
    await store.insert([job])
    with others_write(path) as other:
        other.execute("INSERT INTO holdfast_ready (id, task, payload) VALUES (?, 't', '{}')", (hidden.id,))
        began = time.monotonic()
        assert (await store.get(job.id)) is not None
        assert (await store.get(hidden.id)) is None
        assert [found.id for found in (await store.find(JobQuery())).jobs] == [job.id]
        assert [count.ready for count in await store.counts()] == [1]
        assert await store.lost(10) == []
        # Another process that only looks can even open the file.
        newcomer = SqliteStore(path, timeout=1)
        assert [count.ready for count in await newcomer.counts()] == [1]
        newcomer.close()
        assert time.monotonic() - began < 0.5


def hold_write_lock(path: Path, locked: Any, release: Any) -> None:
    with others_write(path):
        locked.set()
        release.wait(30)


async def test_a_reader_works_while_another_process_holds_the_lock(store: SqliteStore, path: Path) -> None:
    await store.insert(new_jobs(3))
    locked, release = CHILDREN.Event(), CHILDREN.Event()
    child = start_child(hold_write_lock, path, locked, release)
    try:
        assert await asyncio.to_thread(locked.wait, 30)
        waiting = asyncio.ensure_future(store.insert([new_job()]))
        for _ in range(20):
            assert len((await store.find(JobQuery())).jobs) == 3
            await asyncio.sleep(0.01)
        assert not waiting.done()
    finally:
        release.set()
    await waiting
    child.join(10)
    assert len((await store.find(JobQuery())).jobs) == 4


COUNT_FOR_EVER = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


async def test_a_long_read_is_stopped_at_its_deadline(impatient: SqliteStore) -> None:
    await impatient.insert([new_job()])
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="took longer than its deadline; ask for less"):
        await impatient._read(lambda db: db.execute(COUNT_FOR_EVER).fetchone())
    assert 0.35 < time.monotonic() - began < 1.5
    assert [count.ready for count in await impatient.counts()] == [1]


async def test_a_long_read_holds_up_no_write(impatient: SqliteStore) -> None:
    impatient._open()
    reading = asyncio.ensure_future(impatient._read(lambda db: db.execute(COUNT_FOR_EVER).fetchone()))
    await asyncio.sleep(0.05)
    await impatient.insert([new_job()])
    assert not reading.done()
    with pytest.raises(StoreUnavailable):
        await reading


async def test_a_disk_that_never_answers_is_given_up(
    path: Path, monkeypatch: pytest.MonkeyPatch, store: SqliteStore
) -> None:
    monkeypatch.setattr("holdfast.stores.sqlite.calls._REPLY_GRACE", 0.2)
    slow = SqliteStore(path, timeout=0.2)
    disk = threading.Event()
    job = new_job()

    def hang(db: sqlite3.Connection) -> None:
        disk.wait(30)

    hanging = asyncio.ensure_future(writer_of(slow).calls.submit(hang))
    await asyncio.sleep(0.05)
    with pytest.raises(OutcomeUnknown, match="has not answered") as unknown:
        await slow.insert([job])
    assert list(unknown.value.ids) == [job.id]
    with pytest.raises(OutcomeUnknown):
        await hanging
    disk.set()
    # It was written after all, or refused; repeating the call is safe in either case.
    await slow.insert([job])
    assert live_ids(path) == [job.id]
    slow.close()


# Threads and event loops.


def test_threads_and_event_loops_at_once(store: SqliteStore, path: Path) -> None:
    accepted: list[str] = []

    def block() -> None:
        for _ in range(40):
            [inserted] = store.insert_blocking([new_job()])
            accepted.append(inserted.job_id)

    async def insert_some() -> None:
        for _ in range(10):
            answers = await asyncio.gather(*(store.insert(new_jobs(2)) for _ in range(10)))
            accepted.extend(inserted.job_id for answer in answers for inserted in answer)
            assert (await store.get(accepted[-1])) is not None

    threads = [threading.Thread(target=block) for _ in range(6)]
    threads += [threading.Thread(target=lambda: asyncio.run(insert_some())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(accepted) == 6 * 40 + 3 * 200
    assert sorted(live_ids(path)) == sorted(accepted)


async def test_a_cancelled_caller_breaks_no_other(store: SqliteStore, path: Path) -> None:
    jobs = new_jobs(40)
    async with one_batch(store):
        tasks = [asyncio.ensure_future(store.insert([job])) for job in jobs]
        await asyncio.sleep(0)
        for task in tasks[::2]:
            task.cancel()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert all(isinstance(answer, list) for answer in answers[1::2])
    # Nobody had begun with those that were cancelled, so they were not even tried.
    assert live_ids(path) == [job.id for job in jobs[1::2]]


async def test_callers_may_be_cancelled_at_any_moment(store: SqliteStore, path: Path) -> None:
    accepted: set[str] = set()

    async def insert(job_id: str) -> None:
        await store.insert([new_job(id=job_id)])
        accepted.add(job_id)

    ids = [new_job().id for _ in range(400)]
    tasks = [asyncio.ensure_future(insert(job_id)) for job_id in ids]
    for task in random.sample(tasks, 200):
        await asyncio.sleep(random.random() * 0.0005)
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await store.insert([new_job()])
    stored = live_ids(path)
    assert len(accepted) >= 200
    assert accepted <= set(stored)
    assert len(stored) == len(set(stored))


async def test_an_event_loop_that_is_gone_harms_nobody(store: SqliteStore, path: Path) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    def leave_in_the_middle() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(store.insert([new_job()]))
        loop.run_until_complete(asyncio.sleep(0))
        task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()
        loops.append(loop)

    async with one_batch(store):
        await asyncio.to_thread(leave_in_the_middle)
        task = asyncio.ensure_future(store.insert([new_job()]))
    await task
    assert loops[0].is_closed()
    assert len(live_ids(path)) <= 2


class Interrupted(Exception):
    pass


def test_a_signal_handler_may_raise_anywhere(path: Path) -> None:
    """Ctrl-C, or a time limit built on SIGALRM, must not leave a transaction open that keeps everybody else out."""
    store = SqliteStore(path, timeout=5)
    store._open()

    def interrupt(number: int, frame: FrameType | None) -> None:
        if frame and "stores/sqlite" in frame.f_code.co_filename:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    accepted, interrupted = [], 0
    try:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            job = new_job()
            signal.setitimer(signal.ITIMER_REAL, random.uniform(0.00001, 0.004))
            try:
                store.insert_blocking([job])
                accepted.append(job.id)
            except Interrupted:
                interrupted += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            run_sql(path, "BEGIN IMMEDIATE")  # nobody is in the way
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    print(f"{len(accepted)} accepted, {interrupted} interrupted")
    assert interrupted > 10
    store.insert_blocking([new_job()])
    store.close()
    assert set(accepted) <= set(live_ids(path))


# Closing.


async def test_closing_serves_or_refuses_what_waits(store: SqliteStore, path: Path) -> None:
    store._open()
    tasks = [asyncio.ensure_future(store.insert([new_job()])) for _ in range(300)]
    tasks += [asyncio.ensure_future(cast(Any, store.counts())) for _ in range(10)]
    await asyncio.sleep(0.001)
    await asyncio.to_thread(store.close)
    answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert all(isinstance(answer, list | StoreUnavailable) for answer in answers), answers
    served = [answer for answer in answers[:300] if isinstance(answer, list)]
    assert len(live_ids(path)) == len(served)


async def test_closing_while_others_hold_the_lock(impatient: SqliteStore, path: Path) -> None:
    impatient._open()
    with others_write(path):
        tasks = [asyncio.ensure_future(impatient.insert([new_job()])) for _ in range(5)]
        await asyncio.sleep(0.05)
        began = time.monotonic()
        await asyncio.to_thread(impatient.close)
        assert time.monotonic() - began < 1.5
        answers = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers), answers
    assert live_ids(path) == []


async def test_use_after_close_opens_again(store: SqliteStore, path: Path) -> None:
    for _ in range(3):
        await store.insert([new_job()])
        store.insert_blocking([new_job()])
        assert await store.counts()
        store.close()
        store.close()
        assert not os.path.exists(f"{path}-wal")  # noqa: ASYNC240  nobody has it open
    assert len(live_ids(path)) == 6


def test_closing_while_threads_write(store: SqliteStore, path: Path) -> None:
    accepted: list[str] = []
    refused: list[Exception] = []

    def insert() -> None:
        for _ in range(60):
            job = new_job()
            try:
                store.insert_blocking([job])
                accepted.append(job.id)
            except HoldfastError as error:
                refused.append(error)

    threads = [threading.Thread(target=insert) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        store.close()
        time.sleep(0.003)
    for thread in threads:
        thread.join(10)
    assert len(accepted) + len(refused) == 240
    assert all(isinstance(error, StoreUnavailable) for error in refused), refused
    assert sorted(live_ids(path)) == sorted(accepted)


async def test_no_thread_or_descriptor_is_left_behind(path: Path) -> None:
    async def use() -> None:
        async with SqliteStore(path, timeout=1) as store:
            await store.insert([new_job()])
            await store.counts()
        with pytest.raises(StoreError):
            SqliteStore(path.parent).insert_blocking([new_job()])

    await use()
    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        await use()
    gc.collect()
    await eventually(lambda: threading.active_count() <= threads)  # the one that closed may be about to end
    assert len(os.listdir("/proc/self/fd")) <= descriptors


# Forking. On Python 3.12 and later a fork beside threads warns, and still is what servers that preload do.

forks = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_child(work: Callable[[], object]) -> int:
    """Fork, do the work in the child, and give back the child's id. The child's exit status says how it went."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)
            work()
            os._exit(0)
        except BaseException as error:
            os.write(2, f"in the forked child: {error!r}\n".encode())
        finally:
            os._exit(1)
    return pid


def succeeded(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@forks
def test_a_forked_child_makes_its_own_connections(store: SqliteStore, path: Path) -> None:
    store.insert_blocking([new_job()])
    asyncio.run(cast(Any, store.counts()))

    def work() -> None:
        store.insert_blocking([new_job()])
        asyncio.run(cast(Any, store.insert([new_job()])))
        assert len(asyncio.run(cast(Any, store.find(JobQuery()))).jobs) >= 3
        assert succeeded(in_child(lambda: store.insert_blocking([new_job()])))
        store.insert_blocking([new_job()])
        store.close()

    children = [in_child(work) for _ in range(3)]
    for _ in range(10):
        store.insert_blocking([new_job()])
    assert list(map(succeeded, children)) == [True] * 3
    store.insert_blocking([new_job()])
    assert len(live_ids(path)) == 1 + 3 * 4 + 10 + 1
    assert is_sound(path)


@forks
def test_a_child_goes_on_when_its_parent_closes_the_file(store: SqliteStore, path: Path) -> None:
    """SQLite believes that a child holds its parent's locks. Then whoever closes last deletes the log under it."""
    store.insert_blocking([new_job()])
    [child_ready, say_ready], [parent_done, say_done] = os.pipe(), os.pipe()

    def work() -> None:
        store.insert_blocking([new_job()])
        os.write(say_ready, b"x")
        os.read(parent_done, 1)
        assert Path(f"{path}-wal").exists()
        store.insert_blocking([new_job()])

    child = in_child(work)
    os.read(child_ready, 1)
    store.close()
    run_sql(path, "SELECT 1 FROM holdfast_live")  # a visitor comes and goes
    os.write(say_done, b"x")
    assert succeeded(child)
    assert len(live_ids(path)) == 3
    for descriptor in (child_ready, say_ready, parent_done, say_done):
        os.close(descriptor)


@forks
def test_forking_in_the_middle_of_writes(store: SqliteStore, path: Path) -> None:
    """A child that inherits the memory of a half-done transaction would find the file locked for ever."""
    stop = threading.Event()
    written: list[str] = []

    def keep_writing() -> None:
        while not stop.is_set():
            [inserted] = store.insert_blocking([new_job()])
            written.append(inserted.job_id)

    async def keep_reading() -> None:
        while not stop.is_set():
            await store.counts()

    threads = [threading.Thread(target=keep_writing), threading.Thread(target=lambda: asyncio.run(keep_reading()))]
    for thread in threads:
        thread.start()
    ids = [new_job().id for _ in range(10)]
    for job_id in ids:
        assert succeeded(in_child(lambda job_id=job_id: store.insert_blocking([new_job(id=job_id)])))  # type: ignore[misc]
    stop.set()
    for thread in threads:
        thread.join(10)
    assert len(written) > 10
    assert sorted(live_ids(path)) == sorted(written + ids)
    assert is_sound(path)


@forks
async def test_forking_while_others_hold_the_lock(store: SqliteStore, path: Path) -> None:
    store._open()
    locked, release = CHILDREN.Event(), CHILDREN.Event()
    holder = start_child(hold_write_lock, path, locked, release)
    assert await asyncio.to_thread(locked.wait, 30)
    waiting = asyncio.ensure_future(store.insert([new_job()]))
    await asyncio.sleep(0.1)
    began = time.monotonic()
    child = in_child(lambda: store.insert_blocking([new_job()]))
    assert time.monotonic() - began < 1
    await asyncio.sleep(0.1)
    assert not waiting.done()
    release.set()
    await waiting
    assert await asyncio.to_thread(succeeded, child)
    holder.join(10)
    assert len(live_ids(path)) == 2


# Errors.


def sqlite_error(code: str, kind: type[sqlite3.Error] = sqlite3.OperationalError) -> sqlite3.Error:
    error = kind("it says why")
    error.sqlite_errorname = code
    return error


ERRORS = [
    ("SQLITE_FULL", StoreUnavailable, StoreUnavailable, "disk is full. Nothing was written; free some space"),
    ("SQLITE_BUSY", Busy, Busy, "another connection is writing. Nothing was written"),
    ("SQLITE_BUSY_SNAPSHOT", Busy, Busy, "roll back and begin again"),
    ("SQLITE_BUSY_RECOVERY", Busy, Busy, "another connection is writing"),
    ("SQLITE_BUSY_TIMEOUT", Busy, Busy, "another connection is writing"),
    ("SQLITE_LOCKED", Busy, Busy, "another connection is writing"),
    ("SQLITE_LOCKED_SHAREDCACHE", Busy, Busy, "another connection is writing"),
    ("SQLITE_READONLY", StoreUnavailable, StoreUnavailable, "check the permissions of the file and its folder"),
    ("SQLITE_READONLY_DIRECTORY", StoreUnavailable, StoreUnavailable, "check the permissions"),
    ("SQLITE_READONLY_DBMOVED", StoreUnavailable, StoreUnavailable, "check the permissions"),
    ("SQLITE_CANTOPEN", StoreUnavailable, StoreUnavailable, "check the permissions"),
    ("SQLITE_CANTOPEN_ISDIR", StoreUnavailable, StoreUnavailable, "check the permissions"),
    ("SQLITE_PERM", StoreUnavailable, StoreUnavailable, "check the permissions"),
    ("SQLITE_CORRUPT", StoreUnavailable, StoreUnavailable, "damaged or is no database; restore a backup"),
    ("SQLITE_CORRUPT_INDEX", StoreUnavailable, StoreUnavailable, "damaged"),
    ("SQLITE_NOTADB", StoreUnavailable, StoreUnavailable, "damaged or is no database"),
    ("SQLITE_IOERR", StoreUnavailable, OutcomeUnknown, "SQLITE_IOERR"),
    ("SQLITE_IOERR_FSYNC", StoreUnavailable, OutcomeUnknown, "SQLITE_IOERR_FSYNC"),
    ("SQLITE_IOERR_WRITE", StoreUnavailable, OutcomeUnknown, "SQLITE_IOERR_WRITE"),
    ("SQLITE_NOMEM", StoreUnavailable, OutcomeUnknown, "SQLITE_NOMEM"),
    ("SQLITE_INTERRUPT", StoreUnavailable, OutcomeUnknown, "SQLITE_INTERRUPT"),
    ("SQLITE_PROTOCOL", StoreUnavailable, OutcomeUnknown, "SQLITE_PROTOCOL"),
    ("SQLITE_SCHEMA", StoreUnavailable, OutcomeUnknown, "SQLITE_SCHEMA"),
    ("SQLITE_TOOBIG", StoreUnavailable, OutcomeUnknown, "SQLITE_TOOBIG"),
    ("SQLITE_MISUSE", StoreUnavailable, OutcomeUnknown, "SQLITE_MISUSE"),
    ("SQLITE_ERROR", StoreUnavailable, OutcomeUnknown, "SQLITE_ERROR"),
    ("", StoreUnavailable, OutcomeUnknown, "no code"),
]


@pytest.mark.parametrize(("code", "plain", "committing", "words"), ERRORS)
def test_every_error_of_sqlite_has_one_of_ours(
    code: str, plain: type[StoreError], committing: type[StoreError], words: str
) -> None:
    error = store_error(sqlite_error(code), Path("/data/jobs.db"))
    assert type(error) is plain
    assert words in str(error)
    assert "/data/jobs.db" in str(error)
    assert type(store_error(sqlite_error(code), Path("/data/jobs.db"), committing=True)) is committing


def test_no_code_of_sqlite_is_without_an_error() -> None:
    codes = [name for name in dir(sqlite3) if name.startswith("SQLITE_")]
    assert len(codes) > 80
    for code in codes:
        for committing in (True, False):
            error = store_error(sqlite_error(code, sqlite3.DatabaseError), Path("x"), committing=committing)
            assert isinstance(error, StoreUnavailable | OutcomeUnknown)
            assert committing or isinstance(error, StoreUnavailable)


def test_an_error_without_a_code() -> None:
    assert isinstance(store_error(sqlite3.ProgrammingError("closed"), Path("x")), StoreUnavailable)


class BrokenCommits:
    """A connection whose commits report an error: before, or after they took effect."""

    def __init__(self, connection: sqlite3.Connection, *, take_effect: bool) -> None:
        self._connection = connection
        self._take_effect = take_effect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)

    def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
        if self.commits(sql):
            if self._take_effect:
                self._connection.execute(sql, parameters)
            raise sqlite_error("SQLITE_IOERR_FSYNC")
        return self._connection.execute(sql, parameters)

    def commits(self, sql: str) -> bool:
        """A COMMIT, or a statement that is a transaction of its own."""
        return sql == "COMMIT" or ("INSERT INTO" in sql and not self._connection.in_transaction)


@contextlib.contextmanager
def broken_commits(store: SqliteStore, *, take_effect: bool) -> Iterator[None]:
    writer = writer_of(store)
    real = writer._connection
    writer._connection = cast(sqlite3.Connection, BrokenCommits(real, take_effect=take_effect))
    try:
        yield
    finally:
        writer._connection = real


@pytest.mark.parametrize("take_effect", [True, False])
async def test_a_commit_whose_outcome_is_unknown(store: SqliteStore, path: Path, take_effect: bool) -> None:
    session = await open_session(store)
    running = new_job()
    await store.insert([running])
    [claimed] = await claim(store, session)
    move = settle(claimed, Succeeded(), RetryPolicy(), SYSTEM.random)
    batches = [new_jobs(2), new_jobs(3)]
    blocking = new_job()

    with broken_commits(store, take_effect=take_effect):
        async with one_batch(store):
            tasks: list[asyncio.Future[Any]] = [
                asyncio.ensure_future(call) for call in (*map(store.insert, batches), store.apply([move]))
            ]
            tasks.append(asyncio.ensure_future(store.beat(session)))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(OutcomeUnknown) as unknown:
            await asyncio.to_thread(store.insert_blocking, [blocking])
    assert list(unknown.value.ids) == [blocking.id]
    assert all(isinstance(answer, OutcomeUnknown) for answer in answers), answers
    assert isinstance(unknown.value.__cause__, OutcomeUnknown)
    assert [list(cast(OutcomeUnknown, answer).ids) for answer in answers] == [
        [job.id for job in batches[0]],
        [job.id for job in batches[1]],
        [running.id],
        [],
    ]

    # Repeating with the same ids is safe, whatever it was.
    expected = InsertStatus.EXISTING if take_effect else InsertStatus.CREATED
    for batch in (*batches, [blocking]):
        assert {inserted.status for inserted in await store.insert(batch)} == {expected}
    assert await store.apply([move]) == ["already" if take_effect else "applied"]
    assert sorted(live_ids(path)) == sorted(job.id for job in (*batches[0], *batches[1], blocking))


async def test_a_failed_commit_that_surely_wrote_nothing_says_so(store: SqliteStore, path: Path) -> None:
    """A full disk at the commit is no riddle: SQLite has rolled back."""

    class Full(BrokenCommits):
        def execute(self, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
            if self.commits(sql):
                raise sqlite_error("SQLITE_FULL")
            return super().execute(sql, parameters)

    writer = writer_of(store)
    real = writer._connection
    writer._connection = cast(sqlite3.Connection, Full(real, take_effect=False))
    with pytest.raises(StoreUnavailable, match="Nothing was written"):
        await store.insert([new_job()])
    with pytest.raises(StoreUnavailable, match="Nothing was written"):
        store.insert_blocking([new_job()])
    writer._connection = real
    assert live_ids(path) == []
    await store.insert([new_job()])


async def test_an_error_that_ends_the_whole_transaction_reaches_every_caller(store: SqliteStore, path: Path) -> None:
    def lose_the_transaction(db: sqlite3.Connection) -> None:
        db.execute("ROLLBACK")  # as SQLite does by itself when it runs out of disk or memory
        raise sqlite_error("SQLITE_FULL")

    async with one_batch(store):
        tasks: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(store.insert([new_job()])),
            asyncio.ensure_future(writer_of(store).calls.submit(lose_the_transaction)),
            asyncio.ensure_future(store.insert([new_job()])),
        ]
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(answer, StoreUnavailable) for answer in answers), answers
    assert live_ids(path) == []
    await store.insert([new_job()])


async def test_a_closed_session_is_an_error_of_its_own(store: SqliteStore) -> None:
    with pytest.raises(SessionClosed):
        await claim(store, "nobody")


# Calls from a place that interrupted one.


def test_a_handler_that_interrupts_a_write_is_kept_out(store: SqliteStore, path: Path) -> None:
    """What it wrote would be part of a transaction that it knows nothing of, and end with it."""
    inner: list[BaseException] = []

    def interrupted(db: sqlite3.Connection) -> None:
        store._verbs.insert(db, [new_job()], 0, {})
        for jobs in ([new_job()], new_jobs(2)):
            try:
                store.insert_blocking(jobs)
            except StoreUnavailable as error:
                inner.append(error)
        raise RuntimeError("and the write fails")

    with pytest.raises(RuntimeError, match="and the write fails"):
        writer_of(store).run(interrupted)
    assert ["signal handler or finalizer" in str(error) for error in inner] == [True, True]
    assert live_ids(path) == []
    store.insert_blocking([new_job()])
    assert len(live_ids(path)) == 1


def test_a_plain_insert_has_one_deadline(path: Path) -> None:
    store = SqliteStore(path, timeout=0.4)
    store.insert_blocking([new_job()])
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with pytest.raises(Busy):
            store.insert_blocking([new_job()])
        assert time.monotonic() - began < 0.7
    store.close()
