"""What the processes do that are killed: enqueue, or claim and settle, for ever, and tell about it outside the store.

Each line of a log is written by one `write` after the call has returned (`ack`) or before it is made (`try`). A line
is whole or it does not count.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path

from holdfast import Holdfast
from holdfast.failures import Failure
from holdfast.job import Job
from holdfast.lifecycle import Applied, Failed, Released, Succeeded, settle
from holdfast.policy import RetryPolicy, Steps
from holdfast.ports import SYSTEM
from holdfast.store import ClaimRequest, Session
from holdfast.stores.sqlite import SqliteStore
from tests.sqlite.helpers import new_jobs

POLICY = RetryPolicy(backoff=Steps((0.01,)))


class Log:
    """A file to which lines are only ever added."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, word: str, values: Iterable[object]) -> None:
        os.write(self._file, f"{word} {' '.join(map(str, values))}\n".encode())


def read_log(path: Path) -> list[tuple[str, list[str]]]:
    """The whole lines of a log: their first word, and the others."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")[:-1]  # what follows the last line end is a torn line, or nothing
    return [(line.split(" ")[0], line.split(" ")[1:]) for line in lines]


def produce(database: Path, log_path: Path) -> None:
    """Enqueue in every way there is: blocking, asynchronous, single and in batches, with a key, by the client."""
    log = Log(log_path)
    store = SqliteStore(database, timeout=20)
    app = Holdfast(store)

    @app.task(name="mail.welcome")
    def welcome(number: int) -> None:
        """Never run here."""

    def blocking() -> None:
        jobs = new_jobs(3)
        log.write("try", [job.id for job in jobs])
        log.write("ack", [inserted.job_id for inserted in store.insert_blocking(jobs)])

    def by_the_client() -> None:
        for number in range(3):
            log.write("ack", [welcome.enqueue(number).id])

    async def one(count: int) -> None:
        jobs = new_jobs(count)
        log.write("try", [job.id for job in jobs])
        log.write("ack", [inserted.job_id for inserted in await store.insert(jobs)])

    async def many_at_once() -> None:
        await asyncio.gather(*(one(count) for count in (1, 2, 5, 1, 1, 20)))

    log.write("up", [os.getpid()])
    while True:
        blocking()
        by_the_client()
        asyncio.run(many_at_once())


def consume(database: Path, log_path: Path) -> None:
    """Claim and settle: most jobs succeed, some fail, some are given back, some lead to a further job."""
    asyncio.run(_consume(SqliteStore(database, timeout=20), Log(log_path)))


async def _consume(store: SqliteStore, log: Log) -> None:
    session = SYSTEM.ids.session_id()
    log.write("session", [session])
    await store.open_session(Session(id=session))
    log.write("up", [os.getpid()])
    turn = 0

    async def settle_some(jobs: tuple[Job, ...]) -> None:
        moves = []
        for number, job in enumerate(jobs):
            failure = Failure(at=0, attempt=job.attempt, type="Broken", message="on purpose")
            if number % 7 == 5:
                moves.append(settle(job, Failed(failure), POLICY, SYSTEM.random))
            elif number % 7 == 6:
                moves.append(settle(job, Released(), POLICY, SYSTEM.random))
            else:
                moves.append(settle(job, Succeeded(b"1"), POLICY, SYSTEM.random))
        for move, answer in zip(moves, await store.apply(moves), strict=True):
            assert answer is Applied.APPLIED, (move, answer)
            log.write("settled", [move.job_id, move.version, move.to.value])

    while True:
        turn += 1
        claims = await asyncio.gather(
            *(
                store.claim(ClaimRequest(session_id=session, queues=("default",), limit=limit, turn=turn))
                for limit in (1, 5, 10)
            )
        )
        for claimed in claims:
            log.write("claimed", [f"{job.id}/{job.version}" for job in claimed.jobs])
        await asyncio.gather(*(settle_some(claimed.jobs) for claimed in claims if claimed.jobs))
        assert (await store.beat(session)).open
        if not any(claimed.jobs for claimed in claims):
            await asyncio.sleep(0.005)
