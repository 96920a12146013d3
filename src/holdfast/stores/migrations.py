"""Numbered schema files, and which of them a database still needs: the same rule on every SQL engine.

The number is MAJOR * 1000 + MINOR in the name: code goes on with a schema that has a newer minor number and refuses
one with a newer major number. An engine reads the number that its database has, and runs the statements.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files

import msgspec

from holdfast.errors import SchemaOutdated

_MINORS_PER_MAJOR = 1_000


class Migration(msgspec.Struct, frozen=True, gc=False):
    """One numbered file."""

    number: int
    name: str
    text: str


def shipped(package: str) -> list[Migration]:
    """The migrations that this version brings in the package's folder `migrations`, in order."""
    folder = files(package).joinpath("migrations")
    found = [
        Migration(int(entry.name.split("_")[0]), entry.name, entry.read_text("utf-8"))
        for entry in folder.iterdir()
        if entry.name.endswith(".sql")
    ]
    return sorted(found, key=lambda migration: migration.number)


def missing(here: int, migrations: Sequence[Migration], *, where: str) -> list[Migration]:
    """Those that a database with that number (0: none of our tables) still needs, in order.

    `SchemaOutdated` if it was made by a newer major version. `where` says in a message what has the schema.
    """
    newest = migrations[-1].number
    if here // _MINORS_PER_MAJOR > newest // _MINORS_PER_MAJOR:
        raise SchemaOutdated(
            f"{where} has schema {here}, made by a newer major version of Holdfast than this one (schema "
            f"{newest}): upgrade this process"
        )
    return [migration for migration in migrations if migration.number > here]


def outdated(here: int, migrations: Sequence[Migration], *, where: str, namespace: str) -> SchemaOutdated:
    """The error for somebody who must not migrate."""
    return SchemaOutdated(
        f"{where} has schema {here} (0: none) in namespace {namespace!r}, this version brings "
        f"{migrations[-1].number}: migrate it first"
    )
