"""The schema: applied twice, by many at once, killed half-way; older code on a newer schema; two namespaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any, cast

import psycopg
import pytest

from holdfast.errors import SchemaOutdated, StoreUnavailable
from holdfast.job import Key
from holdfast.ports import SYSTEM
from holdfast.store import all_sessions
from holdfast.stores import open_store
from holdfast.stores.migrations import Migration, shipped
from holdfast.stores.postgres import PostgresStore, migrate
from holdfast.stores.postgres.migrate import schema_number
from tests.cli.helpers import run
from tests.postgres.helpers import CHILDREN, HOUR, Database, claim, finish, new_job, open_session, raw, start_child
from tests.servers import PostgresServer

SHIPPED = shipped("holdfast.stores.postgres")
NEWEST = SHIPPED[-1].number
NUMBERS = [migration.number for migration in SHIPPED]


@pytest.fixture(scope="module")
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.url


NAMESPACES = itertools.count()


@pytest.fixture
def database(url: str) -> Iterator[Database]:
    """A namespace that does not exist yet."""
    with contextlib.closing(Database(url, f"migrated_{next(NAMESPACES)}")) as database:
        yield database


def objects(database: Database) -> list[tuple[Any, ...]]:
    """Everything that the namespace has in the server's catalogues, with the transaction that made it."""
    return database.sql(
        """SELECT relname, xmin::text FROM pg_class WHERE starts_with(relname, '{ns}_')
           UNION ALL SELECT proname, xmin::text FROM pg_proc WHERE starts_with(proname, '{ns}_') ORDER BY 1, 2"""
    )


def applied(database: Database) -> list[int]:
    return [row[0] for row in database.sql("SELECT number FROM {ns}_schema ORDER BY number")]


def insert(database: Database) -> None:
    store = database.store()
    assert store.insert_blocking([new_job()])[0].status == "created"
    store.close()


def test_applied_twice(database: Database) -> None:
    insert(database)
    before = objects(database)
    assert len(before) > 80
    insert(database)
    assert objects(database) == before
    assert applied(database) == NUMBERS
    assert database.number_of("waiting") == 2


def open_at_once(databases: list[Database], barrier: Barrier) -> None:
    for database in databases:
        barrier.wait(20)
        insert(database)


def test_six_processes_at_once(url: str) -> None:
    databases = [Database(url, f"at_once_{number}") for number in range(2)]
    barrier = CHILDREN.Barrier(6)
    children = [start_child(open_at_once, databases, barrier) for _ in range(6)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 6
    for database in databases:
        with contextlib.closing(database):
            assert database.number_of("waiting") == 6
            assert applied(database) == NUMBERS


def test_who_waited_for_the_lock_sees_what_was_made_meanwhile(url: str) -> None:
    """A migration of one table: so little happens that the server has no other reason to tell its sessions."""
    one_table = [Migration(NUMBERS[0], "one", "SELECT 1")]
    problems: list[Exception] = []
    with contextlib.closing(Database(url, "waited")) as database, raw(url) as first, raw(url) as second:

        def migrate_second() -> None:
            try:
                migrate.migrate(second, "waited", where="here", migrations=one_table)
            except Exception as problem:
                problems.append(problem)

        migrating = threading.Thread(target=migrate_second)
        with first.transaction():
            first.execute("SELECT pg_advisory_xact_lock(hashtextextended('waited_schema', 0))")
            migrating.start()
            while not database.value("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"):
                assert migrating.is_alive()
            migrate.migrate(first, "waited", where="here", migrations=one_table)
        migrating.join(30)
        assert problems == []
        assert applied(database) == NUMBERS[:1]


def test_six_threads_of_one_store(database: Database) -> None:
    store = database.store()
    problems: list[BaseException] = []
    together = threading.Barrier(6)

    def work() -> None:
        try:
            together.wait(10)
            store.insert_blocking([new_job()])
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    store.close()
    assert problems == []
    assert database.number_of("waiting") == 6


class StopsHalfWay:
    """A connection whose process stands still after so many statements, until it is killed."""

    def __init__(self, connection: psycopg.Connection[Any], statements: int, told: Connection) -> None:
        self._connection = connection
        self._left = statements
        self._told = told

    def execute(self, *args: Any) -> Any:
        cursor = self._connection.execute(*args)
        self._left -= 1
        if self._left == 0:
            self._told.send(self._connection.info.transaction_status.name)
            time.sleep(60)
        return cursor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def migrate_and_stand_still(url: str, namespace: str, statements: int, told: Connection) -> None:
    connection = StopsHalfWay(psycopg.connect(url, autocommit=True), statements, told)
    migrate.migrate(cast(psycopg.Connection[Any], connection), namespace, where="here")
    told.send("it was over sooner")


@pytest.mark.parametrize("statements", [3, 5, 6], ids=["has the lock", "made a table", "made them all"])
def test_killed_half_way_then_run_again(database: Database, statements: int) -> None:
    here, there = CHILDREN.Pipe()
    child = start_child(migrate_and_stand_still, database.url, database.namespace, statements, there)
    assert here.poll(20)
    assert here.recv() == "INTRANS"
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    child.join(10)
    here.close()
    there.close()
    insert(database)  # waits for the server to notice, if need be
    assert applied(database) == NUMBERS
    assert database.number_of("waiting") == 1
    assert len(objects(database)) > 80


def test_a_migration_that_fails_leaves_everything_as_it_was(database: Database) -> None:
    insert(database)
    before = objects(database)
    broken = Migration(NEWEST + 1, "broken.sql", "CREATE TABLE {ns}_more (id int); CREATE TABLE {ns}_waiting (id int);")
    with raw(database.url) as connection, pytest.raises(psycopg.errors.DuplicateTable):
        migrate.migrate(connection, database.namespace, where="here", migrations=[*SHIPPED, broken])
    assert objects(database) == before
    insert(database)


async def test_a_later_version_brings_it_up_to_date_under_the_feet_of_the_old_one(database: Database) -> None:
    async with database.store() as old:
        await old.insert([new_job()])
        later = [
            *SHIPPED,
            Migration(NEWEST + 1, "a.sql", "ALTER TABLE {ns}_waiting ADD COLUMN note text;"),
            Migration(NEWEST + 2, "b.sql", "CREATE INDEX {ns}_notes ON {ns}_waiting (note);"),
        ]
        with raw(database.url) as connection:
            migrate.migrate(connection, database.namespace, where="here", migrations=later)
            assert schema_number(connection, database.namespace) == NEWEST + 2
        await old.insert([new_job()])
        assert len(await claim(old, await open_session(old))) == 2
    async with database.store() as restarted, database.store(create=False) as careful:
        await restarted.insert([new_job()])
        assert len(await claim(careful, await open_session(careful))) == 1


async def test_a_newer_major_schema_is_refused(database: Database) -> None:
    insert(database)
    database.sql("INSERT INTO {ns}_schema VALUES (%s, 'future')", (NEWEST // 1000 + 1) * 1000)
    for create in (True, False):
        store = database.store(create=create)
        with pytest.raises(SchemaOutdated, match="upgrade this process"):
            store.insert_blocking([new_job()])
        with pytest.raises(SchemaOutdated):
            await store.counts()
        with pytest.raises(SchemaOutdated):
            await store.examine()
    assert database.number_of("waiting") == 1


async def test_whoever_must_not_create_it_says_that_it_is_missing(database: Database) -> None:
    store = open_store(f"{database.url}?namespace={database.namespace}", SYSTEM, existing=True)
    with pytest.raises(SchemaOutdated, match=f"has schema 0 .* in namespace '{database.namespace}'.*migrate it first"):
        await store.counts()
    with pytest.raises(SchemaOutdated):
        await store.__aenter__()
    assert not database.exists()
    insert(database)
    assert [counts.ready for counts in await store.counts()] == [1]
    await store.__aexit__()


def test_the_command(database: Database) -> None:
    for _ in range(2):
        result = run("migrate", f"{database.url}?namespace={database.namespace}")
        assert result.exit_code == 0, result.stderr
    assert applied(database) == NUMBERS


async def test_two_namespaces_in_one_database_do_not_see_each_other(url: str) -> None:
    async with PostgresStore(url, namespace="migrated_one") as one, PostgresStore(url, namespace="migrated_two") as two:
        job = new_job()
        [first] = await one.insert([job])
        [second] = await two.insert([new_job(id=job.id, task="else")])
        assert (first.status, second.status) == ("created", "created")
        await two.set_paused("elsewhere", True)
        session = await open_session(one)
        assert [found.task for found in await claim(one, session)] == ["mail.welcome"]
        assert [view.id for view in await all_sessions(one)] == [session]
        assert await all_sessions(two) == []
        assert [(count.queue, count.ready, count.in_flight) for count in await one.counts()] == [("default", 0, 1)]
        assert [count.queue for count in await two.counts()] == ["default", "elsewhere"]
        assert [found.task for found in await claim(two, await open_session(two))] == ["else"]


async def test_columns_that_a_newer_minor_version_adds_do_no_harm(database: Database) -> None:
    insert(database)
    tables = (
        "waiting",
        "in_flight",
        "kept",
        "history",
        "tallies",
        "keys",
        "sessions",
        "paused",
        "checkpoints",
        "pruned",
    )
    for table in tables:
        database.sql(f"ALTER TABLE {{ns}}_{table} ADD COLUMN new_in_2 text")
    async with database.store() as store:
        session = await open_session(store)
        await store.set_paused("other", True)
        await store.insert(
            [new_job(retention=HOUR), new_job(key=Key("k", "h", HOUR), retention=0), new_job(delay=HOUR)]
        )
        jobs = await claim(store, session)
        assert len(jobs) == 3
        assert await finish(store, jobs) == ["applied"] * 3
        assert await store.request_cancel([job.id for job in jobs]) == ["ended"] * 3
        assert await store.prune(10) == 1
        assert await store.forget([job.id for job in jobs]) == 2
        database.sql("INSERT INTO {ns}_ready (task, payload) VALUES ('t', '{}')")
        assert len(await claim(store, session)) == 1


async def test_in_a_schema_of_its_own(database: Database) -> None:
    """Functions find the tables that they were made with, whatever the search path of the caller."""
    database.sql("CREATE SCHEMA {ns}_apart")
    there = f"{database.url}?options=-csearch_path%3D{database.namespace}_apart"
    async with PostgresStore(there, namespace=database.namespace) as store:
        await store.insert([new_job()])
        assert len(await claim(store, await open_session(store))) == 1
        database.sql("INSERT INTO {ns}_apart.{ns}_ready (task, payload) VALUES ('t', '{}')")
        assert [counts.ready for counts in await store.counts()] == [1]
        with raw(database.url) as connection:
            text = "SELECT count(*) FROM {ns}_apart.{ns}_lost(NULL, 10)"
            assert connection.execute(database.text(text)).fetchone() == (0,)
    with pytest.raises(SchemaOutdated):
        await database.store(create=False).counts()


async def test_what_a_later_migration_makes_is_where_the_tables_are(database: Database) -> None:
    """Though another schema comes first on the search path by now, and the role's isolation is another one."""
    database.sql("CREATE SCHEMA {ns}_apart")
    database.sql("CREATE SCHEMA {ns}_first")
    options = f"options=-csearch_path%3D{database.namespace}_apart"
    with raw(f"{database.url}?{options}") as connection:
        migrate.migrate(connection, database.namespace, where="here", migrations=SHIPPED[:1])
        text = "INSERT INTO {ns}_ready (task, payload) VALUES ('t', '{}')"
        connection.execute(database.text(text))
    path = f"{database.namespace}_first,{database.namespace}_apart"
    options = f"options=-csearch_path%3D{path}%20-cdefault_transaction_isolation%3Dserializable"
    seen = Migration(
        NEWEST + 1, "seen.sql", "CREATE TABLE {ns}_seen AS SELECT current_setting('transaction_isolation') AS level;"
    )
    with raw(f"{database.url}?{options}") as connection:
        migrate.migrate(connection, database.namespace, where="here", migrations=[*SHIPPED, seen])
    places = """SELECT DISTINCT relnamespace::regnamespace::text FROM pg_class WHERE starts_with(relname, '{ns}_')
                UNION SELECT pronamespace::regnamespace::text FROM pg_proc WHERE starts_with(proname, '{ns}_')"""
    assert database.sql(places) == [(f"{database.namespace}_apart",)]
    assert database.value("SELECT level FROM {ns}_apart.{ns}_seen") == "read committed"
    async with PostgresStore(f"{database.url}?{options}", namespace=database.namespace) as store:
        session = await open_session(store)
        await store.insert([new_job()])
        jobs = await claim(store, session)
        assert len(jobs) == 2
        assert await finish(store, jobs) == ["applied"] * 2


def test_a_server_that_is_too_old(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migrate, "OLDEST_SERVER", 99)
    with pytest.raises(StoreUnavailable, match=r"is PostgreSQL \d+: 99 or newer is needed"):
        database.store().open_blocking()
    assert not database.exists()


@pytest.mark.parametrize("namespace", ["", "Upper", "a b", "a;b", "ü", "1a", "x" * 41, 'a"b'])
def test_a_namespace_that_is_no_name(url: str, namespace: str) -> None:
    with pytest.raises(Exception, match=r"^namespace .* must be"):
        PostgresStore(url, namespace=namespace)
