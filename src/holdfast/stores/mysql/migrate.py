"""Brings a database to this version's schema: numbered files, applied in order, each once, under a named lock.

The server commits every change of a table by itself. So each statement may be run again, and the number is written
last: whoever is killed half-way leaves something that the next one completes. What the numbers mean:
`holdfast.stores.migrations`.
"""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from collections.abc import Iterator, Sequence

from holdfast.errors import StoreUnavailable, UnsafeStore
from holdfast.stores import migrations
from holdfast.stores.migrations import Migration, missing, outdated
from holdfast.stores.mysql.sql import Batch, Plan, literal, one, row

UNLOCK = "DO RELEASE_ALL_LOCKS()"
"""Also what undoes a migration that failed: its tables stay, and the next one completes them."""

OLDEST_MYSQL = (8, 0, 11)
OLDEST_MARIADB = (10, 6, 0)


def shipped() -> list[Migration]:
    """The migrations of this version, in order."""
    return migrations.shipped("holdfast.stores.mysql")


def statements(text: str) -> Iterator[str]:
    """The single statements of a script, without their comments. One ends with its line; a trigger ends with END."""
    statement: list[str] = []
    for line in text.splitlines():
        if line.strip().startswith("--") or not line.strip():
            continue
        statement.append(line)
        in_trigger = statement[0].startswith("CREATE TRIGGER")
        if line == "END;" if in_trigger else line.endswith(";"):
            yield "\n".join(statement).removesuffix(";")
            statement = []
    if statement:
        raise ValueError(f"the migration ends in the middle of a statement: {statement[0][:80]!r}")


def schema_number(namespace: str) -> Plan[int]:
    """The number of the last migration applied; 0 for a database without our tables."""
    known = yield from one(
        f"SELECT 1 FROM information_schema.tables WHERE table_schema = DATABASE() "
        f"AND table_name = {literal(f'{namespace}_schema')}"
    )
    if not known.rows:
        return 0
    answer = yield from one(f"SELECT COALESCE(MAX(number), 0) FROM {namespace}_schema")
    return int(answer.rows[0][0])


def require_current(namespace: str, wanted: Sequence[Migration], *, where: str) -> Plan[int]:
    """The number of a schema in which nothing is missing; otherwise `SchemaOutdated`."""
    here = yield from schema_number(namespace)
    if missing(here, wanted, where=where):
        raise outdated(here, wanted, where=where, namespace=namespace)
    return here


def migrate(namespace: str, wanted: Sequence[Migration], *, where: str, wait: float) -> Plan[None]:
    """Apply what is missing. A database that is up to date is only read."""
    if not missing((yield from schema_number(namespace)), wanted, where=where):
        return
    # The lock is the server's, its name at most 64 characters long: a hash tells databases and namespaces apart.
    lock = f"CONCAT('holdfast_', LEFT(SHA2(CONCAT(DATABASE(), '.', {literal(namespace)}), 256), 48))"
    answer = yield from one(f"SELECT GET_LOCK({lock}, {max(1, int(wait))})")
    if answer.rows[0][0] != 1:
        raise StoreUnavailable(f"another process has been migrating {where} for {wait:g} s; nothing was changed")
    needed = missing((yield from schema_number(namespace)), wanted, where=where)
    yield from one(
        f"CREATE TABLE IF NOT EXISTS {namespace}_schema (number INT NOT NULL, name VARCHAR(255) CHARACTER SET ascii "
        f"COLLATE ascii_bin NOT NULL, PRIMARY KEY (number)) ENGINE = InnoDB"
    )
    for migration in needed:
        for statement in statements(migration.text.replace("{ns}", namespace)):
            yield from one(statement)
        number = row((migration.number, migration.name))
        yield from one(f"INSERT INTO {namespace}_schema (number, name) VALUES {number}")
    yield from one(UNLOCK)


def refuse_unsafe(namespace: str, *, where: str) -> Plan[str]:
    """The server's version, if it and our tables can keep the promise; otherwise `UnsafeStore`."""
    ours = f"table_schema = DATABASE() AND table_name IN ({_own_tables(namespace)})"
    version, binlog, engines, collations = yield Batch(
        [
            "SELECT VERSION()",
            "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('log_bin', 'binlog_format')",
            f"SELECT table_name, engine FROM information_schema.tables WHERE {ours} AND engine <> 'InnoDB'",
            f"SELECT table_name, column_name, collation_name FROM information_schema.columns "
            f"WHERE {ours} AND RIGHT(collation_name, 4) <> '_bin'",
        ]
    )
    text = str(version.rows[0][0])
    require_version(text, where=where)
    if {("log_bin", "ON"), ("binlog_format", "STATEMENT")} <= {(name, value) for name, value in binlog.rows}:
        raise UnsafeStore(
            f"{where} writes its binary log as statements, which READ COMMITTED cannot be used with: "
            f"set binlog_format = ROW, its default"
        )
    for table, engine in engines.rows:
        raise UnsafeStore(f"table {table} at {where} has the engine {engine}: only InnoDB keeps an accepted job safe")
    for table, column, collation in collations.rows:
        raise UnsafeStore(
            f"column {table}.{column} at {where} has the collation {collation}, which takes different names for the "
            f"same: give it back its binary collation"
        )
    return text


def require_version(text: str, *, where: str) -> None:
    """`UnsafeStore` if the server cannot skip locked rows, or lacks JSON_TABLE."""
    mariadb = "MariaDB" in text
    numbers = text.split("-", maxsplit=1)[0].split(".")
    version = tuple(int(number) for number in numbers[:3] if number.isdigit())
    oldest = OLDEST_MARIADB if mariadb else OLDEST_MYSQL
    if version < oldest:
        name = "MariaDB" if mariadb else "MySQL"
        raise UnsafeStore(f"{where} is {name} {text:.40}: it takes {'.'.join(map(str, oldest))} or newer")


def _own_tables(namespace: str) -> str:
    names = ("ready", "in_flight", "ended", "totals", "keys", "sessions", "gates", "paused", "checkpoints", "schema")
    return ", ".join(literal(f"{namespace}_{name}") for name in names)
