"""What the tests of the command line share: a store with jobs in every state, and ways to run the program."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from typer.testing import CliRunner, Result

from holdfast.cli.program import program
from holdfast.failures import Failure
from holdfast.job import Job, JobId, Key, NewJob, State
from holdfast.lifecycle import Applied, Failed, Outcome, Succeeded, settle
from holdfast.policy import RetryPolicy
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session, Store
from holdfast.stores.sqlite import SqliteStore

T = TypeVar("T")

SESSION = "5e55" * 8
SECRET = "hunter2"
HOSTILE = "[red]gone[/red] \x1b[31mred\x9b31m \u202eright to left\nsecond line"
"""Text that would change a terminal, or a table, if it were written as it is."""

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
PATIENCE = 60


def failure(message: str = "broken", attempt: int = 1) -> Failure:
    """A failed attempt, with a traceback."""
    trace = f'Traceback (most recent call last):\n  File "shop.py", line 7, in resize\nValueError: {message}\n'
    return Failure(at=SYSTEM.clock.now(), attempt=attempt, type="ValueError", message=message, traceback=trace)


class Shop:
    """A store in a file, and what producers and workers do with it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"sqlite:///{path}"

    def use(self, work: Callable[[Store], Awaitable[T]]) -> T:
        """Open the store, do the work, close the store."""

        async def opened() -> T:
            async with SqliteStore(self.path, durability="relaxed") as store:
                return await work(store)

        return asyncio.run(opened())

    def add(self, number: int = 1, **fields: Any) -> list[JobId]:
        """Enqueue so many jobs. Their ids, oldest first."""
        fields = {"task": "resize", "payload": f'{{"password":"{SECRET}"}}'.encode(), **fields}
        new = [NewJob(id=SYSTEM.ids.job_id(), **fields) for _ in range(number)]
        self.use(lambda store: store.insert(new))
        return [job.id for job in new]

    def claim(self, number: int = 1, queue: str = "default") -> list[Job]:
        """Claim so many jobs of the queue under an open session."""

        async def claim(store: Store) -> list[Job]:
            await store.open_session(Session(id=SESSION, host="web-1", pid=4242, queues=(queue,)))
            claimed = await store.claim(ClaimRequest(session_id=SESSION, queues=(queue,), limit=number))
            return list(claimed.jobs)

        return self.use(claim)

    def settle(self, jobs: Sequence[Job], outcome: Outcome) -> None:
        """Settle claims."""

        async def apply(store: Store) -> None:
            answers = await store.apply([settle(job, outcome, RetryPolicy(), SYSTEM.random) for job in jobs])
            assert set(answers) == {Applied.APPLIED}

        self.use(apply)

    def kill(self, number: int = 1, *, message: str = "broken", **fields: Any) -> list[JobId]:
        """Enqueue so many jobs and let them fail for good."""
        ids = self.add(number, **fields)
        for _ in range(0, number, 100):
            claimed = self.claim(100, fields.get("queue", "default"))
            self.settle(claimed, Failed(failure(message), permanent=True))
        return ids

    def finish(self, **fields: Any) -> JobId:
        """Enqueue a job and let it succeed."""
        [job_id] = self.add(**fields)
        self.settle(self.claim(), Succeeded(b'{"width":640}'))
        return job_id

    def get(self, job_id: JobId) -> Job | None:
        """The job as the store has it."""
        return self.use(lambda store: store.get(job_id))

    def states(self, ids: Sequence[JobId]) -> list[State | None]:
        """The state of each job; None: it is gone."""
        return [job.state if (job := self.get(job_id)) else None for job_id in ids]


def key(text: str) -> Key:
    """An idempotency key."""
    return Key(text, "0" * 64, 3_600_000_000)


def run(*arguments: str, store: str | None = None, text: str | None = None) -> Result:
    """Run the command line in this process. `store` is what the environment names; an unexpected error is raised."""
    runner = CliRunner(env={"HOLDFAST_STORE": store})
    return runner.invoke(program, arguments, input=text, catch_exceptions=False)


def records(result: Result) -> list[dict[str, Any]]:
    """What `--json` wrote, an object per line."""
    assert result.exit_code == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


# In processes of their own.


def command(*arguments: str) -> list[str]:
    """The program as a shell would start it."""
    return [sys.executable, "-m", "holdfast.cli", *arguments]


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what steers the output of programs."""
    steering = ("HOLDFAST_STORE", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "PYTHONIOENCODING")
    return {name: value for name, value in os.environ.items() if name not in steering} | changes


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """The program, running. It is killed if it takes too long, so that no test waits for ever."""
    process = subprocess.Popen(
        command(*arguments),
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment(), **options},
    )
    watchdog = threading.Timer(PATIENCE, process.kill)
    watchdog.start()
    try:
        with process:
            yield process
            process.kill()
    finally:
        watchdog.cancel()


def run_alone(
    *arguments: str, text: str | None = None, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own, to its end."""
    return subprocess.run(
        command(*arguments),
        input=text,
        cwd=cwd,
        env=env or environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def in_terminal(
    *arguments: str, columns: int = 100, typed: str = "", env: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """The program in a terminal of that width: its exit code and all that the terminal got."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    try:
        with started(
            *arguments,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=env or environment(TERM="xterm-256color"),
        ) as process:
            os.close(slave)
            os.write(master, typed.encode())
            shown = b"".join(_until_closed(master))
            return process.wait(PATIENCE), shown.decode().replace("\r\n", "\n")
    finally:
        os.close(master)


def _until_closed(master: int) -> Iterator[bytes]:
    while True:
        try:
            yield os.read(master, 65536)
        except OSError:  # what Linux answers when the other side is closed
            return
