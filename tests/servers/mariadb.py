"""A private MariaDB."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from pathlib import Path

from tests.servers.server import STARTUP_SECONDS, Server, find_program, listener_pid


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
                f"--tmpdir={folder}",  # in /tmp another server that starts would remove its temporary tables
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
