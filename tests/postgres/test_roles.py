"""The roles of docs/reference/postgresql.md: each can do its part, and is told which grant it lacks for the rest.

That a worker's role can do all that a store is asked for, the conformance suite shows: tests/store/test_postgres.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import psycopg
import pytest
from msgspec.structs import replace

from holdfast.errors import SchemaOutdated, StoreUnavailable
from holdfast.job import Job, Key, State
from holdfast.lifecycle import Failed, Succeeded, replay, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import (
    Checkpoint,
    ClaimRequest,
    DepthLimit,
    InsertStatus,
    JobQuery,
    Session,
    Store,
    Verdict,
    all_sessions,
)
from holdfast.stores.postgres import PostgresStore
from holdfast.testing.suite.harness import BOOM
from tests.postgres.helpers import DAY, HOUR, Database, claim, finish, new_job, new_jobs, open_session, raw
from tests.postgres.roles import ROLES, make_roles, sql_of, url_of
from tests.servers import PostgresServer

NAMESPACE = "least"
LIMITS = {"default": DepthLimit(max_depth=100, warn_depth=90)}


@pytest.fixture(scope="module")
def urls(postgres_server: PostgresServer) -> dict[str, str]:
    return make_roles(postgres_server.url, NAMESPACE)


@pytest.fixture(scope="module")
def namespace_of_module(urls: dict[str, str]) -> Iterator[Database]:
    database = Database(urls["migrate"], NAMESPACE)
    yield database
    database.close()


@asynccontextmanager
async def store_as(database: Database, role: str) -> AsyncIterator[PostgresStore]:
    async with PostgresStore(url_of_role(database, role), namespace=NAMESPACE, timeout=5) as store:
        yield store


def url_of_role(database: Database, role: str) -> str:
    return database.url.replace("_migrate@", f"_{role}@")


async def in_flight(database: Database) -> Job:
    """A job that some worker holds."""
    async with store_as(database, "worker") as store:
        await store.insert([new_job()])
        [job] = await claim(store, await open_session(store), limit=1)
    return job


# What each can do.


async def test_a_producer_enqueues_in_every_way(database: Database) -> None:
    key = Key("k", "h", HOUR)
    async with store_as(database, "producer") as store:
        plain, keyed, limited = new_job(), new_job(key=key), new_job()
        assert (await store.insert([plain]))[0].status == "created"
        assert (await store.insert([keyed]))[0].status == "created"
        assert (await store.insert([limited], limits=LIMITS))[0].status == "created"
        assert store.insert_blocking([new_job()], limits=LIMITS)[0].status == "created"
        [again, other] = await store.insert([new_job(key=key), new_job(key=Key("k", "other", HOUR))])
        assert (again.job_id, again.status) == (keyed.id, InsertStatus.EXISTING)
        assert (other.job_id, other.status) == (keyed.id, InsertStatus.KEY_CONFLICT)
        mark = Checkpoint("default", "files", None, "1")
        assert (await store.insert(new_jobs(2), checkpoint=mark))[0].status == "created"
        assert await store.checkpoint("default", "files") == "1"
        with psycopg.connect(url_of_role(database, "producer")) as own:
            assert store.insert_on(own, [new_job(key=Key("k2", "h", HOUR))])[0].status == "created"
            own.commit()
            assert store.insert_on(own, [new_job()])[0].status == "created"
            own.rollback()
    with raw(url_of_role(database, "producer")) as own:
        insert = "INSERT INTO {ns}_ready (task, payload) VALUES ('welcome', '{}') RETURNING id"
        assert own.execute(database.text(insert)).fetchone() is not None
    assert database.number_of("waiting") == 8


@pytest.mark.parametrize("state", ["in_flight", "succeeded", "failed"])
@pytest.mark.parametrize("limits", [None, LIMITS], ids=["plain", "limited"])
async def test_a_producer_may_repeat_itself_whatever_became_of_the_job(
    database: Database, state: str, limits: dict[str, DepthLimit] | None
) -> None:
    """The repetition of an unknown insert is safe, also when the job has been claimed or has ended meanwhile."""
    job = new_job(retention=DAY)
    async with store_as(database, "producer") as producer, store_as(database, "worker") as worker:
        await producer.insert([job])
        [claimed] = await claim(worker, await open_session(worker))
        if state != "in_flight":
            outcome = Failed(BOOM, permanent=True) if state == "failed" else Succeeded()
            assert await finish(worker, [claimed], outcome) == ["applied"]
        more = new_job()
        answers = await producer.insert([job, more], limits=limits)
        assert [answer.status for answer in answers] == [InsertStatus.EXISTING, InsertStatus.CREATED]
    assert database.value("SELECT count(*) FROM {ns}_jobs WHERE id = %s", job.id) == 1


async def test_a_reader_sees_everything(database: Database) -> None:
    held = await in_flight(database)
    async with store_as(database, "worker") as worker:
        await worker.set_paused("mail", True)
        await worker.insert([new_job(queue="mail")])
        await worker.close_session(held.lease.session_id)
    async with store_as(database, "reader") as store:
        job = await store.get(held.id)
        assert job is not None
        assert job == held
        assert len((await store.find(JobQuery())).jobs) == 2
        assert [(counts.queue, counts.ready, counts.in_flight) for counts in await store.counts()] == [
            ("default", 0, 1),
            ("mail", 1, 0),
        ]
        assert [session.id for session in await all_sessions(store)] == [held.lease.session_id]
        assert [job.id for job in await store.held(held.lease.session_id)] == [held.id]
        assert await store.checkpoint("default", "files") is None
        assert await store.now() > 0
    with raw(url_of_role(database, "reader")) as own:
        assert own.execute(database.text("SELECT task, payload FROM {ns}_ready")).fetchall() == [("mail.welcome", "{}")]


@pytest.mark.parametrize("role", ["migrate", "worker", "reader"])
async def test_whoever_may_read_may_ask_the_doctor(database: Database, role: str) -> None:
    async with store_as(database, role) as store:
        findings = {finding.name: finding for finding in await store.examine()}
    assert findings["schema"].verdict is Verdict.OK
    hidden = "hidden" in findings["oldest transaction"].value
    assert hidden == (role != "reader"), findings["oldest transaction"]


@pytest.mark.parametrize("role", ROLES)
async def test_every_role_opens_a_store_that_is_up_to_date(database: Database, role: str) -> None:
    async with store_as(database, role) as store:
        assert repr(store).startswith("<PostgresStore ")
    async with PostgresStore(url_of_role(database, role), namespace=NAMESPACE, create=False) as store:
        assert await store.now() > 0


# What each is refused.

Call = Callable[[Store, Job], Awaitable[object]]


def insert_plainly(store: Store, job: Job) -> Awaitable[object]:
    return store.insert([new_job()])


def insert_with_a_key(store: Store, job: Job) -> Awaitable[object]:
    return store.insert([new_job(key=Key("k", "h", HOUR))])


def a_claim(store: Store, job: Job) -> Awaitable[object]:
    return store.claim(ClaimRequest(session_id=job.lease.session_id, queues=("default",), limit=1))


def a_settlement(store: Store, job: Job) -> Awaitable[object]:
    return store.apply([settle(job, Succeeded(), RetryPolicy(), SYSTEM.random)])


def a_replay(store: Store, job: Job) -> Awaitable[object]:
    return store.apply([replay(replace(job, state=State.FAILED))])


WRITES: dict[str, tuple[Call, str]] = {
    "a session": (lambda store, job: store.open_session(Session(id="s")), "sessions"),
    "a beat": (lambda store, job: store.beat(job.lease.session_id), "sessions"),
    "a close": (lambda store, job: store.close_session(job.lease.session_id), "sessions"),
    "a claim": (a_claim, "sessions"),
    "a settlement": (a_settlement, "sessions"),
    "a replay": (a_replay, "kept"),
    "progress": (lambda store, job: store.note(job.lease, b"1"), "in_flight"),
    "a cancel": (lambda store, job: store.request_cancel([job.id]), "waiting"),
    "a pause": (lambda store, job: store.set_paused("default", True), "paused"),
    "a resume": (lambda store, job: store.set_paused("default", False), "paused"),
    "a prune": (lambda store, job: store.prune(10), "kept"),
    "a forget": (lambda store, job: store.forget([job.id]), "pruned"),
}
READS: dict[str, tuple[Call, str]] = {
    "one job": (lambda store, job: store.get(job.id), "jobs"),
    "a list": (lambda store, job: store.find(JobQuery()), "waiting_jobs"),
    "counts": (lambda store, job: store.counts(), "waiting"),
    "sessions": (lambda store, job: store.sessions(), "sessions"),
    "held jobs": (lambda store, job: store.held(job.lease.session_id), "held_jobs"),
    "lost jobs": (lambda store, job: store.lost(10), "sessions"),
}
INSERTS: dict[str, tuple[Call, str]] = {
    "an insert": (insert_plainly, "waiting"),
    "a key": (insert_with_a_key, "waiting"),
    "a checkpoint": (
        lambda store, job: store.insert([new_job()], checkpoint=Checkpoint("default", "f", None, "1")),
        "checkpoints",
    ),
}


@pytest.mark.parametrize(("role", "calls"), [("producer", WRITES | READS), ("reader", WRITES | INSERTS)])
async def test_what_is_not_its_part_is_refused_with_the_name_of_what_is_missing(
    database: Database, role: str, calls: dict[str, tuple[Call, str]]
) -> None:
    job = await in_flight(database)
    before = contents(database)
    async with store_as(database, role) as store:
        for what, (call, table) in calls.items():
            with pytest.raises(StoreUnavailable) as refused:
                await call(store, job)
            said = str(refused.value)
            kind = "view" if table.endswith("jobs") else "table"
            assert f"permission denied for {kind} {NAMESPACE}_{table}" in said, what
            assert "grant the role what docs/reference/postgresql.md lists" in said, what
            assert "\n" not in said, "one line is enough, and the rest is the server's own statement"
    assert contents(database) == before


def contents(database: Database) -> list[int]:
    return [database.number_of(table) for table in ("waiting", "in_flight", "kept", "keys", "sessions", "paused")]


@pytest.mark.parametrize("role", ["producer", "worker", "reader"])
async def test_in_its_own_transaction_it_is_told_the_same(database: Database, role: str) -> None:
    job = await in_flight(database)
    async with store_as(database, role) as store:
        with psycopg.connect(url_of_role(database, role)) as own:
            move = settle(job, Succeeded(), RetryPolicy(), SYSTEM.random)
            if role == "worker":
                assert store.apply_on(own, [move]) == ["applied"]
                return
            with pytest.raises(StoreUnavailable, match=f"permission denied for table {NAMESPACE}_sessions.*roll back"):
                store.apply_on(own, [move])


DDL = [
    "CREATE TABLE {ns}_mine (id int)",
    "ALTER TABLE {ns}_waiting ADD COLUMN mine int",
    "DROP TABLE {ns}_keys",
    "TRUNCATE {ns}_waiting",
    "TRUNCATE {ns}_history",
    "CREATE OR REPLACE FUNCTION {ns}_now() RETURNS bigint LANGUAGE sql STABLE AS 'SELECT 0::bigint'",
    "UPDATE {ns}_identity SET id = 'mine'",
    "INSERT INTO {ns}_schema VALUES (9999, 'mine')",
]
SECRETS = [
    "SELECT payload FROM {ns}_waiting",
    "SELECT payload FROM {ns}_history",
    "SELECT payload FROM {ns}_ready",
    "SELECT * FROM {ns}_jobs",
    "UPDATE {ns}_waiting SET priority = -100",
    "INSERT INTO {ns}_in_flight SELECT * FROM {ns}_in_flight",
]
PLAIN_WRITES = [
    "INSERT INTO {ns}_ready (task, payload) VALUES ('t', '{}')",
    "DELETE FROM {ns}_waiting",
    "UPDATE {ns}_sessions SET open = false",
    "DELETE FROM {ns}_tallies",
]


@pytest.mark.parametrize(
    ("role", "texts"), [("worker", DDL), ("producer", DDL + SECRETS), ("reader", DDL + PLAIN_WRITES)]
)
def test_plain_sql_is_refused_too(database: Database, role: str, texts: list[str]) -> None:
    with raw(url_of_role(database, role)) as own:
        for text in texts:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                own.execute(database.text(text))


@pytest.mark.parametrize("role", ["producer", "worker", "reader"])
async def test_who_may_not_migrate_says_what_it_lacks(
    postgres_server: PostgresServer, urls: dict[str, str], role: str
) -> None:
    url = url_of(postgres_server.url, NAMESPACE, role)
    store = PostgresStore(url, namespace="nobody_made_it")
    with pytest.raises(StoreUnavailable, match="permission denied for schema public"):
        await store.counts()
    careful = PostgresStore(url, namespace="nobody_made_it", create=False)
    with pytest.raises(SchemaOutdated, match="migrate it first"):
        await careful.counts()


# What else the reference shows.


@pytest.mark.parametrize("heading", ["Looking inside", "Plain SQL"])
def test_the_other_examples_of_the_reference_work(database: Database, heading: str) -> None:
    role = "reader" if heading == "Looking inside" else "producer"
    [block] = sql_of(heading, NAMESPACE)
    with raw(url_of_role(database, role)) as own:
        for statement in block.split(";\n"):
            own.execute(statement.encode())
    assert database.number_of("waiting") == (101 if role == "producer" else 0)
