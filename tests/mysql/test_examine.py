"""What the engine says about itself: settings, transactions, and nothing created."""

from __future__ import annotations

import pytest

from holdfast.errors import SchemaOutdated, StoreUnavailable
from holdfast.store import Examinable, Finding, Verdict
from holdfast.stores.mysql import MysqlStore
from holdfast.stores.mysql import examine as examine_module
from holdfast.stores.mysql.examine import survival
from tests.mysql.conftest import NAMESPACE
from tests.mysql.helpers import connect, new_job, sql, store_at


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


async def test_a_sound_store(store: MysqlStore) -> None:
    assert isinstance(store, Examinable)
    await store.insert([new_job()])
    findings = await store.examine()
    found = by_name(findings)
    assert findings[0].name == "survives"
    assert found["schema"].value == "1"
    assert "due for 0:00:0" in found["oldest ready job"].value
    assert "oldest transaction" in found
    assert "transactions not purged" in found
    assert not any(finding.verdict is Verdict.BAD for finding in findings)


async def test_deep(store: MysqlStore) -> None:
    found = by_name(await store.examine(deep=True))
    assert found["integrity"].value == "every page is sound"


async def test_it_creates_nothing(url: str, bare: str) -> None:
    store = store_at(url, bare)
    with pytest.raises(SchemaOutdated, match="migrate it first"):
        await store.examine()
    assert sql(url, "SHOW TABLES LIKE %s", f"{bare}\\_%") == []
    store.close()


async def test_nobody_there() -> None:
    store = store_at("mysql://root@127.0.0.1:1/test")
    with pytest.raises(StoreUnavailable):
        await store.examine()


SAFE = {"innodb_flush_log_at_trx_commit": "1", "sync_binlog": "0", "log_bin": "OFF", "innodb_doublewrite": "ON"}


@pytest.mark.parametrize(
    ("changed", "survives", "weak"),
    [
        ({}, "a power cut, if", set()),
        ({"log_bin": "ON", "sync_binlog": "1"}, "a power cut, if", set()),
        ({"log_bin": "ON"}, "not a power cut", {"survives", "sync_binlog"}),
        ({"innodb_flush_log_at_trx_commit": "2"}, "not a power cut", {"survives", "innodb_flush_log_at_trx_commit"}),
        (
            {"innodb_flush_log_at_trx_commit": "0"},
            "not one of the server",
            {"survives", "innodb_flush_log_at_trx_commit"},
        ),
        ({"innodb_doublewrite": "OFF"}, "not a power cut", {"survives", "innodb_doublewrite"}),
    ],
)
def test_what_a_job_survives(changed: dict[str, str], survives: str, weak: set[str]) -> None:
    findings = survival({**SAFE, **changed})
    assert survives in findings[0].value
    assert {finding.name for finding in findings if finding.verdict is Verdict.WEAK} == weak
    assert all(finding.advice for finding in findings[1:] if finding.verdict is Verdict.WEAK)


async def test_the_live_setting_is_read(store: MysqlStore, url: str) -> None:
    sql(url, "SET GLOBAL innodb_flush_log_at_trx_commit = 2")
    try:
        found = by_name(await store.examine())
    finally:
        sql(url, "SET GLOBAL innodb_flush_log_at_trx_commit = 1")
    assert found["innodb_flush_log_at_trx_commit"].value == "2"
    assert found["survives"].verdict is Verdict.WEAK


async def test_an_old_transaction_is_told(store: MysqlStore, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine_module, "_OLD_TRANSACTION", 1)
    with connect(url, autocommit=False) as connection, connection.cursor() as cursor:
        cursor.execute(f"SELECT COUNT(*) FROM {NAMESPACE}_ready")
        cursor.execute("DO SLEEP(2.1)")
        found = by_name(await store.examine())
    assert found["oldest transaction"].verdict is Verdict.WEAK
    assert "open for 0:00:0" in found["oldest transaction"].value


async def test_without_the_privilege_it_says_so(url: str, store: MysqlStore) -> None:
    sql(url, "CREATE OR REPLACE USER looker@127.0.0.1")
    sql(url, "GRANT SELECT ON test.* TO looker@127.0.0.1")
    looker = store_at(url.replace("holdfast@", "looker@"), NAMESPACE)
    found = by_name(await looker.examine())
    assert "PROCESS" in found["oldest transaction"].value
    assert found["survives"].verdict is Verdict.OK
    looker.close()
