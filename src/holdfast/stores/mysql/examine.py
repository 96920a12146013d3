"""What a MySQL or MariaDB server says about itself: what an accepted job survives there, and whether anything is wrong.

It reads and creates nothing, so a database without our tables is told about instead of filled.
"""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from holdfast.store import Finding, Verdict, oldest_ready
from holdfast.stores.mysql.migrate import refuse_unsafe, require_current, shipped
from holdfast.stores.mysql.sql import Plan, literal, one
from holdfast.stores.mysql.tables import Tables

_SETTINGS = ("innodb_flush_log_at_trx_commit", "sync_binlog", "log_bin", "innodb_doublewrite")
_OLD_TRANSACTION = 60
"""Seconds. Nothing that is deleted while a transaction is open can be removed: what was claimed stays in the way."""
_LONG_HISTORY = 100_000


def examine(tables: Tables, where: str, *, deep: bool) -> Plan[list[Finding]]:
    """The findings, the first about what an accepted job survives. `SchemaOutdated` if our tables are not there."""
    version = yield from refuse_unsafe(tables.ns, where=where)
    schema = yield from require_current(tables.ns, shipped(), where=where)
    settings = yield from _settings()
    findings = [*survival(settings), Finding("server", version), Finding("schema", str(schema))]
    findings += yield from _transactions(may_look=(yield from _may_look()))
    waiting = yield from one(f"SELECT MIN(run_at), {tables.clock()} FROM {tables.by_id('ready')}")
    due, now = waiting.rows[0]
    findings.append(oldest_ready(due, int(now)))
    return [*findings, (yield from _pages(tables.ns))] if deep else findings


def survival(settings: Mapping[str, str]) -> list[Finding]:
    """What follows from the settings of the server."""
    flush = settings.get("innodb_flush_log_at_trx_commit", "")
    binlog = settings.get("log_bin", "OFF") in ("ON", "1")
    synced = settings.get("sync_binlog", "0") == "1"
    torn = settings.get("innodb_doublewrite", "ON") in ("OFF", "0")
    power_cut = flush == "1" and (synced or not binlog) and not torn
    if flush == "0":
        survives = "a crash of any client; not one of the server: about the last second would be lost"
    elif power_cut:
        survives = "a crash of the server; a power cut, if the disk honours flushes; not the loss of the disk"
    else:
        survives = "a crash of the server; not a power cut: the jobs of the last moments would be lost"
    verdict = Verdict.OK if power_cut else Verdict.WEAK
    findings = [
        Finding("survives", survives, verdict),
        Finding(
            "innodb_flush_log_at_trx_commit",
            flush or "unknown",
            Verdict.OK if flush == "1" else Verdict.WEAK,
            "" if flush == "1" else "set it to 1, its default, and every commit waits for the disk",
        ),
    ]
    if binlog:
        advice = "set it to 1: after a power cut the server goes by its binary log, and may take back what is not in it"
        findings.append(
            Finding("sync_binlog", settings["sync_binlog"], *((Verdict.OK,) if synced else (Verdict.WEAK, advice)))
        )
    if torn:
        advice = "turn it on, unless the file system never writes half a page: such a page is beyond repair"
        findings.append(Finding("innodb_doublewrite", settings["innodb_doublewrite"], Verdict.WEAK, advice))
    return findings


def _pages(namespace: str) -> Plan[Finding]:
    """The server's own check of every index of the tables that hold jobs."""
    names = ", ".join(f"{namespace}_{table}" for table in ("ready", "in_flight", "ended", "keys"))
    answer = yield from one(f"CHECK TABLE {names}")
    damages = [f"{table}: {text}" for table, _, kind, text in answer.rows if kind != "note" and text != "OK"]
    if not damages:
        return Finding("integrity", "every page is sound")
    return Finding("integrity", "; ".join(damages[:3]), Verdict.BAD, "a table is damaged: restore a backup")


def _settings() -> Plan[dict[str, str]]:
    names = ", ".join(literal(name) for name in _SETTINGS)
    answer = yield from one(f"SHOW GLOBAL VARIABLES WHERE Variable_name IN ({names})")
    return {str(name): str(value) for name, value in answer.rows}


def _may_look() -> Plan[bool]:
    """Whether this user may see the transactions of others: whoever asks without the privilege gets an error."""
    answer = yield from one("SHOW GRANTS")
    grants = " ".join(str(row[0]).upper() for row in answer.rows if " ON *.* " in str(row[0]).upper())
    return "ALL PRIVILEGES" in grants or "PROCESS" in grants


def _transactions(*, may_look: bool) -> Plan[list[Finding]]:
    if not may_look:
        return [Finding("oldest transaction", "not seen: this user lacks the privilege PROCESS")]
    oldest = yield from one(
        "SELECT TIMESTAMPDIFF(SECOND, MIN(trx_started), NOW()) FROM information_schema.innodb_trx "
        "WHERE trx_mysql_thread_id <> CONNECTION_ID()"
    )
    seconds = max(0, int(oldest.rows[0][0] or 0))
    age = f"open for {timedelta(seconds=seconds)} (h:mm:ss)" if seconds else "none is older than a second"
    old = seconds >= _OLD_TRANSACTION
    advice = "claims slow down until it ends: SELECT * FROM information_schema.innodb_trx ORDER BY trx_started"
    found = [Finding("oldest transaction", age, *((Verdict.WEAK, advice) if old else (Verdict.OK,)))]
    length = yield from one("SELECT `count` FROM information_schema.innodb_metrics WHERE name = 'trx_rseg_history_len'")
    if length.rows:
        rows = int(length.rows[0][0])
        advice = "deleted rows are not removed fast enough, and claims read past them: look for long transactions"
        verdict = (Verdict.WEAK, advice) if rows > _LONG_HISTORY else (Verdict.OK,)
        found.append(Finding("transactions not purged", f"{rows:,}", *verdict))
    return found
