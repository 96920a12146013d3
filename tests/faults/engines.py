"""The engines with a server of their own, as the faults need them: seen from outside, and harmed from outside."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from holdfast.job import NewJob
from holdfast.ports import SYSTEM
from holdfast.stores import open_store
from holdfast.stores.redis.scripts import load_scripts
from tests.servers import MariaDbServer, PostgresServer, RedisServer, Server, redis_command
from tests.worker.programs import children_of, eventually


class Database(ABC):
    """One database on a server."""

    engine: ClassVar[str]
    first: ClassVar[str]
    """The database that a new server has."""
    forgetful: ClassVar[Mapping[str, str]]
    """Settings with which a commit is answered before it is written anywhere but in the server's memory."""
    claim_mark: ClassVar[re.Pattern[bytes]]
    """What the statement by which a claim takes effect has in it, on the wire."""

    def __init__(self, server: Server, name: str = "") -> None:
        self.server = server
        self.name = name or self.first

    @classmethod
    @abstractmethod
    def start(cls, settings: Mapping[str, str] | None = None) -> Server:
        """A server of the test's own, not running yet, with the durability that it ships with."""

    def url(self, *, port: int = 0, timeout: float = 10.0) -> str:
        """Where the store is, by its own port or by another that leads there. `timeout`: how patient it is."""
        parts = urlsplit(self.server.url)
        place = parts.netloc.replace(f":{self.server.port}", f":{port or self.server.port}")
        return f"{parts.scheme}://{place}/{self.name}?timeout={timeout:g}"

    @abstractmethod
    def create(self, *, durable: bool = False) -> None:
        """Make the database. Nobody waits there long for a deadlock to be found, nor for the disk, if not durable."""

    @abstractmethod
    def drop(self) -> None:
        """Remove the database, whoever is connected to it."""

    @abstractmethod
    def enqueue(self, task: str, payloads: Sequence[str], *, at_once: int = 1, max_retries: int = 3) -> None:
        """Add jobs, so many at once, as a program does that knows the engine and not Holdfast, if there can be one."""

    # What handlers write to the server themselves.

    @abstractmethod
    def create_results(self) -> None:
        """Make the place for it."""

    @abstractmethod
    def add_results(self, results: Sequence[tuple[str, int]]) -> None:
        """Write what a handler would."""

    @abstractmethod
    def remove_result(self, number: int) -> None:
        """Take it away again."""

    @abstractmethod
    def results(self) -> list[tuple[str, int]]:
        """Every job id and number that is there."""

    # Harm.

    def deadlocks(self) -> int:
        """How many the server has broken up so far. None, where nobody waits for locks."""
        return 0

    @abstractmethod
    def connections(self) -> dict[int, int]:
        """All connections to the database but the one that asks: the client's port, and the server's name for it."""

    @abstractmethod
    def end_connections(self) -> int:
        """End all of them but our own. How many it was."""

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The server stands still (SIGSTOP) until the block ends."""
        stopped = [self.server.pid]
        try:
            os.kill(self.server.pid, signal.SIGSTOP)
            eventually(lambda: _is_stopped(self.server.pid), "the server is stopped")
            for child in children_of(self.server.pid):  # stopped itself, it makes no more of them
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGSTOP)
                    stopped.append(child)
            yield
        finally:
            for pid in reversed(stopped):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    return "\nState:\tT" in Path(f"/proc/{pid}/status").read_text()


class Sql(ABC):
    """A connection of the test's own, in autocommit mode, beside those of the store."""

    @abstractmethod
    def run(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of one statement. Values stand as %s."""


class SqlDatabase(Database):
    """One that speaks SQL, and has transactions that lock rows."""

    ready_table: ClassVar[str]
    totals_table: ClassVar[str]
    key_column: ClassVar[str]

    @abstractmethod
    def connect(self) -> contextlib.AbstractContextManager[Sql]:
        """Talk to the server."""

    def sql(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        """The rows of one statement on a connection of its own."""
        with self.connect() as sql:
            return sql.run(text, *values)

    def enqueue(self, task: str, payloads: Sequence[str], *, at_once: int = 1, max_retries: int = 3) -> None:
        with self.connect() as sql:
            for first in range(0, len(payloads), at_once):
                some = payloads[first : first + at_once]
                rows = ", ".join(["(%s, %s, %s)"] * len(some))
                values = [value for payload in some for value in (task, payload, max_retries)]
                sql.run(f"INSERT INTO holdfast_ready (task, payload, max_retries) VALUES {rows}", *values)

    def create_results(self) -> None:
        self.sql("CREATE TABLE job_results (job_id varchar(36) NOT NULL, number int NOT NULL)")

    def add_results(self, results: Sequence[tuple[str, int]]) -> None:
        rows = ", ".join(["(%s, %s)"] * len(results))
        self.sql(f"INSERT INTO job_results VALUES {rows}", *[value for result in results for value in result])

    def remove_result(self, number: int) -> None:
        self.sql("DELETE FROM job_results WHERE number = %s", number)

    def results(self) -> list[tuple[str, int]]:
        return [(job_id, number) for job_id, number in self.sql("SELECT job_id, number FROM job_results")]

    @abstractmethod
    def waiting_for_locks(self) -> int:
        """How many transactions wait for others."""

    @abstractmethod
    def locked(self, table: str) -> contextlib.AbstractContextManager[None]:
        """Nobody can write to the table until the block ends. Reading goes on."""

    def claims_blocked(self) -> contextlib.AbstractContextManager[None]:
        """Nothing can be claimed."""
        return self.locked("holdfast_in_flight")

    def inserts_blocked(self) -> contextlib.AbstractContextManager[None]:
        """Nothing can be enqueued."""
        return self.locked(self.ready_table)

    @abstractmethod
    def begin_spared(self, sql: Sql) -> None:
        """Begin a transaction that the server will not choose to end a deadlock."""

    @abstractmethod
    def never_retry(self, patch: pytest.MonkeyPatch) -> None:
        """Switch off what guards user code from deadlocks: the store tries nothing again."""

    @abstractmethod
    def end_connection(self, sql: Sql, connection: int) -> None:
        """End that connection, whatever it is doing."""

    def end_connections(self) -> int:
        ended = self.connections()
        with self.connect() as sql:
            for connection in ended.values():
                self.end_connection(sql, connection)
        return len(ended)


class _PostgresSql(Sql):
    def __init__(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        self._connection = connection

    def run(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(text.encode(), values or None)
        return cursor.fetchall() if cursor.description else []


class PostgresDatabase(SqlDatabase):
    """PostgreSQL."""

    engine = "postgres"
    first = "postgres"
    forgetful: ClassVar[Mapping[str, str]] = {"synchronous_commit": "off", "wal_writer_delay": "10s"}
    ready_table = "holdfast_waiting"
    totals_table = "holdfast_tallies"
    key_column = "key"
    # One that knows of lanes to take jobs from.
    claim_mark = re.compile(rb'_claim_(?:lane|alike)\(|_claim\(.*"since"', re.DOTALL)

    @classmethod
    def start(cls, settings: Mapping[str, str] | None = None) -> Server:
        return PostgresServer(settings=settings)

    @contextlib.contextmanager
    def connect(self) -> Iterator[Sql]:
        with psycopg.connect(self.url().partition("?")[0], autocommit=True, application_name="outside") as connection:
            yield _PostgresSql(connection)

    def create(self, *, durable: bool = False) -> None:
        with PostgresDatabase(self.server).connect() as sql:
            sql.run(f"CREATE DATABASE {self.name}")
            sql.run(f"ALTER DATABASE {self.name} SET synchronous_commit = {'on' if durable else 'off'}")
            sql.run(f"ALTER DATABASE {self.name} SET deadlock_timeout = '100ms'")

    def drop(self) -> None:
        with PostgresDatabase(self.server).connect() as sql:
            sql.run(f"DROP DATABASE {self.name} WITH (FORCE)")

    def deadlocks(self) -> int:
        [(count,)] = self.sql("SELECT deadlocks FROM pg_stat_database WHERE datname = %s", self.name)
        return int(count)

    def waiting_for_locks(self) -> int:
        [(count,)] = self.sql(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = %s AND wait_event_type = 'Lock'", self.name
        )
        return int(count)

    @contextlib.contextmanager
    def locked(self, table: str) -> Iterator[None]:
        with self.connect() as sql:
            sql.run("BEGIN")
            sql.run(f"LOCK TABLE {table} IN SHARE MODE")
            yield
            sql.run("ROLLBACK")

    def begin_spared(self, sql: Sql) -> None:
        sql.run("SET deadlock_timeout = '1h'")  # whoever looks for deadlocks first is the one to give in
        sql.run("BEGIN")

    def never_retry(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("holdfast.stores.postgres.connections.IN_THE_WAY", ())

    def connections(self) -> dict[int, int]:
        rows = self.sql(
            "SELECT client_port, pid FROM pg_stat_activity WHERE datname = %s AND backend_type = 'client backend' "
            "AND application_name <> 'outside'",
            self.name,
        )
        return dict(rows)

    def end_connection(self, sql: Sql, connection: int) -> None:
        sql.run("SELECT pg_terminate_backend(%s)", connection)


class _MariaDbSql(Sql):
    def __init__(self, connection: pymysql.Connection[Any]) -> None:
        self._connection = connection

    def run(self, text: str, *values: object) -> list[tuple[Any, ...]]:
        with self._connection.cursor() as cursor:
            cursor.execute(text, values or None)
            return list(cursor.fetchall())


class MariaDbDatabase(SqlDatabase):
    """MariaDB."""

    engine = "mariadb"
    first = "test"
    forgetful: ClassVar[Mapping[str, str]] = {
        "innodb-flush-log-at-trx-commit": "0",
        "innodb-flush-log-at-timeout": "60",
    }
    ready_table = "holdfast_ready"
    totals_table = "holdfast_totals"
    key_column = "`key`"
    claim_mark = re.compile(rb"INSERT INTO holdfast_in_flight")

    @classmethod
    def start(cls, settings: Mapping[str, str] | None = None) -> Server:
        return MariaDbServer(settings=settings)

    @contextlib.contextmanager
    def connect(self) -> Iterator[Sql]:
        with pymysql.connect(
            host="127.0.0.1", port=self.server.port, user="holdfast", database=self.name, autocommit=True
        ) as connection:
            yield _MariaDbSql(connection)

    def create(self, *, durable: bool = False) -> None:
        with MariaDbDatabase(self.server).connect() as sql:
            sql.run(f"CREATE DATABASE {self.name}")
            sql.run(f"SET GLOBAL innodb_flush_log_at_trx_commit = {1 if durable else 2}")

    def drop(self) -> None:
        with MariaDbDatabase(self.server).connect() as sql:
            sql.run(f"DROP DATABASE {self.name}")
            sql.run("SET GLOBAL innodb_flush_log_at_trx_commit = DEFAULT")

    def deadlocks(self) -> int:
        [(_, count)] = self.sql("SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'")
        return int(count)

    def waiting_for_locks(self) -> int:
        [(_, rows)] = self.sql("SHOW GLOBAL STATUS LIKE 'Innodb_row_lock_current_waits'")
        [(tables,)] = self.sql(
            "SELECT count(*) FROM information_schema.processlist WHERE state LIKE 'Waiting for%%lock'"
        )
        return int(rows) + int(tables)

    @contextlib.contextmanager
    def locked(self, table: str) -> Iterator[None]:
        with self.connect() as sql:
            sql.run(f"LOCK TABLES {table} READ")
            yield
            sql.run("UNLOCK TABLES")

    def begin_spared(self, sql: Sql) -> None:
        sql.run("CREATE TABLE IF NOT EXISTS ballast (n int)")
        sql.run("BEGIN")
        for number in range(100):  # who has written least is the one to give in
            sql.run("INSERT INTO ballast VALUES (%s)", number)

    def never_retry(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("holdfast.stores.mysql.steps.RERUN", frozenset())

    def connections(self) -> dict[int, int]:
        rows = self.sql(
            "SELECT host, id FROM information_schema.processlist WHERE db = %s AND id <> CONNECTION_ID()", self.name
        )
        return {int(host.rpartition(":")[2]): connection for host, connection in rows}

    def end_connection(self, sql: Sql, connection: int) -> None:
        with contextlib.suppress(pymysql.OperationalError):  # it has just ended
            sql.run("KILL CONNECTION %s", connection)


class RedisDatabase(Database):
    """Redis: a namespace on a server. Through a kill it keeps what it has written to its append-only file: all that it
    has answered, as it flushes always. With everysec it would answer before it writes while a flush is under way.
    """

    engine = "redis"
    first = "holdfast"
    forgetful: ClassVar[Mapping[str, str]] = {"appendonly": "no"}
    claim_mark = re.compile(re.escape(load_scripts()["claim"].sha.encode()))

    @classmethod
    def start(cls, settings: Mapping[str, str] | None = None) -> Server:
        return RedisServer(settings={"appendonly": "yes", "appendfsync": "always", **(settings or {})})

    def url(self, *, port: int = 0, timeout: float = 10.0) -> str:
        return f"redis://127.0.0.1:{port or self.server.port}/0?namespace={self.name}&timeout={timeout:g}"

    def ask(self, *words: object) -> Any:
        """The answer to one command."""
        return redis_command(self.server.port, *words)

    def create(self, *, durable: bool = False) -> None:
        pass  # the store does that

    def drop(self) -> None:
        if keys := self.ask("KEYS", f"{self.name}:*"):
            self.ask("UNLINK", *keys)

    def enqueue(self, task: str, payloads: Sequence[str], *, at_once: int = 1, max_retries: int = 3) -> None:
        jobs = [
            NewJob(id=SYSTEM.ids.job_id(), task=task, payload=payload.encode(), max_retries=max_retries)
            for payload in payloads
        ]
        store = open_store(self.url(), SYSTEM)
        for first in range(0, len(jobs), at_once):
            store.insert_blocking(jobs[first : first + at_once])

    def create_results(self) -> None:
        pass  # a list is there with its first element

    def add_results(self, results: Sequence[tuple[str, int]]) -> None:
        self.ask("RPUSH", f"{self.name}:job_results", *[f"{number} {job_id}" for job_id, number in results])

    def remove_result(self, number: int) -> None:
        for job_id, found in self.results():
            if found == number:
                self.ask("LREM", f"{self.name}:job_results", 0, f"{number} {job_id}")

    def results(self) -> list[tuple[str, int]]:
        entries = [entry.partition(" ") for entry in self.ask("LRANGE", f"{self.name}:job_results", 0, -1)]
        return [(job_id, int(number)) for number, _, job_id in entries]

    def connections(self) -> dict[int, int]:
        lines = self.ask("CLIENT", "LIST", "TYPE", "normal").splitlines()
        clients = [dict(word.split("=", 1) for word in line.split()) for line in lines]
        others = [client for client in clients if client["cmd"] not in ("client", "client|list")]
        return {int(client["addr"].rpartition(":")[2]): int(client["id"]) for client in others}

    def end_connections(self) -> int:
        return int(self.ask("CLIENT", "KILL", "TYPE", "normal"))


SQL_ENGINES: dict[str, type[SqlDatabase]] = {cls.engine: cls for cls in (PostgresDatabase, MariaDbDatabase)}
ENGINES: dict[str, type[Database]] = {**SQL_ENGINES, RedisDatabase.engine: RedisDatabase}
ON_SQL = pytest.mark.parametrize("engine", SQL_ENGINES, scope="module")
"""The mark of tests that are about locks and transactions."""
ON_REDIS = pytest.mark.parametrize("engine", [RedisDatabase.engine], scope="module")
"""The mark of tests about what is one answer there, and several with others."""
