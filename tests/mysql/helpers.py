"""What the tests of the MySQL engine share: stores by URL, plain sessions, and namespaces with nothing in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import pymysql
from pymysql.constants import CLIENT

from holdfast.job import Job, NewJob
from holdfast.lifecycle import Move, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM, Ports
from holdfast.store import ClaimRequest, Session, Store
from holdfast.stores import open_store
from holdfast.stores.mysql import MysqlStore

TABLES = ("ready", "in_flight", "ended", "totals", "keys", "sessions", "gates", "paused", "checkpoints")


def store_at(url: str, namespace: str = "holdfast", *, ports: Ports = SYSTEM, **options: object) -> MysqlStore:
    query = "&".join(f"{name}={value}" for name, value in {"namespace": namespace, **options}.items())
    store = open_store(f"{url}?{query}", ports)
    assert isinstance(store, MysqlStore)
    return store


def connect(url: str, **options: Any) -> pymysql.Connection[Any]:
    parts = urlsplit(url)
    login: dict[str, Any] = {
        "host": parts.hostname,
        "port": parts.port or 3306,
        "user": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
        "database": parts.path.strip("/"),
        "client_flag": CLIENT.MULTI_STATEMENTS,
        "autocommit": True,
    }
    return pymysql.connect(**{**login, **options})


def sql(url: str, text: str, *values: object) -> list[tuple[Any, ...]]:
    """The rows of one statement in a session of its own."""
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(text, values or None)
        return list(cursor.fetchall())


def empty(url: str, namespace: str) -> None:
    """Leave nothing in the namespace but its schema, if it has one."""
    with connect(url) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW TABLES LIKE %s", (f"{namespace}\\_schema",))
        if cursor.fetchall():
            # Deleted, not truncated: a truncated table has new files, and the server syncs each of them.
            cursor.execute(";".join(f"DELETE FROM {namespace}_{table}" for table in TABLES))
            while cursor.nextset():
                pass


def drop(url: str, namespace: str) -> None:
    """Leave nothing at all."""
    with connect(url) as connection, connection.cursor() as cursor:
        for table in (*TABLES, "schema"):
            cursor.execute(f"DROP TABLE IF EXISTS {namespace}_{table}")


def new_job(**fields: Any) -> NewJob:
    return NewJob(**{"id": SYSTEM.ids.job_id(), "task": "work", "payload": b"{}", **fields})


def new_jobs(count: int, **fields: Any) -> list[NewJob]:
    return [new_job(**fields) for _ in range(count)]


def done(jobs: Sequence[Job]) -> list[Move]:
    """What follows when each of these claims succeeds."""
    return [settle(job, Succeeded(), RetryPolicy(), SYSTEM.random) for job in jobs]


async def open_session(store: Store, session_id: str = "s") -> str:
    await store.open_session(Session(id=session_id))
    return session_id


async def claim(
    store: Store, session_id: str = "s", limit: int = 100, queues: tuple[str, ...] = ("default",)
) -> list[Job]:
    claimed = await store.claim(ClaimRequest(session_id=session_id, queues=queues, limit=limit))
    return list(claimed.jobs)
