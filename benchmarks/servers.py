"""The engines: a private server each, the same for every contestant, and what can be read from it.

PostgreSQL, MariaDB and SQLite wait for the disk at every commit, as they ship. Redis keeps everything in memory, as the
peers' documentation has it: no append-only file.
"""

import re
import socket
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pymysql

from benchmarks.processes import cpu_seconds
from benchmarks.rabbitmq_server import RabbitMqServer
from holdfast import Holdfast
from tests.servers import MariaDbServer, PostgresServer, RedisServer, Server


class Backend(AbstractContextManager["Backend"], ABC):
    """An engine that runs. `url` is what the contestants get."""

    engine: ClassVar[str]
    url: str

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open = ExitStack()

    def __exit__(self, *error: object) -> None:
        self._open.close()

    @abstractmethod
    def clean(self) -> None:
        """Remove whatever the last contestant left."""

    @abstractmethod
    def version(self) -> str:
        """The engine's own version, and how durable it was set up."""

    @abstractmethod
    def server_pid(self) -> int | None:
        """The server's process; None if the engine has none."""

    def server_cpu(self) -> float:
        """Processor seconds of the server so far."""
        pid = self.server_pid()
        return 0.0 if pid is None else cpu_seconds(pid)

    def environment(self) -> dict[str, str]:
        return {"BENCH_URL": self.url}

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """A list that has, in the end, how many commands or queries the clients sent meanwhile; empty: unknown."""
        yield []

    def counters(self) -> dict[str, float]:
        """What the engine counts by itself, to be compared before and after."""
        return {}

    def pending(self, query: Mapping[str, Any] | None) -> int | None:
        """How many jobs have not ended, as the contestant says one may ask; None if one cannot."""
        if not query:
            return None
        if "holdfast" in query:
            app: Holdfast = self._once("holdfast", lambda: Holdfast(self.url))
            return sum(counts.ready + counts.scheduled + counts.in_flight for counts in app.counts())
        return self._pending(query)

    def _pending(self, query: Mapping[str, Any]) -> int | None:
        raise ValueError(f"{self.engine} cannot be asked {query}")

    def forget(self) -> None:
        """Close what was opened to look at the last contestant's jobs."""
        for thing in self.__dict__.pop("_looking", {}).values():
            thing.close()

    def _once(self, name: str, make: Any) -> Any:
        looking: dict[str, Any] = self.__dict__.setdefault("_looking", {})
        if name not in looking:
            looking[name] = make()
        return looking[name]


class Served(Backend):
    """One with a server process."""

    server: Server

    def server_pid(self) -> int | None:
        return self.server.pid


class Redis(Served):
    engine = "redis"
    server: RedisServer

    def __enter__(self) -> "Redis":
        self.server = self._open.enter_context(RedisServer())
        self.url = self.server.url
        return self

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "BENCH_REDIS_URL": self.url}

    def clean(self) -> None:
        self.forget()
        self.server.ask("FLUSHALL")
        self.server.ask("SCRIPT", "FLUSH")

    def version(self) -> str:
        said = str(self.server.ask("INFO", "server"))
        found = re.search(r"(?:valkey|redis)_version:([\d.]+)", said)
        return f"Redis {found[1] if found else '?'}, in memory, no append-only file"

    def _pending(self, query: Mapping[str, Any]) -> int | None:
        return sum(_counted(self.server.ask(*command)) for command in query["redis"])

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """By MONITOR: what a script calls is not a command of a client's."""
        seen: list[int] = []
        lines: list[bytes] = []
        with socket.create_connection(("127.0.0.1", self.server.port)) as connection:
            connection.sendall(b"MONITOR\r\n")
            connection.recv(5)

            def read() -> None:
                with suppress(OSError), connection.makefile("rb") as stream:
                    lines.extend(line for line in stream if b" lua]" not in line)

            reader = threading.Thread(target=read, daemon=True)
            reader.start()
            yield seen
            connection.shutdown(socket.SHUT_RDWR)
            reader.join(5)
        seen.append(len(lines))


def _counted(answer: Any) -> int:
    """The answers of LLEN, ZCARD and their like, of XPENDING (the first of a list) and XINFO (a number by name)."""
    if isinstance(answer, list):
        if answer and isinstance(answer[0], list):
            return sum(_counted(part) for part in answer)
        if "pending" in answer:
            return int(answer[answer.index("pending") + 1])
        return int(answer[0] or 0) if answer else 0
    return int(answer or 0)


class Postgres(Served):
    engine = "postgres"
    server: PostgresServer

    def __enter__(self) -> "Postgres":
        self.server = self._open.enter_context(
            PostgresServer(settings={"max_connections": "200", "max_wal_size": "4GB", "checkpoint_timeout": "30min"})
        )
        self.url = self.server.url
        self._admin = self._open.enter_context(psycopg.connect(self.url, autocommit=True))
        return self

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "BENCH_POSTGRES_URL": self.url}

    def clean(self) -> None:
        self.forget()
        schemas = self._admin.execute(
            "SELECT quote_ident(nspname) FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'"
        ).fetchall()
        for [schema] in schemas:
            self._admin.execute(f"DROP SCHEMA {schema} CASCADE".encode())
        self._admin.execute("CREATE SCHEMA public")
        self._admin.execute("CHECKPOINT")

    def version(self) -> str:
        return f"PostgreSQL {self._admin.info.parameter_status('server_version')}, fsync and synchronous_commit on"

    def _pending(self, query: Mapping[str, Any]) -> int | None:
        row = self._admin.execute(query["sql"].encode()).fetchone()
        return int(row[0]) if row else None

    def counters(self) -> dict[str, float]:
        """WAL bytes, commits, and row versions that are dead now because they were updated or deleted."""
        [wal] = self._admin.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone() or [0]
        [commits] = self._admin.execute("SELECT sum(xact_commit) FROM pg_stat_database").fetchone() or [0]
        [dead] = self._admin.execute(
            "SELECT coalesce(sum(n_tup_upd + n_tup_del), 0) FROM pg_stat_user_tables"
        ).fetchone() or [0]
        return {"wal_bytes": float(wal), "commits": float(commits), "dead_rows": float(dead)}

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """By the server's log: every statement that a client executes."""
        seen: list[int] = []
        self._log_statements("0")
        begins = self._log().stat().st_size
        yield seen
        with self._log().open("rb") as log:
            log.seek(begins)
            lines = log.read()
        self._log_statements("-1")
        seen.append(len(re.findall(rb"LOG:  duration: .* ms  (?:statement|execute )", lines)))

    def _log(self) -> Path:
        return self.server.folder / "server.log"

    def _log_statements(self, least: str) -> None:
        self._admin.execute(f"ALTER SYSTEM SET log_min_duration_statement = {least}".encode())
        self._admin.execute("SELECT pg_reload_conf()")
        self._admin.execute("SELECT pg_sleep(0.3)")


class MariaDb(Served):
    engine = "mariadb"
    server: MariaDbServer

    def __enter__(self) -> "MariaDb":
        self.server = self._open.enter_context(MariaDbServer())
        self.url = self.server.url
        self._admin = self._open.enter_context(
            pymysql.connect(host="127.0.0.1", port=self.server.port, user="holdfast", autocommit=True)
        )
        return self

    def _ask(self, statement: str) -> Any:
        with self._admin.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()

    def clean(self) -> None:
        self.forget()
        self._ask("DROP DATABASE IF EXISTS test")
        self._ask("CREATE DATABASE test")
        self._ask("USE test")

    def version(self) -> str:
        return f"{self._ask('SELECT version()')[0]}, the log flushed at every commit"

    def _pending(self, query: Mapping[str, Any]) -> int | None:
        return int(self._ask(query["mysql"])[0])

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        seen: list[int] = []
        before = self._questions()
        yield seen
        seen.append(self._questions() - before - 1)

    def _questions(self) -> int:
        return int(self._ask("SHOW GLOBAL STATUS LIKE 'Questions'")[1])


class Sqlite(Backend):
    engine = "sqlite"

    def __enter__(self) -> "Sqlite":
        self.path = self.folder / "jobs.db"
        self.url = f"sqlite:///{self.path}"
        return self

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "BENCH_SQLITE_PATH": str(self.path)}

    def server_pid(self) -> int | None:
        return None

    def clean(self) -> None:
        self.forget()
        for name in (self.path, Path(f"{self.path}-wal"), Path(f"{self.path}-shm")):
            name.unlink(missing_ok=True)

    def version(self) -> str:
        return f"SQLite {sqlite3.sqlite_version}, WAL, synchronous FULL"

    def _pending(self, query: Mapping[str, Any]) -> int | None:
        connection = self._once("file", lambda: sqlite3.connect(self.path, timeout=30))
        return int(connection.execute(query["sqlite"][1]).fetchone()[0])


class Memory(Backend):
    engine = "memory"

    def __enter__(self) -> "Memory":
        self.url = "memory://"
        return self

    def version(self) -> str:
        return "in one process, nothing stored"

    def server_pid(self) -> int | None:
        return None

    def clean(self) -> None:
        """Every worker begins with nothing."""


class RabbitMq(Served):
    """For peers only. What is left in a queue cannot be asked here: a drain ends with its last mark."""

    engine = "rabbitmq"

    def __enter__(self) -> "RabbitMq":
        self.server = self._open.enter_context(RabbitMqServer())
        self.url = self.server.url
        return self

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "BENCH_RABBITMQ_URL": self.url}

    def version(self) -> str:
        found = re.search(r"RabbitMQ (\d[\d.]*)", (self.server.folder / "server.log").read_text(errors="replace"))
        return f"RabbitMQ {found[1] if found else '?'}"

    def clean(self) -> None:
        """A peer deletes its queue when it sets up."""


BACKENDS: dict[str, type[Backend]] = {
    backend.engine: backend for backend in (Redis, Postgres, Sqlite, MariaDb, Memory, RabbitMq)
}
