"""The roles of the reference, made on a test server as the reference says: what it tells is what is tested."""

from __future__ import annotations

import re
from pathlib import Path

import psycopg

from holdfast.stores.postgres import PostgresStore

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "postgresql.md"
ROLES = ("migrate", "producer", "worker", "reader")


def sql_of(heading: str, namespace: str) -> list[str]:
    """The SQL under a heading of the reference, for another namespace than `holdfast`."""
    [section] = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", REFERENCE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    blocks = re.findall(r"^```sql\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    return [re.sub(r"\bholdfast(?=_)", namespace, block) for block in blocks]


def url_of(url: str, namespace: str, role: str) -> str:
    """The same database as another role."""
    return url.replace("//holdfast@", f"//{namespace}_{role}@")


def make_roles(url: str, namespace: str) -> dict[str, str]:
    """Make the roles, migrate as the first of them, and grant the others what they need. A URL for each."""
    create, grant = sql_of("Roles", namespace)
    urls = {role: url_of(url, namespace, role) for role in ROLES}
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(create.encode())
    store = PostgresStore(urls["migrate"], namespace=namespace)
    store.open_blocking()
    store.close()
    with psycopg.connect(urls["migrate"], autocommit=True) as connection:
        connection.execute(grant.encode())
    return urls
