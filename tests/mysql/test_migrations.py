"""The schema: applied twice, by many at once, killed half-way; older code on a newer schema; unsafe tables."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from typing import Any
from urllib.parse import urlsplit

import pytest

from holdfast.errors import SchemaOutdated, StoreUnavailable, UnsafeStore
from holdfast.ports import SYSTEM
from holdfast.stores import open_store
from holdfast.stores.migrations import Migration
from holdfast.stores.mysql import MysqlStore
from holdfast.stores.mysql import store as store_module
from holdfast.stores.mysql.migrate import require_version, shipped, statements
from holdfast.stores.mysql.server import Line
from tests.mysql.helpers import TABLES, claim, done, new_job, open_session, sql, store_at

CHILDREN = multiprocessing.get_context("spawn")
NEWEST = shipped()[-1].number


def schema(url: str, namespace: str) -> list[tuple[Any, ...]]:
    """Every column, index and trigger."""
    found: list[tuple[Any, ...]] = []
    for text in (
        "SELECT table_name, column_name, column_type, collation_name, is_nullable, column_default "
        "FROM information_schema.columns WHERE table_schema = DATABASE() AND table_name LIKE %s",
        "SELECT table_name, index_name, seq_in_index, column_name FROM information_schema.statistics "
        "WHERE table_schema = DATABASE() AND table_name LIKE %s",
        "SELECT trigger_name, event_object_table, action_statement FROM information_schema.triggers "
        "WHERE trigger_schema = DATABASE() AND trigger_name LIKE %s",
    ):
        rows = sql(url, text, namespace + "\\_%")
        found += [tuple(str(value).replace(f"{namespace}_", "{ns}_") for value in row) for row in rows]
    return sorted(found)


def applied(url: str, namespace: str) -> list[int]:
    return [row[0] for row in sql(url, f"SELECT number FROM {namespace}_schema ORDER BY number")]


def test_every_shipped_migration_is_cut_into_whole_statements() -> None:
    for migration in shipped():
        found = list(statements(migration.text))
        assert len(found) == 11
        assert all(
            statement.startswith(("CREATE TABLE IF NOT EXISTS", "DROP TRIGGER IF EXISTS")) for statement in found[:-1]
        )
        assert found[-1].startswith("CREATE TRIGGER")
        assert found[-1].endswith("END")


def test_a_script_that_ends_in_mid_statement_is_refused() -> None:
    with pytest.raises(ValueError, match="in the middle of a statement"):
        list(statements("CREATE TABLE a (b INT);\nCREATE TABLE c (d INT)\n"))


def test_applied_twice(url: str, bare: str) -> None:
    for _ in range(2):
        store = store_at(url, bare)
        store.insert_blocking([new_job()])
        store.close()
    assert applied(url, bare) == [NEWEST]
    assert sql(url, f"SELECT COUNT(*) FROM {bare}_ready") == [(2,)]


def open_at_once(url: str, namespace: str, barrier: Barrier) -> None:
    barrier.wait(20)
    store = store_at(url, namespace)
    store.insert_blocking([new_job()])
    store.close()


def test_six_processes_at_once_on_a_new_namespace(url: str, bare: str) -> None:
    barrier = CHILDREN.Barrier(6)
    children = [CHILDREN.Process(target=open_at_once, args=(url, bare, barrier)) for _ in range(6)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    assert [child.exitcode for child in children] == [0] * 6
    assert applied(url, bare) == [NEWEST]
    assert sql(url, f"SELECT COUNT(*) FROM {bare}_ready") == [(6,)]


def migrate_and_die(url: str, namespace: str, after: int) -> None:
    """Open a store in a process that is killed before its n-th packet."""
    left = after
    send = Line.send

    def dying(line: Line, packet: Sequence[str]) -> Any:
        nonlocal left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return send(line, packet)

    Line.send = dying  # type: ignore[assignment,method-assign]
    store_at(url, namespace)._open_blocking()
    os._exit(7)  # there were fewer than that


def test_killed_after_some_statement_then_run_again(url: str, bare: str) -> None:
    whole = store_at(url, "whole")
    whole._open_blocking()
    whole.close()
    for after in (3, 5, 8, 14, 15, 16):
        child = CHILDREN.Process(target=migrate_and_die, args=(url, bare, after))
        child.start()
        child.join(30)
        assert child.exitcode == -signal.SIGKILL
        if after < 16:
            assert not sql(url, "SHOW TABLES LIKE %s", f"{bare}\\_schema") or applied(url, bare) == []
    store = store_at(url, bare)
    store.insert_blocking([new_job()])
    store.close()
    assert applied(url, bare) == [NEWEST]
    assert schema(url, bare) == schema(url, "whole")
    for table in (*TABLES, "schema"):
        sql(url, f"DROP TABLE whole_{table}")


async def test_a_later_version_brings_an_old_schema_up_to_date(
    url: str, bare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with store_at(url, bare) as old:
        await old.insert([new_job()])
        later = [*shipped(), Migration(NEWEST + 1, "a.sql", "ALTER TABLE {ns}_totals ADD COLUMN note INT;\n")]
        monkeypatch.setattr(store_module, "shipped", lambda: later)
        async with store_at(url, bare) as new:
            await new.insert([new_job()])
        assert applied(url, bare) == [NEWEST, NEWEST + 1]
        await old.insert([new_job()])  # a process of the old version goes on
        await open_session(old)
        assert await old.apply(done(await claim(old))) == ["applied"] * 3


async def test_a_newer_minor_version_is_no_hindrance(url: str, bare: str) -> None:
    async with store_at(url, bare):
        sql(url, f"INSERT INTO {bare}_schema (number, name) VALUES (999, 'later')")
    async with store_at(url, bare) as store:
        await store.insert([new_job()])


async def test_a_newer_major_version_is_refused(url: str, bare: str) -> None:
    async with store_at(url, bare):
        sql(url, f"INSERT INTO {bare}_schema (number, name) VALUES (1000, 'major')")
    store = store_at(url, bare)
    with pytest.raises(SchemaOutdated, match="newer major version"):
        await store.counts()
    with pytest.raises(SchemaOutdated, match="newer major version"):
        store.insert_blocking([new_job()])
    store.close()


async def test_what_must_exist_is_not_created(url: str, bare: str) -> None:
    store = open_store(f"{url}?namespace={bare}", SYSTEM, existing=True)
    with pytest.raises(SchemaOutdated, match="migrate it first"):
        await store.counts()
    assert sql(url, "SHOW TABLES LIKE %s", f"{bare}\\_%") == []
    async with store_at(url, bare):
        assert await store.counts() == []
    await store.__aexit__(None, None, None)


async def test_a_table_of_another_engine_is_refused(url: str, bare: str) -> None:
    async with store_at(url, bare):
        sql(url, f"ALTER TABLE {bare}_totals ENGINE = MyISAM")
    store = store_at(url, bare)
    with pytest.raises(UnsafeStore, match=r"totals.*MyISAM.*only InnoDB"):
        await store.counts()
    with pytest.raises(UnsafeStore, match=r"totals.*MyISAM.*only InnoDB"):
        store.insert_blocking([new_job()])
    store.close()


async def test_a_column_of_another_collation_is_refused(url: str, bare: str) -> None:
    async with store_at(url, bare):
        queue = "queue VARCHAR(255) CHARACTER SET ascii COLLATE ascii_general_ci NOT NULL"
        sql(url, f"ALTER TABLE {bare}_paused MODIFY {queue}")
    store = store_at(url, bare)
    with pytest.raises(UnsafeStore, match=r"paused\.queue.*ascii_general_ci"):
        await store.counts()
    store.close()


@pytest.mark.parametrize("text", ["5.7.44", "8.0.4-rc", "10.5.28-MariaDB", "10.3.39-MariaDB-0+deb10u1"])
def test_an_old_server_is_refused(text: str) -> None:
    with pytest.raises(UnsafeStore, match="or newer"):
        require_version(text, where="there")


@pytest.mark.parametrize("text", ["8.0.11", "8.4.3-0ubuntu1", "9.1.0", "10.6.0-MariaDB", "11.4.2-MariaDB-log"])
def test_a_new_server_is_not(text: str) -> None:
    require_version(text, where="there")


async def test_a_database_that_is_not_there(url: str) -> None:
    store = MysqlStore(urlsplit(url).netloc, "nowhere")
    with pytest.raises(StoreUnavailable, match="nowhere"):
        await store.counts()
    store.close()


async def test_many_tasks_open_one_store_at_once(url: str, bare: str) -> None:
    async with store_at(url, bare) as store:
        assert await asyncio.gather(*(store.counts() for _ in range(20))) == [[]] * 20
