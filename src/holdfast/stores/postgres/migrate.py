"""Brings a database to this version's schema: each numbered file in one transaction, under a lock.

Safe when run twice, by several processes at once, or killed half-way: the server rolls back what was not committed.
"""

# The only names ever put into SQL text are the namespace, which is checked, and our own constants.
# ruff: noqa: S608

from __future__ import annotations

from typing import Any

import psycopg

from holdfast.errors import StoreUnavailable, UnsafeStore
from holdfast.store import CLOSED_SESSION_KEPT
from holdfast.stores.migrations import Migration, missing, outdated, shipped

OLDEST_SERVER = 13
_PACKAGE = "holdfast.stores.postgres"


def refuse_unsafe(connection: psycopg.Connection[Any], *, where: str) -> None:
    """`UnsafeStore` for a database whose settings break our promises."""
    row = connection.execute(
        "SELECT current_setting('server_encoding'), current_setting('transaction_isolation')"
    ).fetchone()
    encoding, isolation = row or ("", "")
    if encoding != "UTF8":
        raise UnsafeStore(
            f"{where} has the encoding {encoding}: texts are kept, and ordered, as UTF8; make a database with that"
        )
    if isolation == "repeatable read":  # a serializable one notices by itself, and the statement is repeated
        raise UnsafeStore(
            f"transactions of this role in {where} are {isolation} by default: a repeated insert might become a second "
            f"job. ALTER ROLE ... IN DATABASE ... SET default_transaction_isolation = 'read committed'"
        )


def schema_number(connection: psycopg.Connection[Any], namespace: str) -> int:
    """The number of the last migration applied; 0 for a database without our tables. It only reads."""
    # FROM pg_class: a server that remembers that there was no such table hears of a new one when it opens a table, and
    # not while it waits for our lock.
    text = "SELECT to_regclass(%s::text) IS NOT NULL FROM pg_class LIMIT 1"
    there = connection.execute(text, (f"{namespace}_schema",)).fetchone()
    if not there or not there[0]:
        return 0
    row = connection.execute(f"SELECT max(number) FROM {namespace}_schema".encode()).fetchone()
    return int(row[0] or 0) if row else 0


def is_current(connection: psycopg.Connection[Any], namespace: str, *, where: str) -> bool:
    """Whether nothing is to be done. `SchemaOutdated` if it is of a newer major version. It only reads."""
    return not missing(schema_number(connection, namespace), shipped(_PACKAGE), where=where)


def require_current(connection: psycopg.Connection[Any], namespace: str, *, where: str) -> int:
    """The schema's number. `SchemaOutdated` if this version needs a newer one, or it is of a newer major version."""
    here, migrations = schema_number(connection, namespace), shipped(_PACKAGE)
    if missing(here, migrations, where=where):
        raise outdated(here, migrations, where=where, namespace=namespace)
    return here


def _stay_in_schema(connection: psycopg.Connection[Any], namespace: str) -> None:
    """Until the transaction ends, make what is made where the tables are, wherever that is on the search_path."""
    connection.execute(
        """SELECT set_config('search_path', concat_ws(', ', quote_ident(n.nspname), nullif(p.path, '')), true)
           FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
           CROSS JOIN (SELECT current_setting('search_path') AS path) p WHERE c.oid = to_regclass(%s::text)""",
        (f"{namespace}_schema",),
    )


def migrate(
    connection: psycopg.Connection[Any], namespace: str, *, where: str, migrations: list[Migration] | None = None
) -> None:
    """Apply what is missing. If nothing is, it only reads, and needs no right to create anything."""
    migrations = shipped(_PACKAGE) if migrations is None else migrations
    if connection.info.server_version < OLDEST_SERVER * 10_000:
        raise StoreUnavailable(
            f"{where} is PostgreSQL {connection.info.server_version // 10_000}: {OLDEST_SERVER} or newer is needed"
        )
    if not missing(schema_number(connection, namespace), migrations, where=where):
        return
    with connection.transaction():
        # Whatever the role's default is: after waiting for the lock, it must see what was done meanwhile.
        connection.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
        # One migrates, the others wait and then find nothing left to do. The lock ends with the transaction.
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s::text, 0))", (f"{namespace}_schema",))
        for migration in missing(schema_number(connection, namespace), migrations, where=where):
            if migration is not migrations[0]:
                _stay_in_schema(connection, namespace)
            else:
                connection.execute(
                    f"CREATE TABLE {namespace}_schema (number int PRIMARY KEY, name text NOT NULL)".encode()
                )
            text = migration.text.replace("{ns}", namespace).replace("{closed_session_kept}", str(CLOSED_SESSION_KEPT))
            connection.execute(text.encode())
            connection.execute(
                f"INSERT INTO {namespace}_schema (number, name) VALUES (%s::int, %s::text)".encode(),
                (migration.number, migration.name),
            )
