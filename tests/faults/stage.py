"""A test with worker processes on any engine: what the store says about their jobs; and on a server: what the system
does about their connections.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from holdfast.job import Job, JobId, SessionId
from holdfast.ports import SYSTEM
from holdfast.store import JobQuery, Store, all_sessions
from holdfast.sync import Portal
from tests.faults.engines import Database
from tests.worker.programs import DEADLINE, Stage, eventually

T = TypeVar("T")

ESTABLISHED = "01"
"""As /proc/net/tcp writes it."""


class StoreStage(Stage):
    """One test on any engine that several processes can share: it asks the store itself."""

    def __init__(self, folder: Path, url: str) -> None:
        super().__init__(folder, url)
        self._portal = Portal(SYSTEM)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        self._portal.close()

    @property
    def store(self) -> Store:
        """The test's own, on the same database."""
        return self._app.store

    def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """The answer of a call to the store."""
        return self._portal.run("ask", call)

    # Jobs.

    def jobs(self) -> dict[JobId, Job]:
        """All of them, by id. None is there twice."""
        found: dict[JobId, Job] = {}
        cursor = None
        while True:
            page = self.ask(self.store.find(JobQuery(limit=1000, cursor=cursor)))
            for job in page.jobs:
                assert job.id not in found
                found[job.id] = job
            if page.next is None:
                return found
            cursor = page.next

    def job(self, job_id: JobId) -> Job:
        job = self.ask(self.store.get(job_id))
        assert job is not None
        return job

    def counts(self) -> Counter[str]:
        """How many jobs are in each state, in all queues."""
        counted: Counter[str] = Counter()
        for count in self.ask(self.store.counts()):
            for state in ("ready", "scheduled", "in_flight", "succeeded", "failed", "cancelled"):
                counted[state] += getattr(count, state)
        return counted

    def wait_for_count(self, state: str, count: int, seconds: float = DEADLINE) -> None:
        eventually(lambda: self.counts()[state] == count, f"{count} jobs are {state}", seconds, self.counts)

    def wait_for_state(self, job_id: JobId, state: str, seconds: float = DEADLINE) -> Job:
        """The job, once it is in that state."""
        eventually(lambda: self.job(job_id).state == state, f"job {job_id} is {state}", seconds)
        return self.job(job_id)

    def wait_for_end(self, job_ids: Collection[JobId], seconds: float = DEADLINE) -> dict[JobId, Job]:
        """All jobs, once nothing waits or runs any more, and these have ended."""

        def all_ended() -> bool:
            counts = self.counts()
            return not counts["ready"] + counts["scheduled"] + counts["in_flight"]

        eventually(all_ended, f"the end of {len(job_ids)} jobs", seconds, self.counts)
        jobs = self.jobs()
        assert [job_id for job_id in job_ids if job_id not in jobs] == [], "accepted, and not there any more"
        return jobs

    def open_sessions(self) -> dict[SessionId, int]:
        """The sessions that the store counts as open, with their processes."""
        return {view.id: view.pid for view in self.ask(all_sessions(self.store)) if view.open}


class ServerStage(StoreStage):
    """One test on a database of a server. The programs reach it by `port`, and are as patient as `timeout` says."""

    application = "tests.faults.program:app"

    def __init__(self, folder: Path, database: Database, *, port: int = 0, timeout: float = 10.0) -> None:
        super().__init__(folder, database.url())
        self.database = database
        self.url = database.url(port=port, timeout=timeout)

    def sockets(self) -> dict[int, str]:
        """The sockets of the programs, and of this process, towards the server: their ports and states."""
        own = {inode for pid in [*self.left_behind(), os.getpid()] for inode in _socket_inodes(pid)}
        found = {}
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            _, local, remote, state, *_, inode = line.split()[:10]
            if inode in own and int(remote.rpartition(":")[2], 16) == self.database.server.port:
                found[int(local.rpartition(":")[2], 16)] = state
        return found

    def connections_agree(self) -> bool:
        """Whether what the programs hold as connections is what the server holds as such.

        A supervisor asks the store nothing while all goes well: its one connection may be dead without its knowing.
        """
        sockets = self.sockets()
        established = {port for port, state in sockets.items() if state == ESTABLISHED}
        return len(sockets) <= len(established) + 1 and established == set(self.database.connections())


def _socket_inodes(pid: int) -> set[str]:
    inodes = set()
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if match := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                    inodes.add(match[1])
            except FileNotFoundError:
                continue
    except (FileNotFoundError, ProcessLookupError):
        pass
    return inodes
