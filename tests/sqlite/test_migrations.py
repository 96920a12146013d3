"""The schema: applied twice, by many at once, killed half-way; older code on a newer schema; two namespaces."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from holdfast.errors import SchemaOutdated
from holdfast.job import Key
from holdfast.lifecycle import Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, JobQuery, Session, all_sessions
from holdfast.stores.migrations import Migration
from holdfast.stores.sqlite import SqliteStore
from holdfast.stores.sqlite.migrate import is_current, migrate, schema_number, shipped, statements
from holdfast.stores.sqlite.verbs import Verbs
from holdfast.stores.sqlite.writer import Writer
from tests.sqlite.helpers import (
    CHILDREN,
    arrived_ids,
    claim,
    finish,
    is_sound,
    live_ids,
    new_job,
    open_session,
    raw,
    run_sql,
    start_child,
)

NEWEST = shipped()[-1].number


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "jobs.db"


def schema(path: Path) -> list[tuple[Any, ...]]:
    return run_sql(path, "SELECT type, name, sql FROM sqlite_master ORDER BY type, name")


def applied(path: Path) -> list[int]:
    return [row[0] for row in run_sql(path, "SELECT number FROM holdfast_schema ORDER BY number")]


def test_every_shipped_migration_is_cut_into_whole_statements() -> None:
    numbers = [migration.number for migration in shipped()]
    assert numbers == sorted(set(numbers))
    for migration in shipped():
        assert "".join(statements(migration.text)) == migration.text
        assert all(sqlite3.complete_statement(statement) for statement in statements(migration.text))


def test_applied_twice(path: Path) -> None:
    for _ in range(2):
        store = SqliteStore(path)
        store.insert_blocking([new_job()])
        store.close()
    assert applied(path) == [migration.number for migration in shipped()]
    assert len(live_ids(path)) == 2


def test_a_second_opening_writes_nothing(path: Path) -> None:
    with_schema = SqliteStore(path)
    with_schema._open()
    with_schema.close()
    before = path.read_bytes()
    again = SqliteStore(path)
    again._open()
    again.close()
    assert path.read_bytes() == before


def open_at_once(paths: list[Path], barrier: Barrier) -> None:
    for path in paths:
        barrier.wait(10)
        store = SqliteStore(path, timeout=20)
        store.insert_blocking([new_job()])
        assert asyncio.run(cast(Any, store.counts()))
        store.close()


def test_eight_processes_at_once_on_a_new_file(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.db" for number in range(20)]
    barrier = CHILDREN.Barrier(8)
    children = [start_child(open_at_once, paths, barrier) for _ in range(8)]
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 8
    for path in paths:
        assert len(live_ids(path)) == 8
        assert applied(path) == [migration.number for migration in shipped()]
        assert is_sound(path)


class DiesHalfWay:
    """A connection whose process is killed before its n-th statement."""

    def __init__(self, connection: sqlite3.Connection, statements_left: int) -> None:
        self._connection = connection
        self._left = statements_left

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> sqlite3.Cursor:
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1
        return self._connection.execute(sql, parameters)


def migrate_and_die(path: Path, after: int) -> None:
    writer = Writer(path, durable=True, timeout=5, ports=SYSTEM)
    writer.run(lambda db: migrate(cast(sqlite3.Connection, DiesHalfWay(db, after)), "holdfast", shipped()))
    os._exit(7)  # there were fewer statements than that


def test_killed_after_any_statement_then_run_again(tmp_path: Path) -> None:
    whole = tmp_path / "whole.db"
    complete = SqliteStore(whole)
    complete._open()
    complete.close()
    total = 0
    while True:
        path = tmp_path / f"{total}.db"
        child = start_child(migrate_and_die, path, total)
        child.join(30)
        if child.exitcode == 7:
            break
        assert child.exitcode == -signal.SIGKILL
        assert schema(path) == []  # all or nothing
        store = SqliteStore(path)
        store.insert_blocking([new_job()])
        store.close()
        assert schema(path) == schema(whole)
        assert applied(path) == [migration.number for migration in shipped()]
        total += 1
    assert total > 15


def test_a_migration_that_fails_leaves_the_file_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqliteStore(path)
    store.insert_blocking([new_job()])
    store.close()
    before = schema(path)
    broken = Migration(NEWEST + 1, "broken.sql", "CREATE TABLE {ns}_more (id);\nCREATE TABLE {ns}_live (id);\n")
    with monkeypatch.context() as patch:
        patch.setattr("holdfast.stores.sqlite.store.shipped", lambda: [*shipped(), broken])
        with pytest.raises(Exception, match="holdfast_live already exists"):
            store.insert_blocking([new_job()])
    assert schema(path) == before
    store.insert_blocking([new_job()])
    assert len(live_ids(path)) == 2
    store.close()


def test_a_later_version_brings_an_old_file_up_to_date(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = SqliteStore(path)
    job = new_job()
    old.insert_blocking([job])
    later = [
        *shipped(),
        Migration(NEWEST + 1, "a.sql", "ALTER TABLE {ns}_live ADD COLUMN note TEXT;\n"),
        Migration(NEWEST + 2, "b.sql", "CREATE INDEX {ns}_notes ON {ns}_live (note);\n"),
    ]
    monkeypatch.setattr("holdfast.stores.sqlite.store.shipped", lambda: later)
    new = SqliteStore(path)
    new.insert_blocking([new_job()])
    assert applied(path) == [migration.number for migration in later]
    # A process of the old version that has the file open goes on.
    old.insert_blocking([new_job()])
    assert len(live_ids(path)) == 3
    assert live_ids(path)[0] == job.id
    old.close()
    new.close()


async def test_a_file_from_before_the_arrivals_keeps_its_jobs_and_its_processes(path: Path) -> None:
    """A process of that version has it open, holds a job, and goes on enqueuing, claiming and settling."""
    first = Writer(path, durable=True, timeout=5, ports=SYSTEM)
    first.run(lambda db: migrate(db, "holdfast", shipped()[:1]))
    verbs = Verbs("holdfast")
    first.run(lambda db: verbs.open_session(db, Session(id="older"), 0))
    jobs = [new_job() for _ in range(4)]
    first.run(lambda db: verbs.insert(db, jobs, 1, {}))
    request = ClaimRequest(session_id="older", queues=("default",), limit=2)
    ended, held = first.run(lambda db: verbs.claim(db, request, 2)).claimed().jobs
    first.run(lambda db: verbs.apply(db, [settle(ended, Succeeded(), RetryPolicy(), SYSTEM.random)], 3))

    async with SqliteStore(path) as store:
        assert applied(path) == [migration.number for migration in shipped()]
        found = (await store.find(JobQuery())).jobs
        assert {job.id: job.state for job in found} == {
            ended.id: "succeeded",
            held.id: "in_flight",
            jobs[2].id: "ready",
            jobs[3].id: "ready",
        }
        alone = new_job()
        store.insert_blocking([alone], fresh=True)
        assert arrived_ids(path) == [alone.id]
        assert len(run_sql(path, "SELECT id FROM holdfast_ready")) == 3
        theirs = new_job()
        first.run(lambda db: verbs.insert(db, [theirs], store._clock.now(), {}))
        first.run(lambda db: verbs.apply(db, [settle(held, Succeeded(), RetryPolicy(), SYSTEM.random)], 4))
        [next_one] = first.run(lambda db: verbs.claim(db, replace(request, limit=1), 5)).claimed().jobs
        assert next_one.id == jobs[2].id
        claimed = await claim(store, await open_session(store))
        assert [job.id for job in claimed] == [jobs[3].id, alone.id, theirs.id]
        assert await finish(store, claimed) == ["applied"] * 3
    first.close()
    assert is_sound(path)


async def test_a_newer_minor_schema_goes_on(path: Path) -> None:
    store = SqliteStore(path)
    store.insert_blocking([new_job()])
    store.close()
    run_sql(path, "INSERT INTO holdfast_schema VALUES (?, 'future')", (NEWEST // 1000 * 1000 + 999,))
    async with store:
        store.insert_blocking([new_job()])
        assert len(await claim(store, await open_session(store))) == 2


async def test_a_newer_major_schema_is_refused(path: Path) -> None:
    store = SqliteStore(path)
    store.insert_blocking([new_job()])
    store.close()
    run_sql(path, "INSERT INTO holdfast_schema VALUES (?, 'future')", ((NEWEST // 1000 + 1) * 1000,))
    before = schema(path), live_ids(path)
    with pytest.raises(SchemaOutdated, match="upgrade this process"):
        store.insert_blocking([new_job()])
    with pytest.raises(SchemaOutdated):
        await store.counts()
    assert (schema(path), live_ids(path)) == before


def test_the_number_of_a_file_without_our_tables_is_zero(path: Path) -> None:
    connection = raw(path)
    assert schema_number(connection, "holdfast") == 0
    assert not is_current(connection, "holdfast", shipped())
    connection.execute("CREATE TABLE holdfast_schema (number INTEGER PRIMARY KEY, name TEXT NOT NULL)")
    assert schema_number(connection, "holdfast") == 0
    connection.close()


async def test_two_namespaces_in_one_file_do_not_see_each_other(path: Path) -> None:
    async with SqliteStore(path) as one, SqliteStore(path, namespace="other") as two:
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


def test_a_script_that_ends_in_mid_statement_is_refused() -> None:
    with pytest.raises(ValueError, match="in the middle of a statement"):
        list(statements("CREATE TABLE a (b); CREATE TABLE c (d)\n"))


async def test_columns_that_a_newer_minor_version_adds_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    async with SqliteStore(path) as store:
        for table in ("sessions", "totals", "paused", "keys", "checkpoints", "live", "ended"):
            run_sql(path, f"ALTER TABLE holdfast_{table} ADD COLUMN new_in_2 TEXT")
        await store.open_session(Session(id="s"))
        await store.set_paused("other", True)
        await store.insert([new_job(), new_job(key=Key("k", "h", 1_000_000))])
        jobs = await claim(store, "s")
        assert await finish(store, jobs) == ["applied", "applied"]
        assert await store.prune(10) == 0
