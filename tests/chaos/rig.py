"""A rig: one run of one cell on one engine.

It has a store, a folder, and the programs that work on the store. Whoever does something notes it in a file of that
folder; at the end the files and what is in the store are one history.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import psycopg
import pymysql

from holdfast import Holdfast
from holdfast.config import WorkerSettings
from holdfast.errors import HoldfastError, OutcomeUnknown, StoreUnavailable
from holdfast.job import Job, JobId, SessionId
from holdfast.ports import SYSTEM
from holdfast.store import Store, all_sessions
from holdfast.stores import open_store
from holdfast.sync import Portal
from holdfast.testing.history.events import AnyEvent, Fault, Healed, History, Measured, Rules, Stopped
from holdfast.testing.history.recording import HistoryFile, read_ending, read_events, recorded
from tests.chaos.fleet import Fleet
from tests.chaos.producer import EVERY, Calls, Producer, mixed, new_job
from tests.faults.engines import ENGINES, Database
from tests.servers import RedisRefusedError, Server
from tests.worker.programs import Program, Stage, children_of, eventually, is_alive

T = TypeVar("T")

TTL = 1.0
GRACE = 30.0
PATIENCE = 120.0
"""Seconds. For everything that ends soon, unless others need the machine."""
NOT_THERE_YET = (
    StoreUnavailable,
    OutcomeUnknown,
    psycopg.OperationalError,
    pymysql.err.OperationalError,
    RedisRefusedError,
    OSError,
)
"""What a server that is only just coming back makes of a call, also of one that goes past the store."""
_START = re.compile(rb'"event":"start".*?"job_id":"([^"]+)"')
CONNECTIONS = "connections"
SLACK = 6
"""So many more files or threads of a process, or connections for each, are no leak: pools grow to their size once."""


class _Programs(Stage):
    """Programs, and no use of the store: whoever comes first makes its schema."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.url = url
        self.programs = []
        self._app = Holdfast(url)


class Rig:
    """What a cell works with. `with Rig(engine, folder, fleet) as rig: cell.run(rig); history = rig.finish()`.

    Nothing is started before it is asked for. The server is the one that the fleet has, unless `use_server` comes
    first. All times are `time.monotonic()`, which all processes of a machine share; a host is the number of a process.
    """

    application = "tests.chaos.program:app"

    def __init__(self, engine: str, folder: Path, fleet: Fleet) -> None:
        self.engine = engine
        self.folder = folder
        self.timeout = 10.0
        """How patient the workers' stores are."""
        self._fleet = fleet
        self._server: Server | None = None
        self._owns_server = False
        self._database: Database | None = None
        self._stage: Stage | None = None
        self._store: Store | None = None
        self._portal = Portal(SYSTEM)
        self._file = HistoryFile(folder / "history-rig.jsonl")
        self._producers: list[Producer] = []
        self._producers_stores: list[Store] = []
        self._before: dict[str, float] = {}
        self._healed = False
        self._workers: list[Program] = []
        self._measured: tuple[Program, ...] = ()
        self._starts: Counter[JobId] = Counter()
        self._read_up_to: dict[Path, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as ending:
            if self._owns_server and self._server is not None:
                ending.callback(self._server.close)
            elif error is not None and self.engine in ENGINES:
                ending.callback(self._fleet.discard, self.engine)  # who knows in what state it is
            elif self._database is not None:
                ending.callback(self._database.drop)
            ending.callback(self._portal.close)
            for store in (self._store, *self._producers_stores):
                if store is not None:
                    ending.callback(self._close_store, store)
            if self._stage is not None:
                ending.callback(self._stage.__exit__, kind, error, traceback)
            for producer in self._producers:
                ending.callback(producer.abandon)

    def _close_store(self, store: Store) -> None:
        with contextlib.suppress(HoldfastError):
            self._portal.run("close", store.__aexit__(None, None, None))

    # The store.

    def use_server(self, server: Server) -> None:
        """Work on this server, which runs, instead of the shared one. The rig closes it at its end."""
        assert self._server is None, "there is a server in use already"
        self._server, self._owns_server = server, True

    @property
    def server(self) -> Server:
        """The server of the engine, running when it is first asked for."""
        if self._server is None:
            self._server = self._fleet.server(self.engine)
        return self._server

    @property
    def database(self) -> Database:
        """The database on that server, seen from outside and harmed from outside."""
        if self._database is None:
            database = ENGINES[self.engine](self.server, Fleet.database_name())
            persistently(lambda: database.create(durable=True))
            self._database = database
        return self._database

    @property
    def sqlite_file(self) -> Path:
        return self.folder / "jobs.db"

    def url(self, *, port: int = 0, timeout: float | None = None) -> str:
        """Where the store is: by its own port, or by another that leads there (a proxy's)."""
        patience = self.timeout if timeout is None else timeout
        if self.engine == "sqlite":
            return f"sqlite:///{self.sqlite_file}?timeout={patience:g}"
        return self.database.url(port=port, timeout=patience)

    @property
    def stage(self) -> Stage:
        """Where programs are started and watched."""
        if self._stage is None:
            self._stage = _Programs(self.folder, self.url())
        return self._stage

    def open_store(self) -> None:
        """Have the schema made, if it is not there. The first worker would do it otherwise."""
        self.ask(lambda store: store.now())

    @property
    def store(self) -> Store:
        """The rig's own way to the store, past all proxies. Nothing of it is noted."""
        if self._store is None:
            self._store = open_store(self.url(timeout=10.0), SYSTEM)
        return self._store

    def ask(self, question: Callable[[Store], Coroutine[Any, Any, T]]) -> T:
        """The store's answer. A server that is only just coming back is asked again."""
        return persistently(lambda: self._portal.run("ask", question(self.store)))

    # The history.

    def note(self, event: AnyEvent) -> None:
        """Add to the history what the rig did."""
        self._file.note(event)

    def fault(self, kind: str, victim: object = "") -> None:
        """Note that harm is done now. Call it before doing it: what follows from it must not come first."""
        self.note(Fault(at=time.monotonic(), host="rig", kind=kind, victim=str(victim)))

    # Programs.

    def worker(
        self,
        *,
        concurrency: int = 4,
        ttl: float = TTL,
        grace: float = GRACE,
        keepers: bool = True,
        url: str | None = None,
        prefix: Sequence[str] = (),
        wait: bool = True,
        **environment: object,
    ) -> Program:
        """A worker that nobody supervises, up. `url`: another way to the store. `prefix`: what comes before the
        command. `wait` False: do not wait until it is up. `environment`: `guard_off="..."` and the like.
        """
        settings = WorkerSettings(concurrency=concurrency, lease_ttl=ttl, grace=grace, keepers=keepers, poll=1.0)
        command = ["tests.worker.program_alone", self.application, encoded(settings)]
        return self._start_worker([*prefix, sys.executable, "-m", *command], 1 if wait else 0, url, environment)

    def supervisor(
        self,
        *,
        processes: int = 1,
        concurrency: int = 4,
        ttl: float = TTL,
        grace: float = GRACE,
        url: str | None = None,
        prefix: Sequence[str] = (),
        wait: bool = True,
        more: Sequence[object] = (),
        **environment: object,
    ) -> Program:
        """`holdfast worker`, with all its processes up. `more`: further options of the command."""
        options = {"processes": processes, "concurrency": concurrency, "lease-ttl": ttl, "grace": grace}
        named = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        command = ["holdfast.cli", "worker", self.application, *named, "--log-format", "json", *map(str, more)]
        up = processes if wait else 0
        return self._start_worker([*prefix, sys.executable, "-m", *command], up, url, environment)

    def keeper(
        self, *, ttl: float = TTL, url: str | None = None, prefix: Sequence[str] = (), **environment: object
    ) -> Program:
        """`holdfast keep`, up."""
        command = ["tests.chaos.program_keep", "keep", "--store", url or self.url(), "--lease-ttl", str(ttl)]
        program = self._start([*prefix, sys.executable, "-m", *command], url, environment)
        eventually(lambda: "keeping" in program.text(), "the keepers run", PATIENCE, program.text)
        return program

    def _start_worker(
        self, command: Sequence[str], up: int, url: str | None, environment: dict[str, object]
    ) -> Program:
        program = self._start(command, url, environment)
        self._workers.append(program)
        if up:
            program.wait_for("worker started", times=up, seconds=PATIENCE)
        return program

    def _start(self, command: Sequence[str], url: str | None, environment: dict[str, object]) -> Program:
        return self.stage.start_command(command, **environment, store=url or self.url())

    def processes(self, supervisor: Program) -> list[int]:
        """The worker processes of a supervisor that live now."""
        return [pid for pid, state in children_of(supervisor.pid).items() if state not in "ZX"]

    # Jobs.

    def producer(self, calls: Calls = mixed, *, every: float = EVERY, url: str | None = None) -> Producer:
        """A producer in a thread of this process: `with rig.producer(): ...`. What it was told is noted."""
        store = open_store(url or self.url(), SYSTEM)
        self._producers_stores.append(store)
        self._producers.append(Producer(store, self.note, calls=calls, every=every))
        return self._producers[-1]

    def producing_program(self, *, url: str | None = None) -> Program:
        """A producer in a process of its own, which can be killed."""
        command = [sys.executable, "-m", "tests.chaos.program_produce", url or self.url()]
        program = self._start(command, url, {})
        eventually(lambda: "producing" in program.text(), "jobs are accepted", PATIENCE, program.text)
        return program

    def enqueue(self, task: str, times: int = 1, **arguments: Any) -> list[JobId]:
        """Jobs of one task, numbered from 0, in one call that is repeated until it is answered."""
        jobs = [new_job(task, {"number": number, **arguments}) for number in range(times)]
        noted = recorded(self.store, self.note, time.monotonic, lambda: "rig")
        persistently(lambda: noted.insert_blocking(jobs))
        return [job.id for job in jobs]

    def jobs(self, *job_ids: JobId) -> list[Job]:
        """These jobs, as they are now."""

        async def found(store: Store) -> list[Job]:
            jobs = [await store.get(job_id) for job_id in job_ids]
            return [job for job in jobs if job is not None]

        return self.ask(found)

    def open_gate(self, gate: str) -> None:
        """Let the handlers go on that wait for it."""
        (self.folder / f"gate-{gate}").touch()

    def starts(self, *job_ids: JobId) -> int:
        """How often handlers of these jobs (none: of any) were called so far."""
        for path in self.folder.glob("history-[0-9]*.jsonl"):
            read = self._read_up_to.get(path, 0)
            if path.stat().st_size > read:
                with path.open("rb") as file:
                    file.seek(read)
                    whole, newline, _ = file.read().rpartition(b"\n")
                self._read_up_to[path] = read + len(whole) + len(newline)
                self._starts.update(match[1].decode() for match in _START.finditer(whole))
        return sum(self._starts[job_id] for job_id in job_ids) if job_ids else self._starts.total()

    def wait_for_starts(self, count: int, *job_ids: JobId) -> None:
        """Until handlers of these jobs (none: of any) were called so often."""
        eventually(lambda: self.starts(*job_ids) >= count, f"{count} starts", PATIENCE, lambda: self.starts(*job_ids))

    def wait_for_more(self, count: int) -> None:
        """Until so many more handlers were called than now: the work goes on."""
        self.wait_for_starts(self.starts() + count)

    # Harm.

    def kill(self, *programs: Program) -> None:
        """SIGKILL, with everything that is below them. Noted."""
        victims = [pid for program in programs for pid in [program.pid, *descendants_of(program.pid)]]
        for pid in victims:
            self.fault("kill", pid)
        for pid in victims:
            send(pid, signal.SIGKILL)
        for program in programs:
            program.popen.wait(PATIENCE)

    def kill_process(self, pid: int) -> None:
        """SIGKILL to one process. Noted."""
        self.fault("kill", pid)
        send(pid, signal.SIGKILL)
        eventually(lambda: not is_alive(pid), "it is dead")

    def pause(self, *programs: Program) -> None:
        """SIGSTOP. Noted. On SQLite not in the middle of a write: that would stop everybody else, too."""
        for program in programs:
            self.fault("pause", program.pid)
        while True:
            for program in programs:
                program.signal(signal.SIGSTOP)
            eventually(lambda: all(program.is_stopped() for program in programs), "they are stopped")
            if self.engine != "sqlite" or can_write(self.sqlite_file):
                return
            self.resume(*programs)

    def resume(self, *programs: Program) -> None:
        """SIGCONT."""
        for program in programs:
            program.signal(signal.SIGCONT)

    def arm(self, point: str) -> None:
        """The next process that comes to this crash point ends there: `program.POINTS`."""
        (self.folder / f"crash-{point}").touch()

    def wait_for_crash(self, point: str) -> int:
        """Until it has. The number of the process."""
        armed = self.folder / f"crash-{point}"
        eventually(lambda: not armed.exists(), f"a process ends {point}", PATIENCE)
        eventually(lambda: self._crashed(point), "it says so")
        victim = self._crashed(point)[-1]
        eventually(lambda: not is_alive(victim), "it is dead")
        return victim

    def _crashed(self, point: str) -> list[int]:
        events = read_events(self.folder.glob("history-*.jsonl"))
        return [int(e.victim) for e in events if isinstance(e, Fault) and e.kind == f"killed {point}"]

    @contextlib.contextmanager
    def server_away(self) -> Iterator[None]:
        """The server is killed (SIGKILL); it starts again at the end of the block. Noted."""
        self.fault("server killed", self.engine)
        self.server.kill()
        yield
        self.start_server()

    def start_server(self) -> None:
        """Start the server again, and wait until it lets clients in."""
        self.server.start()
        self.open_store()

    # The end.

    def measure(self, *programs: Program) -> None:
        """Count what these programs hold now, and what the server holds for everybody. `finish` counts again."""
        self._before = self._resources(programs)
        self._measured = programs

    def _resources(self, programs: Sequence[Program]) -> dict[str, float]:
        found: dict[str, float] = {}
        for program in programs:
            for pid in [program.pid, *descendants_of(program.pid)]:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    found[f"files of {pid}"] = len(os.listdir(f"/proc/{pid}/fd"))
                    found[f"threads of {pid}"] = len(os.listdir(f"/proc/{pid}/task"))
        if self.engine in ENGINES:
            found[CONNECTIONS] = len(persistently(self.database.connections))
        return found

    def heal(self) -> None:
        """No more harm from here on. There must be workers enough for what is left."""
        if not self._healed:
            self._healed = True
            self.note(Healed(at=time.monotonic(), host="rig"))

    def drain(self, seconds: float = PATIENCE) -> None:
        """Until every job has ended."""

        def left() -> int:
            counts = self.ask(lambda store: store.counts())
            return sum(count.ready + count.scheduled + count.in_flight for count in counts)

        eventually(lambda: not left(), "every job has ended", seconds, lambda: self.ask(lambda store: store.counts()))

    def stop(
        self, *programs: Program, number: int = signal.SIGTERM, times: int = 1, codes: Sequence[int] = (0,)
    ) -> None:
        """Send a signal so often, and wait for the end. Who has stopped is noted: its session holds nothing any more.

        `codes`: how it may end. A session that holds nothing may still be open: its worker closes it if the store
        answers within a second, and leaves it to a keeper if not.
        """
        for again in range(times):
            for program in programs:
                if program.popen.poll() is None:
                    if again:
                        program.wait_until_heard(number)
                    program.signal(number)
        for program in programs:
            code = program.exit_code(PATIENCE)
            for line in program.lines("worker stopped"):
                if not self.ask(functools.partial(_left_open, session_id=line.worker_id)):
                    self.note(Stopped(at=time.monotonic(), host=str(program.pid), session_id=line.worker_id))
            assert code in codes, f"{program.log.name} ended with {code}:\n{program.text()[-4000:]}"

    def finish(self) -> History:
        """No more harm, every job ends, everybody stops. The history of it all."""
        for producer in self._producers:
            producer.stop()
        for worker in self._workers:
            if worker.popen.poll() is None:  # one that is told to stop before it can listen ends as any program would
                worker.wait_for("worker started", seconds=PATIENCE)
        self.heal()
        self.drain()
        if self._before:
            self._note_resources()
        self.stop(*[program for program in self.stage.programs if program.popen.poll() is None])
        return self.history()

    def _note_resources(self) -> None:
        alive = [program for program in self._measured if program.popen.poll() is None]
        deadline = time.monotonic() + 10.0
        while True:  # the last answers may be under way
            after = self._resources(alive)
            grown = [what for what in self._before if after.get(what, 0) > self._before[what] + self._slack(what)]
            if not grown or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        for what, before in self._before.items():
            if what in after:
                slack = self._slack(what)
                self.note(
                    Measured(at=time.monotonic(), host="rig", what=what, before=before, after=after[what], slack=slack)
                )

    def _slack(self, what: str) -> int:
        return SLACK * len(self._measured) if what == CONNECTIONS else SLACK

    def history(self) -> History:
        """What has been noted so far, and what is in the store now."""
        ending = self.ask(read_ending)
        files = [*self.folder.glob("history-*.jsonl"), *self.folder.glob("ledger-*.jsonl")]
        return History(events=read_events(files), ending=ending, rules=Rules(drained_within=PATIENCE))


async def _left_open(store: Store, session_id: SessionId) -> bool:
    """Whether the session is open, though it holds nothing."""
    if await store.held(session_id):
        return False
    return any(view.id == session_id and view.open for view in await all_sessions(store))


def persistently(call: Callable[[], T], seconds: float = PATIENCE) -> T:
    """The answer of a call that may be repeated, once the store or the server gives one."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return call()
        except NOT_THERE_YET:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def encoded(settings: WorkerSettings) -> str:
    return msgspec.json.encode(settings).decode()


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def descendants_of(pid: int) -> list[int]:
    """The living processes below this one."""
    found = []
    for child, state in children_of(pid).items():
        if state not in "ZX":
            found += [child, *descendants_of(child)]
    return found


def can_write(path: Path) -> bool:
    """Whether nobody is in the middle of a write to this SQLite file."""
    impatient = sqlite3.connect(path, isolation_level=None, timeout=0)
    try:
        impatient.execute("BEGIN IMMEDIATE")
        return True
    except sqlite3.OperationalError:
        return False
    finally:
        impatient.close()
