"""A private PostgreSQL, and a private PgBouncer in front of one."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path

from tests.servers.server import STARTUP_SECONDS, Server, ServerMissingError, find_program, listener_pid


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
