"""Real private servers for tests: PostgreSQL, PgBouncer, MariaDB and Redis, on free loopback ports.

Each lives in a temporary folder. A server is a context manager; its data survives `kill` and `stop`, so a test may
crash it and `start` it again on the same port. It runs in a session of its own (Ctrl-C reaches the tests, not the
server), is only ever signalled by the process id that was started here, and is stopped by a small guard process if the
tests die without stopping it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import shutil
import signal
import socket
import struct
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

import pytest

STARTUP_SECONDS = 30.0
SHUTDOWN_SECONDS = 10.0
LOG_TAIL_LINES = 30


class ServerMissingError(RuntimeError):
    """The server's programs are not installed."""


class ServerFailedError(RuntimeError):
    """The server did not start in time, or ended while starting. The message holds the end of its log."""


class Server(ABC):
    """One private server: `with PostgresServer() as server: connect(server.url)`."""

    name: ClassVar[str]
    # What to send, in this order, when the server is to end; SIGKILL follows.
    stop_signals: ClassVar[Sequence[signal.Signals]]
    # What the guard sends when the tests died: end at once, no need to be tidy.
    orphan_signal: ClassVar[signal.Signals]
    # The users to run as, the first that exists, when we are root and the server refuses to be; empty: as we are.
    instead_of_root: ClassVar[Sequence[str]] = ()

    def __init__(self, *, startup_seconds: float = STARTUP_SECONDS) -> None:
        self.startup_seconds = startup_seconds
        self.port = 0
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect."""

    @property
    def folder(self) -> Path:
        """The temporary folder with the data and the log; gone after `close`."""
        if self._folder is None:
            raise RuntimeError(f"{self.name} was never started, or is closed")
        return self._folder

    @property
    def pid(self) -> int:
        """The process that was started; raises when there is none."""
        if self._process is None:
            raise RuntimeError(f"{self.name} is not running")
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process that was started is still alive."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and return when it answers. After `stop` or `kill`: same port, same data."""
        if self.running:
            raise RuntimeError(f"{self.name} is already running")
        self._forget_process()
        deadline = time.monotonic() + self.startup_seconds
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f"holdfast-{self.name}-"))
            user = self._user()
            if user is not None:
                shutil.chown(self._folder, user)
            self._prepare(self._folder, deadline)
        keep_port = self.port != 0
        while True:
            if not keep_port:
                self.port = free_port()
            if self._launch(deadline):
                return
            # It ended while starting. Worth another try: another process took the port between the check and
            # the start, or a killed server's children are still letting go of its memory.
            if not self._worth_retrying(self._log_tail()) or time.monotonic() > deadline:
                raise ServerFailedError(f"{self.name} ended while starting.\n{self._log_tail()}")
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server in an orderly way, by force if that takes too long. No effect when not running."""
        if self._process is not None:
            for each in (*self.stop_signals, signal.SIGKILL):
                self._process.send_signal(each)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(SHUTDOWN_SECONDS)
                    break
        self._forget_process()

    def kill(self) -> None:
        """End the server with SIGKILL: it gets no chance to tidy up."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._forget_process()

    def close(self) -> None:
        """Stop the server and remove its folder."""
        self.stop()
        if self._folder is not None:
            remove_folder(self._folder)
            self._folder = None
        self.port = 0

    # What a particular server fills in.

    @abstractmethod
    def _prepare(self, folder: Path, deadline: float) -> None:
        """Put into the new folder what the server needs before its first start."""

    @abstractmethod
    def _command(self, folder: Path) -> list[str]:
        """The command line; the server must stay in the foreground."""

    @abstractmethod
    def _answers(self, folder: Path, pid: int) -> bool:
        """Whether this very process (not another one on the same port) is ready for clients."""

    @abstractmethod
    def _worth_retrying(self, log: str) -> bool:
        """Whether a start that ended with this log may succeed a moment later."""

    # How any server is run.

    def _user(self) -> str | None:
        """The user to run as; None for our own."""
        if os.geteuid() != 0 or not self.instead_of_root:
            return None
        for name in self.instead_of_root:
            with contextlib.suppress(KeyError):
                return pwd.getpwnam(name).pw_name
        users = " or ".join(f"`{name}`" for name in self.instead_of_root)
        raise ServerMissingError(f"{self.name} cannot run as root, and there is no user {users}")

    def _run_to_end(self, command: list[str], deadline: float) -> None:
        """Run a program that prepares the folder, as the server's user; a ServerFailedError unless it ends well."""
        program = Path(command[0]).name
        process = self._spawn(command)
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise ServerFailedError(f"{program} did not finish in time.\n{self._log_tail()}") from None
        if code != 0:
            raise ServerFailedError(f"{program} failed with exit code {code}.\n{self._log_tail()}")

    def _launch(self, deadline: float) -> bool:
        """Start once: True when it answers, False when it ended; neither in time is a ServerFailedError."""
        self._process = self._spawn(self._command(self.folder))
        self._guard = guard_orphan(self._process.pid, self.orphan_signal)
        while self._process.poll() is None:
            if self._answers(self.folder, self._process.pid):
                return True
            if time.monotonic() > deadline:
                self.kill()
                raise ServerFailedError(
                    f"{self.name} did not answer within {self.startup_seconds:g} s.\n{self._log_tail()}"
                )
            time.sleep(0.02)
        self._forget_process()
        return False

    def _spawn(self, command: list[str]) -> subprocess.Popen[bytes]:
        user = self._user()
        identity = None if user is None else pwd.getpwnam(user)
        # The log is begun anew, so that its end always speaks of this start.
        with (self.folder / "server.log").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=None if identity is None else identity.pw_uid,
                group=None if identity is None else identity.pw_gid,
                extra_groups=None if identity is None else [],
            )

    def _forget_process(self) -> None:
        if self._guard is not None:
            # "stopped" is the word that sends the guard home; it may have gone already.
            with contextlib.suppress(BrokenPipeError):
                self._guard.communicate(b"stopped\n")
            self._guard = None
        self._process = None

    def _log_tail(self) -> str:
        try:
            lines = (self.folder / "server.log").read_text(errors="replace").splitlines()
        except FileNotFoundError:
            lines = []
        return "\n".join(lines[-LOG_TAIL_LINES:]) or "(its log is empty)"


class PostgresServer(Server):
    """A private PostgreSQL cluster with trust authentication, on loopback and on a socket in its folder.

    The cluster is made with `initdb --no-sync`: it is thrown away after the tests, so a power cut during its
    creation does not matter. The running server keeps the durability settings PostgreSQL ships with, because
    that is what users have; `settings` changes any of them.
    """

    name = "postgres"
    stop_signals = (signal.SIGINT, signal.SIGQUIT)  # fast shutdown, immediate shutdown
    orphan_signal = signal.SIGQUIT
    instead_of_root = ("postgres", "nobody")

    def __init__(self, *, settings: Mapping[str, str] | None = None, startup_seconds: float = STARTUP_SECONDS) -> None:
        super().__init__(startup_seconds=startup_seconds)
        self._settings = {
            # In the data folder instead of /dev/shm, so that a killed server leaves nothing behind.
            "dynamic_shared_memory_type": "mmap",
            **(settings or {}),
        }
        self._binaries = find_postgres()

    @property
    def url(self) -> str:
        return f"postgresql://holdfast@127.0.0.1:{self.port}/postgres"

    @property
    def socket_url(self) -> str:
        """The same database through the socket."""
        return f"postgresql://holdfast@/postgres?host={self.folder}&port={self.port}"

    def _prepare(self, folder: Path, deadline: float) -> None:
        self._run_to_end(
            [
                str(self._binaries / "initdb"),
                f"--pgdata={folder / 'data'}",
                "--username=holdfast",
                "--auth=trust",
                "--encoding=UTF8",
                "--locale=C",
                "--no-sync",
            ],
            deadline,
        )

    def _command(self, folder: Path) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(self.port),
            "unix_socket_directories": str(folder),
            **self._settings,
        }
        command = [str(self._binaries / "postgres"), "-D", str(folder / "data")]
        for key, value in settings.items():
            command += ["-c", f"{key}={value}"]
        return command

    def _answers(self, folder: Path, pid: int) -> bool:
        # The server writes its process id on the first line and its state on the eighth, for pg_ctl to read.
        try:
            lines = (folder / "data" / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0].strip() == str(pid) and lines[7].strip() == "ready"

    def _worth_retrying(self, log: str) -> bool:
        return "Address already in use" in log or "is still in use" in log or "lock file" in log


class PgBouncerServer(Server):
    """A private PgBouncer in front of a PostgresServer, pooling transactions: each may run on another connection.

    Whoever comes is let in, as the user `holdfast`; with the database `pgbouncer` he reaches its console. `settings`
    changes anything of the section [pgbouncer]. The PostgreSQL behind it may be killed and started meanwhile.
    """

    name = "pgbouncer"
    # At once, and (since 1.23, where the first means that clients may finish) really at once.
    stop_signals = (signal.SIGTERM, signal.SIGQUIT)
    orphan_signal = signal.SIGKILL
    instead_of_root = ("postgres", "nobody")

    def __init__(
        self,
        postgres: PostgresServer,
        *,
        settings: Mapping[str, str] | None = None,
        startup_seconds: float = STARTUP_SECONDS,
    ) -> None:
        super().__init__(startup_seconds=startup_seconds)
        self._postgres = postgres
        self._settings = dict(settings or {})
        self._binary = find_program("PgBouncer", "pgbouncer")

    @property
    def url(self) -> str:
        return f"postgresql://holdfast@127.0.0.1:{self.port}/postgres"

    @property
    def console_url(self) -> str:
        """Where PgBouncer itself answers: SHOW POOLS, PAUSE, RESUME."""
        return f"postgresql://holdfast@127.0.0.1:{self.port}/pgbouncer"

    def _prepare(self, folder: Path, deadline: float) -> None:
        """Its settings name the port, so they are written at each start."""

    def _command(self, folder: Path) -> list[str]:
        settings = {
            "listen_addr": "127.0.0.1",
            "listen_port": str(self.port),
            "unix_socket_dir": str(folder),
            "auth_type": "any",
            "pool_mode": "transaction",
            "max_client_conn": "500",
            "default_pool_size": "20",
            **self._settings,
        }
        lines = ["[databases]", f"* = host=127.0.0.1 port={self._postgres.port} user=holdfast", "[pgbouncer]"]
        lines += [f"{key} = {value}" for key, value in settings.items()]
        path = folder / "pgbouncer.ini"
        path.write_text("\n".join(lines) + "\n")
        return [str(self._binary), str(path)]

    def _answers(self, folder: Path, pid: int) -> bool:
        log = self._log_tail()
        if "cannot listen on 127.0.0.1" in log:
            os.kill(pid, signal.SIGTERM)  # it would go on without the port; `start` tries again
            return False
        has_port = f"listening on 127.0.0.1:{self.port}" in log
        return has_port and listener_pid(folder / f".s.PGSQL.{self.port}") == pid

    def _worth_retrying(self, log: str) -> bool:
        return "Address already in use" in log


class MariaDbServer(Server):
    """A private MariaDB with a database `test`, on loopback and on a socket in its folder.

    The user `holdfast` needs no password and may do everything, also make users and grant them something. The server
    has the settings that MariaDB ships with, durability included, and none of this machine's files; `settings`
    changes any of them. So what does not name its character set is latin1 before MariaDB 11.6.
    """

    name = "mariadb"
    stop_signals = (signal.SIGTERM,)
    orphan_signal = signal.SIGKILL
    instead_of_root = ("mysql", "nobody")

    def __init__(self, *, settings: Mapping[str, str] | None = None, startup_seconds: float = STARTUP_SECONDS) -> None:
        super().__init__(startup_seconds=startup_seconds)
        self._settings = dict(settings or {})
        self._install = find_program("MariaDB", "mariadb-install-db")
        self._binary = find_program("MariaDB", "mariadbd", "mysqld")

    @property
    def url(self) -> str:
        return f"mysql://holdfast@127.0.0.1:{self.port}/test"

    @property
    def socket(self) -> Path:
        """The socket of the same server."""
        return self.folder / "socket"

    def _prepare(self, folder: Path, deadline: float) -> None:
        accounts = "holdfast@localhost, holdfast@127.0.0.1"
        first_steps = folder / "first_steps.sql"
        first_steps.write_text(
            "FLUSH PRIVILEGES;\n"  # from here on there are accounts
            "CREATE DATABASE test;\n"
            f"CREATE USER {accounts};\n"
            f"GRANT ALL PRIVILEGES ON *.* TO {accounts} WITH GRANT OPTION;\n"
        )
        self._run_to_end(
            [
                str(self._install),
                "--no-defaults",
                f"--datadir={folder / 'data'}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
                f"--extra-file={first_steps}",
            ],
            deadline,
        )

    def _command(self, folder: Path) -> list[str]:
        settings = {
            "datadir": str(folder / "data"),
            "tmpdir": str(folder),
            "bind-address": "127.0.0.1",
            "port": str(self.port),
            "socket": str(self.socket),
            "pid-file": str(folder / "pid"),
            **self._settings,
        }
        return [str(self._binary), "--no-defaults", *(f"--{key}={value}" for key, value in settings.items())]

    def _answers(self, folder: Path, pid: int) -> bool:
        # The socket is the last thing that it opens, and the greeting comes when it is ready.
        return listener_pid(self.socket, greeting=True) == pid

    def _worth_retrying(self, log: str) -> bool:
        return "Address already in use" in log or "Unable to lock" in log


class RedisServer(Server):
    """A private Redis (or Valkey) that keeps everything in memory: no snapshots, no append-only file."""

    name = "redis"
    stop_signals = (signal.SIGTERM,)
    orphan_signal = signal.SIGTERM

    def __init__(self, *, settings: Mapping[str, str] | None = None, startup_seconds: float = STARTUP_SECONDS) -> None:
        super().__init__(startup_seconds=startup_seconds)
        self._settings = dict(settings or {})
        self._binary = find_program("Redis", "redis-server", "valkey-server")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _prepare(self, folder: Path, deadline: float) -> None:
        """Redis needs nothing but the folder."""

    def _command(self, folder: Path) -> list[str]:
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "dir": str(folder),
            **self._settings,
        }
        command = [str(self._binary)]
        for key, value in settings.items():
            command += [f"--{key}", value]
        return command

    def _answers(self, folder: Path, pid: int) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"INFO server\r\n")
                answer = connection.recv(65536)
        except OSError:
            return False
        return b"process_id:%d\r\n" % pid in answer

    def _worth_retrying(self, log: str) -> bool:
        return "Address already in use" in log


def find_postgres() -> Path:
    """The folder with `initdb` and `postgres`: the newest under /usr/lib/postgresql, else from the PATH."""
    candidates = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"),
        key=lambda folder: [int(part) for part in folder.parent.name.split(".") if part.isdigit()],
        reverse=True,
    )
    on_path = shutil.which("initdb")
    if on_path is not None:
        candidates.append(Path(on_path).resolve().parent)
    for folder in candidates:
        if all(os.access(folder / program, os.X_OK) for program in ("initdb", "postgres")):
            return folder
    raise ServerMissingError("PostgreSQL is not installed; scripts/install_servers says what to do")


def find_program(server: str, *names: str) -> Path:
    """The first of these programs that is there: on the PATH, or where a system keeps its servers."""
    for name in names:
        found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")
        if found is not None:
            return Path(found)
    raise ServerMissingError(f"{server} is not installed; scripts/install_servers says what to do")


@contextlib.contextmanager
def missing_server_policy() -> Iterator[None]:
    """A missing server fails the tests that need it; with HOLDFAST_SKIP_SERVERS=1, outside CI, they skip."""
    try:
        yield
    except ServerMissingError as error:
        in_ci = os.environ.get("CI", "") not in ("", "0", "false")
        if os.environ.get("HOLDFAST_SKIP_SERVERS") == "1" and not in_ci:
            pytest.skip(f"{error} (skipped because HOLDFAST_SKIP_SERVERS=1)")
        raise


def free_port() -> int:
    """A loopback port nobody listens on, below the range the system takes outgoing connections from.

    A port from that range may be taken by any client while the server is down for a restart; worse, a client
    that keeps trying to reconnect can be given the very port as its own end and connect to itself.
    """
    try:
        upper = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        upper = 32768
    lower = min(15000, max(1024, upper - 5000))
    for _ in range(100):
        port = random.randrange(lower, max(upper, lower + 1000))
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ServerFailedError("found no free loopback port")


def listener_pid(path: Path, *, greeting: bool = False) -> int | None:
    """Which process listens on that socket; None if nobody does, or if it does not send the greeting asked for."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1)
            connection.connect(str(path))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            if greeting and not connection.recv(1):
                return None
    except OSError:
        return None
    return int(struct.unpack("3i", credentials)[0])


def guard_orphan(pid: int, number: signal.Signals) -> subprocess.Popen[bytes]:
    """Watch over one server: if our end of the pipe closes without a word, we died, and it is to end."""
    return subprocess.Popen(
        [
            "/bin/sh",
            "-c",
            'read -r word || kill -s "$1" "$2"',
            "guard",
            number.name.removeprefix("SIG"),
            str(pid),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def remove_folder(folder: Path) -> None:
    """Remove a server's folder; the children of a killed server may still be writing to it for a moment."""
    for _ in range(50):
        try:
            shutil.rmtree(folder)
        except FileNotFoundError:
            if not folder.exists():
                return
        except OSError:
            time.sleep(0.1)
        else:
            return
    shutil.rmtree(folder)
