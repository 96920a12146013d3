"""Try every verb of a peer with tiny numbers: does it work at all? The figures of such a run mean nothing."""

import json
import os
import signal
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.catalogue import ADDRESSES, FOLDER, Entry
from benchmarks.peers.install import command, environment

JOBS = 20
LATENCY_JOBS = 5
CALL_SECONDS = 60.0
DRAIN_SECONDS = 30.0
STOP_SECONDS = 5.0
REASON_LINES = 4
VERBS = ("info", "setup", "enqueue_one", "enqueue_one_async", "enqueue_bulk", "worker", "worker --plain", "latency")


@dataclass(frozen=True)
class Trial:
    """What became of each verb: `ok`, `none` if the library has no such thing, or what went wrong."""

    entry: Entry
    version: str
    verbs: Mapping[str, str]

    @property
    def is_good(self) -> bool:
        return all(said in {"ok", "none"} for said in self.verbs.values())


class VerbFailedError(RuntimeError):
    """A verb ended with an error, took too long, or did not do what it should. The message says which."""


def try_out(entry: Entry, folder: Path = FOLDER) -> Trial:
    """Run every verb of an installed peer against the server that the environment names."""
    verbs: dict[str, str] = {}
    version = ""
    if ADDRESSES[entry.engine] not in os.environ:
        return Trial(entry, version, {"info": f"{ADDRESSES[entry.engine]} is not set"})
    with tempfile.TemporaryDirectory() as scratch:
        program = _Program(entry, folder, Path(scratch) / "marks")
        try:
            info = program.call("info")
            version = info["version"]
            verbs["info"] = "ok"
            for verb in VERBS[1:]:
                if verb.split()[0] in info["verbs"]:
                    _STEPS[verb](program, info)
                    verbs[verb] = "ok"
                else:
                    verbs[verb] = "none"
        except VerbFailedError as error:
            verbs[VERBS[len(verbs)]] = str(error)
    return Trial(entry, version, verbs)


class _Program:
    """The adapter of a peer, and the file of marks that its handlers write."""

    def __init__(self, entry: Entry, folder: Path, marks: Path) -> None:
        self._command = command(entry, folder)
        self._environment = {**os.environ, **environment(entry, folder), "BENCH_MARKS": str(marks)}
        self._marks = marks
        self.forget_marks()

    def forget_marks(self) -> None:
        self._marks.write_bytes(b"")

    def ran(self) -> int:
        return self._marks.stat().st_size // 8

    def call(self, *arguments: object) -> dict[str, Any]:
        """A verb that ends by itself, and its answer."""
        try:
            outcome = subprocess.run(
                [*self._command, *map(str, arguments)],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CALL_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise VerbFailedError(f"not done within {CALL_SECONDS:.0f} s") from None
        if outcome.returncode != 0:
            raise VerbFailedError(_last_lines(outcome.stderr) or f"exit code {outcome.returncode}")
        try:
            answer = json.loads(outcome.stdout)
        except json.JSONDecodeError:
            raise VerbFailedError(f"not one JSON object: {outcome.stdout[:200]!r}") from None
        return dict(answer)

    @contextmanager
    def worker(self, *arguments: str) -> Iterator[None]:
        """A worker that runs meanwhile, in a process group of its own, and is gone afterwards. What it wrote is told if
        the block fails.
        """
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(
                [*self._command, "worker", *arguments],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            try:
                yield
            except VerbFailedError as error:
                log.seek(0)
                raise VerbFailedError(f"{error}; {_last_lines(log.read())}") from None
            finally:
                _stop(process)


def _stop(process: subprocess.Popen[bytes]) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, kind)
            process.wait(STOP_SECONDS)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _last_lines(text: str) -> str:
    return " | ".join([line.strip() for line in text.splitlines() if line.strip()][-REASON_LINES:])


def _set_up(program: _Program, info: dict[str, Any]) -> None:
    program.call("setup")
    _expect_pending(info, 0)


def _enqueue_one(program: _Program, info: dict[str, Any]) -> None:
    _enqueue(program, info, "enqueue_one")


def _enqueue_one_async(program: _Program, info: dict[str, Any]) -> None:
    _enqueue(program, info, "enqueue_one_async")


def _enqueue_bulk(program: _Program, info: dict[str, Any]) -> None:
    _enqueue(program, info, "enqueue_bulk")


def _enqueue(program: _Program, info: dict[str, Any], verb: str) -> None:
    answer = program.call(verb, JOBS)
    if answer["n"] != JOBS or not answer["seconds"] > 0:
        raise VerbFailedError(f"a strange answer: {answer}")


def _drain(program: _Program, info: dict[str, Any], *arguments: str) -> None:
    """Every job that was enqueued since `setup` runs once, and the server shows that nothing is left."""
    program.call("setup")
    program.forget_marks()
    program.call("enqueue_one", JOBS)
    with program.worker(*arguments):
        _wait(lambda: program.ran() >= JOBS, lambda: f"{program.ran()} of {JOBS} jobs ran")
        _wait(lambda: pending(info) in {0, None}, lambda: f"{pending(info)} jobs are left in the server")
    if program.ran() != JOBS:
        raise VerbFailedError(f"{program.ran()} runs of {JOBS} jobs")


def _worker(program: _Program, info: dict[str, Any]) -> None:
    _drain(program, info)


def _plain_worker(program: _Program, info: dict[str, Any]) -> None:
    _drain(program, info, "--plain")


def _latency(program: _Program, info: dict[str, Any]) -> None:
    program.call("setup")
    program.forget_marks()
    with program.worker():
        program.call("enqueue_one", 1)
        _wait(lambda: program.ran() >= 1, lambda: "the worker does not start")
        answer = program.call("latency", LATENCY_JOBS)
        if answer["n"] != LATENCY_JOBS or not 0 < answer["p50"] <= answer["max"]:
            raise VerbFailedError(f"a strange answer: {answer}")


_STEPS = {
    "setup": _set_up,
    "enqueue_one": _enqueue_one,
    "enqueue_one_async": _enqueue_one_async,
    "enqueue_bulk": _enqueue_bulk,
    "worker": _worker,
    "worker --plain": _plain_worker,
    "latency": _latency,
}


def _wait(condition: Callable[[], bool], complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + DRAIN_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise VerbFailedError(f"{complaint()} within {DRAIN_SECONDS:.0f} s")
        time.sleep(0.02)


def _expect_pending(info: dict[str, Any], expected: int) -> None:
    if pending(info) not in {expected, None}:
        raise VerbFailedError(f"{pending(info)} jobs are left in the server")


def pending(info: dict[str, Any]) -> int | None:
    """How many jobs the server has that are not done, by what the adapter says about it. None: that cannot be seen."""
    how = info["pending"]
    if how is None:
        return None
    if "sql" in how:
        import psycopg

        # a server goes on with a query whose client is gone
        limit = f"-c statement_timeout={DRAIN_SECONDS:.0f}s"
        with psycopg.connect(os.environ[ADDRESSES["postgres"]], autocommit=True, options=limit) as connection:
            (count,) = connection.execute(how["sql"]).fetchall()[0]
    elif "sqlite" in how:
        path, query = how["sqlite"]
        with closing(sqlite3.connect(path)) as file:
            count = file.execute(query).fetchone()[0]
    else:
        import redis

        with redis.Redis.from_url(os.environ[ADDRESSES["redis"]]) as server:
            count = sum(_first_integer(server.execute_command(*words)) for words in how["redis"])
    return int(count)


def _first_integer(answer: Any) -> int:
    """redis-py makes a dict of what XPENDING says."""
    if isinstance(answer, dict):
        return int(answer["pending"])
    return int(answer[0] if isinstance(answer, list) else answer)
