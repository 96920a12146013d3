"""The contestants: Holdfast, the bare loop and the peers of each engine, as programs that all answer the same verbs."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
CALL_SECONDS = 300.0
STOP_SECONDS = 5.0

Kind = Literal["holdfast", "bare", "peer"]


class ContestantFailedError(RuntimeError):
    """It answered nothing, or an error; or its worker ended by itself, or left jobs undone."""


@dataclass(frozen=True)
class Contestant:
    """A program and what it is called with."""

    name: str
    kind: Kind
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


OURS: dict[str, Sequence[Contestant]] = {
    engine: (
        Contestant("holdfast", "holdfast", (sys.executable, "-m", "benchmarks.holdfast_program")),
        *(
            Contestant(name, "bare", (sys.executable, "-m", f"benchmarks.bare.{module}"))
            for name, module in bare.items()
        ),
    )
    for engine, bare in (
        ("redis", {"bare": "redis_py", "bare-hiredis": "redis"}),
        ("postgres", {"bare": "postgres", "bare-asyncpg": "postgres_asyncpg"}),
        ("sqlite", {"bare": "sqlite"}),
        ("mariadb", {"bare": "mysql"}),
        ("memory", {"bare": "alone"}),
    )
}


class Program:
    """A contestant on a server. Its workers are processes of ours, stopped by their ids."""

    def __init__(self, contestant: Contestant, environment: Mapping[str, str], logs: Path) -> None:
        self.contestant = contestant
        self._environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            **environment,
            **contestant.environment,
        }
        self._logs = logs
        self._workers: list[subprocess.Popen[bytes]] = []
        self.info = self.call("info")

    def call(self, verb: str, *arguments: object, seconds: float = CALL_SECONDS) -> dict[str, Any]:
        """What it answers to the verb."""
        what = f"{self.contestant.name}: {' '.join(map(str, (verb, *arguments)))}"
        try:
            outcome = subprocess.run(
                [*self.contestant.command, verb, *map(str, arguments)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ContestantFailedError(f"{what}: {error}") from error
        answers = [line for line in outcome.stdout.splitlines() if line.startswith("{")]
        if outcome.returncode or not answers:
            last = "\n".join((outcome.stdout + outcome.stderr).strip().splitlines()[-8:])
            raise ContestantFailedError(f"{what} ended with {outcome.returncode}\n{last}")
        answer: dict[str, Any] = json.loads(answers[-1])
        return answer

    def can(self, verb: str) -> bool:
        return verb in self.info["verbs"]

    def start_workers(self, count: int, *, plain: bool = False, jobs: int = 0) -> None:
        """So many worker processes, each in a session of its own, logging to a file of its own."""
        for number in range(count):
            with (self._logs / f"{self.contestant.name}.{number}.log").open("wb") as log:
                self._workers.append(
                    subprocess.Popen(
                        [*self.contestant.command, "worker", *(["--plain"] if plain else [])],
                        env={**self._environment, "BENCH_JOBS": str(jobs)},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
                )

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers]

    def check_workers(self) -> None:
        """Raise if one has ended by itself."""
        for number, worker in enumerate(self._workers):
            if worker.poll() is not None:
                text = (self._logs / f"{self.contestant.name}.{number}.log").read_text(errors="replace")
                last = "\n".join(text.strip().splitlines()[-8:])
                raise ContestantFailedError(f"{self.contestant.name}: a worker ended with {worker.returncode}\n{last}")

    def stop_workers(self) -> None:
        """SIGTERM to each process group, SIGKILL to what is left after a few seconds."""
        for worker in self._workers:
            self._signal(worker, signal.SIGTERM)
        for worker in self._workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(STOP_SECONDS)
            self._signal(worker, signal.SIGKILL)
            worker.wait()
        self._workers.clear()

    @staticmethod
    def _signal(worker: subprocess.Popen[bytes], number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, number)


def peers_of(engine: str, wanted: str) -> tuple[list[Contestant], list[tuple[str, str]]]:
    """The peers of an engine that are asked for (`best`, `all`, `none`, or names), installed now if they are not; and
    those that cannot be, with the reason."""
    if wanted == "none":
        return [], []
    from benchmarks.peers import catalogue, install

    chosen = [one for one in catalogue.CATALOGUE if one.engine == engine]
    if wanted == "best" and any(one.is_default for one in chosen):
        chosen = [one for one in chosen if one.is_default]
    if wanted not in ("best", "all"):
        names = wanted.split(",")
        try:
            catalogue.named(names)
        except KeyError as error:
            raise SystemExit(error.args[0]) from None
        chosen = [entry for entry in chosen if {entry.name, f"{entry.name}@{engine}"} & set(names)]
    outcomes = install.install([f"{entry.name}@{engine}" for entry in chosen]) if chosen else []
    peers = [
        Contestant(outcome.entry.name, "peer", install.command(outcome.entry), install.environment(outcome.entry))
        for outcome in outcomes
        if outcome.is_installed
    ]
    return peers, [(outcome.entry.name, outcome.reason) for outcome in outcomes if not outcome.is_installed]
