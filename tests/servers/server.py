"""One private server process: how it is started, watched, stopped and cleaned up; what every kind of server shares."""

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
from collections.abc import Iterator, Sequence
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
        self.home: Path | None = None
        """Where its folder is made at the first start; None: where the system has its temporary files."""
        self.environment: dict[str, str] = {}
        """What its process finds in its environment, besides our own."""
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
            self._folder = Path(tempfile.mkdtemp(prefix=f"holdfast-{self.name}-", dir=self.home))
            user = self._user()
            if user is not None:
                shutil.chown(self._folder, user)
            self._prepare(self._folder, deadline)
        keep_port = self.port != 0
        while True:
            if not keep_port:
                self._choose_port()
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

    def _choose_port(self) -> None:
        """Called before the first start, and again when another process was faster to take the port."""
        self.port = free_port()

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
                env={**os.environ, **self.environment},
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


def free_port(*, also: int = 0) -> int:
    """A loopback port nobody listens on, below the range the system takes outgoing connections from.

    With `also`, the port so many above it is such a port too.

    A port from that range may be taken by any client while the server is down for a restart; worse, a client
    that keeps trying to reconnect can be given the very port as its own end and connect to itself.
    """
    try:
        upper = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError):
        upper = 32768
    lower = min(15000, max(1024, upper - 5000))
    for _ in range(100):
        port = random.randrange(lower, max(upper - also, lower + 1000))
        if is_free(port) and is_free(port + also):
            return port
    raise ServerFailedError("found no free loopback port")


def is_free(port: int) -> bool:
    """Whether a server could listen on that loopback port."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


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
