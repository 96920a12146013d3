"""A private Redis (or Valkey), alone or as the replica of another."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tests.servers.server import STARTUP_SECONDS, Server, ServerFailedError, find_program


class RedisRefusedError(RuntimeError):
    """Redis answered a command with an error."""


class RedisServer(Server):
    """A private Redis (or Valkey) that keeps everything in memory: no snapshots, no append-only file.

    `settings` changes anything; a value is what redis.conf has after the name, of one word or several:
    `{"appendonly": "yes", "replicaof": f"127.0.0.1 {primary.port}"}`. The settings are a file, written before the first
    start. What CONFIG REWRITE has changed in it (a sentinel does that when it promotes a replica) holds after a
    restart too.

    The user `default` needs no password and may do everything, unless `settings` (`aclfile`, `requirepass`, `user`)
    say otherwise. `ask`, `info`, `wait_for_replica`, clusters and sentinels speak as that user. Starting does not
    depend on it: where it may not look, the log has to say that the server is ready (so leave `loglevel` as it is).
    """

    name = "redis"
    stop_signals = (signal.SIGTERM,)
    orphan_signal = signal.SIGKILL  # it would let a script that is running, or a replica that lags, go on

    def __init__(self, *, settings: Mapping[str, str] | None = None, startup_seconds: float = STARTUP_SECONDS) -> None:
        super().__init__(startup_seconds=startup_seconds)
        self._settings = dict(settings or {})
        self._binary = find_program("Redis", "redis-server", "valkey-server")

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def ask(self, *words: object) -> Any:
        """Send one command and return the answer; a RedisRefusedError if that is an error."""
        return redis_command(self.port, *words)

    def info(self, section: str = "default") -> dict[str, str]:
        """The fields of INFO."""
        return fields(self.ask("INFO", section))

    def _prepare(self, folder: Path, deadline: float) -> None:
        """The settings name the port, so they are written when it is known."""

    def _command(self, folder: Path) -> list[str]:
        path = folder / f"{self.port}.conf"
        if not path.exists():
            path.write_text(settings_text({"dir": f'"{folder}"', **self._own_settings(), **self._settings}))
        return [str(self._binary), str(path)]

    def _own_settings(self) -> dict[str, str]:
        return {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "save": "",
            "appendonly": "no",
            "repl-diskless-sync-delay": "0",  # do not wait 5 s for a second replica to come along
        }

    def _answers(self, folder: Path, pid: int) -> bool:
        try:
            info = self.info()
        except OSError:
            return False
        except RedisRefusedError:
            # The log is this process's own, and it says so after it has the port and has read its data.
            return "Ready to accept connections" in (folder / "server.log").read_text(errors="replace")
        return info.get("process_id") == str(pid) and info.get("loading") == "0"

    def _worth_retrying(self, log: str) -> bool:
        return "Address already in use" in log


def wait_for_replica(primary: RedisServer, replica: RedisServer, seconds: float = 10.0) -> None:
    """Return when the replica follows this primary and has all that was written to it before the call."""
    deadline = time.monotonic() + seconds
    wanted = primary.info("replication")
    while True:
        has = replica.info("replication")
        if (
            has["role"] == "slave"
            and has["master_port"] == str(primary.port)
            and has["master_link_status"] == "up"
            and has["master_replid"] == wanted["master_replid"]
            and int(has["slave_repl_offset"]) >= int(wanted["master_repl_offset"])
        ):
            return
        if time.monotonic() > deadline:
            raise ServerFailedError(f"the replica did not catch up within {seconds:g} s: {has}, wanted: {wanted}")
        time.sleep(0.02)
        if has.get("master_replid") != wanted["master_replid"]:
            wanted = primary.info("replication")  # a primary begins a new history with its first replica


def redis_command(port: int, *words: object, seconds: float = 5.0) -> Any:
    """Send one command to the Redis on that port and return the answer; text, numbers, None, or lists of these."""
    encoded = [str(word).encode() for word in words]
    command = b"*%d\r\n" % len(encoded) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
    with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
        connection.sendall(command)
        with connection.makefile("rb") as stream:
            return _read_answer(stream)


def _read_answer(stream: BinaryIO) -> Any:
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("Redis closed the connection before the end of its answer")
    kind, rest = line[:1], line[1:-2].decode(errors="replace")
    if kind == b"-":
        raise RedisRefusedError(rest)
    if kind == b"+":
        return rest
    if kind == b":":
        return int(rest)
    length = int(rest)
    if length < 0:
        return None
    if kind == b"*":
        return [_read_answer(stream) for _ in range(length)]
    text = stream.read(length + 2)
    if len(text) < length + 2:
        raise ConnectionError("Redis closed the connection before the end of its answer")
    return text[:length].decode(errors="replace")


def fields(text: str) -> dict[str, str]:
    """What INFO and CLUSTER INFO answer: lines of `name:value`."""
    return dict(line.split(":", 1) for line in text.splitlines() if ":" in line)


def settings_text(settings: Mapping[str, str]) -> str:
    """A redis.conf with these settings."""
    nothing = '""'
    return "".join(f"{name} {value or nothing}\n" for name, value in settings.items())
