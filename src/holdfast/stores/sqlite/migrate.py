"""Brings a file to this version's schema: numbered files, applied in order, each once, under the write lock.

Safe when run twice, by several processes at once, or killed half-way: every step is one transaction that also writes
its number. What the numbers mean: `holdfast.stores.migrations`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence

from holdfast.stores import migrations
from holdfast.stores.migrations import Migration, missing


def shipped() -> list[Migration]:
    """The migrations of this version, in order."""
    return migrations.shipped("holdfast.stores.sqlite")


def statements(text: str) -> Iterator[str]:
    """The single statements of a script: a trigger's body has semicolons of its own, so SQLite must judge the end."""
    statement = ""
    for line in text.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
    if statement.strip():
        raise ValueError(f"the migration ends in the middle of a statement: {statement.strip()[:80]!r}")


def schema_number(connection: sqlite3.Connection, namespace: str) -> int:
    """The number of the last migration applied; 0 for a file without our tables."""
    known = connection.execute(
        "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (f"{namespace}_schema",)
    ).fetchone()
    if not known:
        return 0
    row = connection.execute(f"SELECT max(number) FROM {namespace}_schema").fetchone()  # noqa: S608
    return int(row[0] or 0)


def is_current(connection: sqlite3.Connection, namespace: str, wanted: Sequence[Migration]) -> bool:
    """Whether nothing is missing. It only reads: a file that is up to date opens while somebody else writes.

    `SchemaOutdated` if the file was made by a newer major version.
    """
    return not missing(schema_number(connection, namespace), wanted, where="the file")


def migrate(connection: sqlite3.Connection, namespace: str, wanted: Sequence[Migration]) -> None:
    """Apply what is missing. The caller holds the write transaction; it commits."""
    if not (needed := missing(schema_number(connection, namespace), wanted, where="the file")):
        return
    connection.execute(
        f"CREATE TABLE IF NOT EXISTS {namespace}_schema (number INTEGER PRIMARY KEY, name TEXT NOT NULL)"
    )
    for migration in needed:
        for statement in statements(migration.text.replace("{ns}", namespace)):
            connection.execute(statement)
        connection.execute(
            f"INSERT INTO {namespace}_schema (number, name) VALUES (?, ?)",  # noqa: S608
            (migration.number, migration.name),
        )
