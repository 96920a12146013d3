"""A private RabbitMQ for peers that run on it: one node and its port mapper, on loopback, in a temporary folder."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from tests.servers import Server, ServerMissingError, find_program, free_port, guard_orphan

PROGRAM = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The program itself: the one in /usr/sbin runs as another user, in the folders of the system's service."""
HELLO = b"AMQP\x00\x00\x09\x01"


class RabbitMqServer(Server):
    name = "rabbitmq"
    stop_signals: ClassVar[Sequence[signal.Signals]] = (signal.SIGTERM,)
    orphan_signal = signal.SIGTERM

    def __init__(self) -> None:
        super().__init__(startup_seconds=60.0)
        self._mapper: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def close(self) -> None:
        super().close()
        if self._mapper is not None:
            self._mapper.terminate()
            self._mapper.wait()
            self._mapper_guard.communicate(b"stopped\n")
            self._mapper = None

    def _prepare(self, folder: Path, deadline: float) -> None:
        if not PROGRAM.exists():
            raise ServerMissingError("RabbitMQ is not installed: it is the package rabbitmq-server")
        # With a mapper of our own nothing is left running: the node would start one that outlives it.
        port = str(free_port())
        mapper = find_program("RabbitMQ", "epmd")
        self._mapper = subprocess.Popen(
            [str(mapper), "-port", port, "-address", "127.0.0.1"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._mapper_guard = guard_orphan(self._mapper.pid, signal.SIGTERM)
        (folder / "plugins").write_text("[].\n")
        self.environment = {
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": port,
            "HOME": str(folder),
            "RABBITMQ_ALLOW_INPUT": "1",  # then the program becomes the node, and its process id is the node's
            "RABBITMQ_CONFIG_FILE": str(folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none-either"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": str(folder),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1} -noinput",
        }

    def _command(self, folder: Path) -> list[str]:
        self.environment |= {
            "RABBITMQ_NODENAME": f"holdfast{self.port}@localhost",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
        }
        return [str(PROGRAM)]

    def _answers(self, folder: Path, pid: int) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=2) as connection:
            connection.sendall(HELLO)
            return connection.recv(1) == b"\x01"
        return False

    def _worth_retrying(self, log: str) -> bool:
        return "eaddrinuse" in log
