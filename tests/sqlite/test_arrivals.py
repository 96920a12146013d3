"""The table of arrivals: who takes in what lies there, who sees it without doing so, and that it stays small.

What is asked of a job that lies there is in the conformance suite (`alone.py`); here is what the file looks like.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from holdfast.job import Lease, State
from holdfast.lifecycle import Applied, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, InsertStatus, JobQuery, Session
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.inserts import Inserts
from holdfast.stores.sqlite.queries import Queries
from holdfast.stores.sqlite.verbs import Verbs
from tests.sqlite.helpers import (
    arrived_ids,
    claim,
    finish,
    is_sound,
    live_ids,
    new_job,
    new_jobs,
    open_session,
    raw,
    run_sql,
    start_child,
)

ENOUGH = 128
"""So many have never arrived without being taken in."""
NOBODY = Lease(job_id="nothing", session_id="nobody", version=1, queue="default")
VERBS = Verbs("holdfast")
"""As a process of a version before the table uses them: without taking anything in."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


@pytest_asyncio.fixture
async def store(path: Path) -> AsyncIterator[SqliteStore]:
    async with SqliteStore(path, timeout=5) as store:
        yield store


@pytest.fixture
def older(path: Path, store: SqliteStore) -> Iterator[sqlite3.Connection]:
    """The connection of a process of an older version, and its session."""
    connection = raw(path)
    VERBS.open_session(connection, Session(id="older"), 0)
    yield connection
    connection.close()


def arrive(store: SqliteStore, count: int = 1, **fields: Any) -> list[str]:
    """The ids of jobs that were enqueued one by one."""
    jobs = new_jobs(count, **fields)
    for job in jobs:
        assert store.insert_blocking([job], fresh=True)[0].status is InsertStatus.CREATED
    return [job.id for job in jobs]


def taken_in_ids(path: Path) -> list[str]:
    return [row[0] for row in run_sql(path, "SELECT id FROM holdfast_live ORDER BY id")]


def nothing_is_taken_in(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Inserts, "take_in", lambda *args: None)


# Who takes in.

WRITES: dict[str, Callable[[SqliteStore], Awaitable[object]]] = {
    "open_session": lambda store: store.open_session(Session(id="s")),
    "close_session": lambda store: store.close_session("nobody"),
    "beat": lambda store: store.beat("nobody"),
    "insert": lambda store: store.insert([]),
    "claim": lambda store: claim(store, "here"),
    "apply": lambda store: store.apply([]),
    "note": lambda store: store.note(NOBODY, b""),
    "request_cancel": lambda store: store.request_cancel([]),
    "set_paused": lambda store: store.set_paused("mail", True),
    "prune": lambda store: store.prune(1),
    "forget": lambda store: store.forget([]),
}
READS: dict[str, Callable[[SqliteStore], Awaitable[object]]] = {
    "get": lambda store: store.get("nothing"),
    "find": lambda store: store.find(JobQuery()),
    "counts": lambda store: store.counts(),
    "held": lambda store: store.held("here"),
    "lost": lambda store: store.lost(1),
    "sessions": lambda store: store.sessions(),
    "checkpoint": lambda store: store.checkpoint("mail", "source"),
}


def test_every_verb_is_of_one_kind() -> None:
    other = {"insert_blocking", "insert_on", "ainsert_on", "apply_on", "aapply_on", "now", "wakeups", "examine"}
    verbs = {name for name in vars(SqliteStore) if not name.startswith("_")}
    assert verbs - other - {"beside", "close"} == {*WRITES, *READS}


@pytest.mark.parametrize("verb", WRITES.values(), ids=WRITES)
async def test_a_write_takes_in_what_has_arrived(
    store: SqliteStore, path: Path, verb: Callable[[SqliteStore], Awaitable[object]]
) -> None:
    await store.open_session(Session(id="here"))
    ids = arrive(store, 3)
    assert arrived_ids(path) == ids
    await verb(store)
    assert arrived_ids(path) == []
    assert taken_in_ids(path) == ids


def test_a_blocking_batch_takes_in_what_has_arrived(store: SqliteStore, path: Path) -> None:
    [first] = arrive(store)
    store.insert_blocking(batch := new_jobs(2))
    assert arrived_ids(path) == []
    assert taken_in_ids(path) == [first, *(job.id for job in batch)]


@pytest.mark.parametrize("verb", READS.values(), ids=READS)
async def test_a_read_leaves_it_and_does_not_wait_for_a_writer(
    store: SqliteStore, path: Path, verb: Callable[[SqliteStore], Awaitable[object]]
) -> None:
    ids = arrive(store, 3)
    writer = raw(path)
    writer.execute("BEGIN IMMEDIATE")
    await verb(store)
    writer.close()
    assert arrived_ids(path) == ids


async def test_taking_in_nothing_writes_nothing(store: SqliteStore, path: Path) -> None:
    """Else workers that look in vain would wake each other for ever."""
    session = await open_session(store)
    other = raw(path)

    def commits() -> int:
        return int(other.execute("PRAGMA data_version").fetchone()[0])

    before = commits()
    assert await claim(store, session) == ()
    await store.insert([])
    assert commits() == before
    arrive(store)
    assert commits() != before
    other.close()


async def test_a_claim_that_takes_nothing_in_does_not_see_it(
    store: SqliteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control of taking in: it is what claims rely on."""
    session = await open_session(store)
    ids = arrive(store, 2)
    store.close()
    with monkeypatch.context() as patch:
        nothing_is_taken_in(patch)
        async with SqliteStore(store.path) as careless:
            assert await claim(careless, session) == ()
    assert [job.id for job in await claim(store, session)] == ids


async def test_a_call_that_fails_takes_nothing_back(store: SqliteStore, path: Path) -> None:
    """What is taken in belongs to the transaction, and not to one of the calls that share it."""
    ids = arrive(store, 2)
    with pytest.raises(Exception, match="not open"):
        await store.claim(ClaimRequest(session_id="nobody", queues=("default",), limit=1))
    assert taken_in_ids(path) == ids


async def test_a_transaction_that_cannot_commit_leaves_it_there(store: SqliteStore, path: Path) -> None:
    ids = arrive(store, 2)
    run_sql(path, "CREATE TRIGGER broken BEFORE INSERT ON holdfast_sessions BEGIN SELECT RAISE(ROLLBACK, 'no'); END")
    with pytest.raises(Exception, match="no"):
        await open_session(store)
    assert arrived_ids(path) == ids
    run_sql(path, "DROP TRIGGER broken")
    assert [job.id for job in await claim(store, await open_session(store))] == ids


# What goes there.


def test_only_short_jobs_arrive(store: SqliteStore, path: Path) -> None:
    """What arrives is written twice."""
    short = new_job(payload=b'{"a":"%s"}' % (b"x" * 2040))
    long = new_job(payload=b'{"a":"%s"}' % (b"x" * 2041))
    assert (len(short.payload), len(long.payload)) == (2048, 2049)
    for fresh in (True, False):
        one, other = new_job(payload=short.payload), new_job(payload=long.payload)
        store.insert_blocking([one], fresh=fresh)
        store.insert_blocking([other], fresh=fresh)
        assert one.id in arrived_ids(path)
        assert other.id in taken_in_ids(path)


def only_enqueuing(path: Path) -> SqliteStore:
    """A store that does nothing else: a durable one makes the log long meanwhile, in a transaction."""
    return SqliteStore(path, durability="relaxed")


def test_it_never_grows(path: Path) -> None:
    """Also if nobody does anything but enqueue, and from several connections."""
    store, other = only_enqueuing(path), only_enqueuing(path)
    store.insert_blocking([])
    other.insert_blocking([])
    sizes = []
    ids = []
    for number in range(3 * ENOUGH + 5):
        ids += arrive(other if number % 3 else store)
        sizes.append(len(arrived_ids(path)))
    assert max(sizes) == ENOUGH - 1
    assert sizes[-1] == 5
    assert sorted([*taken_in_ids(path), *arrived_ids(path)]) == sorted(ids)
    store.close()
    other.close()


def test_without_its_trigger_it_grows(path: Path) -> None:
    """The negative control; and with the trigger back, however many there are, one more is enough."""
    store = only_enqueuing(path)
    store.insert_blocking([])
    [[trigger]] = run_sql(path, "SELECT sql FROM sqlite_master WHERE name = 'holdfast_arrived_enough'")
    run_sql(path, "DROP TRIGGER holdfast_arrived_enough")
    ids = arrive(store, 2 * ENOUGH + 3)
    assert len(arrived_ids(path)) == 2 * ENOUGH + 3
    run_sql(path, trigger)
    ids += arrive(store)
    assert arrived_ids(path) == []
    assert taken_in_ids(path) == sorted(ids)
    store.close()


# Two that know it, or not.


async def test_a_process_of_an_older_version_sees_it_after_a_heartbeat(
    store: SqliteStore, older: sqlite3.Connection
) -> None:
    ids = arrive(store, 2)
    request = ClaimRequest(session_id="older", queues=("default",), limit=10)
    now = await store.now()
    assert VERBS.claim(older, request, now).claimed().jobs == ()
    assert VERBS.beat(older, "older", now).open
    jobs = VERBS.claim(older, request, now).claimed().jobs
    assert [job.id for job in jobs] == ids
    moves = [settle(job, Succeeded(), RetryPolicy(), SYSTEM.random) for job in jobs]
    assert VERBS.apply(older, moves, now) == [Applied.APPLIED] * 2


async def test_without_the_trigger_of_the_heartbeat_it_stays_blind(
    store: SqliteStore, older: sqlite3.Connection
) -> None:
    older.execute("DROP TRIGGER holdfast_arrived_beat")
    arrive(store, 2)
    now = await store.now()
    VERBS.beat(older, "older", now)
    request = ClaimRequest(session_id="older", queues=("default",), limit=10)
    assert VERBS.claim(older, request, now).claimed().jobs == ()


async def test_what_an_older_version_inserts_once_more_is_one_job(
    store: SqliteStore, older: sqlite3.Connection, path: Path
) -> None:
    """It does not see that the id has arrived: the job that it makes is the one that stays."""
    job = new_job()
    store.insert_blocking([job], fresh=True)
    older.execute("BEGIN IMMEDIATE")
    assert VERBS.insert(older, [job], await store.now(), {})[0].status is InsertStatus.CREATED
    older.execute("COMMIT")
    [claimed] = await claim(store, await open_session(store))
    assert claimed.id == job.id
    assert live_ids(path) == [job.id]
    assert await finish(store, [claimed]) == [Applied.APPLIED]


async def test_what_has_ended_meanwhile_does_not_come_back(
    store: SqliteStore, older: sqlite3.Connection, path: Path
) -> None:
    job = new_job()
    store.insert_blocking([job], fresh=True)
    now = await store.now()
    older.execute("BEGIN IMMEDIATE")
    VERBS.insert(older, [job], now, {})
    request = ClaimRequest(session_id="older", queues=("default",), limit=10)
    jobs = VERBS.claim(older, request, now).claimed().jobs
    VERBS.apply(older, [settle(one, Succeeded(), RetryPolicy(), SYSTEM.random) for one in jobs], now)
    older.execute("COMMIT")
    assert await claim(store, await open_session(store)) == ()
    assert live_ids(path) == []
    assert (found := await store.get(job.id)) is not None
    assert found.state is State.SUCCEEDED


# Readers.


class Interrupted:
    """A reader's connection. After each of its statements somebody else takes in what has arrived."""

    def __init__(self, reader: sqlite3.Connection, path: Path) -> None:
        self._reader = reader
        self._path = path

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        rows = self._reader.execute(sql, parameters).fetchall()
        run_sql(self._path, "INSERT INTO holdfast_take_in VALUES ('all')")
        return Rows(rows)

    def executemany(self, sql: str, parameters: Any, /) -> Any:
        raise AssertionError("a reader writes")


class Rows:
    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def fetchall(self) -> list[Any]:
        return self._rows

    def fetchone(self) -> Any:
        return self._rows[0] if self._rows else None


@pytest.mark.parametrize("begun", [True, False])
async def test_a_job_that_is_taken_in_meanwhile_is_seen_once(store: SqliteStore, path: Path, begun: bool) -> None:
    """A reader's statements see one snapshot (`Reader` begins a transaction). Without it the job is there twice."""
    [job_id] = arrive(store)
    connection = raw(path)
    queries = Queries("holdfast")
    if begun:
        connection.execute("BEGIN")
    found = queries.find(Interrupted(connection, path), JobQuery())
    assert [job.id for job in found.jobs] == [job_id] * (1 if begun else 2)
    assert arrived_ids(path) == []
    connection.close()


async def test_readers_always_see_every_job_once(store: SqliteStore) -> None:
    """While others enqueue one by one and take in, as fast as they can."""
    known: list[str] = []
    stop = threading.Event()
    mistakes: list[BaseException] = []

    def write() -> None:
        try:
            for _ in range(600):
                known.extend(arrive(store))
                if len(known) % 5 == 0:
                    store.insert_blocking([])
        except BaseException as error:
            mistakes.append(error)
        finally:
            stop.set()

    writer = threading.Thread(target=write)
    writer.start()
    looks = 0
    while not stop.is_set():
        before = list(known)
        page = [job.id for job in (await store.find(JobQuery(limit=1000))).jobs]
        ready = sum(counts.ready for counts in await store.counts())
        assert len(set(page)) == len(page)
        assert set(before) <= set(page)
        assert len(before) <= ready <= len(known) + 1
        if before:
            assert await store.get(before[-1]) is not None
        looks += 1
    writer.join()
    assert mistakes == []
    assert looks > 20
    assert sorted(job.id for job in (await store.find(JobQuery(limit=1000))).jobs) == sorted(known)


async def test_doctor_sees_what_has_arrived(store: SqliteStore, path: Path) -> None:
    [job_id] = arrive(store)
    run_sql(path, "UPDATE holdfast_arrived SET run_at = run_at - 7200500000")
    findings = {finding.name: finding.value for finding in await store.examine()}
    assert findings["oldest ready job"].startswith("due for 2:00:00")
    assert [job.id for job in await claim(store, await open_session(store))] == [job_id]


# Callers' transactions.


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_callers_transaction_takes_in_and_gives_back(store: SqliteStore, path: Path, end: str) -> None:
    ids = arrive(store, 2)
    connection = raw(path)
    connection.execute("BEGIN IMMEDIATE")
    mine = new_job()
    store.insert_on(connection, [mine])
    assert connection.execute("SELECT count(*) FROM holdfast_arrived").fetchone() == (0,)
    assert arrived_ids(path) == ids  # nothing is committed yet
    assert {job.id for job in (await store.find(JobQuery())).jobs} == set(ids)
    connection.execute(end)
    connection.close()
    assert arrived_ids(path) == ([] if end == "COMMIT" else ids)
    expected = [*ids, mine.id] if end == "COMMIT" else ids
    assert [job.id for job in await claim(store, await open_session(store))] == expected


async def test_a_callers_transaction_that_writes_nothing_is_ended_and_takes_nothing_in(
    store: SqliteStore, path: Path
) -> None:
    job = new_job()
    store.insert_blocking([job], fresh=True)
    connection = sqlite3.connect(path, timeout=0)
    assert store.insert_on(connection, [job])[0].status is InsertStatus.EXISTING
    assert not connection.in_transaction
    assert arrived_ids(path) == [job.id]
    connection.close()


async def test_a_callers_transaction_settles_beside_arrivals(store: SqliteStore, path: Path) -> None:
    await store.insert([new_job()])
    [job] = await claim(store, await open_session(store))
    ids = arrive(store, 2)
    connection = raw(path)
    connection.execute("BEGIN IMMEDIATE")
    move = settle(job, Succeeded(), RetryPolicy(), SYSTEM.random)
    assert store.apply_on(connection, [move]) == [Applied.APPLIED]
    connection.execute("COMMIT")
    connection.close()
    assert taken_in_ids(path) == ids


# Plain SQL.


async def test_plain_sql_sees_takes_in_and_refuses(store: SqliteStore, path: Path) -> None:
    [first] = arrive(store)
    assert run_sql(path, "SELECT id, task, reason FROM holdfast_ready") == [(first, "mail.welcome", "enqueued")]
    with pytest.raises(sqlite3.IntegrityError):
        run_sql(path, "INSERT INTO holdfast_ready (id, task, payload) VALUES (?, 't', '{}')", (first,))
    assert arrived_ids(path) == [first]
    run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('second', '{}')")
    assert arrived_ids(path) == []
    arrive(store, task="third")
    tasks = [job.task for job in await claim(store, await open_session(store))]
    assert tasks == ["mail.welcome", "second", "third"]


async def test_a_row_of_plain_sql_goes_behind_what_has_arrived(store: SqliteStore, path: Path) -> None:
    """Its clock only has milliseconds: it looks for those that came in the same one."""
    arrive(store)
    [[soon]] = run_sql(path, "UPDATE holdfast_arrived SET run_at = run_at + 900 RETURNING run_at")
    run_sql(path, "INSERT INTO holdfast_ready (task, payload) VALUES ('second', '{}')")
    rows = run_sql(path, "SELECT task, run_at FROM holdfast_ready ORDER BY run_at, id")
    assert [row[0] for row in rows] == ["mail.welcome", "second"]
    assert rows[0][1] == soon


# Other processes.


def enqueue_alone(path: Path, count: int, log: Path) -> None:
    store = SqliteStore(path, timeout=20)
    with log.open("a", buffering=1) as lines:
        for _ in range(count):
            lines.write(f"{arrive(store)[0]}\n")
    os.kill(os.getpid(), signal.SIGKILL)


async def test_jobs_of_a_process_that_is_killed_are_served(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    """They are on disk when the call returns, wherever they lie."""
    child = start_child(enqueue_alone, path, 10, tmp_path / "log")
    child.join(30)
    assert child.exitcode == -signal.SIGKILL
    ids = (tmp_path / "log").read_text().split()
    assert arrived_ids(path) == ids
    assert [job.id for job in await claim(store, await open_session(store))] == ids


async def test_two_processes_enqueue_while_a_third_claims(store: SqliteStore, path: Path, tmp_path: Path) -> None:
    logs = [tmp_path / "one", tmp_path / "two"]
    children = [start_child(enqueue_alone, path, 300, log) for log in logs]
    session = await open_session(store)
    seen: list[str] = []

    async with asyncio.timeout(60):
        while len(seen) < 600:
            jobs = await claim(store, session, limit=50)
            seen.extend(job.id for job in jobs)
            assert set(await finish(store, jobs)) <= {Applied.APPLIED}
    for child in children:
        child.join(30)
    assert sorted(seen) == sorted(job_id for log in logs for job_id in log.read_text().split())
    assert [(counts.ready, counts.succeeded) for counts in await store.counts()] == [(0, 600)]
    assert is_sound(path)


async def test_a_waiting_worker_hears_of_what_another_process_enqueued_alone(store: SqliteStore) -> None:
    """An insert there is a commit like any other."""
    session = await open_session(store)
    wakeups = store.wakeups(["default"])
    heard = asyncio.ensure_future(anext(wakeups))
    await asyncio.sleep(0)
    other = SqliteStore(store.path)
    ids = arrive(other)
    await asyncio.wait_for(heard, 10)
    await wakeups.aclose()  # type: ignore[attr-defined]
    assert [job.id for job in await claim(store, session)] == ids
    other.close()
