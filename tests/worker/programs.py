"""How the tests start worker processes, watch them from outside, and leave nothing behind.

Whatever is started for a test carries the test's own folder in its environment: by that, and by nothing else, what is
left of it is found and ended.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from holdfast import Holdfast
from holdfast.config import WorkerSettings
from holdfast.failures import Failure, decode_history
from holdfast.job import NewJob
from holdfast.ports import SYSTEM

ROOT = Path(__file__).parents[2]
TTL = 1.0
DEADLINE = 60.0
"""Seconds. Nothing takes nearly as long, unless others need the machine."""
_COLUMNS = "id, task, state, reason, attempt, failures, crashes, suspect, session_id, failure_history"


class Entry(msgspec.Struct, frozen=True):
    """What a handler noted: see `tests.worker.program`."""

    event: str
    job: str
    task: str
    attempt: int
    pid: int
    parent: int
    at: float
    number: int = 0
    others: tuple[int, ...] = ()


class JobRow(msgspec.Struct, frozen=True):
    """A job as its row says."""

    id: str
    task: str
    state: str
    reason: str
    attempt: int
    failures: int
    crashes: int
    suspect: int
    session_id: str | None
    failure_history: bytes
    result: bytes | None = None

    @property
    def failure_list(self) -> list[Failure]:
        return decode_history(self.failure_history)


class LogLine(msgspec.Struct, frozen=True):
    """A line that a program logged."""

    level: str
    msg: str
    worker_id: str = ""
    job_id: str = ""


def eventually(
    condition: Callable[[], object], what: str, seconds: float = DEADLINE, instead: Callable[[], object] = str
) -> None:
    """Wait until it holds. `instead` tells what is the case, if it does not."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what} {instead()}"
        time.sleep(0.005)


def throughout(seconds: float, condition: Callable[[], object], what: str) -> None:
    """It holds all that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"no longer: {what}"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is no mere zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children_of(parent: int) -> dict[int, str]:
    """The children of a process, zombies included, with their states."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, its_parent = entry.read_text().rpartition(")")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(its_parent) == parent:
            found[int(entry.parent.name)] = state
    return found


class Program:
    """A program that a test has started. What it logs is in a file."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen = popen
        self.log = log

    @property
    def pid(self) -> int:
        return self.popen.pid

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def lines(self, part: str = "") -> list[LogLine]:
        """The whole lines of its log whose message has that part."""
        whole = self.text().split("\n")[:-1]
        found = [msgspec.json.decode(text, type=LogLine) for text in whole if text.startswith("{")]
        return [line for line in found if part in line.msg]

    def wait_for(self, part: str, *, times: int = 1, seconds: float = DEADLINE) -> list[LogLine]:
        """Its lines with that part, as soon as there are so many."""
        eventually(
            lambda: len(self.lines(part)) >= times or self.popen.poll() is not None, f"{part!r} in {self.log}", seconds
        )
        lines = self.lines(part)
        assert len(lines) >= times, f"no {part!r} from {self.log.name}, which says:\n{self.text()}"
        return lines

    def signal(self, number: int) -> None:
        assert self.popen.poll() is None, f"it has ended by itself:\n{self.text()}"
        os.kill(self.pid, number)

    def wait_until_heard(self, number: int) -> None:
        """A signal that was sent is no longer pending: another of its kind will not be taken for the same."""
        eventually(lambda: not any(pending & 1 << number - 1 for pending in self._status("SigPnd", "ShdPnd")), "heard")

    def is_stopped(self) -> bool:
        return "\nState:\tT" in Path(f"/proc/{self.pid}/status").read_text()

    def _status(self, *names: str) -> list[int]:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return [int(line.split()[1], 16) for line in lines if line.split(":")[0] in names]

    def exit_code(self, seconds: float = DEADLINE) -> int:
        """How it ended, once it has."""
        return self.popen.wait(seconds)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self.exit_code() == -signal.SIGKILL


def pause_between_writes(database: Path, programs: Sequence[Program]) -> None:
    """Stop programs that work on a SQLite file (SIGSTOP) at a moment when none of them writes."""
    while True:
        for program in programs:
            program.signal(signal.SIGSTOP)
        eventually(lambda: all(program.is_stopped() for program in programs), "they are stopped")
        impatient = sqlite3.connect(database, isolation_level=None, timeout=0)
        try:
            impatient.execute("BEGIN IMMEDIATE")
            return
        except sqlite3.OperationalError:
            for program in programs:
                program.signal(signal.SIGCONT)
        finally:
            impatient.close()


class Stage:
    """One test on any engine: a folder with a ledger and gates, and the programs that work on a store."""

    application = "tests.worker.program:app"

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.programs: list[Program] = []
        self._app = Holdfast(url).open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for program in self.programs:
            if program.popen.poll() is None:
                os.kill(program.pid, signal.SIGKILL)
                program.popen.wait(DEADLINE)
        while left := self.left_behind():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self._app.close()
        if error is not None:
            for program in self.programs:
                error.add_note(f"--- {program.log.name}\n{program.text()[-6000:]}")

    # Programs.

    def supervisor(
        self,
        *,
        processes: int = 1,
        concurrency: int = 1,
        ttl: float = TTL,
        grace: float = 5.0,
        more: Sequence[object] = (),
        **environment: object,
    ) -> Program:
        """`holdfast worker`, with all its processes up."""
        options = {"processes": processes, "concurrency": concurrency, "lease-ttl": ttl, "grace": grace}
        named = [word for name, value in options.items() for word in (f"--{name}", value)]
        program = self.start(
            ["holdfast.cli", "worker", self.application, *named, "--log-format", "json", *more], **environment
        )
        program.wait_for("worker started", times=processes)
        return program

    def alone(self, **settings: Any) -> Program:
        """A worker that nobody supervises, up."""
        program = self.start_alone(**settings)
        program.wait_for("worker started")
        return program

    def start_alone(
        self, *, concurrency: int = 1, ttl: float = TTL, grace: float = 5.0, keepers: bool = True, **environment: object
    ) -> Program:
        """The same, without waiting until it is up."""
        settings = WorkerSettings(concurrency=concurrency, lease_ttl=ttl, grace=grace, keepers=keepers)
        arguments = [self.application, msgspec.json.encode(settings).decode()]
        return self.start(["tests.worker.program_alone", *arguments], **environment)

    def keeper(self, *, ttl: float = TTL) -> Program:
        """`holdfast keep`, up."""
        program = self.start(["holdfast.cli", "keep", "--store", self.url, "--lease-ttl", ttl])
        eventually(lambda: "keeping" in program.text(), "the keepers run")
        return program

    def start(self, module_and_arguments: Sequence[object], **environment: object) -> Program:
        """A Python module as a program, from the root of the repository. `guard_off`, `claim_ahead`, `look_every`:
        see `tests.worker.program`.
        """
        return self.start_command([sys.executable, "-m", *map(str, module_and_arguments)], **environment)

    def start_command(self, command: Sequence[str], **environment: object) -> Program:
        """Any program."""
        named = {f"HOLDFAST_TEST_{name.upper()}": str(value) for name, value in environment.items()}
        log = self.folder / f"log-{len(self.programs)}"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **self._environment(), **named},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.programs.append(Program(popen, log))
        return self.programs[-1]

    def _environment(self) -> dict[str, str]:
        return {"HOLDFAST_TEST_FOLDER": str(self.folder), "HOLDFAST_TEST_STORE": self.url}

    def left_behind(self) -> list[int]:
        """Every living process that was started for this test, by whomever: they all carry its folder."""
        mark = f"HOLDFAST_TEST_FOLDER={self.folder}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in entry.read_bytes().split(b"\0"):
                    found.append(int(entry.parent.name))
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    # Jobs.

    def enqueue(self, task: str, *, max_retries: int = 3, **arguments: Any) -> str:
        """One job."""
        return self.enqueue_all([(task, arguments)], max_retries=max_retries)[0]

    def enqueue_all(self, calls: Iterable[tuple[str, dict[str, Any]]], *, max_retries: int = 3) -> list[str]:
        """Jobs in one transaction: whoever claims sees all of them, in this order, or none."""
        jobs = [
            NewJob(id=SYSTEM.ids.job_id(), task=task, payload=msgspec.json.encode(arguments), max_retries=max_retries)
            for task, arguments in calls
        ]
        return [inserted.job_id for inserted in self._app.store.insert_blocking(jobs)]

    def open_gate(self, gate: str) -> None:
        (self.folder / f"gate-{gate}").touch()

    # The ledger.

    def entries(self, event: str = "start", job_id: str | None = None, task: str | None = None) -> list[Entry]:
        """What handlers noted, in the order in which they did."""
        try:
            text = (self.folder / "ledger").read_bytes()
        except FileNotFoundError:
            return []
        entries = [msgspec.json.decode(line, type=Entry) for line in text.split(b"\n")[:-1]]
        return [
            entry
            for entry in entries
            if entry.event == event and job_id in (None, entry.job) and task in (None, entry.task)
        ]

    def wait_for_entry(self, job_id: str, event: str = "start", *, times: int = 1) -> Entry:
        """What the handler noted, the so many-th time."""
        eventually(lambda: len(self.entries(event, job_id)) >= times, f"{times} x {event!r} of job {job_id}")
        return self.entries(event, job_id)[times - 1]

    def runs(self) -> Counter[str]:
        """How often each job was started."""
        return Counter(entry.job for entry in self.entries())


class World(Stage):
    """One test on a SQLite file."""

    def __init__(self, folder: Path, *, timeout: float = 10.0) -> None:
        self.database = folder / "jobs.db"
        super().__init__(folder, f"sqlite:///{self.database}?timeout={timeout:g}")
        self._db = sqlite3.connect(self.database, isolation_level=None, timeout=30, check_same_thread=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._db.close()

    def pause(self, *programs: Program) -> None:
        """Stop the programs (SIGSTOP), but not in the middle of a write: that would stop everybody else, too."""
        pause_between_writes(self.database, programs)

    def sql(self, statement: str, parameters: Sequence[Any] = ()) -> list[Any]:
        """One statement, as any other program would send it."""
        return self._db.execute(statement, parameters).fetchall()

    def jobs(self) -> dict[str, JobRow]:
        """All of them, by id."""
        rows = self.sql(
            f"""SELECT {_COLUMNS}, NULL FROM holdfast_arrivals UNION ALL SELECT {_COLUMNS}, NULL FROM holdfast_live
                UNION ALL SELECT {_COLUMNS}, result FROM holdfast_ended"""
        )
        return {row[0]: JobRow(*row) for row in rows}

    def job(self, job_id: str) -> JobRow:
        return self.jobs()[job_id]

    def count(self, state: str) -> int:
        """How many jobs are in that state."""
        tables = ("arrivals", "live") if state in ("ready", "in_flight") else ("ended",)
        rows = " UNION ALL ".join(f"SELECT state FROM holdfast_{table}" for table in tables)
        return int(self.sql(f"SELECT count(*) FROM ({rows}) WHERE state = ?", (state,))[0][0])

    def wait_for_count(self, state: str, count: int, seconds: float = DEADLINE) -> None:
        eventually(lambda: self.count(state) == count, f"{count} jobs are {state}", seconds, self._states)

    def _states(self) -> Counter[tuple[str, str]]:
        return Counter((job.task, job.state) for job in self.jobs().values())

    def wait_for_state(self, job_id: str, state: str, seconds: float = DEADLINE) -> JobRow:
        """The job, once it is in that state."""
        eventually(lambda: self.job(job_id).state == state, f"job {job_id} is {state}", seconds)
        return self.job(job_id)

    def wait_for_end(self, *job_ids: str, seconds: float = DEADLINE) -> list[JobRow]:
        """The jobs, once all have ended."""
        marks = ",".join("?" * len(job_ids))
        statement = f"SELECT count(*) FROM holdfast_ended WHERE id IN ({marks})"
        eventually(
            lambda: self.sql(statement, job_ids)[0][0] == len(job_ids),
            f"the end of {len(job_ids)} jobs",
            seconds,
            self._states,
        )
        jobs = self.jobs()
        return [jobs[job_id] for job_id in job_ids]

    def open_sessions(self) -> dict[str, int]:
        """The sessions that the store counts as open, with their processes."""
        return dict(self.sql("SELECT id, pid FROM holdfast_sessions WHERE open"))
