"""What a PostgreSQL server says about itself: what an accepted job survives in it, and what is in the way."""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg

from holdfast.errors import StoreUnavailable
from holdfast.store import Finding, Verdict, oldest_ready
from holdfast.stores.postgres.connections import Server, said
from holdfast.stores.postgres.migrate import require_current

_OLD_TRANSACTION = 60.0
_MANY_DEAD = 0.5
_DEAD_WORTH_MENTION = 10_000


def examine(server: Server, namespace: str) -> list[Finding]:
    """Everything that is found, the first about what an accepted job survives. Blocking; it changes nothing.

    `SchemaOutdated` if the tables are missing or not this version's.
    """
    connection = server.connect_blocking()
    try:
        number = require_current(connection, namespace, where=server.shown)
        return [
            *_durability(connection),
            Finding("server", f"PostgreSQL {_setting(connection, 'server_version')} at {server.shown}"),
            Finding("schema", str(number)),
            _isolation(connection),
            _oldest_transaction(connection),
            _dead_rows(connection, namespace),
            _oldest_ready(connection, namespace),
        ]
    except psycopg.Error as error:
        raise StoreUnavailable(f"cannot examine {server.shown}: {said(error)}") from error
    finally:
        connection.throw_away()


def _row(connection: psycopg.Connection[Any], text: str, *values: object) -> tuple[Any, ...]:
    row = connection.execute(text.encode(), values or None).fetchone()
    return tuple(row) if row else ()


def _setting(connection: psycopg.Connection[Any], name: str) -> str:
    return str(_row(connection, "SELECT current_setting(%s::text)", name)[0])


def _durability(connection: psycopg.Connection[Any]) -> list[Finding]:
    commit = _setting(connection, "synchronous_commit")
    fsync = _setting(connection, "fsync") == "on"
    whole_pages = _setting(connection, "full_page_writes") == "on"
    standbys = bool(_setting(connection, "synchronous_standby_names"))
    [replica] = _row(connection, "SELECT pg_is_in_recovery()")
    crash = commit != "off"
    power = crash and fsync and whole_pages
    failover = standbys and commit not in ("off", "local")
    survives = "; ".join(
        [
            "a crash of any worker or producer",
            "a crash of the server" if crash else "not a crash of the server: the last 0.6 seconds would be lost",
            "a power cut, if the disk honours flushes" if power else "not a power cut",
            "the loss of the primary" if failover else "not the loss of the primary, if a replica takes over",
        ]
    )
    findings = [
        Finding(
            "survives", survives, Verdict.BAD if not (fsync and whole_pages) else Verdict.OK if power else Verdict.WEAK
        ),
        Finding(
            "synchronous_commit",
            commit,
            Verdict.OK if crash else Verdict.WEAK,
            "" if crash else "set synchronous_commit = on for this role or database: commits then wait for the disk",
        ),
        Finding(
            "fsync",
            "on" if fsync else "off",
            Verdict.OK if fsync else Verdict.BAD,
            "" if fsync else "set fsync = on: without it, a power cut can destroy the whole database",
        ),
        Finding(
            "full_page_writes",
            "on" if whole_pages else "off",
            Verdict.OK if whole_pages else Verdict.BAD,
            "" if whole_pages else "set full_page_writes = on: without it, a power cut can leave torn pages behind",
        ),
    ]
    if replica:
        findings.append(Finding("role", "a replica", Verdict.BAD, "it cannot be written to: connect to the primary"))
    return findings


def _isolation(connection: psycopg.Connection[Any]) -> Finding:
    """Every statement must see what was committed before it began: see `migrations/`."""
    level = _setting(connection, "default_transaction_isolation")
    if level == "read committed":
        return Finding("isolation", level)
    advice = "ALTER ROLE ... SET default_transaction_isolation = 'read committed' for the roles that use this store"
    return Finding("isolation", level, Verdict.WEAK, advice)


def _oldest_transaction(connection: psycopg.Connection[Any]) -> Finding:
    """A transaction that stays open keeps every row that was deleted since: see `lookback.py`."""
    seconds, sees_all = _row(
        connection,
        """SELECT coalesce(max(extract(epoch FROM clock_timestamp() - x.begun)), 0)::float8,
                  pg_has_role('pg_read_all_stats', 'USAGE')
           FROM (SELECT xact_start AS begun FROM pg_stat_activity
                 WHERE pid <> pg_backend_pid() AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
                 UNION ALL SELECT prepared FROM pg_prepared_xacts WHERE database = current_database()) x""",
    )
    if seconds < _OLD_TRANSACTION:
        hidden = "" if sees_all else "; those of other roles are hidden: GRANT pg_read_all_stats shows them"
        return Finding("oldest transaction", f"{seconds:.1f} s{hidden}")
    return Finding(
        "oldest transaction",
        f"{timedelta(seconds=round(seconds))} (h:mm:ss)",
        Verdict.WEAK,
        "nothing deleted since it began can be cleaned up: end it, or set idle_in_transaction_session_timeout",
    )


def _dead_rows(connection: psycopg.Connection[Any], namespace: str) -> Finding:
    dead, live = _row(
        connection,
        """SELECT coalesce(sum(n_dead_tup), 0)::bigint, coalesce(sum(n_live_tup), 0)::bigint FROM pg_stat_user_tables
           WHERE relid IN (to_regclass(%s::text), to_regclass(%s::text))""",
        f"{namespace}_waiting",
        f"{namespace}_in_flight",
    )
    ratio = dead / (dead + live) if dead + live else 0.0
    value = f"{ratio:.0%} of the hot tables' rows ({dead:,} dead, {live:,} live, as last counted by the server)"
    if dead < _DEAD_WORTH_MENTION or ratio < _MANY_DEAD:
        return Finding("dead rows", value)
    return Finding(
        "dead rows", value, Verdict.WEAK, "autovacuum does not keep up: is it on, or is a transaction in its way?"
    )


def _oldest_ready(connection: psycopg.Connection[Any], namespace: str) -> Finding:
    now, run_at = _row(connection, f"SELECT {namespace}_now(), (SELECT min(run_at) FROM {namespace}_waiting)")
    return oldest_ready(run_at, now)
