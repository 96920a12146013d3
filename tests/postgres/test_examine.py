"""What a server says about itself: each weak setting has its verdict and its advice. Also by `holdfast doctor`."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Iterator

import psycopg
import pytest

from holdfast.errors import SchemaOutdated, StoreUnavailable
from holdfast.store import Examinable, Finding, Verdict
from holdfast.stores.migrations import shipped
from holdfast.stores.postgres import PostgresStore, examine
from tests.cli.helpers import records, run
from tests.cli.test_doctor import advice, verdicts
from tests.postgres.helpers import HOUR, Database, eventually, new_job, new_jobs, raw, wait_until
from tests.servers import PostgresServer, missing_server_policy

SETTINGS = ("fsync", "full_page_writes", "synchronous_commit", "synchronous_standby_names")


@pytest.fixture(scope="module")
def own_server() -> Iterator[PostgresServer]:
    """A server whose settings may be changed."""
    with missing_server_policy():
        server = PostgresServer(settings={"max_prepared_transactions": "2"})
    with server:
        yield server


@pytest.fixture(scope="module")
def own(own_server: PostgresServer) -> Iterator[Database]:
    with contextlib.closing(Database(own_server.url, "holdfast")) as database:
        store = database.store()
        store.open_blocking()
        store.close()
        yield database


@pytest.fixture
def sound(own: Database) -> Iterator[Database]:
    """With all settings as they should be, before and after."""
    own.empty()
    yield own
    for setting in SETTINGS:
        own.sql(f"ALTER SYSTEM RESET {setting}")
    reload(own)


def reload(database: Database) -> None:
    """Let the server read its settings again, and wait until it has."""
    before = database.value("SELECT pg_conf_load_time()")
    database.sql("SELECT pg_reload_conf()")
    wait_until(lambda: database.value("SELECT pg_conf_load_time()") != before)


def change(database: Database, setting: str, value: str) -> None:
    database.sql(f"ALTER SYSTEM SET {setting} = '{value}'")
    reload(database)


async def found(database: Database) -> dict[str, Finding]:
    store = database.store()
    findings = await store.examine()
    store.close()
    assert findings[0].name == "survives"
    assert all((finding.verdict is Verdict.OK) <= (finding.advice == "") for finding in findings)
    assert all("\n" not in finding.advice for finding in findings)
    return {finding.name: finding for finding in findings}


def weak(findings: dict[str, Finding]) -> dict[str, str]:
    return {name: finding.verdict.value for name, finding in findings.items() if finding.verdict is not Verdict.OK}


async def test_a_server_as_it_comes(sound: Database) -> None:
    assert isinstance(sound.store(), Examinable)
    findings = await found(sound)
    assert weak(findings) == {}
    assert findings["survives"].value == (
        "a crash of any worker or producer; a crash of the server; a power cut, if the disk honours flushes; "
        "not the loss of the primary, if a replica takes over"
    )
    assert findings["server"].value.startswith("PostgreSQL ")
    assert findings["schema"].value == str(shipped("holdfast.stores.postgres")[-1].number)
    assert findings["oldest ready job"].value == "none is due"


@pytest.mark.parametrize(
    ("setting", "value", "expected", "survives", "said"),
    [
        (
            "synchronous_commit",
            "off",
            {"survives": "weak", "synchronous_commit": "weak"},
            "not a crash of the server: the last 0.6 seconds would be lost; not a power cut",
            "set synchronous_commit = on",
        ),
        (
            "fsync",
            "off",
            {"survives": "bad", "fsync": "bad"},
            "a crash of the server; not a power cut",
            "set fsync = on",
        ),
        (
            "full_page_writes",
            "off",
            {"survives": "bad", "full_page_writes": "bad"},
            "a crash of the server; not a power cut",
            "set full_page_writes = on",
        ),
    ],
)
async def test_a_weak_setting(
    sound: Database, setting: str, value: str, expected: dict[str, str], survives: str, said: str
) -> None:
    change(sound, setting, value)
    findings = await found(sound)
    assert weak(findings) == expected
    assert survives in findings["survives"].value
    assert findings[setting].advice.startswith(said)
    result = await asyncio.to_thread(run, "doctor", sound.url)
    assert result.exit_code == ("bad" in expected.values())
    assert {name: verdict for name, verdict in verdicts(result).items() if verdict != "ok"} == expected
    [line] = advice(result)
    assert line.startswith(f"{expected[setting]}: {setting}: {said}")


async def test_local_commits_survive_all_but_the_loss_of_the_primary(sound: Database) -> None:
    for commit, standbys, expected in (("local", "nobody", False), ("local", "", False), ("on", "nobody", True)):
        sound.sql(f"ALTER SYSTEM SET synchronous_commit = '{commit}'")
        change(sound, "synchronous_standby_names", standbys)
        value = (await found(sound))["survives"].value
        assert value.endswith("; the loss of the primary") == expected


async def test_another_isolation_level(sound: Database) -> None:
    sound.sql("CREATE ROLE strict LOGIN SUPERUSER")
    sound.sql("ALTER ROLE strict SET default_transaction_isolation = 'repeatable read'")
    store = PostgresStore(sound.url.replace("holdfast@", "strict@"))
    findings = {finding.name: finding for finding in await store.examine()}
    assert weak(findings) == {"isolation": "weak"}
    assert "read committed" in findings["isolation"].advice


@pytest.mark.parametrize("kind", ["writes", "reads", "is prepared"])
async def test_an_old_transaction(sound: Database, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(examine, "_OLD_TRANSACTION", 0.2)
    with raw(sound.url) as connection:
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        if kind == "reads":
            connection.execute("SELECT count(*) FROM pg_class")
        else:
            connection.execute("CREATE TABLE of_somebody (id int)")
        if kind == "is prepared":
            connection.execute("PREPARE TRANSACTION 'forgotten'")
        await eventually(lambda: sound.value("SELECT clock_timestamp() - %s > '0.3 s'", began(sound)))
        old = (await found(sound))["oldest transaction"]
        connection.execute("ROLLBACK PREPARED 'forgotten'" if kind == "is prepared" else "ROLLBACK")
    assert old.verdict is Verdict.WEAK
    assert re.fullmatch(r"0:00:\d\d \(h:mm:ss\)", old.value)
    assert old.advice.startswith("nothing deleted since it began can be cleaned up: end it")
    assert (await found(sound))["oldest transaction"].verdict is Verdict.OK


def began(database: Database) -> object:
    return database.value(
        """SELECT coalesce((SELECT min(prepared) FROM pg_prepared_xacts),
                           (SELECT min(xact_start) FROM pg_stat_activity WHERE backend_xmin IS NOT NULL))"""
    )


async def test_dead_rows(sound: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "_DEAD_WORTH_MENTION", 100)
    sound.sql("ALTER TABLE {ns}_waiting SET (autovacuum_enabled = off)")
    async with sound.store() as store:
        await store.insert(new_jobs(300))
    sound.sql("DELETE FROM {ns}_waiting")
    counted = "SELECT coalesce(n_dead_tup, 0) >= 300 FROM pg_stat_user_tables WHERE relname = '{ns}_waiting'"
    await eventually(lambda: sound.value(counted))
    dead = (await found(sound))["dead rows"]
    assert dead.verdict is Verdict.WEAK
    assert dead.value.startswith("100% of the hot tables' rows (")
    assert dead.advice.startswith("autovacuum does not keep up")
    sound.sql("VACUUM {ns}_waiting")
    await eventually(lambda: not sound.value(counted))
    assert (await found(sound))["dead rows"].verdict is Verdict.OK


async def test_the_oldest_ready_job(sound: Database) -> None:
    async with sound.store() as store:
        await store.insert([new_job(), new_job(delay=HOUR)])
    sound.sql("UPDATE {ns}_waiting SET run_at = run_at - 7200500000 WHERE run_at < {ns}_now()")
    assert (await found(sound))["oldest ready job"].value == "due for 2:00:00 (h:mm:ss)"


async def test_a_replica_is_told_from_its_primary(sound: Database) -> None:
    """Made to look like one: nothing else tells a standby here."""
    sound.sql("CREATE SCHEMA IF NOT EXISTS pretending")
    sound.sql("CREATE OR REPLACE FUNCTION pretending.pg_is_in_recovery() RETURNS bool LANGUAGE sql AS 'SELECT true'")
    url = f"{sound.url}?options=-csearch_path%3Dpretending,pg_catalog,public"
    findings = {finding.name: finding for finding in await PostgresStore(url).examine()}
    assert findings["role"] == Finding(
        "role", "a replica", Verdict.BAD, "it cannot be written to: connect to the primary"
    )


async def test_it_creates_nothing(sound: Database) -> None:
    store = sound.store(namespace="nothing_here")
    with pytest.raises(SchemaOutdated, match="migrate it first"):
        await store.examine()
    assert sound.value("SELECT to_regclass('nothing_here_schema')") is None
    result = await asyncio.to_thread(run, "doctor", f"{sound.url}?namespace=nothing_here")
    assert result.exit_code == 1
    assert verdicts(result) == {"store": "bad"}
    assert "SchemaOutdated" in result.stdout
    assert sound.value("SELECT to_regclass('nothing_here_schema')") is None


async def test_nobody_answers() -> None:
    url = "postgresql://holdfast:hunter2@127.0.0.1:1/postgres"
    with pytest.raises(StoreUnavailable, match=r"cannot connect to postgresql://127\.0\.0\.1:1/postgres"):
        await PostgresStore(url).examine()
    result = await asyncio.to_thread(run, "doctor", url)
    assert result.exit_code == 1
    assert verdicts(result) == {"store": "bad"}
    assert "hunter2" not in result.stdout + result.stderr


def test_the_command(sound: Database) -> None:
    result = run("doctor", sound.url)
    assert result.exit_code == 0
    assert verdicts(result) == dict.fromkeys(
        (
            "survives",
            "synchronous_commit",
            "fsync",
            "full_page_writes",
            "server",
            "schema",
            "isolation",
            "oldest transaction",
            "dead rows",
            "oldest ready job",
            "workers",
        ),
        "ok",
    )
    assert advice(result) == []
    secret = sound.url.replace("holdfast@", "holdfast:hunter2@")
    [record] = records(run("doctor", "--json", secret))
    assert "hunter2" not in str(record)
    assert [finding["verdict"] for finding in record["findings"]] == ["ok"] * 11
    with psycopg.connect(sound.url) as connection:
        connection.execute(sound.text("INSERT INTO {ns}_ready (task, payload) VALUES ('t', '{}')"))
    assert verdicts(run("doctor", sound.url))["workers"] == "weak"
