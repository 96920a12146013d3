"""The server: where it is, and connections to it by both drivers, each as a `Line` that a transaction can use."""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import asyncmy
import asyncmy.errors
import msgspec
import pymysql
from asyncmy.constants import CLIENT as ASYNC_CLIENT
from pymysql.constants import CLIENT

from holdfast.errors import InvalidOption, shown
from holdfast.ports import Ports
from holdfast.stores.mysql.faults import Fault, fault_of
from holdfast.stores.mysql.sql import Answer

_MOST_BYTES_PER_PACKET = 3 * 1024 * 1024


class Server(msgspec.Struct, frozen=True, kw_only=True):
    """Where the database is. Its text never shows the password."""

    host: str
    port: int
    user: str
    password: str
    database: str
    unix_socket: str | None
    tls: ssl.SSLContext | None
    timeout: float
    ports: Ports

    def __repr__(self) -> str:
        return f"<Server {self.where}>"

    @property
    def where(self) -> str:
        """How messages call it."""
        return f"MySQL at {self.unix_socket or f'{self.host}:{self.port}'}/{self.database}"

    def deadline(self, patience: float | None = None) -> float:
        """Until when a call that begins now must be done, on the monotonic clock."""
        return self.ports.clock.monotonic() + (self.timeout if patience is None else patience)

    def time_left(self, deadline: float) -> float:
        """Seconds until then, at least a moment. `Fault` if there are none."""
        left = deadline - self.ports.clock.monotonic()
        if left <= 0:
            raise Fault(0, f"no answer within {self.timeout:g} s", lost=True)
        return left

    def _login(self) -> dict[str, Any]:
        place: dict[str, Any] = {"unix_socket": self.unix_socket} if self.unix_socket else {"ssl": self.tls}
        return {
            "host": self.host,
            "port": self.port,
            "user": self.user,
            "password": self.password,
            "database": self.database,
            "charset": "utf8mb4",
            "autocommit": True,
            **place,
        }

    def _session(self) -> str:
        """What every session of ours is like, whatever the server's defaults are."""
        # Half of the time: whoever waits for a lock in vain must be able to try again.
        wait = max(1, int(self.timeout / 2))
        # No call of ours takes longer, so whoever leaves a transaction open for so long is gone without the server's
        # knowing, and its locks hide jobs from everybody. Only MariaDB reads what stands between the marks.
        idle = max(1, math.ceil(self.timeout))
        return (
            "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED; "
            "SET SESSION sql_mode = 'STRICT_ALL_TABLES,NO_ENGINE_SUBSTITUTION', time_zone = '+00:00', "
            f"sql_notes = 0, innodb_lock_wait_timeout = {wait}, lock_wait_timeout = {wait} "
            f"/*M! , idle_transaction_timeout = {idle} */"
        )

    def connect(self, deadline: float) -> pymysql.Connection[Any]:
        """A blocking connection. `Fault` if there is none to be had."""
        try:
            left = max(0.1, self.time_left(deadline))
            connection = pymysql.connect(
                **self._login(),
                client_flag=CLIENT.MULTI_STATEMENTS,
                ssl_disabled=self.tls is None,  # left to itself it would encrypt, where the other driver would not
                connect_timeout=left,
                read_timeout=left,
                write_timeout=left,
            )
        except (pymysql.MySQLError, OSError, RuntimeError) as error:
            raise fault_of(error) from error
        try:
            Line(connection, self, deadline).send([self._session()])
        except BaseException:
            connection._force_close()  # type: ignore[attr-defined]
            raise
        return connection

    async def aconnect(self, deadline: float) -> asyncmy.Connection:
        """A connection of the running event loop. `Fault` if there is none to be had."""
        connection = asyncmy.Connection(  # type: ignore[no-untyped-call]
            **self._login(), client_flag=ASYNC_CLIENT.MULTI_STATEMENTS, connect_timeout=max(0.1, self.timeout)
        )
        try:
            async with asyncio.timeout(self.time_left(deadline)):
                await connection.connect()
            await AsyncLine(connection, self, deadline).send([self._session()])
        except (asyncmy.errors.MySQLError, OSError, RuntimeError, TimeoutError) as error:
            connection.close()
            raise fault_of(error) from error
        except BaseException:
            connection.close()
            raise
        return connection


def tls_context(ssl_mode: str, ssl_ca: str | None) -> ssl.SSLContext | None:
    """How to encrypt: `off`; `on`, without asking who the server is; `verify`, by the certificates of `ssl_ca`."""
    if ssl_mode not in ("off", "on", "verify"):
        raise InvalidOption(f"the option ssl is off, on or verify, not {shown(ssl_mode)}")
    if ssl_mode == "off":
        return None
    try:
        context = ssl.create_default_context(cafile=ssl_ca)
    except OSError as error:
        raise InvalidOption(f"the certificates in {shown(ssl_ca)} cannot be read: {error}") from error
    if ssl_mode == "on":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def server_from(
    netloc: str,
    database: str,
    *,
    unix_socket: str | None,
    tls: ssl.SSLContext | None,
    timeout: float,
    ports: Ports,
) -> Server:
    """The server of a URL's middle part, `user:password@host:port`."""
    login, _, place = netloc.rpartition("@")
    user, _, password = login.partition(":")
    host, colon, port = place.rpartition(":") if not place.endswith("]") else (place, "", "")
    if not colon:
        host, port = place, "3306"
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidOption("the store URL's port is not a number from 1 to 65535")
    if not database or "/" in database:
        raise InvalidOption("a MySQL URL names a database, as in mysql://user:password@localhost:3306/app")
    if not 0.1 <= timeout <= 3600:
        raise InvalidOption(f"timeout must be 0.1 to 3600 seconds, not {timeout!r:.40}")
    return Server(
        host=unquote(host.strip("[]")) or "localhost",
        port=int(port),
        user=unquote(user),
        password=unquote(password),
        database=database,
        unix_socket=unix_socket,
        tls=tls,
        timeout=timeout,
        ports=ports,
    )


def packets(statements: Sequence[str]) -> Iterator[list[str]]:
    """The statements in groups that travel together, none too long for the server."""
    group: list[str] = []
    length = 0
    for statement in statements:
        if group and length + len(statement) > _MOST_BYTES_PER_PACKET:
            yield group
            group, length = [], 0
        group.append(statement)
        length += len(statement)
    if group:
        yield group


class Line:
    """A blocking connection of ours until a deadline."""

    def __init__(self, connection: pymysql.Connection[Any], server: Server, deadline: float) -> None:
        self.connection = connection
        self._server = server
        self._deadline = deadline

    def send(self, statements: Sequence[str]) -> Sequence[Answer]:
        """See `drive.Line`."""
        connection: Any = self.connection
        answers: list[Answer] = []
        try:
            for group in packets(statements):
                connection._read_timeout = connection._write_timeout = self._server.time_left(self._deadline)
                cursor = connection.cursor()
                cursor.execute("; ".join(group))
                answers.append(_answer(cursor, cursor.fetchall() if cursor.description else ()))
                while cursor.nextset():
                    answers.append(_answer(cursor, cursor.fetchall() if cursor.description else ()))
        except (pymysql.MySQLError, OSError, RuntimeError) as error:
            raise _fault(error, statements) from error
        return answers


class AsyncLine:
    """A connection of ours on an event loop until a deadline."""

    def __init__(self, connection: asyncmy.Connection, server: Server, deadline: float) -> None:
        self.connection = connection
        self._server = server
        self._deadline = deadline

    async def send(self, statements: Sequence[str]) -> Sequence[Answer]:
        """See `drive.AsyncLine`."""
        answers: list[Answer] = []
        try:
            async with asyncio.timeout(self._server.time_left(self._deadline)):
                for group in packets(statements):
                    cursor: Any = self.connection.cursor()
                    await cursor.execute("; ".join(group))
                    answers.append(_answer(cursor, await cursor.fetchall() if cursor.description else ()))
                    while await cursor.nextset():
                        answers.append(_answer(cursor, await cursor.fetchall() if cursor.description else ()))
        except (asyncmy.errors.MySQLError, OSError, RuntimeError) as error:
            raise _fault(error, statements) from error
        return answers


def _answer(cursor: Any, rows: Sequence[tuple[Any, ...]]) -> Answer:
    return Answer(rows, cursor.rowcount, cursor.lastrowid or 0)


def _fault(error: Exception, statements: Sequence[str]) -> Fault:
    fault = fault_of(error)
    longest = max(map(len, statements))
    if fault.lost and longest > _MOST_BYTES_PER_PACKET:
        # The server hangs up on what is too long for it, often before its error is read.
        return Fault(fault.code, f"{fault}; is its max_allowed_packet below {longest:,} bytes?", lost=True)
    return fault


def discard(connection: pymysql.Connection[Any]) -> None:
    """Drop the connection without a word to the server, which rolls back what was open."""
    with contextlib.suppress(Exception):
        connection._force_close()  # type: ignore[attr-defined]


def adiscard(connection: asyncmy.Connection) -> None:
    """The same for one of an event loop, which may have been closed before it."""
    transport: Any = getattr(connection, "_transport", None)
    try:
        connection.close()
    except RuntimeError:  # the loop is closed: only the socket is left to close
        if (sock := getattr(transport, "_sock", None)) is not None:
            sock.close()
            transport._sock = None
