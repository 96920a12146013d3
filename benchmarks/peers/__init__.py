"""Other job queues to measure beside ours: their pinned versions, installed when a benchmark first needs them.

They go to a folder of this user's in the system's temporary folder, where the next run finds them. Each has a program
of its own here that knows the verbs `fill` and `start`.
"""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BULLMQ = "6.7.0"
IOREDIS = "5.11.1"
RQ = "2.12.0"
REDIS_PY = "8.1.0"

HERE = Path(__file__).resolve().parent
INSTALLED = Path(tempfile.gettempdir()) / f"holdfast-peers-{os.getuid()}"
INSTALL_SECONDS = 300
RUN_SECONDS = 900
REASON_LINES = 3


class PeerMissingError(RuntimeError):
    """The peer is not there and cannot be installed: no node or npm, no network. The message says which."""


@dataclass(frozen=True)
class Peer:
    """A peer that is installed. Its program is run against the Redis on a port, and waited for."""

    name: str
    version: str
    command: Sequence[str]
    environment: dict[str, str] = field(default_factory=dict)

    def fill(self, port: int, count: int, payload: str) -> None:
        """Enqueue so many jobs with that JSON object."""
        self._call(port, "fill", count, payload)

    def start(self, port: int, count: int) -> None:
        """Take so many of them and settle none."""
        self._call(port, "start", count)

    def _call(self, port: int, verb: str, *arguments: object) -> None:
        command = [*self.command, str(port), verb, *map(str, arguments)]
        outcome = _run(command, RUN_SECONDS, self.environment)
        if outcome.returncode != 0:
            raise RuntimeError(f"{self.name}: {verb} failed with exit code {outcome.returncode}\n{outcome.stderr}")


def bullmq() -> Peer:
    node, npm = (_program("BullMQ", program) for program in ("node", "npm"))
    folder = INSTALLED / f"bullmq-{BULLMQ}-ioredis-{IOREDIS}"
    options = ["--prefix", str(folder), "--no-audit", "--no-fund", "--ignore-scripts", "--engine-strict"]
    packages = [f"bullmq@{BULLMQ}", f"ioredis@{IOREDIS}"]
    _install(f"BullMQ {BULLMQ}", folder, [[npm, "install", *options, "--fetch-retries=1", *packages]])
    program = [node, str(HERE / "bullmq_jobs.js")]
    return Peer("BullMQ", BULLMQ, program, {"NODE_PATH": str(folder / "node_modules")})


def rq() -> Peer:
    folder = INSTALLED / f"rq-{RQ}-redis-{REDIS_PY}"
    python = str(folder / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-qq", "--retries", "1"]
    steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, "install", f"rq=={RQ}", f"redis=={REDIS_PY}"]]
    _install(f"RQ {RQ}", folder, steps)
    return Peer("RQ", RQ, [python, str(HERE / "rq_jobs.py")])


PEERS: Sequence[Callable[[], Peer]] = (bullmq, rq)


def _program(peer: str, name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise PeerMissingError(f"{peer} needs {name}, which is not installed")
    return found


def _install(peer: str, folder: Path, steps: Sequence[Sequence[str]]) -> None:
    """Carry out the steps in the folder, unless all of them were carried out before."""
    INSTALLED.mkdir(mode=0o700, exist_ok=True)
    owner = INSTALLED.lstat()
    if owner.st_uid != os.getuid() or stat.S_IMODE(owner.st_mode) != 0o700:
        raise PeerMissingError(f"{peer} is not installed into {INSTALLED}: others may write there")
    ready = folder / ".ready"
    if ready.exists():
        return
    print(f"installing {peer} into {folder}", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for step in steps:
        try:
            outcome = _run(step, INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            raise PeerMissingError(f"{peer} was not installed within {INSTALL_SECONDS} s") from None
        if outcome.returncode != 0:
            lines = [line for line in outcome.stderr.splitlines() if "error" in line.lower()]
            raise PeerMissingError("\n  ".join([f"{peer} cannot be installed:", *lines[:REASON_LINES]]))
    ready.touch()


def _run(
    command: Sequence[str], seconds: float, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
