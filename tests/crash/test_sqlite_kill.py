"""Two processes write to one file, and one of them is killed, a hundred times, at random moments.

The promise: what was acknowledged is in the store, exactly once; what was settled stays settled; what a dead process
held is given back; and the file is sound.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from holdfast.failures import Failure
from holdfast.job import State
from holdfast.lifecycle import Applied, Lost, settle
from holdfast.ports import SYSTEM
from holdfast.store import all_sessions
from holdfast.stores.sqlite import SqliteStore
from tests.crash.victims import POLICY, consume, produce, read_log
from tests.sqlite.helpers import claim, eventually, finish, is_sound, new_jobs, open_session, run_sql, start_child

KILLS = 100
LONGEST_LIFE = 0.2
LOST = Failure(at=0, attempt=1, type="WorkerLost", message="killed on purpose")


class Victim:
    """A process that is started again whenever it is killed. Every life has a log of its own."""

    def __init__(self, work: Callable[[Path, Path], None], database: Path, folder: Path) -> None:
        self._work = work
        self._database = database
        self._folder = folder
        self.logs: list[Path] = []
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        self.logs.append(self._folder / f"{self._work.__name__}-{len(self.logs)}.log")
        self._process = start_child(self._work, self._database, self.logs[-1])

    def is_up(self) -> bool:
        return any(word == "up" for word, _ in read_log(self.logs[-1]))

    async def wait_until_up(self) -> None:
        assert self._process is not None
        process = self._process
        await eventually(lambda: self.is_up() or not process.is_alive(), 20)

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.pid is not None
        assert self._process.is_alive(), f"it ended by itself, with status {self._process.exitcode}"
        os.kill(self._process.pid, signal.SIGKILL)
        self._process.join(20)
        assert self._process.exitcode == -signal.SIGKILL

    def lines(self, word: str) -> list[list[str]]:
        return [values for log in self.logs for found, values in read_log(log) if found == word]


async def rescue(store: SqliteStore, session: str) -> int:
    """What a supervisor does when its worker is dead: close the session, and give back what it held."""
    assert await store.close_session(session)
    rescued = 0
    while lost := await store.lost(1000, session_id=session):
        moves = [settle(job, Lost(LOST, started=False), POLICY, SYSTEM.random) for job in lost]
        assert set(await store.apply(moves)) == {Applied.APPLIED}
        rescued += len(moves)
    assert await store.held(session) == []
    return rescued


async def test_a_hundred_kills(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    database = tmp_path / "jobs.db"
    store = SqliteStore(database, timeout=20)
    producer = Victim(produce, database, tmp_path)
    consumer = Victim(consume, database, tmp_path)
    began = time.monotonic()
    rescued = 0
    async with store:
        for victim in (producer, consumer):
            victim.start()
        for _ in range(KILLS):
            victim = chance.choice((producer, consumer))
            # Mostly in the middle of its work, sometimes while it is still coming up.
            if chance.random() < 0.9:
                await victim.wait_until_up()
            await asyncio.sleep(chance.random() * LONGEST_LIFE)
            victim.kill()
            dead_log = read_log(victim.logs[-1])
            victim.start()  # the next life begins before anybody has tidied up after the last
            for word, values in dead_log:
                if word == "session" and any(view.id == values[0] for view in await all_sessions(store)):
                    rescued += await rescue(store, values[0])
        for victim in (producer, consumer):
            await victim.wait_until_up()
            victim.kill()
        for [session] in consumer.lines("session"):
            if any(view.id == session and view.open for view in await all_sessions(store)):
                rescued += await rescue(store, session)
        took = time.monotonic() - began

        acked = [job_id for ids in producer.lines("ack") for job_id in ids]
        settled = consumer.lines("settled")
        print(
            f"{KILLS} kills in {took:.1f} s: {len(acked)} jobs acknowledged, {len(settled)} settled, "
            f"{rescued} given back from {len(consumer.logs)} dead workers"
        )
        check_every_job_is_there_once(database, acked)
        check_batches_are_whole(database, producer.lines("try"))
        check_what_was_settled(database, settled)
        check_one_holder(consumer.lines("claimed"))
        assert await store.lost(1000) == []
        assert run_sql(database, "SELECT count(*) FROM holdfast_live WHERE state = 'in_flight'") == [(0,)]
        check_totals(database)
        assert is_sound(database)

        # And it goes on: everything that is left can be claimed and settled.
        session = await open_session(store)
        run_sql(database, "UPDATE holdfast_live SET run_at = 0")
        while jobs := await claim(store, session, limit=1000):
            assert set(await finish(store, jobs)) == {Applied.APPLIED}
        assert run_sql(database, "SELECT count(*) FROM holdfast_live") == [(0,)]
        check_every_job_is_there_once(database, acked)
        check_totals(database)
    assert is_sound(database)
    assert rescued > 0
    assert len(acked) > KILLS
    assert len(settled) > KILLS


def stored_ids(database: Path) -> list[str]:
    """The id in every row of a job, wherever it is."""
    tables = " UNION ALL ".join(f"SELECT id FROM holdfast_{table}" for table in ("arrived", "live", "ended"))
    return [row[0] for row in run_sql(database, tables)]


def check_every_job_is_there_once(database: Path, acked: list[str]) -> None:
    stored = Counter(stored_ids(database))
    assert [job_id for job_id in acked if stored[job_id] == 0] == []
    assert [job_id for job_id, copies in stored.items() if copies > 1] == []
    assert len(acked) == len(set(acked))


def check_batches_are_whole(database: Path, tried: list[list[str]]) -> None:
    """A call that was never answered has inserted all of its jobs, or none."""
    stored = set(stored_ids(database))
    for batch in tried:
        assert len(stored.intersection(batch)) in (0, len(batch))


def check_what_was_settled(database: Path, settled: list[list[str]]) -> None:
    """A settlement that was answered holds: its end is final, and no version ever went back."""
    ended = {row[0]: (row[1], row[2]) for row in run_sql(database, "SELECT id, state, version FROM holdfast_ended")}
    live = dict(run_sql(database, "SELECT id, version FROM holdfast_live"))
    claims = Counter((job_id, version) for job_id, version, _ in settled)
    assert [claim for claim, times in claims.items() if times > 1] == []
    for job_id, version, state in settled:
        if state == State.READY.value:
            assert (ended[job_id][1] if job_id in ended else live[job_id]) >= int(version)
        else:
            assert ended[job_id] == (state, int(version))


def check_one_holder(claimed: list[list[str]]) -> None:
    """No claim was handed out twice: every claim of a job has a version of its own."""
    claims = Counter(claim for claims in claimed for claim in claims)
    assert [claim for claim, times in claims.items() if claim and times > 1] == []


def check_totals(database: Path) -> None:
    """The counts that are kept agree with the rows that are there."""
    kept = run_sql(database, "SELECT queue, state, jobs FROM holdfast_totals WHERE jobs > 0 ORDER BY 1, 2")
    counted = run_sql(database, "SELECT queue, state, count(*) FROM holdfast_ended GROUP BY 1, 2 ORDER BY 1, 2")
    assert kept == counted


# The checks find what they look for.


@pytest.fixture
def filled(tmp_path: Path) -> tuple[Path, list[str]]:
    database = tmp_path / "jobs.db"
    store = SqliteStore(database)
    ids = [inserted.job_id for inserted in store.insert_blocking(new_jobs(3))]
    store.close()
    return database, ids


def test_a_lost_job_is_found(filled: tuple[Path, list[str]]) -> None:
    database, ids = filled
    check_every_job_is_there_once(database, ids)
    run_sql(database, "DELETE FROM holdfast_live WHERE id = ?", (ids[1],))
    with pytest.raises(AssertionError, match=ids[1]):
        check_every_job_is_there_once(database, ids)
    with pytest.raises(AssertionError):
        check_batches_are_whole(database, [ids])


async def test_a_settlement_that_is_undone_is_found(filled: tuple[Path, list[str]]) -> None:
    database, ids = filled
    async with SqliteStore(database) as store:
        jobs = await claim(store, await open_session(store))
        await finish(store, jobs)
        settled = [[job.id, str(job.version), "succeeded"] for job in jobs]
        check_what_was_settled(database, settled)
        check_totals(database)
        with pytest.raises(AssertionError):
            check_what_was_settled(database, [*settled, settled[0]])
        with pytest.raises(AssertionError):
            check_one_holder([[f"{ids[0]}/1"], [f"{ids[0]}/1"]])
        run_sql(database, "DELETE FROM holdfast_ended WHERE id = ?", (ids[0],))
        with pytest.raises(KeyError):
            check_what_was_settled(database, settled)
        with pytest.raises(AssertionError):
            check_totals(database)
