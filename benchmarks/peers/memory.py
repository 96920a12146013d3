"""The peers of `benchmarks/redis_memory.py`: BullMQ and RQ, each with a program here that knows `fill` and `start`."""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.catalogue import GROUPS
from benchmarks.peers.install import PeerMissingError, install, interpreter, module_path

HERE = Path(__file__).resolve().parent
RUN_SECONDS = 900


@dataclass(frozen=True)
class Peer:
    """A peer that is installed. Its program is run against the Redis on a port, and waited for."""

    name: str
    group: str
    program: str

    @property
    def version(self) -> str:
        return GROUPS[self.group].requirements[0].replace("@", "==").partition("==")[2]

    def fill(self, port: int, count: int, payload: str) -> None:
        """Enqueue so many jobs with that JSON object."""
        self._call(port, "fill", count, payload)

    def start(self, port: int, count: int) -> None:
        """Take so many of them and settle none."""
        self._call(port, "start", count)

    def _call(self, port: int, verb: str, *arguments: object) -> None:
        outcome = subprocess.run(
            [*interpreter(self.group), str(HERE / self.program), str(port), verb, *map(str, arguments)],
            env={**os.environ, **module_path(self.group)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            check=False,
        )
        if outcome.returncode != 0:
            raise RuntimeError(f"{self.name}: {verb} failed with exit code {outcome.returncode}\n{outcome.stderr}")


def bullmq() -> Peer:
    """BullMQ, installed. Raises PeerMissingError."""
    return _installed(Peer("BullMQ", "bullmq", "bullmq_jobs.js"))


def rq() -> Peer:
    """RQ, installed. Raises PeerMissingError."""
    return _installed(Peer("RQ", "rq", "rq_jobs.py"))


PEERS: Sequence[Callable[[], Peer]] = (bullmq, rq)


def _installed(peer: Peer) -> Peer:
    for outcome in install([peer.group]):
        if not outcome.is_installed:
            raise PeerMissingError(f"{peer.name} cannot be installed: {outcome.reason}")
    return peer
