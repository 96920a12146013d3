"""What a run does that the rules of a usual history do not allow for: a record is spoilt, the store's clock jumps, its
data is gone, its file is another.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.errors import StoreReplaced
from holdfast.job import JobId, State
from holdfast.ports import SYSTEM
from holdfast.stores import open_store
from holdfast.testing.history import History, check
from tests.chaos.cell import ENGINES
from tests.chaos.clocks import WrongClock
from tests.chaos.fleet import Fleet
from tests.chaos.producer import new_job
from tests.chaos.rig import Rig
from tests.faults.engines import ENGINES as DATABASES
from tests.faults.engines import SqlDatabase
from tests.servers import redis_command

_NOT_JSON = b"\xff{"


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def spoil(rig: Rig, job_id: JobId) -> None:
    """Make the payload of a waiting job one that nobody can read."""
    if rig.engine == "sqlite":
        with contextlib.closing(sqlite3.connect(rig.sqlite_file, timeout=60)) as file, file:
            file.execute("UPDATE holdfast_live SET payload = ? WHERE id = ?", (_NOT_JSON, job_id))
    elif rig.engine == "redis":
        redis_command(rig.server.port, "HSET", f"{rig.database.name}:{{default}}:jobs", job_id, "garbage")
    else:
        assert isinstance(rig.database, SqlDatabase)
        table = rig.database.ready_table
        rig.database.sql(f"UPDATE {table} SET payload = %s WHERE id = %s", _NOT_JSON, job_id)


@pytest.mark.parametrize("engine", ENGINES)
def test_only_the_job_whose_record_is_spoilt_becomes_a_dead_letter(engine: str, tmp_path: Path, fleet: Fleet) -> None:
    with Rig(engine, tmp_path, fleet) as rig:
        job_ids = rig.enqueue("quick", 20, text="sound")
        spoilt = job_ids[7]
        rig.fault("record spoilt", spoilt)
        spoil(rig, spoilt)
        rig.worker()
        history = rig.finish()
    states = {job.id: job.state for job in history.ending.jobs}
    assert states.get(spoilt) is State.FAILED
    assert {states[job_id] for job_id in job_ids if job_id != spoilt} == {State.SUCCEEDED}
    assert [found for found in check(history) if found.job_id == spoilt], "the control: what is spoilt is seen"
    damaged = replace(history.rules, damaged=frozenset([spoilt]))
    assert [str(found) for found in check(replace(history, rules=damaged))] == []


@pytest.mark.parametrize("engine", ["postgres", "mariadb"])
def test_nothing_is_lost_when_the_clock_of_the_server_jumps(engine: str, tmp_path: Path) -> None:
    """Redis is not among them: its allocator and libfaketime cannot be in one process.

    What was enqueued while the clock was fast is due by that clock, so it ends before the clock jumps back: otherwise
    it would rightly wait for an hour.
    """
    with contextlib.ExitStack() as ending:
        folder = Path(tempfile.mkdtemp(prefix="holdfast-clock-"))
        ending.callback(shutil.rmtree, folder)
        folder.chmod(0o755)  # servers run as users of their own
        clock = ending.enter_context(WrongClock(folder))
        server = DATABASES[engine].start()
        server.environment.update(clock.environment)
        fleet = ending.enter_context(Fleet())
        rig = ending.enter_context(Rig(engine, tmp_path, fleet))
        rig.use_server(server)
        server.start()
        rig.worker()
        with rig.producer():
            rig.wait_for_more(15)
            before = rig.ask(lambda store: store.now())
            rig.fault("server clock set", engine)
            clock.set(3600.0)
            rig.wait_for_more(15)
            after = rig.ask(lambda store: store.now())
        assert after - before > 3000 * 1_000_000, "the control: the server goes by its wrong clock"
        rig.drain()
        rig.fault("server clock set back", engine)
        clock.set(0.0)
        rig.wait_for_starts(10, *rig.enqueue("quick", 10, text="afterwards"))
        history = rig.finish()
    unsteady: History = replace(history, rules=replace(history.rules, steady_clock=False))
    assert [str(found) for found in check(unsteady)] == []


def test_workers_go_on_after_somebody_has_removed_everything(tmp_path: Path, fleet: Fleet) -> None:
    with Rig("redis", tmp_path, fleet) as rig:
        rig.worker()
        rig.wait_for_starts(5, *rig.enqueue("quick", 5, text="before"))
        rig.drain()
        rig.fault("flushed", "redis")
        redis_command(rig.server.port, "FLUSHALL")
        again = rig.enqueue("quick", 5, text="after")
        rig.wait_for_starts(5, *again)
        history = rig.finish()
    assert {job.id for job in history.ending.jobs} >= set(again)
    assert [found for found in check(history) if found.invariant == 1], "the control: what was removed is missed"


def test_a_file_that_was_replaced_is_an_error_and_not_a_new_database(tmp_path: Path) -> None:
    path = tmp_path / "jobs.db"
    store = open_store(f"sqlite:///{path}?timeout=3", SYSTEM)
    store.insert_blocking([new_job("quick", {"number": 1})])
    for name in os.listdir(tmp_path):
        (tmp_path / name).rename(tmp_path / f"old-{name}")
    with contextlib.closing(sqlite3.connect(path)) as other, other:
        other.execute("CREATE TABLE anything (n)")
    with pytest.raises(StoreReplaced):
        store.insert_blocking([new_job("quick", {"number": 2})])
